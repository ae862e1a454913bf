"""Operands of integer products in the form the micro-kernels read.

B is panels of signed bytes: unsigned codes are moved by 128, and whoever asks for the product takes
that out of the result again (:func:`moved_right`). A is rows of codes as they are, but for byte products of the vector
units, which take codes of one sign: those of the other are moved there too, and what that adds to every column is
taken out by the finish kernel (:func:`put_right`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.gemm.blocks import Panels, best_tile
from ranvier.codegen.llvm.gemm.pack import pack_launch
from ranvier.codegen.llvm.integer.dots import BYTES, HALF, LEAST_TERMS, PAIRS, SIGNED, TILES, Dot, dot_for, shapes_of
from ranvier.codegen.llvm.integer.panels import put_into_panels
from ranvier.codegen.llvm.integer.sums import column_sums
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import (
    Const,
    Epilogue,
    Expr,
    Final,
    Index,
    Load,
    Map,
    Nest,
    Op,
    Operand,
    Reduce,
    Result,
    Size,
    substitute,
    walk,
)
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View, dense_strides
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
NEAR_BYTES = 1 << 20  # of B that are found in the second-level cache again
_SOME_ROWS = 8


def moved_right(dtype: DType) -> int:
    """What is added to codes of B before they are multiplied."""
    return -HALF if dtype is DType.uint8 else 0


def turned(x: Expr) -> Expr:
    """Signed codes as unsigned ones and the reverse: the highest bit stands for 128 in the one, -128 in the other."""
    other = DType.uint8 if x.dtype is DType.int8 else DType.int8
    return Op(
        "bits", (Op("bitxor", (x, Const(HALF - 256 if x.dtype is DType.int8 else HALF, x.dtype)), x.dtype),), other
    )


def signed(b: Array) -> Array:
    """Codes of B as the product sees them."""
    return b if b.dtype == np.int8 else (b ^ np.uint8(HALF)).view(np.int8)


@dataclass(frozen=True)
class PackedCodes:
    """A packed matrix of codes, or a dense stack of them: panel after panel, group after group of K."""

    storage: Storage
    batch: tuple[int, ...]
    k: int  # groups
    n: int
    panels: Panels
    dot: Dot
    shift: View | None = None  # [..., N] of int32: what moving codes of A adds, negated
    reach: Array | None = None  # [..., N]: how large sums can be, where it is known and of use
    lined: bool = False  # of filters: whether every line of taps begins a group

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def entry(self) -> int:
        """Bytes of one matrix."""
        return self.panels.packed_elements(self.k) * self.dot.unit


def panels_for(m: int, n: int, deep: int, isa: Isa, dot: Dot) -> Panels:
    if dot is TILES or (dot in (BYTES, PAIRS) and m >= _SOME_ROWS and deep * n * dot.unit > NEAR_BYTES):
        return Panels.of(n, isa.lanes(4), 2)  # what is read from afar meets as many rows as it can
    return Panels.of(n, isa.lanes(4), best_tile(max(1, m), n, deep, shapes_of(isa), 4).vectors)


def pack_codes(b: Array, isa: Isa, *, rows_hint: int, dot: Dot | None = None) -> PackedCodes:
    """Constant codes [..., K, N] packed once. ``rows_hint`` is the M they will usually meet."""
    dot, codes = dot or dot_for(isa, rows_hint, b.shape[-2]), signed(b)
    *batch, k, n = codes.shape
    deep = dot.groups(k)
    panels = panels_for(rows_hint, n, deep, isa, dot)
    packed = packed_empty((*batch, panels.packed_elements(deep)), dot.packed.numpy)
    put_into_panels(codes, panels, dot, packed)
    shift = None
    if dot.moves:
        total = column_sums(codes) * np.int32(-dot.moves)
        shift = View.dense(Storage.constant(total), DType.int32, total.shape)
    # -128 stays what it is without its sign, and is 128 as an unsigned byte
    reach = column_sums(np.abs(codes).view(np.uint8)).astype(np.int64) * (HALF if dot is SIGNED else 2 * HALF - 1)
    return PackedCodes(Storage.packed(packed), tuple(batch), deep, n, panels, dot, shift, reach)


def pack_words(b: Array, isa: Isa, *, rows_hint: int) -> PackedCodes:
    """Constant codes [..., K, N] of 8 or 16 signed bits, for products with codes of 16."""
    *batch, k, n = b.shape
    deep = PAIRS.groups(k)
    panels = panels_for(rows_hint, n, deep, isa, PAIRS)
    packed = packed_empty((*batch, panels.packed_elements(deep)), PAIRS.packed.numpy)
    put_into_panels(b, panels, PAIRS, packed)
    return PackedCodes(Storage.packed(packed), tuple(batch), deep, n, panels, PAIRS, reach=reach_of_words(b))


def reach_of_words(b: Array) -> Array:
    """How large sums of any codes of 16 bits times these can be, for every column."""
    return np.asarray(np.abs(b.astype(np.int64)).sum(axis=-2) << 15)


def pack_at_run(b: View, m: int, left: DType, isa: Isa, threads: int) -> tuple[PackedCodes, list[Launch]]:
    """Codes that are a tensor of the graph [..., K, N]: grouped by one pass, where they do not lie so, put into panels
    by another. They will meet ``m`` rows of ``left``."""
    *batch, k, n = b.shape
    dot = dot_for(isa, m, max(k, LEAST_TERMS))  # every matrix of a batch may be another one: strips do not take them
    deep, entries = dot.groups(k), math.prod(batch)
    words, launches = _lying_words(b, dot, isa, threads) or _grouped_words(b, dot, isa, threads)
    panels = panels_for(m, n, deep, isa, dot)
    size = panels.packed_elements(deep)
    storage = Storage.temporary(entries * size * dot.unit, "packed")
    outer: list[tuple[int, int, int]] = []
    for extent, step in zip(reversed(batch), reversed(words.strides[:-2])):
        if extent > 1:
            outer.insert(0, (extent, step, size * math.prod(each[0] for each in outer)))
    if size and entries:
        launches.append(pack_launch(words, panels, _merged(outer), storage))
    shift = None
    if dot.turns(left):
        shift = View.temporary(DType.int32, (*batch, n))
        launches += _shift(b, shift, -dot.moves, isa, threads)
    return PackedCodes(storage, tuple(batch), deep, n, panels, dot, shift), launches


def _merged(axes: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Axes of (extent, source stride, target stride), as few as they can be."""
    found: list[tuple[int, int, int]] = []
    for extent, source, target in axes:
        if found and found[-1][1] == extent * source and found[-1][2] == extent * target:
            found[-1] = (found[-1][0] * extent, source, target)
        else:
            found.append((extent, source, target))
    return tuple(found)


