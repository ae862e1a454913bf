"""Weights rounded by what their sums read."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing.rounding import Rounding, SumMoments, moments_of, spread, to_bfloat, windows
from ranvier.runtime.quantizing.sites import Site, find_sites
from tests.runtime.test_quantizing_layers import graph_of

Array = np.ndarray[Any, Any]
SHAPES = [  # strides, dilations, pads, groups
    ((1, 1), (1, 1), (0, 0, 0, 0), 1),
    ((2, 1), (1, 2), (1, 2, 0, 1), 1),
    ((1, 2), (1, 1), (1, 1, 1, 1), 4),
    ((1, 1), (2, 1), (2, 1, 2, 1), 8),
]


def layer(strides: Any, dilations: Any, pads: Any, groups: int) -> Graph:
    rng = np.random.default_rng(1)
    weights = {"w": rng.standard_normal((32, 8 // groups, 3, 3))}
    attrs: dict[str, Any] = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups}
    return graph_of([helper.make_node("Conv", ["x", "w"], ["y"], "conv", **attrs)], weights)


def site_of(graph: Graph) -> Site:
    (found,) = find_sites(graph)
    return found


def smooth(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers whose neighbours are alike, as those of pictures are; channels have means."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    for axis in (-1, -2):
        x = (x + np.roll(x, 1, axis) + np.roll(x, 2, axis)) / 3
    return (x + rng.standard_normal((1, shape[1], 1, 1))).astype(np.float32)


@pytest.mark.parametrize(("strides", "dilations", "pads", "groups"), SHAPES)
def test_windows_are_what_sums_read(strides: Any, dilations: Any, pads: Any, groups: int) -> None:
    site = site_of(layer(strides, dilations, pads, groups))
    x = smooth((2, 8, 9, 11))
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    expected = []
    tall, wide = ((padded.shape[2 + k] - 2 * dilations[k] - 1) // strides[k] + 1 for k in (0, 1))
    for n, i, j in itertools.product(range(2), range(tall), range(wide)):
        top, left = i * strides[0], j * strides[1]
        rows = slice(top, top + 2 * dilations[0] + 1, dilations[0])
        window = padded[n, :, rows, left : left + 2 * dilations[1] + 1 : dilations[1]]
        expected.append(window.reshape(groups, -1))
    found = windows(site, x, 10**6, np.random.default_rng(0))
    assert found.shape == (groups, len(expected), site.numbers[0].size)
    for group in range(groups):
        rows = np.stack([each[group] for each in expected])
        order, other = np.lexsort(rows.T), np.lexsort(found[group].T)
        np.testing.assert_array_equal(found[group][other], rows[order])


@pytest.mark.parametrize(("strides", "dilations", "pads", "groups"), SHAPES)
def test_results_move_less_than_with_the_nearest(strides: Any, dilations: Any, pads: Any, groups: int) -> None:
    site = site_of(layer(strides, dilations, pads, groups))
    moments = moments_of([site])
    for seed in range(16):
        moments["conv"].update(smooth((1, 8, 24, 24), seed))
    fresh = windows(site, smooth((4, 8, 24, 24), 99), 2000, np.random.default_rng(0)).astype(np.float64)
    weights = site.numbers.astype(np.float64)

    def off(made: Array) -> float:
        lost = (made - weights).reshape(groups, 32 // groups, -1)
        return float(np.square(fresh @ lost.transpose(0, 2, 1)).mean())

    given, plain = Rounding(moments), Rounding()
    codes, steps, lost = given.codes(site)
    assert codes.dtype == np.int8 and abs(codes.astype(int)).max() <= 127
    np.testing.assert_allclose(codes * steps.reshape(-1, 1, 1, 1) + lost, site.numbers, rtol=1e-5, atol=1e-6)
    assert off(weights - lost) < 0.7 * off(weights - plain.codes(site)[2])
    made = given.bfloat(site)
    np.testing.assert_array_equal(made, made.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert off(made) < 0.7 * off(plain.bfloat(site))


def test_inputs_that_say_nothing_leave_the_nearest() -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((2, 5, 7))
    for second in (np.zeros((2, 7, 7)), np.broadcast_to(np.eye(7), (2, 7, 7)).copy()):
        np.testing.assert_array_equal(spread(weights, second, np.rint), np.rint(weights))


def test_numbers_that_are_not_finite_are_left_out() -> None:
    moments = SumMoments(site_of(layer(*SHAPES[0])))
    x = smooth((1, 8, 6, 6))
    x[0, 0] = np.inf
    moments.update(x)
    assert moments.count == 0 and not moments.second.any()


def test_bfloat_is_rounded_to_even() -> None:
    rng = np.random.default_rng(5)
    values = (rng.standard_normal(4096) * 10.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
    halves = (np.arange(1, 64, dtype=np.uint32) << 16 | 0x3F808000).view(np.float32)
    for each in (values, halves, -halves):
        np.testing.assert_array_equal(to_bfloat(each), each.astype(ml_dtypes.bfloat16).astype(np.float32))
