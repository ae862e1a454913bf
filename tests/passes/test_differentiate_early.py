"""Gradients of operators that the standard dropped, adopted later, or has for filling and choosing."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.graph.ir import Value
from ranvier.graph.rewrite import GraphOps
from tests.passes.gradient_tools import Case, check, op_of, r
from tests.passes.test_differentiate_contrib import fused

I64 = np.int64


def scattered(mode: str, axis: int, starts: bool) -> Case:
    shapes = {-2: ((2, 3, 5, 2), (2, 3, 2, 2)), 1: ((2, 5, 3), (2, 2, 3))}[axis]
    at = [np.array([4, 1] if mode == "circular" else [3, 1], I64)] if starts else []
    return Case(op_of("TensorScatter", axis=axis, mode=mode), [r(*shape) for shape in shapes], at)


def ranged(op: GraphOps, start: Value, step: Value) -> Value:
    return op.node("Range", [start, np.float64(2.0), step], {}).output


CASES = {
    "Affine": Case(op_of("Affine", alpha=0.7, beta=0.2), [r(5)]),
    "Scale": Case(op_of("Scale", scale=0.3), [r(5)]),
    "ParametricSoftplus": Case(op_of("ParametricSoftplus", alpha=0.7, beta=1.2), [r(5)]),
    "ScaledTanh": Case(op_of("ScaledTanh", alpha=0.7, beta=1.2), [r(5)]),
    "ImageScaler": Case(op_of("ImageScaler", scale=0.5, bias=[0.1, 0.2]), [r(1, 2, 2, 2)]),
    "ImageScaler without offsets": Case(op_of("ImageScaler", scale=0.5), [r(1, 2, 2, 2)]),
    "Crop": Case(op_of("Crop", border=[1, 0, 0, 1]), [r(1, 2, 3, 4)]),
    "Crop to a size": Case(op_of("Crop", border=[1, 1, 0, 0], scale=[2, 2]), [r(1, 2, 3, 4)]),
    "Range": Case(ranged, [np.array(0.3), np.array(0.4)], shape=(5,)),
    "OneHot": Case(
        lambda op, values, at: op.node("OneHot", [at, np.array(4, I64), values], {"axis": 1}).output,
        [r(2)],
        [np.array([[1, 3], [-1, 0], [7, 2]], I64)],
    ),
    "OneHot 9": Case(
        lambda op, values, at: op.node("OneHot", [at, np.array(4, I64), values], {}, version=9).output,
        [r(2)],
        [np.array([1, -1, 3], I64)],
        shape=(3, 4),
    ),
    "Scatter": Case(
        lambda op, x, u, i: op.node("Scatter", [x, i, u], {"axis": 1}, version=9).output,
        [r(2, 4), r(2, 2)],
        [np.array([[1, 3], [0, 2]], I64)],
        shape=(2, 4),
    ),
    "SimplifiedLayerNormalization": Case(
        op_of("SimplifiedLayerNormalization", axis=1), [r(2, 2, 3), r(2, 3)], shape=(2, 2, 3)
    ),
    "TensorScatter": scattered("linear", -2, True),
    "TensorScatter from the start": scattered("linear", 1, False),
    "TensorScatter around": scattered("circular", -2, True),
}
FUSED = {
    "Trilu": Case(fused("Trilu", upper=0), [r(3, 3)]),
    "GridSample": Case(
        fused("GridSample", mode="bilinear"), [r(1, 2, 3, 3), r(1, 2, 2, 2, low=-0.9, high=0.9)], shape=(1, 2, 2, 2)
    ),
    "SimplifiedLayerNormalization": Case(fused("SimplifiedLayerNormalization"), [r(3, 6), r(6)]),
    "DequantizeLinear": Case(
        fused("DequantizeLinear", order=(1, 0, 2), axis=0),
        [r(3, low=0.5).astype(np.float32).astype(np.float64)],
        [np.array([[1, 2], [3, 4], [5, 6]], np.int8), np.array([1, 0, 2], np.int8)],
    ),
    "Range": Case(
        fused("Range", order=(0, 2, 1)), [np.array(0.3), np.array(0.4)], [np.array(2.0)], shape=(5,)
    ),
    "GatherND": Case(fused("GatherND"), [r(3, 4)], [np.array([[1, 2], [0, 3]], np.int32)]),
    "TorchEmbedding": Case(fused("TorchEmbedding"), [r(4, 3)], [np.array([[0, 2], [2, 2]], I64)]),
    "Pad": Case(fused("Pad", order=(0, 2, 1)), [r(2, 3), np.array([0.5])], [np.array([0, 1, 1, 2], I64)]),
    "Pad by reflection": Case(fused("Pad", mode="reflect"), [r(3, 4)], [np.array([[1, 2, 0, 1]], I64)]),
    "ExpandDims": Case(fused("ExpandDims"), [r(3, 4)], [np.array([1], np.int32)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", FUSED)
def test_early_form(name: str) -> None:
    check(FUSED[name])
