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
