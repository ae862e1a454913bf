"""Weights that are known only at run time: packed by a kernel before the convolution reads them."""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.conv.epilogues import Fields
from ranvier.codegen.llvm.conv.front import conv, packing
from ranvier.codegen.llvm.conv.plan import Panels, best_tile, panels_of
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed, triple
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_FIELDS = (
    *("panels", "panel", "rest", "depth", "width", "kh", "kw"),
    *("group_step", "out_step", "in_step", "d_step", "h_step", "w_step", "taps", "group_elements"),
)


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
) -> list[Launch]:
    """A convolution whose weights [cout, cin/group, *kernel] are a tensor of the graph."""
    if shape.is_empty:
        return []
    weights = w if isinstance(w, WeightView) else WeightView.conv(w, shape)
    launch, packed = _pack(weights, shape, isa)
    return [
        launch,
        *conv(x, packed, out, shape, isa, epilogue=epilogue, threads=threads, numbering=numbering),
    ]


def _pack(w: WeightView, shape: ConvShape, isa: Isa) -> tuple[Launch, Packed]:
    item = w.dtype.numpy.itemsize
    kind = packing(shape, isa, item=item, winograd=False)
    kind = "gemm" if kind == "narrow" else kind
    lanes = isa.lanes(item)
    groups, width, group_step = shape.group, shape.width, w.group
    if kind == "depthwise":
        # [taps][channels] is one panel as wide as all channels; channels are groups and outputs of a group
        groups, width = 1, shape.cout
        cut = Panels(-(-shape.cout // lanes), 1, -(-shape.cout // lanes), lanes, shape.taps)
        block = cut.columns
    else:
        block = best_tile(shape.width, isa, item).vectors
        cut = panels_of(shape, block, isa, item)
    storage = Storage.temporary(groups * cut.group_elements() * item, "packed weights")
    numbers = {
        "panels": cut.count,
        "panel": cut.columns,
        "rest": cut.rest * lanes,
        "depth": shape.depth,
        "width": 0 if w.zero else width,
        "kh": shape.kernel[1],
        "kw": shape.kernel[2],
        "group_step": group_step,
        "out_step": w.out,
        "in_step": w.channel,
        **dict(zip(("d_step", "h_step", "w_step"), w.taps)),
        "taps": shape.taps,
        "group_elements": cut.group_elements(),
    }
    # outputs of a group lie ``out_step`` apart; where channels were joined, a group's outputs end and the next begins
    per_group = shape.width if kind == "depthwise" else 0
    spec = KernelSpec(
        f"pack weights {w.dtype}",
        ("pack weights", 1, w.dtype.name),
        lambda module, symbol, _: _emit(module, symbol, w.dtype),
    )
    launch = Launch(
        spec,
        (At(w.storage, w.offset * item), At(storage)),
        (*(numbers[name] for name in _FIELDS), per_group),
        tiles=groups * cut.count,
        writes=(storage,),
        traffic=2.0 * storage.nbytes,
        label="pack weights",
    )
    return launch, Packed(kind, storage, w.dtype, block)


def _emit(module: Module, symbol: str, dtype: DType) -> None:
    f = module.kernel(symbol)
    element = register_type(dtype)
    at = Fields(f, f.args["dims"], (*_FIELDS, "per_group"))
    source, target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(2))
    joined = f.cmp("ne", at["per_group"], 0)
    split = f.max_(at["per_group"], 1)
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        group, panel = f.div(tile, at["panels"]), f.rem(tile, at["panels"])
        columns = f.select(f.cmp("eq", panel, at["panels"] - 1), at["rest"], at["panel"])
        start = group * at["group_elements"] + panel * at["panel"] * at["taps"] * at["depth"]
        place = f.gep(target, start, element)
        with f.loop(0, at["taps"]) as tap, f.loop(0, at["depth"]) as channel:
            line = f.div(tap, at["kw"])
            over = f.rem(tap, at["kw"]) * at["w_step"] + f.rem(line, at["kh"]) * at["h_step"]
            over = over + f.div(line, at["kh"]) * at["d_step"] + channel * at["in_step"] + group * at["group_step"]
            row = f.gep(place, (tap * at["depth"] + channel) * columns, element)
            with f.loop(0, columns) as c:
                out = panel * at["panel"] + c
                apart = f.div(out, split) * at["group_step"] + f.rem(out, split) * at["out_step"]
                offset = over + f.select(joined, apart, out * at["out_step"])
                value = f.var(element, 0.0)
                with f.if_(f.cmp("slt", out, at["width"])):
                    value.set(f.load(element, f.gep(source, offset, element)))
                f.store(value.get(), f.gep(row, c, element))
    f.ret()
