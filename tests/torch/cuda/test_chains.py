"""Loops over the same rows as one kernel, matrices copied once for all products, and like sums in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from ranvier.providers.cuda.realise import CallStep, LoopStep
from ranvier.providers.cuda.steps import NodeStep, Step
from tests.torch.test_specialise import kernels, random, steps_of


def _by_torch(steps: list[Step]) -> list[str]:
    found = [step.step if isinstance(step, CallStep) else step for step in steps]
    return [step.node.op for step in found if isinstance(step, NodeStep)]


def test_a_norm_spelt_out_is_one_kernel() -> None:
    made = steps_of(
        """g (float[6,8] x, float[8] scale) => (float[6,8] y, float[6,8] centred) {
            axis = Constant <value_ints = [1]> ()
            small = Constant <value_float = 0.001> ()
            mean = ReduceMean(x, axis)
            centred = Sub(x, mean)
            square = Mul(centred, centred)
            variance = ReduceMean(square, axis)
            safe = Add(variance, small)
            root = Sqrt(safe)
            inverse = Reciprocal(root)
            normal = Mul(centred, inverse)
            y = Mul(normal, scale)
        }""",
        {"x": random(6, 8), "scale": random(8, seed=1)},
    )
    assert len(kernels(made)) == 1 and not _by_torch(made)


def test_what_is_wanted_in_between_comes_first() -> None:
    """The product needs the difference, and the sum needs the product: neither can go into the other's kernel."""
    made = steps_of(
        """g (float[4,4] x, float[4,4] w) => (float[4,4] y) {
            axis = Constant <value_ints = [1]> ()
            mean = ReduceMean(x, axis)
            centred = Sub(x, mean)
            p = MatMul(centred, w)
            q = Mul(p, centred)
            total = ReduceSum(q, axis)
            y = Mul(centred, total)
        }""",
        {"x": random(4, 4), "w": random(4, 4, seed=1)},
    )
    assert len(kernels(made)) == 2 and _by_torch(made) == ["MatMul"]


@pytest.mark.parametrize("rows", [3, 1024])
def test_sums_of_columns(rows: int) -> None:
    """High ones are summed in parts; like ones by the same launches."""
    made = steps_of(
        f"""g (float[{rows},64] x, float[{rows},64] z) => (float[1,64] a, float[1,64] b) {{
            axis = Constant <value_ints = [0]> ()
            a = ReduceSum(x, axis)
            b = ReduceSum(z, axis)
        }}""",
        {"x": random(rows, 64), "z": random(rows, 64, seed=1)},
        runs=2,
    )
    if rows == 3:
        assert not kernels(made)
        return
    (loops,) = [step for step in made if isinstance(step, LoopStep)]
    assert loops.label.endswith("(2 times)") and len(loops.printed.calls) == 2


def test_heads_are_copied_once_for_all_products() -> None:
    text = """g (float[2,3,8] q, float[2,3,8] k) => (float[2,2,3,3] s, float[2,2,4,4] t) {
        shape = Constant <value_ints = [2,3,2,4]> ()
        a = Reshape(q, shape)
        b = Reshape(k, shape)
        x = Transpose <perm = [0,2,1,3]> (a)
        y = Transpose <perm = [0,2,1,3]> (b)
        z = Transpose <perm = [0,2,3,1]> (b)
        u = Transpose <perm = [0,2,3,1]> (a)
        s = MatMul(x, z)
        t = MatMul(u, y)
    }"""
    made = steps_of(text, {"q": random(2, 3, 8), "k": random(2, 3, 8, seed=1)})
    copies = [step for step in made if isinstance(step, LoopStep)]
    assert sum(len(step.nests) for step in copies) == 2 and _by_torch(made) == ["MatMul", "MatMul"]


def test_scaling_goes_into_the_copy() -> None:
    made = steps_of(
        """g (float[2,3,8] q, float[2,2,4,5] w) => (float[2,2,3,5] s) {
            shape = Constant <value_ints = [2,3,2,4]> ()
            factor = Constant <value_float = 0.5> ()
            a = Reshape(q, shape)
            x = Transpose <perm = [0,2,1,3]> (a)
            y = Mul(x, factor)
            s = MatMul(y, w)
        }""",
        {"q": random(2, 3, 8), "w": random(2, 2, 4, 5, seed=1)},
    )
    assert len(kernels(made)) == 1 and _by_torch(made) == ["MatMul"]


@pytest.mark.parametrize("wanted", [False, True])
def test_results_on_the_way_are_stored(wanted: bool) -> None:
    outputs = "float[5,6] y, float[5,1] total" if wanted else "float[5,6] y"
    text = f"""g (float[5,6] x) => ({outputs}) {{
        axis = Constant <value_ints = [1]> ()
        total = ReduceSum(x, axis)
        y = Div(x, total)
    }}"""
    x: Any = np.abs(random(5, 6)) + 1
    made = steps_of(text, {"x": x})
    (loops,) = [step for step in made if isinstance(step, LoopStep)]
    assert len(loops.makes) == 1 + wanted
