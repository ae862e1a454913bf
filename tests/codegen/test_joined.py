"""Launches as one step give what they give one after another, to the last bit, however the step is cut."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.gemm import matmul, pack_b
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.joined import joined
from ranvier.codegen.loops.ir import Epilogue, Load, Op, Operand, Result
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Runner, aligned, view_of

Array = np.ndarray[Any, Any]
F32 = DType.float32


@st.composite
def projections(draw: st.DrawFn) -> dict[str, Any]:
    """One tensor and the widths of its products, some of them narrower, as with fewer heads of keys and values."""
    widths = draw(st.lists(st.sampled_from([1, 3, 16, 31, 64, 96, 130, 192]), min_size=2, max_size=4))
    return {
        "rows": draw(st.sampled_from([1, 2, 7, 8, 33, 65])),
        "depth": draw(st.sampled_from([1, 5, 16, 48, 96])),
        "widths": widths,
        "biased": [draw(st.booleans()) for _ in widths],
        "packed": draw(st.booleans()),
        "dtype": draw(st.sampled_from([np.float32, ml_dtypes.bfloat16])),
        "threads": draw(st.sampled_from([1, 2, 4])),
        "in_turns": draw(st.booleans()),
        "split": draw(st.sampled_from([1, 2, 3, 7])),
    }


class Products:
    """The launches of products of one tensor, and the memory of their operands and results."""

    def __init__(self, isa: Isa, case: dict[str, Any]) -> None:
        rng = np.random.default_rng(case["rows"] + 100 * case["depth"])
        self.isa = isa
        self.a = rng.standard_normal((case["rows"], case["depth"])).astype(case["dtype"])
        self.factors = [rng.standard_normal((case["depth"], n)).astype(case["dtype"]) for n in case["widths"]]
        self.biases = [
            rng.standard_normal(n).astype(np.float32) if biased else None
            for n, biased in zip(case["widths"], case["biased"])
        ]
        left = view_of(self.a)
        self.bound: dict[Storage, Array] = {left.storage: self.a}
        self.before: list[Launch] = []
        self.products: list[Launch] = []
        self.outs: list[View] = []
        for b, bias in zip(self.factors, self.biases):
            right: Any
            if case["packed"]:
                right = pack_b(b, isa, rows_hint=case["rows"])
            else:
                right = view_of(b)
                self.bound[right.storage] = b
            out = View.dense(Storage("output", 4 * case["rows"] * b.shape[1]), F32, (case["rows"], b.shape[1]))
            *before, product = matmul(left, right, out, isa, epilogue=self._epilogue(bias), threads=case["threads"])
            self.before += before
            self.products.append(product)
            self.outs.append(out)

    def _epilogue(self, bias: Array | None) -> Epilogue | None:
        if bias is None:
            return None
        view = view_of(bias)
        self.bound[view.storage] = bias
        return Epilogue(Op("add", (Result(0, F32), Load(0, F32)), F32), (Operand(view, (0, 0, 1)),))

    def results(self, launches: list[Launch], split: int) -> list[Array]:
        made = {v.storage: aligned(v.storage.nbytes) for v in self.outs}
        Runner([*self.before, *launches], self.isa, {**self.bound, **made}, split=split)()
        return [made[v.storage].view(np.float32).reshape(v.shape).copy() for v in self.outs]


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@settings(deadline=None, max_examples=30)
@given(projections())
def test_one_step_gives_what_its_parts_give(isa: Isa, case: dict[str, Any]) -> None:
    products = Products(isa, case)
    apart = products.results(products.products, 1)
    whole = joined(products.products, in_turns=case["in_turns"])
    for one, other in zip(products.results([whole], case["split"]), apart):
        assert np.array_equal(one, other)
    for found, b, bias in zip(apart, products.factors, products.biases):
        exact = products.a.astype(np.float64) @ b.astype(np.float64)
        exact = exact if bias is None else exact + bias
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-3)


def made(tiles: list[int], *, in_turns: bool) -> Launch:
    """The step of launches with so many tiles each; nobody runs it."""
    products = Products(
        ISAS[0],
        {
            "rows": 1,
            "depth": 4,
            "widths": [16] * len(tiles),
            "biased": [False] * len(tiles),
            "packed": True,
            "dtype": np.float32,
            "threads": 1,
        },
    )
    for launch, count in zip(products.products, tiles):
        launch.tiles = count
    return joined(products.products, in_turns=in_turns)


def test_tiles_of_the_whole() -> None:
    assert made([12, 4, 4], in_turns=False).tiles == 20
    assert made([12, 4, 4], in_turns=True).tiles == 12


def test_work_is_the_sum_and_its_speed_the_mean() -> None:
    products = Products(
        ISAS[0],
        {
            "rows": 4,
            "depth": 8,
            "widths": [16, 32],
            "biased": [False, False],
            "packed": True,
            "dtype": np.float32,
            "threads": 1,
        },
    )
    quick, slow = products.products
    quick.rate, quick.label, slow.label = 4.0, "q", "k"
    whole = joined([quick, slow])
    assert whole.flops == quick.flops + slow.flops and whole.traffic == quick.traffic + slow.traffic
    assert whole.flops / whole.rate == pytest.approx(quick.flops / 4.0 + slow.flops)
    assert whole.label == "q + k" and set(whole.writes) == {*quick.writes, *slow.writes}
    assert whole.scratch == max(quick.scratch, slow.scratch)
