"""Convolutions over few input channels, each a plane of its own, as a network's first layer has its image.

The sums of some neighbouring pixels times a panel of output channels stay in registers while kernel rows of all planes
pass by; elements of the image are read where they lie, each broadcast to a vector of channels. With a window of a few
dozen elements, copying it together and calling a micro-kernel takes as long as the products: here is neither.

Kernel rows outside the image are not visited. Groups of pixels that touch the left or right border run a second copy
of the body that checks every column; the last group of a row ends with its last pixel, and does some pixels again.
"""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.conv.borders import taps_inside
from ranvier.codegen.llvm.conv.epilogues import Fields, Lanes, Tail, TailCode, below
from ranvier.codegen.llvm.conv.plan import Panels, work_pieces
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed, Pixels
from ranvier.codegen.llvm.elements import memory_type
from ranvier.codegen.llvm.gemm.tiles import rows_for
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_FIELDS = (
    *("h", "w", "oh", "ow", "kh", "sh", "dh", "ph", "pw", "channels", "panels"),
    *("xn", "xc", "xh", "yn", "yh", "yw", "rows", "blocks", "qh", "qw", "q0"),
)
_WIDEST = 7  # taps of a kernel row, at most, that are written out
_FEWEST = 4  # pixels of a group
_BESIDE = 1.0  # what a group takes beside its pixels, in pixels


@dataclass(frozen=True)
class _Structure:
    """What the code depends on beside types and the epilogue."""

    planes: int
    taps: int  # of a kernel row
    stride: int
    vectors: int  # of a panel of output channels
    pixels: int
    last_vectors: int  # of the last panel
    last_pixels: int
    partial: bool  # the last vector has lanes without a channel

    @property
    def key(self) -> tuple[object, ...]:
        panels = self.vectors, self.pixels, self.last_vectors, self.last_pixels
        return self.planes, self.taps, self.stride, *panels, self.partial


def suits(x: View, shape: ConvShape, cut: Panels, isa: Isa, epilogue: Epilogue | None) -> bool:
    """Whether a thin convolution is one of these. What is added to pixels may lie where they are written, so none of
    them could be computed again."""
    if epilogue is not None and not epilogue.is_still:
        return False
    if x.dtype is not DType.float32 or x.rank != 4 or x.strides[3] != 1 or shape.dilations[2] != 1:
        return False
    if shape.kernel[2] > _WIDEST or not (isa.masks or shape.cout % cut.lanes == 0):
        return False
    return all(_pixels(shape, v, isa) <= shape.out[2] for v in (cut.vectors, cut.rest))


