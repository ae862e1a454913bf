"""Gradients of samples, windows, transforms and scattering against finite differences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ranvier.graph.ir import Value
from ranvier.graph.rewrite import GraphOps
from tests.passes.gradient_tools import Array, Build, Case, check, op_of, r

I64 = np.int64


def scalar(value: int) -> Array:
    return np.asarray(value, I64)


def sampled(mode: str, padding: str, align: int) -> Case:
    grid = r(2, 2, 3, 2, low=-1.35, high=1.35)  # some of them outside
    build = op_of("GridSample", mode=mode, padding_mode=padding, align_corners=align)
    if mode == "nearest":
        return Case(build, [r(2, 2, 3, 4)], [grid])
    return Case(build, [r(2, 2, 3, 4), grid])


def transform(axis: int, length: int | None = None, inverse: int = 0, onesided: int = 0) -> Build:
    def build(op: GraphOps, x: Value) -> Value:
        size = None if length is None else scalar(length)
        return op.node("DFT", [x, size, scalar(axis)], {"inverse": inverse, "onesided": onesided}).output

    return build


def short(onesided: int, window: bool) -> Build:
    def build(op: GraphOps, x: Value, *rest: Value) -> Value:
        operands = [x, scalar(2), rest[0] if window else None, scalar(4)]
        return op.node("STFT", operands, {"onesided": onesided}).output

    return build


ELEMENTS = np.array([[0, 2, 2], [1, 0, 0]], I64)
ROWS = np.array([[1], [0], [1]], I64)
CASES = {
    f"GridSample {mode} {padding} {align}": sampled(mode, padding, align)
    for mode, padding, align in itertools.product(
        ("nearest", "linear", "cubic"), ("zeros", "border", "reflection"), (0, 1)
    )
}
CASES |= {
    "GridSample volume": Case(op_of("GridSample"), [r(1, 2, 2, 3, 2), r(1, 1, 2, 2, 3, low=-0.9, high=0.9)]),
    **{
        f"AveragePool up {counted}": Case(
            op_of(
                "AveragePool",
                kernel_shape=[3, 2],
                strides=[2, 2],
                pads=[1, 0, 1, 1],
                ceil_mode=1,
                count_include_pad=counted,
            ),
            [r(1, 2, 4, 4)],
        )
        for counted in (0, 1)
    },
    "AveragePool up long": Case(op_of("AveragePool", kernel_shape=[3], strides=[3], ceil_mode=1), [r(1, 2, 7)]),
    "LpPool up": Case(
        op_of("LpPool", kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 0, 1], ceil_mode=1), [r(1, 2, 5, 4)]
    ),
    "Col2Im": Case(op_of("Col2Im", np.array([4, 5], I64), np.array([2, 3], I64)), [r(1, 12, 9)]),
    "Col2Im in steps": Case(
        op_of(
            "Col2Im", np.array([5, 4], I64), np.array([2, 2], I64), strides=[2, 1], pads=[1, 0, 0, 1], dilations=[1, 2]
        ),
        [r(2, 4, 9)],
    ),
    "MaxUnpool": Case(
        op_of("MaxUnpool", kernel_shape=[2, 2], strides=[2, 2]),
        [r(1, 1, 2, 2)],
        [np.array([[[[5, 7], [13, 14]]]], I64)],
    ),
    "MaxUnpool into more": Case(
        op_of("MaxUnpool", kernel_shape=[2, 2], strides=[2, 2]),
        [r(1, 1, 2, 2)],
        [np.array([[[[5, 7], [13, 14]]]], I64), np.array([1, 1, 5, 6], I64)],
        shape=(1, 1, 5, 6),
    ),
    "DFT": Case(transform(1), [r(2, 5, 2)]),
    "DFT of real numbers": Case(transform(1), [r(2, 6, 1)]),
    "DFT onesided": Case(transform(1, onesided=1), [r(2, 6, 1)]),
    "DFT onesided odd": Case(transform(-2, onesided=1), [r(2, 5, 1)]),
    "DFT inverse": Case(transform(0, inverse=1), [r(5, 2, 2)]),
    "DFT inverse onesided": Case(transform(1, inverse=1, onesided=1), [r(2, 4, 2)], shape=(2, 6, 1)),
    "DFT inverse onesided odd": Case(transform(1, 5, inverse=1, onesided=1), [r(2, 4, 2)], shape=(2, 5, 1)),
    "DFT longer": Case(transform(1, 7), [r(2, 5, 2)]),
    "DFT shorter": Case(transform(1, 3, inverse=1), [r(2, 5, 2)]),
    "STFT": Case(short(1, True), [r(2, 9, 1), r(4, seed=1)]),
    "STFT of both sides": Case(short(0, False), [r(1, 8, 2)], shape=(1, 3, 4, 2)),
    **{
        f"ScatterElements {how}": Case(
            lambda op, x, u, i, how=how: op.ScatterElements(x, i, u, axis=1, reduction=how),
            [r(2, 4, seed=2), r(2, 3)],
            [ELEMENTS],
        )
        for how in ("add", "mul", "max", "min")
    },
    **{
        f"ScatterND {how}": Case(
            lambda op, x, u, i, how=how: op.ScatterND(x, i, u, reduction=how), [r(2, 3), r(3, 3, seed=1)], [ROWS]
        )
        for how in ("mul", "max", "min")
    },
    "ScatterElements mul with zeros": Case(
        lambda op, x, u, i: op.ScatterElements(x, i, u, axis=1, reduction="mul"),
        [r(2, 4, seed=2), np.array([[0.0, 0.0, 1.5], [2.0, 0.0, 0.0]])],
        [ELEMENTS],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])
