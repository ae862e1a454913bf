"""Rows that visit experts: how they are sorted, and products with the weights of each one's expert, by every way."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.codegen.llvm.coded import Accuracy, Coding, Groups
from ranvier.codegen.llvm.coded.adding import multiplies_fours
from ranvier.codegen.llvm.coded.visited import pack_experts, usual_rows, visited_matmul
from ranvier.codegen.llvm.coded.visiting import ALIGNED
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.visits import VISIT, most_visits, sort_visits, sorted_rows
from tests.codegen.harness import ISAS, Runner, aligned, view_of
from tests.codegen.test_coded import CODINGS, KEPT, meaning, stepped, ways

Array = np.ndarray[Any, Any]
F32 = np.float32
FLOATS = {
    "float32": (Coding(32, "float32"), np.dtype(np.float32)),
    "float16": (Coding(16, "float16"), np.dtype(np.float16)),
    "bfloat16": (Coding(16, "bfloat16"), np.dtype(ml_dtypes.bfloat16)),
}


def sort(chosen: Array, experts: int, align: int) -> tuple[Array, Array, Array, Array]:
    rows = sorted_rows(len(chosen), experts, align)
    made = [np.full(n, -9, np.int32) for n in (rows, len(chosen), rows)]
    visits = np.full((most_visits(len(chosen), experts), VISIT), -9, np.int32)
    views = [view_of(chosen), *(view_of(x, "output") for x in (*made, visits))]
    launches = sort_visits(*views, experts, align)
    bound = {v.storage: x for v, x in zip(views, (chosen, *made, visits))}
    runner = Runner(launches, ISAS[0], bound)
    KEPT.update({(ISAS[0].key, spec): kernel for spec, kernel in runner.kernels.items()})
    runner()
    return (*made, visits)


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (4, 9), (30, 3), (200, 128), (64, 1)])
def test_rows_are_sorted_by_expert(rows: int, experts: int, align: int) -> None:
    chosen = np.random.default_rng(rows).integers(0, experts, rows)
    order, places, owners, visits = sort(chosen, experts, align)
    np.testing.assert_array_equal(order[places], np.arange(rows))  # where each row went, it is
    np.testing.assert_array_equal(owners[places], chosen)
    found, counts = np.unique(chosen, return_counts=True)
    np.testing.assert_array_equal(visits[: len(found), 0], found)
    np.testing.assert_array_equal(visits[: len(found), 2], counts)
    assert not visits[len(found) :, 2].any()
    assert not (visits[: len(found), 1] % align).any()
    for expert, first, count in visits[: len(found)]:
        np.testing.assert_array_equal(order[first : first + count], np.flatnonzero(chosen == expert))
    assert order.min() >= 0  # rows in between are some row of the work
    assert order.max() < rows
    assert owners.min() >= 0


class Case:
    """Experts with random weights, what they stand for, and tokens that have chosen."""

    def __init__(
        self, coding: Coding, isa: Isa, experts: int, k: int, n: int, group: int, *, zeros: bool = False, seed: int = 0,
        shared: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        less = None
        if coding.bits > 8:
            stored = rng.standard_normal((experts, n, k)).astype(FLOATS[coding.kind][1])
            scales = np.ones((experts, n, 1), F32)
            self.matrices = stored.astype(np.float64)
        else:
            values = meaning(coding)
            stored = rng.choice(np.flatnonzero(np.isfinite(values)), (experts, n, k)).astype(np.uint8)
            count = -(-k // group)
            scales = (rng.uniform(0.01, 0.1, (experts, n, count)) * (2.0**-6 if coding.kind == "e5m2" else 1)).astype(
                F32
            )
            if shared:
                scales = np.stack([stepped(rng, n, count, group, 1) for _ in range(experts)])
            group_of = np.arange(k) // group
            wide = values[stored]
            if zeros and shared:
                offsets = np.stack([stepped(rng, n, count, group, 0) for _ in range(experts)])
                less = (offsets / scales).astype(np.float64) - coding.middle
                wide = wide - less[..., group_of]
            elif zeros:
                less = rng.integers(-2, 3, scales.shape).astype(F32)
                wide = wide - less[..., group_of]
            self.matrices = wide * scales.astype(np.float64)[..., group_of]
        groups = Groups.even(k, k if coding.bits > 8 else group, coding)
        self.packed = pack_experts(stored, coding, groups, scales, less, isa, filled=False)
        self.rng = rng

    def check(self, isa: Isa, tokens: int, choices: int, *, accuracy: Accuracy = "float32", split: int = 1) -> None:
        count, n, k = self.matrices.shape
        chosen = np.argsort(self.rng.random((tokens, count)), axis=1)[:, :choices].reshape(-1)
        usual = usual_rows(tokens, choices, count)
        align = ALIGNED if usual >= ALIGNED else 1
        order, _, owners, visits = sort(chosen, count, align)
        x = self.rng.standard_normal((tokens, k)).astype(F32)
        a = aligned(len(order) * k * 4).view(F32).reshape(-1, k)
        a[:] = x[order // choices]
        out = aligned(len(order) * n * 4).view(F32).reshape(-1, n)
        out[:] = 77.0
        av, vv, ov = view_of(a), view_of(visits), view_of(out, "output")
        launches = visited_matmul(
            *(av, vv, self.packed, ov, usual, isa),
            aligned=align > 1, threads=split, accuracy=accuracy,
        )  # fmt: skip
        runner = Runner(launches, isa, {av.storage: a, vv.storage: visits, ov.storage: out}, split=split, poison=0xFF)
        KEPT.update({(isa.key, spec): kernel for spec, kernel in runner.kernels.items()})
        runner()
        off = 1e-5 if accuracy == "float32" or not multiplies_fours(isa) else 2e-2
        seen = np.zeros(len(order), bool)
        for expert, first, height in visits:
            for r in range(first, first + height):
                assert owners[r] == expert
                expected = self.matrices[expert] @ a[r].astype(np.float64)
                size = np.abs(self.matrices[expert]) @ np.abs(a[r])
                np.testing.assert_array_less(np.abs(out[r] - expected), off * size + 1e-6)
                seen[r] = True
        assert seen.sum() == len(chosen)
        last = max(first + -(-height // align) * align for _, first, height in visits)
        assert (out[last:] == 77.0).all()  # nothing is written behind the rows there are


@ways
@pytest.mark.parametrize("name", [*CODINGS, *FLOATS])
def test_every_coding(isa: Isa, name: str) -> None:
    coding = CODINGS[name] if name in CODINGS else FLOATS[name][0]
    case = Case(coding, isa, 5, 96, 40, 32, zeros=coding.kind == "integers")
    for tokens in (1, 3, 60):
        case.check(isa, tokens, 2)


@ways
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_of_eight_bits(isa: Isa, bits: int) -> None:
    for zeros in (False, True):
        case = Case(Coding(bits), isa, 4, 128, 33, 32, zeros=zeros, seed=bits)
        for tokens in (1, 6, 90):
            case.check(isa, tokens, 2, accuracy="int8")


@ways
@pytest.mark.parametrize(("bits", "group", "zeros"), [(4, 32, True), (6, 16, False)])
def test_groups_that_share_a_step(isa: Isa, bits: int, group: int, zeros: bool) -> None:
    case = Case(Coding(bits), isa, 5, 256, 40, group, zeros=zeros, shared=True)
    assert bool(case.packed.all.scales.layout.run) == (dot_of(isa) is not SIGNED)
    for tokens in (1, 7, 40, 160):
        case.check(isa, tokens, 2)
        case.check(isa, tokens, 2, accuracy="int8")


@ways
def test_numbers_of_tokens_and_sizes(isa: Isa) -> None:
    """Columns that fill no panel, depths that are no whole words, one expert, as many choices as experts; in ranges."""
    for experts, choices, k, n, group in ((1, 1, 61, 7, 16), (3, 3, 64, 1, 32), (7, 2, 30, 17, 30), (2, 1, 64, 64, 16)):
        case = Case(Coding(4), isa, experts, k, n, group, zeros=True, seed=n)
        for tokens in (1, 2, 9, 17, 70):
            case.check(isa, tokens, choices, split=1 + tokens % 3)


@ways
def test_floats_of_an_odd_depth(isa: Isa) -> None:
    for coding, _ in FLOATS.values():
        case = Case(coding, isa, 3, 37, 20, 37)
        for tokens in (1, 40):
            case.check(isa, tokens, 1)


def test_all_tokens_choose_one_expert() -> None:
    """More rows than the product was planned for."""
    isa = ISAS[0]
    case = Case(Coding(4), isa, 8, 64, 48, 32)
    case.rng = _One(case.rng)  # type: ignore[assignment]
    for tokens in (2, 70, 200):
        case.check(isa, tokens, 1)


class _One:
    """Random numbers by which everybody likes the first best."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def random(self, shape: tuple[int, int]) -> Array:
        return np.broadcast_to(np.arange(shape[1], dtype=np.float64), shape)

    def standard_normal(self, shape: tuple[int, ...]) -> Array:
        return self.rng.standard_normal(shape)
