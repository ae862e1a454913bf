"""Convolutions as products whose left operand is never laid out: its elements are taken from the image as they are
needed.

A row of the product is a pixel of the result, a column one of its channels, and K counts the taps of the window and the
channels under each. The image and the filters may lie in memory in any way; with their channels last, loads are whole
vectors. The epilogue is that of a product.
"""

from __future__ import annotations

from dataclasses import replace

from ranvier.codegen.loops.ir import Epilogue, Expr, Operand, Result
from ranvier.codegen.storage import View
from ranvier.codegen.triton.gemm import Product, Tile, in_parts, likely_tiles
from ranvier.codegen.triton.library import Printed
from ranvier.codegen.triton.printer import Source
from ranvier.codegen.triton.schedule import power_of_two
from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.records import dataclass

_OPERANDS = frozenset({DType.float16, DType.bfloat16, DType.float32})


@dataclass(frozen=True)
class Sliding:
    """How a window of two axes moves over an image; ``pads`` are those before its first row and column."""

    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int]


def conv_tiles(x: View, w: View, rows: int, count: int) -> list[Tile]:
    """Tiles for a convolution, the likeliest first: as for a product, with steps that stay under one tap."""
    made, channels = w.shape[0], w.shape[1]
    k = channels * w.shape[2] * w.shape[3]
    depth = min(64 if x.dtype.numpy.itemsize == 2 else 32, max(16, power_of_two(channels)))
    found = [replace(t, depth=depth) for t in likely_tiles(1, rows, made, k, x.dtype.numpy.itemsize, count)]
    return list(dict.fromkeys(found))


def convolution(
    x: View,
    w: View,
    out: View,
    places: tuple[int, int],
    sliding: Sliding,
    epilogue: Epilogue | None = None,
    *,
    tile: Tile | None = None,
) -> Printed:
    """The kernels of ``x`` [N, C, H, W] by filters ``w`` [out, C, rows, columns]. ``out`` is [1, pixels, out], its
    pixels those of all images with ``places`` rows and columns each."""
    if x.dtype is not w.dtype or x.dtype not in _OPERANDS:
        raise NotSupported(f"no Triton convolution of {x.dtype} and {w.dtype}")
    if x.shape[1] != w.shape[1] or out.shape != (1, x.shape[0] * places[0] * places[1], w.shape[0]):
        raise ValueError(f"an image {x.shape} by filters {w.shape} does not make {out.shape}")
    chosen = tile or conv_tiles(x, w, out.shape[1], 1)[0]
    epilogue = epilogue or Epilogue(Result(0, DType.float32))

    def text(operands: tuple[Operand, ...], value: Expr) -> Source:
        return _Convolution(x, w, operands, value, out.shape, chosen, places, sliding).source()

    return in_parts(text, out, epilogue, chosen.parts, DType.float32)


class _Convolution(Product):
    """A product's text, but for the addresses of its operands."""

    kind = "convolution"

    def __init__(
        self,
        x: View,
        w: View,
        operands: tuple[Operand, ...],
        value: Expr,
        shape: tuple[int, ...],
        tile: Tile,
        places: tuple[int, int],
        sliding: Sliding,
    ) -> None:
        super().__init__(x, w, operands, value, shape, tile, "ieee")
        self._places, self._sliding = places, sliding

    def even(self) -> dict[str, bool]:
        return {"EVEN_K": self.a.shape[1] % self.tile.depth == 0}

    def multiply(self) -> None:
        _, channels, high, wide = self.a.shape
        taps_across = self.b.shape[3]
        steps_per_tap = -(-channels // self.tile.depth)
        steps = self.b.shape[2] * taps_across * steps_per_tap
        pointed = (self.b.shape[2], taps_across) == (1, 1) and not any(self._sliding.pads)
        self.line("c = tl.arange(0, K)")
        across, down = self.number("places_w", self._places[1]), self.number("places_h", self._places[0])
        self.line(f"column = x % {across}")
        self.line(f"row = x // {across} % {down}")
        image = f"(x // ({across} * {down})){self._times('a', self.a, 0)}"
        for name, along, axis in (("row", "h", 2), ("column", "w", 3)):
            stride, pad = self._sliding.strides[axis - 2], self._sliding.pads[axis - 2]
            self.line(f"{name} = {name} * {self.number(f'step_{along}', stride)} - {self.number(f'pad_{along}', pad)}")
        self.line(f"a_row = a + ({image} + row{self._times('a', self.a, 2)} + column{self._times('a', self.a, 3)})")
        self.line(f"a_row = a_row + c[None, :]{self._times('a', self.a, 1)}")
        self.line(f"b_row = b + (r{self._times('b', self.b, 0)} + c[:, None]{self._times('b', self.b, 1)})")
        self.line(f"acc = tl.zeros((X, R), {self.sums()})")
        begin, end = "0", self.number("n_steps", steps)
        if self.tile.parts > 1:
            share = self.number("n_share", -(-steps // self.tile.parts))
            self.line(f"first_step = tl.program_id(1) * {share}")
            self.line(f"last_step = tl.minimum(first_step + {share}, {end})")
            begin, end = "first_step", "last_step"
        with self.loop(f"for step in range({begin}, {end}):"):
            self._addresses(pointed, steps_per_tap, taps_across)
            self._loads(pointed, channels, high, wide)
            self.accumulate()
        self.finish()

    def _addresses(self, pointed: bool, steps_per_tap: int, taps_across: int) -> None:
        """Those of this step: its tap of the window, and the first of its channels."""
        if pointed:
            self.line("channel = step * K")
            self.line(f"a_at = a_row + channel{self._times('a', self.a, 1)}")
            self.line(f"b_at = b_row + channel{self._times('b', self.b, 1)}")
            return
        self.line(f"tap = step // {self.number('n_chunks', steps_per_tap)}")
        self.line("channel = (step % n_chunks) * K")
        self.line(f"tap_h = tap // {self.number('taps_w', taps_across)}")
        self.line("tap_w = tap % taps_w")
        for along, k in (("h", 0), ("w", 1)):
            self.line(f"off_{along} = tap_{along} * {self.number(f'spread_{along}', self._sliding.dilations[k])}")
        steps = [f"off_h{self._times('a', self.a, 2)}", f"off_w{self._times('a', self.a, 3)}"]
        self.line(f"a_at = a_row + ({' + '.join(steps)} + channel{self._times('a', self.a, 1)})")
        steps = [f"tap_h{self._times('b', self.b, 2)}", f"tap_w{self._times('b', self.b, 3)}"]
        self.line(f"b_at = b_row + ({' + '.join(steps)} + channel{self._times('b', self.b, 1)})")

    def _loads(self, pointed: bool, channels: int, high: int, wide: int) -> None:
        count = self.number("n_c", channels)
        inside = "in_x"
        if not pointed:
            high_name, wide_name = self.number("n_h", high), self.number("n_w", wide)
            self.line(f"seen_h = (row + off_h >= 0) & (row + off_h < {high_name})")
            self.line(f"seen_w = (column + off_w >= 0) & (column + off_w < {wide_name})")
            inside = "in_x & seen_h & seen_w"
        self.line("if EVEN_K:")
        self.line(f"    left = tl.load(a_at, mask={inside}, other=0)")
        self.line("    right = tl.load(b_at, mask=in_r, other=0)")
        self.line("else:")
        self.line(f"    left = tl.load(a_at, mask={inside} & (c[None, :] < {count} - channel), other=0)")
        self.line(f"    right = tl.load(b_at, mask=in_r & (c[:, None] < {count} - channel), other=0)")
