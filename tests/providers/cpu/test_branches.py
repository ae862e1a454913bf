"""Branches whose condition follows from shapes are part of the code; others run as bodies."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import pytest

import ranvier as rv
from ranvier.codegen.definitions.defs import Declined
from ranvier.providers.cpu.kernel import CpuKernel

RNG = np.random.default_rng(8)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


NESTED = """
squeezes (float[A, B] x, float[B] w) => (float y, float z)
{
    shape = Shape (x)
    zero = Constant <value = int64[1] {0}> ()
    one = Constant <value = int64[1] {1}> ()
    rows = Gather <axis = 0> (shape, zero)
    single = Equal (rows, one)
    scaled = Mul (x, w)
    picked, z = If (single) <
        then_branch = flat () => (a, p) {
            a = Squeeze (scaled, zero)
            p = Relu (w)
        },
        else_branch = whole () => (c, w) {
            shape2 = Shape (scaled)
            last = Gather <axis = 0> (shape2, one)
            three = Constant <value = int64[1] {3}> ()
            narrow = Less (last, three)
            c = If (narrow) <
                then_branch = up () => (d) { d = Exp (scaled) },
                else_branch = down () => (e) { e = Tanh (scaled) }
            >
        }
    >
    y = Neg (picked)
}
"""


def expected(x: Any, w: Any) -> tuple[Any, Any]:
    scaled = x * w
    if len(x) == 1:
        return -scaled[0], np.maximum(w, 0)
    return -(np.exp(scaled) if x.shape[1] < 3 else np.tanh(scaled)), w


@pytest.mark.parametrize("shape", [(1, 4), (5, 2), (5, 4), (1, 1)])
def test_the_branch_follows_the_shapes(shape: tuple[int, int]) -> None:
    x, w = RNG.normal(size=shape).astype(np.float32), RNG.normal(size=shape[1]).astype(np.float32)
    with rv.load(parsed(NESTED), providers=["cpu", "reference"]) as session:
        assert {node.provider for node in session.report.nodes} == {"cpu"}
        for _ in range(2):
            with mock.patch.object(CpuKernel, "_interpret", lambda *_: pytest.fail("ran node by node")):
                found = session.run({"x": x, "w": w})
            for have, want in zip(found.values(), expected(x, w)):
                np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 4), (5, 2)])
def test_a_part_with_branches_runs_node_by_node_too(shape: tuple[int, int]) -> None:
    x, w = RNG.normal(size=shape).astype(np.float32), RNG.normal(size=shape[1]).astype(np.float32)

    def declined(*_: Any) -> None:
        raise Declined("not today")

    with (
        rv.load(parsed(NESTED), providers=["cpu", "reference"]) as session,
        mock.patch.object(CpuKernel, "_specialise", declined),
    ):
        found = session.run({"x": x, "w": w})
    for have, want in zip(found.values(), expected(x, w)):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_a_condition_from_data_stays_a_body() -> None:
    text = """
    chooses (float[N] x, bool c) => (float[N] y)
    { y = If (c) <then_branch = t () => (a) { a = Exp (x) }, else_branch = e () => (b) { b = Neg (x) }> }
    """
    x = RNG.normal(size=6).astype(np.float32)
    with rv.load(parsed(text), providers=["cpu", "reference"]) as session:
        assert [node.provider for node in session.report.nodes] == ["reference"]
        np.testing.assert_allclose(session.run({"x": x, "c": np.array(True)})["y"], np.exp(x), rtol=1e-5)
        np.testing.assert_array_equal(session.run({"x": x, "c": np.array(False)})["y"], -x)
