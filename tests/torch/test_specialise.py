"""Runs of nodes as generated kernels: the same results as without them, whatever lies around them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import onnx.parser
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import ranvier as rv
from ranvier.errors import InvalidValue
from ranvier.providers.cuda import specialise
from ranvier.providers.cuda.realise import CallStep, LoopStep
from ranvier.providers.cuda.steps import Step
from tests.torch.device import options

Array = np.ndarray[Any, Any]
OPTIONS = options(triton=True)
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def steps_of(text: str, inputs: dict[str, Array], *, runs: int = 3) -> list[Step]:
    """The steps that a graph's only part becomes; its results are compared with the reference's in every run."""
    model = onnx.parser.parse_model(HEADER + text)
    seen: list[list[Step]] = []
    whole = specialise.Specialiser.__call__

    def watched(self: Any, *given: Any) -> list[Step]:
        made = whole(self, *given)
        seen.append(made)
        return made

    with mock.patch.object(specialise.Specialiser, "__call__", watched):
        wanted = rv.load(model, providers=["reference"], optimization="none").run(inputs)
        with rv.load(
            model, providers=["cuda", "reference"], provider_options=OPTIONS, optimization="none", fallback="off"
        ) as session:
            for _ in range(runs):
                found = session.run(inputs)
                for name, array in wanted.items():
                    assert found[name].dtype == array.dtype and found[name].shape == array.shape
                    np.testing.assert_allclose(
                        found[name].astype(np.float64), array.astype(np.float64), rtol=1e-4, atol=1e-5
                    )
    assert len(seen) == 1
    return seen[0]


def kernels(steps: list[Step]) -> list[str]:
    return [step.label for step in steps if isinstance(step, LoopStep)]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_elementwise_work_behind_a_product_is_one_kernel() -> None:
    made = steps_of(
        """g (float[5,8] x, float[8,12] w, float[12] b) => (float[5,12] y) {
            p = MatMul(x, w)
            q = Add(p, b)
            r = Sigmoid(q)
            y = Mul(q, r)
        }""",
        {"x": random(5, 8), "w": random(8, 12, seed=1), "b": random(12, seed=2)},
    )
    assert kernels(made) == ["q + r + y"]


def test_rows_take_in_what_goes_before_and_after() -> None:
    made = steps_of(
        """g (float[3,4,9] x, float[3,1,9] m) => (float[3,4,9] y) {
            s = Add(x, m)
            t = Softmax(s)
            y = Neg(t)
        }""",
        {"x": random(3, 4, 9), "m": random(3, 1, 9, seed=1)},
    )
    assert kernels(made) == ["s + t + y"]


def test_a_node_alone_stays_with_torch() -> None:
    made = steps_of("g (float[3,4] x) => (float[3,4] y) { y = Exp(x) }", {"x": random(3, 4)})
    assert not kernels(made)


def test_views_are_strides_and_a_step_of_torch_reads_what_loops_have_made() -> None:
    made = steps_of(
        """g (float[4,6] x, float[4,5] w) => (float[6,5] y) {
            a = Exp(x)
            b = Neg(a)
            t = Transpose(b)
            y = MatMul(t, w)
        }""",
        {"x": random(4, 6), "w": random(4, 5, seed=1)},
    )
    assert kernels(made) == ["a + b"]
    assert any(isinstance(step, CallStep) and step.label == "y" for step in made)


def test_steps_backwards_are_turned_round_for_torch() -> None:
    steps_of(
        """g (float[4,6] x, float[6,5] w) => (float[4,5] y) {
            a = Exp(x)
            b = Neg(a)
            start = Constant <value_ints = [-1]> ()
            end = Constant <value_ints = [-100]> ()
            axis = Constant <value_ints = [1]> ()
            step = Constant <value_ints = [-1]> ()
            s = Slice(b, start, end, axis, step)
            y = MatMul(s, w)
        }""",
        {"x": random(4, 6), "w": random(6, 5, seed=1)},
    )


def test_what_is_joined_is_written_there_at_once() -> None:
    made = steps_of(
        """g (float[2,3] x, float[2,4] z) => (float[2,7] y) {
            a = Exp(x)
            b = Neg(a)
            c = Abs(z)
            d = Sqrt(c)
            y = Concat <axis = 1> (b, d)
        }""",
        {"x": random(2, 3), "z": random(2, 4, seed=1)},
    )
    assert kernels(made) == ["a + b", "c + d"]


def test_convolutions_leave_their_results_as_torch_lays_them() -> None:
    made = steps_of(
        """g (float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y) {
            c = Conv(x, w)
            t = Tanh(c)
            y = Mul(t, c)
        }""",
        {"x": random(1, 3, 8, 8), "w": random(4, 3, 3, 3, seed=1)},
    )
    assert kernels(made) == ["t + y"]


def test_inputs_and_results_in_the_midst_may_be_results() -> None:
    steps_of(
        """g (float[3,4] x) => (float[3,4] x, float[3,4] a, float[12] f, float[3,4] y) {
            a = Exp(x)
            shape = Constant <value_ints = [12]> ()
            f = Reshape(a, shape)
            n = Neg(a)
            y = Abs(n)
        }""",
        {"x": random(3, 4)},
    )


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_at_the_edge(size: int) -> None:
    steps_of(
        """g (float[N,4] x) => (float[N,4] y, float[N] z) {
            a = Exp(x)
            y = Neg(a)
            axes = Constant <value_ints = [1]> ()
            s = ReduceSum <keepdims = 0> (y, axes)
            z = Abs(s)
        }""",
        {"x": random(size, 4)},
    )


def test_halves_and_integers() -> None:
    made = steps_of(
        """g (float16[3,4] x, int32[3,4] k) => (float16[3,4] y, int32[3,4] n) {
            a = Add(x, x)
            y = Relu(a)
            b = Mul(k, k)
            n = Sub(b, k)
        }""",
        {"x": random(3, 4).astype(np.float16), "k": np.arange(-6, 6, dtype=np.int32).reshape(3, 4)},
    )
    assert kernels(made) == ["a + y", "b + n"]


def test_a_position_outside_is_refused_in_every_run() -> None:
    model = onnx.parser.parse_model(
        HEADER
        + """g (float[5,4] x, int64[3] k) => (float[3,4] y) {
            a = Gather(x, k)
            b = Exp(a)
            y = Neg(b)
        }"""
    )
    with rv.load(
        model, providers=["cuda", "reference"], provider_options=OPTIONS, optimization="none", fallback="off"
    ) as session:
        good, bad = np.array([0, -5, 4]), np.array([0, 5, 1])
        x = random(5, 4)
        for _ in range(2):
            np.testing.assert_allclose(session.run({"x": x, "k": good})["y"], -np.exp(x[good]), rtol=1e-5)
            with pytest.raises(InvalidValue, match="Gather"):
                session.run({"x": x, "k": bad})


def test_without_an_interpreter_torch_computes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    from ranvier.providers.cuda.place import Twin

    place = Twin()
    assert "TRITON_INTERPRET" in (specialise.problem(place) or "")
    assert specialise.specialiser(place, None) is None
    assert specialise.specialiser(place, False) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert specialise.specialiser(place, True) is not None