def _lying_words(b: View, dot: Dot, isa: Isa, threads: int) -> tuple[View, list[Launch]] | None:
    """Groups of codes as int32 [..., K / group, N] where they lie, if K lies side by side in whole words; unsigned
    codes are turned word by word."""
    *batch, k, n = b.shape
    apart = (*b.strides[:-2], b.strides[-1])
    if dot is not SIGNED or b.strides[-2] != 1 or any(x % dot.group for x in (k, b.offset, *apart)):
        return None
    shape = (*batch, k // dot.group, n)
    strides = (*(step // dot.group for step in apart[:-1]), 1, apart[-1] // dot.group)
    words, launches = View(b.storage, DType.int32, shape, strides, b.offset // dot.group), list[Launch]()
    if b.dtype is DType.uint8:
        order = (*range(len(batch)), b.rank - 1, b.rank - 2)  # K stays side by side
        target = View.temporary(DType.int32, (*batch, n, k // dot.group)).transposed(order)
        value = Op("bitxor", (Load(0, DType.int32), Const(-0x7F7F7F80, DType.int32)), DType.int32)
        operands = (Operand(words, words.strides), Operand(target, target.strides))
        launches = nests.launches(Nest(shape, operands, (Map(((1, value),)),), label="group"), isa, threads)
        words = target
    return words, launches


def _grouped_words(b: View, dot: Dot, isa: Isa, threads: int) -> tuple[View, list[Launch]]:
    """Groups of codes as integers [..., K / group, N], put together in a temporary."""
    *batch, k, n = b.shape
    deep = dot.groups(k)
    extents = (*batch, deep, n, dot.group)
    target = View.temporary(dot.right, extents)
    strides = (*b.strides[:-2], dot.group * b.strides[-2], b.strides[-1], b.strides[-2])
    guard, other = None, 0
    if k % (dot.group * dot.step):
        axis = len(batch)
        place = Op("add", (Op("mul", (Index(axis), Size(dot.group)), DType.int64), Index(axis + 2)), DType.int64)
        guard, other = Op("lt", (place, Size(k)), DType.bool), -moved_right(b.dtype)
    value: Expr = Load(0, b.dtype)
    value = _cast(turned(value) if b.dtype is DType.uint8 else value, dot.right)
    operands = (Operand(b, strides, guard=guard, other=other), Operand(target, target.strides))
    launches = nests.launches(Nest(extents, operands, (Map(((1, value),)),), label="group"), isa, threads)
    return View.dense(target.storage, dot.packed, (*batch, deep, n)), launches


def _shift(b: View, shift: View, times: int, isa: Isa, threads: int) -> list[Launch]:
    *batch, k, n = b.shape
    code: Expr = Load(0, b.dtype)
    code = _cast(turned(code) if b.dtype is DType.uint8 else code, DType.int32)
    total = Op("mul", (Result(0, DType.int32), Const(times, DType.int32)), DType.int32)
    operands = (
        Operand(b, (*b.strides[:-2], b.strides[-1], b.strides[-2])),
        Operand(shift, (*shift.strides, 0)),
    )
    stages = (Reduce("sum", code, DType.int32), Final(((1, total),)))
    row = frozenset({len(batch) + 1})
    return nests.launches(Nest((*batch, n, k), operands, stages, row, "column sums"), isa, threads)


def put_right(
    left: DType, packed: PackedCodes, epilogue: Epilogue | None, batch: tuple[int, ...], isa: Isa, threads: int
) -> tuple[Epilogue | None, list[Launch]]:
    """The epilogue of a product with this batch on sums of codes of A as they are."""
    if not packed.dot.turns(left):
        return epilogue, []
    shift, launches = packed.shift, []
    assert shift is not None
    if math.prod(packed.batch) not in (1, math.prod(batch)):
        every = View.temporary(DType.int32, (*batch, packed.n))
        operands = (Operand(shift, shift.expanded(every.shape).strides), Operand(every, every.strides))
        copy = Nest(every.shape, operands, (Map(((1, Load(0, DType.int32)),)),), label="column sums")
        shift, launches = every, nests.launches(copy, isa, threads)
    given = () if epilogue is None else epilogue.operands
    raw = Result(0, DType.int32)
    if epilogue is not None and (joined := _joined(epilogue, raw, shift)) is not None:
        return joined, launches
    total: Expr = Op("add", (raw, Load(len(given), DType.int32)), DType.int32)
    value = total if epilogue is None else substitute(epilogue.value, {raw: total})
    apart = packed.n if math.prod(shift.shape[:-1]) > 1 else 0
    return Epilogue(value, (*given, Operand(shift, (apart, 0, 1)))), launches


def _joined(epilogue: Epilogue, raw: Result, shift: View) -> Epilogue | None:
    """The epilogue with ``shift`` in the constant that it adds to the sums of every column, if there is one."""
    parts = list(walk(epilogue.value))
    adds = [e for e in parts if isinstance(e, Op) and e.name == "add" and e.args[0] == raw]
    if not adds or shift.rank != 1 or shift.storage.array is None:
        return None
    added = adds[0].args[1]
    # neither the sums nor the constant may be met anywhere else
    others = any(e.args[1] != added for e in adds) or parts.count(raw) != len(adds)
    if others or not isinstance(added, Load) or parts.count(added) != len(adds):
        return None
    operand = epilogue.operands[added.operand]
    array, n = operand.view.storage.array, shift.shape[0]
    if array is None or operand.dtype is not DType.int32 or operand.strides != (0, 0, 1) or operand.at or operand.guard:
        return None
    start = operand.view.offset + operand.offset
    total = array.reshape(-1)[start : start + n] + shift.storage.array.reshape(-1)[shift.offset : shift.offset + n]
    operands = list(epilogue.operands)
    operands[added.operand] = Operand(View.constant(total, DType.int32), (0, 0, 1))
    return Epilogue(epilogue.value, tuple(operands))


def _cast(x: Expr, dtype: DType) -> Expr:
    return x if x.dtype is dtype else Op("cast", (x,), dtype)


def left_codes(a: View, dot: Dot, isa: Isa, threads: int) -> tuple[View, list[Launch]]:
    """Rows of A as bytes: where they lie if they can be read there, else in a temporary."""
    *outer, k = a.shape
    beside = a.strides[-1] == 1 or k == 1
    width = 1 if dot.left is None else dot.left.numpy.itemsize
    if dot.left is None and beside:
        return View(a.storage, DType.uint8, a.shape, (*a.strides[:-1], 1), a.offset), []
    if a.dtype is dot.left and beside and k % dot.group == 0:
        steps = [s if d != 1 else 0 for s, d in zip(a.strides[:-1], outer)]
        if not any(s % 4 for s in steps) and a.offset % 4 == 0:
            return View(a.storage, DType.uint8, a.shape, (*steps, 1), a.offset), []
    room = (*outer, k if dot.left is None else dot.groups(k) * dot.group)
    kind = dot.left or a.dtype
    target = View.dense(Storage.temporary(math.prod(room) * width), kind, room)
    value: Expr = Load(0, a.dtype)
    value = _cast(turned(value) if dot.turns(a.dtype) else value, kind)
    # what stands behind the last code of a row meets zeros of B
    operands = (Operand(a, a.strides), Operand(target, target.strides))
    launches = nests.launches(Nest(a.shape, operands, (Map(((1, value),)),), label="codes"), isa, threads)
    inside = (*outer, room[-1] * width)
    return View(target.storage, DType.uint8, inside, dense_strides(inside)), launches
