"""Weights that are known only at run time: packed by a kernel before the convolution reads them."""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.conv.dynamic_pack import Source, pack_launch
from ranvier.codegen.llvm.conv.epilogues import Fields
from ranvier.codegen.llvm.conv.front import conv, packing
from ranvier.codegen.llvm.conv.plan import Panels, best_tile, panels_of
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed, triple
from ranvier.codegen.llvm.conv.squares import position_panels
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_FIELDS = ("width", "taps", "kh", "kw", "pitch", "group_step", "out_step", "d_step", "h_step", "w_step", "per_group")


@dataclass(frozen=True)
class WeightView:
    """Weights in memory by (group, output channel, input channel, depth, height, width), any strides."""

    storage: Storage
    dtype: DType
    offset: int
    group: int
    out: int
    channel: int
    taps: tuple[int, int, int]
    zero: bool = False  # pack zeros instead: nothing of the weights is meant

    @classmethod
    def conv(cls, w: View, shape: ConvShape) -> WeightView:
        """Of ONNX's [cout, cin/group, *kernel]."""
        taps = triple(w.strides[2:], 0)
        return cls(w.storage, w.dtype, w.offset, shape.width * w.strides[0], w.strides[0], w.strides[1], taps)

    @classmethod
    def transpose(cls, w: View, shape: ConvShape) -> WeightView:
        """Of ConvTranspose's [cin, cout/group, *kernel]."""
        taps = triple(w.strides[2:], 0)
        return cls(w.storage, w.dtype, w.offset, shape.depth * w.strides[0], w.strides[1], w.strides[0], taps)


def conv_dynamic(
    x: View,
    w: View | WeightView,
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
    numbering: Numbering | None = None,
    winograd: bool = False,
) -> list[Launch]:
    """A convolution whose weights [cout, cin/group, *kernel] are a tensor of the graph."""
    if shape.is_empty:
        return []
    weights = w if isinstance(w, WeightView) else WeightView.conv(w, shape)
    if numbering == Numbering.plain(shape.out):
        numbering = None
    usable = winograd and numbering is None and not weights.zero and x.dtype is weights.dtype
    launch, packed = _pack(weights, shape, isa, usable)
    return [
        launch,
        *conv(x, packed, out, shape, isa, epilogue=epilogue, threads=threads, numbering=numbering),
    ]


def _pack(w: WeightView, shape: ConvShape, isa: Isa, winograd: bool) -> tuple[Launch, Packed]:
    item = w.dtype.numpy.itemsize
    kind = packing(shape, isa, item=item, winograd=winograd, packed_at_run=True)
    if kind == "depthwise":
        return _pack_depthwise(w, shape, isa)
    block = best_tile(shape.width, isa, item).vectors
    m = int(kind.removeprefix("winograd")) if kind.startswith("winograd") else 0
    if m:
        cut, positions = position_panels(shape, block, isa, item), (m + 2) ** 2
        size = positions * cut.group_elements()
    else:
        kind, positions = "gemm", shape.taps
        cut = panels_of(shape, block, isa, item)
        size = shape.group * cut.group_elements()
    storage = Storage.temporary(size * item, "packed weights")
    source = Source(At(w.storage, w.offset * item), w.dtype, w.group, w.out, w.channel, w.taps, w.zero)
    return pack_launch(source, storage, shape, cut, m, positions), Packed(kind, storage, w.dtype, block)


def _pack_depthwise(w: WeightView, shape: ConvShape, isa: Isa) -> tuple[Launch, Packed]:
    """[taps][channels]: one panel as wide as all channels, which are groups and outputs of a group."""
    item, lanes = w.dtype.numpy.itemsize, isa.lanes(w.dtype.numpy.itemsize)
    cut = Panels(-(-shape.cout // lanes), 1, -(-shape.cout // lanes), lanes, shape.taps)
    storage = Storage.temporary(cut.group_elements() * item, "packed weights")
    numbers = {
        "width": 0 if w.zero else shape.cout,
        "taps": shape.taps,
        "kh": shape.kernel[1],
        "kw": shape.kernel[2],
        "pitch": cut.columns,
        "group_step": w.group,
        "out_step": w.out,
        **dict(zip(("d_step", "h_step", "w_step"), w.taps)),
        "per_group": shape.width,
    }
    spec = KernelSpec(
        f"pack depthwise weights {w.dtype}",
        ("pack depthwise weights", 1, w.dtype.name),
        lambda module, symbol, _: _emit_depthwise(module, symbol, w.dtype),
    )
    launch = Launch(
        spec,
        (At(w.storage, w.offset * item), At(storage)),
        tuple(numbers[name] for name in _FIELDS),
        tiles=shape.taps,
        writes=(storage,),
        traffic=2.0 * storage.nbytes,
        label="pack weights",
    )
    return launch, Packed("depthwise", storage, w.dtype, cut.columns)


def _emit_depthwise(module: Module, symbol: str, dtype: DType) -> None:
    f = module.kernel(symbol)
    element = register_type(dtype)
    at = Fields(f, f.args["dims"], _FIELDS)
    source, target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(2))
    with f.loop(f.args["begin"], f.args["end"]) as tap:
        line = f.div(tap, at["kw"])
        over = f.rem(tap, at["kw"]) * at["w_step"] + f.rem(line, at["kh"]) * at["h_step"]
        over = over + f.div(line, at["kh"]) * at["d_step"]
        row = f.gep(target, tap * at["pitch"], element)
        with f.loop(0, at["pitch"]) as c:
            apart = f.div(c, at["per_group"]) * at["group_step"] + f.rem(c, at["per_group"]) * at["out_step"]
            value = f.var(element, 0.0)
            with f.if_(f.cmp("slt", c, at["width"])):
                value.set(f.load(element, f.gep(source, over + apart, element)))
            f.store(value.get(), f.gep(row, c, element))
    f.ret()
