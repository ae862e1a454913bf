"""Convolutions of one tensor are joined where that takes fewer vectors, and only where they do the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.graph import Graph
from ranvier.passes import ParallelLayers
from tests.passes.pass_tools import Draft, apply

ROUNDING = 1e-5


def weights(out: int, inside: int = 3, kernel: int = 3, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(out).standard_normal((out, inside, kernel, kernel)).astype(dtype)


def bias(out: int) -> np.ndarray:
    return np.random.default_rng(out).standard_normal(out).astype(np.float32)


def test_heads_of_a_detector_become_one() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", ("n", 3, 6, 5))
        boxes = d.op("Conv", x, weights(8), bias(8), pads=[1, 1, 1, 1])
        scores = d.op("Sigmoid", d.op("Conv", x, weights(2), pads=[1, 1, 1, 1]))
        points = d.op("Relu", d.op("Conv", x, weights(5), bias(5), pads=[1, 1, 1, 1]))
        return d.done(boxes, scores, points)

    found = apply(ParallelLayers(), draw, rtol=ROUNDING)
    assert found.ops.count("Conv") == 1 and found.ops.count("Split") == 1
    assert [value.name for value in found.graph.outputs] == ["y0", "y1", "y2"]
    assert found.only("Conv").inputs[1].const.shape == (15, 3, 3, 3)


def test_what_differs_stays_apart() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (1, 4, 8, 8))
        one = d.op("Conv", x, weights(4, 4), pads=[1, 1, 1, 1])
        strided = d.op("Conv", x, weights(4, 4), pads=[1, 1, 1, 1], strides=[2, 2])
        small = d.op("Conv", x, weights(4, 4, 1))
        grouped = d.op("Conv", x, weights(4, 2), pads=[1, 1, 1, 1], group=2)
        wide = d.op("Conv", d.op("Cast", x, to=11), weights(4, 4, dtype=np.float64), pads=[1, 1, 1, 1])
        return d.done(one, strided, small, grouped, wide)

    found = apply(ParallelLayers(), draw)
    assert found.ops.count("Conv") == 5


def test_full_vectors_gain_nothing() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (1, 3, 5, 5))
        return d.done(d.op("Conv", x, weights(16)), d.op("Conv", x, weights(32)))

    found = apply(ParallelLayers(), draw)
    assert found.ops.count("Conv") == 2


def test_weights_of_the_graph_stay() -> None:
    def draw() -> Graph:
        d = Draft()
        x, w = d.input("x", (1, 3, 5, 5)), d.input("w", (4, 3, 3, 3))
        return d.done(d.op("Conv", x, w), d.op("Conv", x, weights(4)))

    found = apply(ParallelLayers(), draw)
    assert found.ops.count("Conv") == 2


def matrix(inside: int, out: int) -> np.ndarray:
    return np.random.default_rng(out).standard_normal((inside, out)).astype(np.float32)


def test_narrow_products_become_one() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", ("n", 7, 6))
        return d.done(d.op("Relu", d.op("MatMul", x, matrix(6, 5))), d.op("MatMul", x, matrix(6, 9)))

    found = apply(ParallelLayers(), draw, rtol=ROUNDING)
    assert found.ops.count("MatMul") == 1 and found.only("MatMul").inputs[1].const.shape == (6, 14)


def test_gemms_become_one_with_a_bias_for_all() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (4, 6))
        one = d.op("Gemm", x, matrix(6, 5).T.copy(), bias(5), transB=1, alpha=0.5, beta=2.0)
        other = d.op("Gemm", x, matrix(6, 3).T.copy(), transB=1, alpha=0.5, beta=2.0)
        return d.done(one, other)

    found = apply(ParallelLayers(), draw, rtol=ROUNDING)
    assert found.ops.count("Gemm") == 1 and found.only("Gemm").inputs[1].const.shape == (8, 6)


def test_products_that_stay_apart() -> None:
    def draw() -> Graph:
        d = Draft()
        x, row = d.input("x", (4, 6)), d.input("row", (1, 6))
        alone = [d.op("MatMul", row, matrix(6, n)) for n in (3, 4)]  # a single row shares nothing
        full = [d.op("MatMul", x, matrix(6, n)) for n in (16, 32)]
        scaled = [d.op("Gemm", x, matrix(6, 5), alpha=a) for a in (1.0, 2.0)]
        whole = [d.op("Gemm", x, matrix(6, 4), np.ones((4, 4), np.float32)) for _ in range(2)]
        return d.done(*alone, *full, *scaled, *whole)

    found = apply(ParallelLayers(), draw)
    assert found.ops.count("MatMul") == 4 and found.ops.count("Gemm") == 4
