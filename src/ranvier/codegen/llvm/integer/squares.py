"""3x3 convolutions of 8-bit codes of stride 1 by Winograd's F(4x4): a quarter of the products, of 16 bits each.

With the points 0, ±1, ±2 and infinity both transforms are whole numbers, if filters are not divided by what the
differences of the points multiply to: codes become at most 100 times as large and filters 49 times, so both fit 16
bits, and their sums 32 where the weights allow it, which is known when they are packed. All that is exact. The way
back is computed in float32 and divides at its end: sums of some hundred thousand are those of the direct way, the
largest ones differ by a millionth or so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen import tuning
from ranvier.codegen.launch import Code, KernelSpec, Launch
from ranvier.codegen.llvm.amx.micro import suits
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.conv.driver import MOST_ROWS
from ranvier.codegen.llvm.conv.epilogues import Lanes, Tail
from ranvier.codegen.llvm.conv.plan import Panels, best_tile
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.conv.squares import Kind, Numbers, Squares, can_be_squares, position_panels, squares_launch
from ranvier.codegen.llvm.conv.transforms import both_ways
from ranvier.codegen.llvm.integer.dots import BYTES, PAIRS, WORDS, dot_of, shapes_of
from ranvier.codegen.llvm.integer.micro import IntegerMicro
from ranvier.codegen.llvm.integer.pack import signed
from ranvier.codegen.llvm.integer.product import most_rows
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.stored_codes import nearest
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_M = 4
_EDGE = _M + 2
_POSITIONS = _EDGE**2
_LARGEST = (1 << 31) - 1
# Nanoseconds and operations of the machine that the rules' constants were measured on, see ``conv/front.py``.
_BYTE_GOPS, _PAIR_GOPS, _WORD_GOPS = 560.0, 260.0, 130.0
_VECTOR_BYTES = 64
_FINISH = 0.22  # of an output
_INTO, _BACK = 3.7, 7.0  # per square and channel, into and out of the transformed domain
_BYTE = 1 / 20.0  # of weights, which a network's other layers have pushed out of the near caches
_TOGETHER = 0.3  # weights arrive while others are used: so much of the shorter of both is still waited for
_GAIN = 1.15  # transformed weights take eight times the memory: it has to be worth it
_SCALE = 24  # what a line of outputs is too large by
# inputs of a line, transformed; in the order 0, 1, -1, 2, -2, infinity
_INPUT = np.array(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)


@dataclass(frozen=True)
class PackedSquares:
    """Transformed filters [panel][position][pair of channels][column]; none where sums might not fit 32 bits."""

    storage: Storage | None
    panels: Panels

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes if self.storage is not None else 0


def suits_squares(shape: ConvShape, isa: Isa) -> bool:
    """Whether a convolution of codes is quicker so than by its nine taps."""
    if not (can_be_squares(shape) and _adds_pairs(isa)):
        return False
    usual = _squares_time(shape, isa) * _GAIN < _direct_time(shape, isa)
    return tuning.choose("integer squares", shape.key, usual, lambda: {"taps": False, "squares": True})


def _adds_pairs(isa: Isa) -> bool:
    """Whether pairs of 16 bits are multiplied by one instruction, and nothing multiplies more at a time than VNNI."""
    return isa.triple == "x86_64" and dot_of(isa) in (BYTES, WORDS) and not suits(isa, DType.uint8, DType.int8)


def _pace(isa: Isa) -> float:
    """Of arithmetic, beside that of the machine where the constants were measured."""
    return isa.pace * isa.vector_bytes / _VECTOR_BYTES


def _direct_time(shape: ConvShape, isa: Isa) -> float:
    work = shape.flops / (_BYTE_GOPS if dot_of(isa) is BYTES else _WORD_GOPS)
    return (work + shape.n * shape.pixels * shape.cout * _FINISH) / _pace(isa)


def _squares_time(shape: ConvShape, isa: Isa) -> float:
    squares = shape.n * -(-shape.out[1] // _M) * -(-shape.out[2] // _M)
    weights = shape.cin * shape.cout
    work = 2.0 * _POSITIONS * squares * weights / (_PAIR_GOPS if dot_of(isa) is BYTES else _WORD_GOPS)
    work = (work + squares * (shape.cin * _INTO + shape.cout * _BACK)) / _pace(isa)
    wait = 2.0 * _POSITIONS * weights * _BYTE
    return max(work, wait) + _TOGETHER * min(work, wait)


def pack_squares(w: Array, codes: DType, isa: Isa, shape: ConvShape) -> PackedSquares:
    """Filters [cout, cin, 3, 3] for codes of this type."""
    by_position = _transformed(signed(w))
    vectors = best_tile(shape.cout, shapes_of(isa), 4).vectors
    cut = position_panels(shape, vectors, isa, 4, PAIRS.group)
    most = np.abs(by_position).sum(axis=1, dtype=np.int64) * _reach(codes)[:, None]
    if (most > _LARGEST).any():
        return PackedSquares(None, cut)
    columns = ((cut.count - 1) * vectors + cut.rest) * cut.lanes
    pairs = np.zeros((_POSITIONS, cut.depth, columns, PAIRS.group), np.int16)
    for place in range(PAIRS.group):
        rows = by_position[:, place :: PAIRS.group]
        pairs[:, : rows.shape[1], : shape.cout, place] = rows
    packed = packed_empty((_POSITIONS * cut.group_elements() * PAIRS.group,), pairs.dtype)
    at = 0
    for start in range(0, columns, cut.columns):
        piece = pairs[:, :, start : start + cut.columns]
        packed[at : at + piece.size].reshape(piece.shape)[...] = piece
        at += piece.size
    return PackedSquares(Storage.packed(packed), cut)


def _transformed(w: Array) -> Array:
    """[position, channel, filter] of int16."""

    def lines(g: Array) -> Array:
        """Of [3, …]."""
        even, odd, far = g[0] + g[2], g[1], g[0] + 4 * g[2]
        return np.stack([g[0], even + odd, even - odd, far + 2 * odd, far - 2 * odd, g[2]])

    taps = w.astype(np.int16).transpose(2, 3, 1, 0)
    both = lines(lines(taps).swapaxes(0, 1)).swapaxes(0, 1)
    return both.reshape(_POSITIONS, *taps.shape[2:])


def _reach(codes: DType) -> Array:
    """How large a transformed code can be, for every position."""
    ends = np.iinfo(codes.numpy)
    factors = np.kron(_INPUT, _INPUT)
    above, below = np.maximum(factors, 0).sum(axis=1), np.minimum(factors, 0).sum(axis=1)
    highest, lowest = above * ends.max + below * ends.min, above * ends.min + below * ends.max
    return np.asarray(np.maximum(highest, -lowest))


def squares_conv(
    x: View,
    zero: View,
    packed: PackedSquares,
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
) -> list[Launch]:
    """``out = epilogue(conv(x))`` of int32 sums: ``x`` and ``out`` lie channels-last, borders are padded with the one
    code of ``zero``."""
    if shape.is_empty:
        return []
    cut, codes, stored = packed.panels, x.dtype, out.dtype
    assert packed.storage is not None

    def spec(tail: Tail) -> KernelSpec:
        return KernelSpec(
            f"integer winograd {codes}",
            ("integer winograd", codes.name, stored.name, tail.key),
            lambda module, symbol, target: _CodeSquares(module, symbol, target, codes, stored, tail).function(),
        )

    def micro(used: set[int]) -> Sequence[Code]:
        widths = (cut.vectors if cut.count > 1 else cut.rest, cut.rest)
        nearest_to = [min(used, key=lambda u: abs(u - rows)) for rows in range(1, MOST_ROWS + 1)]
        return [Code(IntegerMicro(rows, width, pairs=True).spec()) for width in widths for rows in nearest_to]

    kind = Kind(_M, _numbers(codes), spec, micro, most_rows(isa, cut.vectors), "integer conv")
    return [squares_launch(kind, x, packed.storage, cut, out, shape, isa, epilogue, threads, zero)]


def _numbers(codes: DType) -> Numbers:
    return Numbers(codes, DType.int16, DType.int32, PAIRS.group)


class _CodeSquares(Squares):
    def __init__(self, module: Module, symbol: str, isa: Isa, codes: DType, out: DType, tail: Tail) -> None:
        super().__init__(module, symbol, isa, _M, _numbers(codes), out, tail)
        self.signed = codes is DType.int8

    def nothing(self) -> Val:
        return self.f.load(self.image, self.border, 1)

    def loaded(self, address: Val, piece: Lanes) -> Val:
        f, kind = self.f, vector(self.image, piece.count)
        codes = f.load(kind, address, 1) if piece.mask is None else f.masked_load(kind, address, piece.mask)
        return f.cast(codes, self.inner, signed=self.signed)

    def transformed(self, lines: list[list[Val]]) -> list[list[Val]]:
        return both_ways(self.f, _M, lines, _into)

    def returned(self, lines: list[list[Val]]) -> list[list[Val]]:
        f = self.f
        sums = [[f.cast(each, "float") for each in line] for line in lines]
        found = both_ways(f, _M, sums, _back)
        return [[nearest(f, self.isa, each * (1.0 / _SCALE**2)) for each in line] for line in found]


def _into(f: Fn, _: int, d: list[Val]) -> list[Val]:
    """``_INPUT`` times a line: 16 bits hold every result, and what lies beyond on the way there comes back."""
    far, near = f.shl(d[2], 2), f.shl(d[1], 2)
    even_1, odd_1 = d[4] - far, d[3] - near
    even_2, odd_2 = d[4] - d[2], f.shl(d[3] - d[1], 1)
    first = f.shl(d[0], 2) - far + even_2
    last = d[5] - d[3] - f.shl(odd_2, 1)
    return [first, even_1 + odd_1, even_1 - odd_1, even_2 + odd_2, even_2 - odd_2, last]


def _back(f: Fn, _: int, v: list[Val]) -> list[Val]:
    """Four outputs of a line from its six products, 24 times too large."""
    sum_1, dif_1, sum_2, dif_2 = v[1] + v[2], v[1] - v[2], v[3] + v[4], v[3] - v[4]
    return [
        f.fma(6.0, v[0], f.fma(-4.0, sum_1, sum_2)),
        f.fma(-4.0, dif_1, 2.0 * dif_2),
        4.0 * (sum_2 - sum_1),
        f.fma(24.0, v[5], f.fma(8.0, dif_2, -4.0 * dif_1)),
    ]
