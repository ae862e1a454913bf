"""Einsum, running totals and losses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranvier as rv
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(11)
SIZES = {"a": 3, "b": 2, "c": 5, "d": 7, "h": 4, "i": 6, "j": 9, "k": 8, "q": 5, "n": 1}


def operand(term: str, dtype: Any = np.float32, hidden: tuple[int, ...] = (2, 3)) -> Array:
    before, dots, after = term.partition("...")
    shape = (*(SIZES[c] for c in before), *(hidden if dots else ()), *(SIZES[c] for c in after))
    if np.issubdtype(dtype, np.integer):
        return RNG.integers(-5, 5, shape).astype(dtype)
    return RNG.normal(size=shape).astype(dtype)


EQUATIONS = [
    "ij->ji",
    "ij->",
    "ij->j",
    "ii->i",
    "ii->",
    "iji->j",
    "ij",
    "ba",
    "i,j->ij",
    "i,i->",
    "i,i->i",
    "ij,jk->ik",
    "ij,jk->ki",
    "ij,jk",
    "ij,kj->ik",
    "bij,bjk->bik",
    "bij,bkj->bik",
    "bqhd,bkhd->bhqk",
    "bhqk,bkhd->bqhd",
    "ijk,jil->kl".replace("l", "c"),
    "ijk,jkc->i",
    "ij,ij->i",
    "abc,cd->abd",
    "ab,cd->acbd",
    "ij,jk,kc->ic",
    "a,b,c->abc",
    "ijk,i,jk->k",
    "ij,->ij",
    "...ij,...jk->...ik",
    "...ii->...i",
    "...i->...",
    "i...->...",
    "nij,bjk->bik",
    "ij,ik->i",
]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(equation: str) -> None:
    terms = equation.partition("->")[0].split(",")
    check("Einsum", [operand(t) for t in terms], {"equation": equation}, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_einsum_of_other_types(dtype: Any) -> None:
    for equation in ("ij,jk->ik", "ij,ij->i", "ij->", "i,j,k->kji"):
        inputs = [operand(t, dtype) for t in equation.partition("->")[0].split(",")]
        check("Einsum", inputs, {"equation": equation}, rtol=2e-3, atol=2e-3)


def test_einsum_broadcasts_ellipses_and_sums_nothing() -> None:
    x, y = operand("...ij", hidden=(2, 1)), operand("...jk", hidden=(1, 3))
    check("Einsum", [x, y], {"equation": "...ij,...jk->...ik"}, rtol=1e-4, atol=1e-5)
    empty = np.zeros((0, 4), np.float32)
    check("Einsum", [empty.T.copy(), empty], {"equation": "ij,jk->ik"})


# -- running totals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_running_totals(op: str, exclusive: int, reverse: int) -> None:
    attrs = {"exclusive": exclusive, "reverse": reverse}
    opset = 26 if op == "CumProd" else 14
    for shape in ((37,), (5, 40), (3, 17, 9)):
        for axis in {0, len(shape) - 1, -len(shape)}:
            x = RNG.normal(size=shape).astype(np.float32)
            check(op, [x, np.array(axis)], attrs, constant=[1], opset=opset, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64])
def test_running_totals_of_other_types(dtype: Any) -> None:
    x = (RNG.normal(size=(4, 33)) * 4).astype(dtype)
    check("CumSum", [x, np.array([1])], constant=[1], rtol=1e-2, atol=1e-3)


# -- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("spatial", [(), (5,), (3, 4)])
def test_losses(op: str, reduction: str, spatial: tuple[int, ...]) -> None:
    scores = RNG.normal(size=(6, 11, *spatial)).astype(np.float32)
    labels = RNG.integers(0, 11, (6, *spatial))
    weights = RNG.random(11).astype(np.float32)
    for weight, ignored in ((None, None), (weights, None), (weights, 3), (None, -7)):
        attrs: dict[str, Any] = {"reduction": reduction}
        given = labels.copy()
        if ignored is not None:
            attrs["ignore_index"] = ignored
            given.reshape(-1)[::4] = ignored
        for outputs in (1, 2) if op.startswith("Soft") else (1,):
            check(op, [scores, given, weight], attrs, outputs=outputs, rtol=1e-4, atol=1e-5)


def test_losses_of_halves_and_int32_labels() -> None:
    scores, labels = RNG.normal(size=(6, 11)).astype(np.float16), RNG.integers(0, 11, 6).astype(np.int32)
    for outputs in (1, 2):
        check("SoftmaxCrossEntropyLoss", [scores, labels], outputs=outputs, rtol=2e-3, atol=1e-3)


def test_a_label_out_of_range_is_an_error() -> None:
    inputs = [RNG.normal(size=(3, 4)).astype(np.float32), np.array([0, 4, 1])]
    for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        with rv.load(one_node(op, inputs), providers=["cpu"]) as session, pytest.raises(rv.errors.InvalidValue):
            session.run({"x0": inputs[0], "x1": inputs[1]})
