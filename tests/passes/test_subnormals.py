"""Subnormal weights of layers become zeros; everything else keeps every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ranvier.dtypes import DType
from ranvier.graph import ConstTensor, Graph
from ranvier.passes import SubnormalWeights
from ranvier.passes.subnormals import without_subnormals
from tests.passes.pass_tools import Draft, apply, run

TINY = np.float32(1e-40)


def weights(*shape: int, tiny: tuple[int, ...] = ()) -> np.ndarray:
    found = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    if tiny:
        found[tiny] = TINY
    return found


@given(arrays.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, 2**32 - 1)), st.booleans())
def test_only_subnormal_numbers_change(bits: np.ndarray, reverse: bool) -> None:
    array = bits.view(np.float32)[:: -1 if reverse else 1]
    small = ((bits & 0x7F800000) == 0)[:: -1 if reverse else 1] & (array != 0)
    cleared = without_subnormals(array)
    assert (cleared is not None) == bool(small.any())
    if cleared is not None:
        want = np.where(small, bits[:: -1 if reverse else 1] & 0x80000000, bits[:: -1 if reverse else 1])
        np.testing.assert_array_equal(np.ascontiguousarray(cleared).view(np.uint32), want)


@pytest.mark.parametrize("place", [0, 32767, 32768, 99_999])
def test_one_is_found_wherever_it_is(place: int) -> None:
    array = np.zeros(100_000, np.float32)
    array[place] = -TINY
    cleared = without_subnormals(array)
    assert cleared is not None and not cleared.any() and np.signbit(cleared[place])
    array[place] = np.finfo(np.float32).tiny
    assert without_subnormals(array) is None


def test_weights_and_biases_of_layers() -> None:
    shared = weights(6, 6, tiny=(slice(2, 4),))

    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (2, 3, 5, 6))
        y = d.op("Conv", x, weights(4, 3, 1, 1, tiny=(1,)), weights(4, tiny=(1,)))
        y = d.op("Add", y, weights(4, 1, 1, tiny=(2,)))
        both = d.constant(shared)
        y = d.op("MatMul", d.op("MatMul", y, both), both)
        return d.done(y)

    found = apply(SubnormalWeights(), draw, rtol=1e-30)
    assert found.ctx.notes == {"tensor": 4}
    kept = [v.const.numpy() for node in found.graph for v in node.inputs if v is not None and v.const is not None]
    assert len(kept) == 5 and not any((np.abs(a) == TINY).any() for a in kept)
    first, second = (node.inputs[1] for node in found.graph if node.op == "MatMul")
    assert first.const is second.const


def test_what_is_no_weight_stays() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (2, 3))
        y = d.op("Add", x, weights(3, tiny=(1,)))
        y = d.op("Mul", y, weights(3, tiny=(1,)))
        wide = d.op("Cast", x, to=11)
        wide = d.op("MatMul", wide, np.full((3, 3), 1e-310))  # subnormal, but of 64 bits
        return d.done(y, wide, d.op("MatMul", x, weights(3, 3)))

    assert not apply(SubnormalWeights(), draw).ctx.changes


def test_what_is_made_again_is_not_read() -> None:
    def never() -> Any:
        raise AssertionError("read")

    d = Draft()
    const = ConstTensor(DType.float32, (90, 90), never, again=True)
    graph = d.done(d.op("MatMul", d.input("x", (2, 90)), d.graph.add_constant(const, "w")))
    assert not run(SubnormalWeights(), graph).changes
