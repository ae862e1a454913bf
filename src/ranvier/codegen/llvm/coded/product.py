"""Products with coded weights as launches: which kind of kernel one gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.amx.micro import suits
from ranvier.codegen.llvm.coded.pack import CodedB
from ranvier.codegen.llvm.coded.panels import many_rows, stand_in
from ranvier.codegen.llvm.coded.prepare import copied, given, prepare, readable
from ranvier.codegen.llvm.coded.rows import few_rows, fits_bytes
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
# Up to so many rows, by bytes of a vector, meet weights as digits: a weight meets four digits of an activation in a
# quarter of an instruction each, and is decoded by half of one. Long vectors of floats soon outdo that.
_DIGIT_ROWS = {16: 8, 32: 32, 64: 2}
_DIGIT_GROUP = 32  # of shorter ones half as many rows: four sums of a group become one number, and there are more
_DIGIT_COLUMNS = 128  # from so many on, making digits of a row costs less than it saves


def many_from(isa: Isa, accuracy: Accuracy) -> int:
    """Rows from which on panels are decoded once for all of them."""
    return _MANY_SHORT if isa.vector_bytes == 16 and accuracy != "int8" else _MANY[accuracy]


def takes_digits(b: CodedB, rows: int, isa: Isa) -> bool:
    """Whether so many rows, taken to the full, are multiplied as digits of 8 bits."""
    if not (b.coding.whole and multiplies_bytes(isa) and fits_bytes(b)):
        return False
    short = b.words * b.coding.per_word < _DIGIT_GROUP
    return b.n >= _DIGIT_COLUMNS and rows <= _DIGIT_ROWS[isa.vector_bytes] // (2 if short else 1)


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
    integers = accuracy == "int8" and b.coding.whole and multiplies_bytes(isa) and fits_bytes(b)
    assert integers or not b.coupled
    # products of bytes outdo those of floats at any number of rows, but for what the matrix unit multiplies
    stays = integers and not suits(isa, DType.bfloat16, DType.bfloat16)
    many = many_from(isa, "int8" if integers else "bfloat16" if pairs else "float32")
    if b.n > 1 and not stays and p.m >= many:
        return _many(p, b, isa, threads, pairs)
    if integers:
        prepared = prepare(p, b, isa, "codes")
        if suits_unpacked(b, p.m, isa):
            return [*prepared.launches, by_unpacked(p, b, prepared, isa, threads)]
    elif takes_digits(b, p.m, isa):
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
