"""Products with coded weights as launches: which kind of kernel one gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.amx.micro import suits
from ranvier.codegen.llvm.coded.adding import by_halves, multiplies_fours
from ranvier.codegen.llvm.coded.pack import CodedB
from ranvier.codegen.llvm.coded.panels import many_rows, stand_in
from ranvier.codegen.llvm.coded.passes import fits_bytes
from ranvier.codegen.llvm.coded.prepare import copied, given, prepare, readable
from ranvier.codegen.llvm.coded.rows import few_rows
from ranvier.codegen.llvm.coded.unpacked import by_unpacked, suits_unpacked
from ranvier.codegen.llvm.gemm.pack import multiplies_pairs
from ranvier.codegen.llvm.gemm.problem import Problem, folded, problem_of
from ranvier.codegen.llvm.integer.dots import multiplies_bytes
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

# How exactly activations have to be taken: as they are, as bfloat16, or as codes of 8 bits with a step for each group.
Accuracy = Literal["float32", "bfloat16", "int8"]
# From so many rows on, decoding a panel once for all of them costs less than decoding it in every pass.
_MANY = {"float32": 33, "bfloat16": 12, "int8": 33}
_MANY_SHORT = 9  # the same of float32 with vectors of 16 bytes: more than a pass takes
# Up to so many rows, by bytes of a vector and least k of groups, meet weights as digits. A weight meets three digits
# of an activation in a quarter of an instruction each, and is decoded by half of one; what a group costs at its end is
# three times as much as with floats, whose panels are decoded only once. More rows would take much memory as digits.
_DIGIT_ROWS = {
    16: {0: 6, 32: 12, 64: 24, 128: 48},
    32: {0: 16, 32: 32},
    64: {0: 2, 32: 16, 128: 64},
}
# Where bytes are multiplied two at a time, one row does, but for the shortest groups of codes of the fewest bits.
_PAIRED_GROUP = {2: 32, 4: 16, 6: 16}
_COUPLED_ROWS = {0: 12, 32: 24, 64: 48, 128: 256}  # where columns share bytes
_DIGIT_COLUMNS = {16: 48, 32: 128, 64: 128}  # from so many on, making digits of a row costs less than it saves


def many_from(isa: Isa, accuracy: Accuracy) -> int:
    """Rows from which on panels are decoded once for all of them."""
    return _MANY_SHORT if isa.vector_bytes == 16 and accuracy != "int8" else _MANY[accuracy]


def takes_codes(b: CodedB, rows: int, isa: Isa) -> bool:
    """Whether so many rows of codes are multiplied by weights as bytes, where activations may be codes."""
    return _as_bytes(b, isa) and (rows < _MANY["int8"] or not by_halves(isa, b.coding.reach))


def takes_digits(b: CodedB, rows: int, isa: Isa) -> bool:
    """Whether so many rows, taken to the full, are multiplied as digits of 8 bits."""
    return _as_bytes(b, isa) and b.n >= _DIGIT_COLUMNS[isa.vector_bytes] and rows <= _digit_rows(b, isa)


def _as_bytes(b: CodedB, isa: Isa) -> bool:
    return b.coding.whole and multiplies_fours(isa) and fits_bytes(b)


def _digit_rows(b: CodedB, isa: Isa) -> int:
    group = b.words * b.coding.per_word
    if not multiplies_bytes(isa):
        return 0 if by_halves(isa, b.coding.reach) or group < _PAIRED_GROUP.get(b.coding.bits, 0) else 1
    by_group = _COUPLED_ROWS if b.coupled else _DIGIT_ROWS[isa.vector_bytes]
    return by_group[max(least for least in by_group if least <= group)]


def coded_matmul(
    a: View,
    b: CodedB,
    out: View,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
    accuracy: Accuracy = "float32",
) -> list[Launch]:
    """``out = epilogue(a @ b)``: a [..., M, K] of float32 or 16 bits, b [K, N]; sums are float32.

    ``accuracy`` is what is asked for at least: less exact arithmetic is used only where it is the faster one.
    """
    if 0 in out.shape:
        return []
    sizes = View(b.codes, DType.float32, (b.k, b.n), (0, 0))  # nobody reads it: kernels know the packed weights
    p = folded(problem_of(a, sizes, out, epilogue, 1.0))
    pairs = accuracy != "float32" and multiplies_pairs(isa)
    integers = accuracy == "int8" and takes_codes(b, p.m, isa)
    # such products outdo those of floats at any number of rows, but for what the matrix unit multiplies
    stays = integers and not suits(isa, DType.bfloat16, DType.bfloat16)
    many = many_from(isa, "int8" if integers else "bfloat16" if pairs else "float32")
    digits = not integers and takes_digits(b, p.m, isa)
    if b.n > 1 and not stays and not (digits and not pairs) and p.m >= many:
        return _many(p, b, isa, threads, pairs)
    if integers:
        prepared = prepare(p, b, isa, "codes")
        if suits_unpacked(b, p.m, isa):
            return [*prepared.launches, by_unpacked(p, b, prepared, isa, threads)]
    elif digits:
        prepared = prepare(p, b, isa, "digits")
        return [*prepared.launches, few_rows(p, b, prepared, isa, threads, "digits")]
    elif b.less is not None:
        prepared = prepare(p, b, isa, "sums")
    else:
        prepared = given(p) if readable(p, b) else prepare(p, b, isa, "plain")
    return [*prepared.launches, few_rows(p, b, prepared, isa, threads, "codes" if integers else "floats")]


def _many(p: Problem, b: CodedB, isa: Isa, threads: int, pairs: bool) -> list[Launch]:
    p = replace(p, b=stand_in(b, p.m, isa, pairs=pairs))
    before: tuple[Launch, ...] = ()
    if b.order is not None:
        prepared = prepare(p, b, isa, "plain")
        view, before = copied(p, b, prepared), prepared.launches
        batch = tuple(replace(axis, a=steps[0] // 4) for axis, steps in zip(p.batch, prepared.batch))
        p = replace(p, a=view, k=b.deep, a_strides=(b.deep, 1), batch=batch)
    return [*before, *many_rows(p, b, isa, threads)]
