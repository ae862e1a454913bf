"""Rows times the coded weights of the expert that each visits: packing, and which kernel a product gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.pack import Array, CodedB, Groups, pack_coded
from ranvier.codegen.llvm.coded.panels import many_rows, stand_in
from ranvier.codegen.llvm.coded.passes import Activations
from ranvier.codegen.llvm.coded.prepare import Form, Prepared, given, prepare, readable
from ranvier.codegen.llvm.coded.product import Accuracy, many_from, takes_codes, takes_digits
from ranvier.codegen.llvm.coded.rows import MOST_ROWS, few_rows
from ranvier.codegen.llvm.coded.shape import beside
from ranvier.codegen.llvm.coded.unpacked import by_unpacked, suits_unpacked
from ranvier.codegen.llvm.coded.visiting import ALIGNED, FewRows, ManyRows, Steps, visit_launch
from ranvier.codegen.llvm.gemm.plan import Plan
from ranvier.codegen.llvm.gemm.problem import Problem, problem_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

# of a pass where activations are codes: nearly as quick for a row as passes of more, and where experts have more rows
# or fewer than usual, fewer of a pass are none
_CODED_ROWS = 2


@dataclass(frozen=True)
class Experts:
    """The weights of all experts, one behind the other: each begins with a panel of its own."""

    all: CodedB
    count: int
    n: int  # columns of each

    @property
    def one(self) -> CodedB:
        """The first, or any from where it begins."""
        return replace(self.all, n=self.n)

    def step(self, column: int) -> int:
        """Bytes between experts of what a column has so many of."""
        return self.all.n // self.count * column


def pack_experts(
    codes: Array, coding: Coding, groups: Groups, scales: Array, zeros: Array | None, isa: Isa, *, filled: bool,
    bits: int = 0, below: int = 0,
) -> Experts:  # fmt: skip
    """``codes``, ``scales`` and ``zeros`` are [experts, N, …]; what follows is as :func:`pack_coded` takes it."""
    count, n = codes.shape[:2]
    past = -n % (isa.lanes(4) * beside(isa))
    size = n + past

    def some(numbers: Array, first: int, last: int, nothing: int = 0) -> Array:
        """Columns by their numbers in all experts; stacks of those may have gaps in memory, and are large."""
        found = []
        for expert in range(first // size, -(-last // size)):
            begin, end = max(0, first - expert * size), min(size, last - expert * size)
            found.append(numbers[expert, begin:end])
            if end > n:
                found.append(np.full((end - max(n, begin), *numbers.shape[2:]), nothing, numbers.dtype))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def flat(numbers: Array, nothing: int = 0) -> Array:
        return some(numbers, 0, count * size, nothing) if past else numbers.reshape(count * size, -1)

    packed = pack_coded(
        *(lambda first, last: some(codes, first, last), coding, count * size, groups, flat(scales)),
        None if zeros is None else flat(zeros, below),
        isa,
        filled=filled,
        bits=bits,
        below=below,
    )
    return Experts(packed, count, n)


def usual_rows(tokens: int, k: int, experts: int) -> int:
    """Rows that an expert has if they spread evenly."""
    return max(1, -(-tokens * k // experts))


def visited_matmul(
    a: View, visits: View, experts: Experts, out: View, usual: int, isa: Isa, *,
    aligned: bool, threads: int, accuracy: Accuracy,
) -> list[Launch]:  # fmt: skip
    """``out[r] = a[r] @ weights of the expert that row r visits``: a [rows, K] and out [rows, N] of float32. ``usual``
    rows visit an expert; ``aligned``: their first ones are multiples of ALIGNED."""
    b = experts.one
    if 0 in out.shape:
        return []
    p = problem_of(a, View(b.codes, DType.float32, (b.k, b.n), (0, 0)), out, None, 1.0)
    typical = replace(p, m=usual)
    integers = accuracy == "int8" and takes_codes(b, usual, isa)
    digits = not integers and takes_digits(b, usual, isa)
    traffic = float(visits.shape[0] * b.nbytes)
    # experts have more rows or fewer, so that passes are not full: decoding panels pays a little earlier
    if not (integers or digits) and aligned and b.n > 1 and 4 * usual >= 3 * many_from(isa, "float32"):
        prepared = given(p) if readable(p, b) else prepare(p, b, isa, "plain")
        return [*prepared.launches, _by_panels(typical, experts, prepared, visits, isa, threads, traffic)]
    activations: Activations = "codes" if integers else "digits" if digits else "floats"
    forms: dict[Activations, Form] = {"codes": "codes", "digits": "digits", "floats": "plain"}
    form: Form = "sums" if activations == "floats" and b.less is not None else forms[activations]
    prepared = given(p) if form == "plain" and readable(p, b) else prepare(p, b, isa, form)
    if integers and suits_unpacked(b, usual, isa):
        inner = by_unpacked(typical, b, prepared, isa, threads)
    else:
        most = _CODED_ROWS if integers else MOST_ROWS
        inner = few_rows(replace(p, m=1) if digits else typical, b, prepared, isa, threads, activations, most)
    steps = _steps(experts, prepared.row, prepared.about_row, p)
    return [*prepared.launches, visit_launch(inner, FewRows, visits, steps, inner.tiles, traffic)]


def _by_panels(
    p: Problem, experts: Experts, prepared: Prepared, visits: View, isa: Isa, threads: int, traffic: float
) -> Launch:  # fmt: skip
    b = experts.one
    rows = View(prepared.rows.storage, DType.float32, (p.m, b.deep), (prepared.row // 4, 1), prepared.rows.offset // 4)
    m = -(-p.m // ALIGNED) * ALIGNED
    packed = stand_in(b, m, isa, pairs=False)
    p = replace(p, m=m, k=b.deep, a=rows, a_strides=(prepared.row // 4, 1), b=packed)
    (inner,) = many_rows(p, b, isa, threads, _EvenBlocks)
    return visit_launch(inner, ManyRows, visits, _steps(experts, prepared.row, 0, p), packed.panels.cut.count, traffic)


class _EvenBlocks(Plan):
    """All blocks of rows are of one size, which divides what visits are aligned to."""

    def most_rows(self, vectors: int) -> int:
        return min(ALIGNED, 1 << super().most_rows(vectors).bit_length() - 1)


def _steps(experts: Experts, row: int, about: int, p: Problem) -> Steps:
    b = experts.all
    return Steps(
        row=row,
        about=about,
        out=p.out_strides[0] * p.out.dtype.numpy.itemsize,
        codes=experts.step(b.code_bytes),
        scales=experts.step(b.scales.layout.column(b.groups)),
        zeros=experts.step(b.zeros.layout.column(b.groups)),
    )