def _pixels(shape: ConvShape, vectors: int, isa: Isa) -> int:
    """Of a group: as many as registers hold, or some fewer where that wastes less at the end of a row."""
    most = rows_for(isa, vectors)
    return min(range(max(_FEWEST, 2 * most // 3), most + 1), key=lambda p: -(-shape.out[2] // p) * (p + _BESIDE))


def planes_conv(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    cut: Panels,
    threads: int,
    numbering: Numbering,
) -> Launch:
    """Weights are packed as for other products."""
    tail = Tail.of(epilogue, DType.float32)
    structure = _Structure(
        *(shape.cin, shape.kernel[2], shape.strides[2]),
        *(cut.vectors, _pixels(shape, cut.vectors, isa), cut.rest, _pixels(shape, cut.rest, isa)),
        shape.cout % cut.lanes > 0,
    )

    def emit(module: Module, symbol: str, target: Isa) -> None:
        _Planes(module, symbol, target, out.dtype, structure, tail).function()

    wanted = -(-work_pieces(shape, threads) // shape.n)
    rows = -(-shape.out[1] // min(shape.out[1], wanted))
    blocks = -(-shape.out[1] // rows)
    place = Pixels.of(out)
    dims = (
        *(*shape.size[1:], *shape.out[1:]),
        *(shape.kernel[1], shape.strides[1], shape.dilations[1], *shape.begin[1:]),
        *(shape.cout, cut.count),
        *x.strides[:3],
        *(place.n, place.h, place.w),
        *(rows, blocks, numbering.h, numbering.w, numbering.first),
        *tail.dims,
    )
    return Launch(
        KernelSpec(
            f"conv planes {structure.planes}x{structure.taps} stride {structure.stride}",
            ("conv planes", 2, out.dtype.name, structure.key, tail.key),
            emit,
        ),
        (At(x.storage, x.offset * 4), At(packed.storage), At.of(out), *tail.buffers),
        dims,
        tiles=shape.n * blocks,
        writes=(out.storage,),
        flops=shape.flops,
        traffic=float(x.nbytes + out.nbytes),
        label="conv",
    )


class _Planes:
    def __init__(
        self, module: Module, symbol: str, isa: Isa, out_dtype: DType, structure: _Structure, tail: Tail
    ) -> None:
        self.isa, self.out_dtype, self.structure = isa, out_dtype, structure
        self.bias, self.tail = tail.begun()
        self.lanes = isa.lanes(4)
        self.f = f = module.kernel(symbol)
        self.nothing = Val(f, "ptr", module.table(f"{symbol}_nothing", "float", [0]))
        self.at = Fields(f, f.args["dims"], _FIELDS)
        bufs = f.args["bufs"]
        self.x, self.w, self.y = (f.load("ptr", f.gep(bufs, k, "ptr")) for k in range(3))
        self.code = TailCode(f, isa, self.tail, bufs, 3, f.args["dims"], len(_FIELDS))
        most = max(structure.vectors * structure.pixels, structure.last_vectors * structure.last_pixels)
        self.held = f.stack("float", most * self.lanes)

    def function(self) -> None:
        f, at = self.f, self.at
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            first = f.rem(tile, at["blocks"]) * at["rows"]
            image = f.div(tile, at["blocks"])
            with f.loop(first, f.min_(first + at["rows"], at["oh"])) as oh:
                self.row(image, oh)
        f.ret()

    def row(self, image: Val, oh: Val) -> None:
        """One row of output pixels: panel by panel, so that a panel's weights are near for all of its groups."""
        f, at, s = self.f, self.at, self.structure
        top = oh * at["sh"] - at["ph"]
        kernel_rows = taps_inside(f, top, at["h"], at["kh"], at["dh"])
        x = f.gep(self.x, image * at["xn"] + top * at["xh"], "float")
        y = f.gep(self.y, image * at["yn"] + oh * at["yh"], memory_type(self.out_dtype))
        number = oh * at["qh"] + at["q0"]
        columns = s.vectors * self.lanes
        depth = at["kh"] * (s.taps * s.planes)

        def panel(index: Val, vectors: int, pixels: int, partial: bool) -> None:
            weights = f.gep(self.w, depth * columns * index, "float")
            body = _Body(self, vectors, pixels, index * columns, partial, weights, kernel_rows)
            with f.loop(0, at["ow"], pixels) as ow:
                body.group(image, x, y, number, f.min_(ow, at["ow"] - pixels))

        whole = at["panels"] - 1
        alike = (s.vectors, s.pixels) == (s.last_vectors, s.last_pixels) and not s.partial
        with f.loop(0, at["panels"] if alike else whole) as index:
            panel(index, s.vectors, s.pixels, False)
        if not alike:
            panel(whole, s.last_vectors, s.last_pixels, s.partial)


class _Body:
    """Groups of pixels against one panel of weights."""

    def __init__(
        self,
        kernel: _Planes,
        vectors: int,
        pixels: int,
        channel: Val,
        partial: bool,
        weights: Val,
        kernel_rows: tuple[Val, Val],
    ) -> None:
        self.kernel, self.vectors, self.pixels, self.weights = kernel, vectors, pixels, weights
        self.f, self.at, self.lanes, self.kernel_rows = kernel.f, kernel.at, kernel.lanes, kernel_rows
        self.channels = [channel + v * self.lanes for v in range(vectors)]
        self.mask = below(self.f, self.lanes, self.at["channels"] - self.channels[-1]) if partial else None

    def group(self, image: Val, x: Val, y: Val, number: Val, ow: Val) -> None:
        """The pixels from ``ow`` on."""
        f, at, s = self.f, self.at, self.kernel.structure
        left = ow * s.stride - at["pw"]
        width = (self.pixels - 1) * s.stride + s.taps
        inside = f.and_(f.cmp("sge", left, 0), f.cmp("sle", left + width, at["w"]))
        start = f.gep(x, left, "float")
        place = f.gep(y, ow * at["yw"], memory_type(self.kernel.out_dtype))
        rows = self.kernel.code.rows(image, number + ow * at["qw"])
        with f.if_else(inside) as otherwise:
            self.finish(self.sums(rows, start, None), place, rows)
            otherwise()
            there = [f.cmp("ult", left + column, at["w"]) for column in range(width)]
            self.finish(self.sums(rows, start, there), place, rows)

    def sums(self, rows: list[Val], start: Val, there: list[Val] | None) -> list[list[Val]]:
        """Of every pixel all vectors of channels; ``there``: the columns that exist, where some may not."""
        f, at, s = self.f, self.at, self.kernel.structure
        kind = vector("float", self.lanes)
        bias = self.kernel.bias
        begin = [f.zero(kind) if bias is None else known[bias] for known in self.fixed(rows)]
        sums = [[f.var(kind, each) for each in begin] for _ in range(self.pixels)]
        step = self.vectors * self.lanes
        with f.loop(0, s.planes) as plane, f.loop(*self.kernel_rows) as kh:
            line = f.gep(start, plane * at["xc"] + kh * at["dh"] * at["xh"], "float")
            weights = f.gep(self.weights, (kh * (s.taps * s.planes) + plane) * step, "float")
            self.kernel_row(sums, line, weights, there)
        return [[each.get() for each in row] for row in sums]

    def kernel_row(self, sums: list[list[Var]], line: Val, weights: Val, there: list[Val] | None) -> None:
        f, s = self.f, self.kernel.structure
        kind, step = vector("float", self.lanes), self.vectors * self.lanes
        for t in range(s.taps):
            tap = f.gep(weights, t * s.planes * step, "float")
            filters = [f.load(kind, f.gep(tap, v * self.lanes, "float")) for v in range(self.vectors)]
            line = f.opaque(line)  # elements that another tap has too are read again: there are no registers for them
            for p in range(self.pixels):
                column = p * s.stride + t
                address = f.gep(line, column, "float")
                if there is not None:
                    address = f.select(there[column], address, self.kernel.nothing)
                element = f.splat(f.load("float", address), self.lanes)
                for v, weight in enumerate(filters):
                    sums[p][v].set(f.fma(element, weight, sums[p][v].get()))

    def finish(self, sums: list[list[Val]], place: Val, rows: list[Val]) -> None:
        """The epilogue and the stores."""
        f, kernel = self.f, self.kernel
        if kernel.tail.is_cheap:
            fixed = self.fixed(rows)
            for p, row in enumerate(sums):
                self.store(row, place, rows, f.i64(p), fixed)
            return
        # one copy of the epilogue in a loop over the pixels
        kind = vector("float", self.lanes)
        places = [v * self.lanes for v in range(self.vectors)]
        for p, row in enumerate(sums):
            for v, value in zip(places, row):
                f.store(value, f.gep(kernel.held, p * self.vectors * self.lanes + v, "float"))
        with f.loop(0, self.pixels) as pixel:
            first = f.gep(kernel.held, pixel * (self.vectors * self.lanes), "float")
            self.store([f.load(kind, f.gep(first, v, "float")) for v in places], place, rows, pixel, self.fixed(rows))

    def fixed(self, rows: list[Val]) -> list[dict[int, Val]]:
        """Operands that are the same for all pixels, by vectors of channels."""
        return [self.kernel.code.fixed(rows, c, Lanes(self.lanes, c, m)) for c, m in zip(self.channels, self.masks)]

    @property
    def masks(self) -> list[Val | None]:
        return [*[None] * (self.vectors - 1), self.mask]

    def store(self, values: list[Val], place: Val, rows: list[Val], pixel: Val, fixed: list[dict[int, Val]]) -> None:
        f, at, kernel = self.f, self.at, self.kernel
        start = f.gep(place, pixel * at["yw"], memory_type(kernel.out_dtype))
        here = kernel.code.moved(rows, pixel * at["qw"])
        for value, channel, mask, known in zip(values, self.channels, self.masks, fixed):
            address = f.gep(start, channel, memory_type(kernel.out_dtype))
            kernel.code.store(value, here, channel, address, kernel.out_dtype, mask, known)


__all__ = ["planes_conv", "suits"]
