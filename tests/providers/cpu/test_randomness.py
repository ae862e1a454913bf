"""Random operators in generated code: the same numbers as the reference draws, and what is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import ranvier as rv
from ranvier.errors import InvalidValue
from ranvier.ops.seed import set_seed
from tests.runtime.small_models import model_of, tensor

FLOAT, DOUBLE, HALF, INT32, INT64 = (
    getattr(TensorProto, name) for name in ("FLOAT", "DOUBLE", "FLOAT16", "INT32", "INT64")
)


def _one(op: str, inputs: list[Any], kind: int, size: list[Any], **attrs: Any) -> ModelProto:
    node = helper.make_node(op, [i.name for i in inputs], ["y"], **attrs)
    return model_of([node], inputs, [tensor("y", kind, size)], opsets={"": 22}, ir_version=10)


def _both(model: ModelProto, feed: dict[str, Any], runs: int = 2) -> None:
    """As the reference, number for number, also in later runs; the model runs on the CPU provider as a whole."""
    found = []
    for provider in ("cpu", "reference"):
        set_seed(5)
        with rv.load(model, providers=[provider], optimization="none") as session:
            found.append([session.run(feed)["y"] for _ in range(runs)])
    set_seed(None)
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("seed", [None, 3.5])
@pytest.mark.parametrize("kind", [FLOAT, DOUBLE, HALF])
def test_numbers_as_the_reference_draws_them(kind: int, seed: float | None) -> None:
    attrs: dict[str, Any] = {} if seed is None else {"seed": seed}
    x = tensor("x", FLOAT, [2, "n"])
    feed = {"x": np.zeros((2, 7), np.float32)}
    _both(_one("RandomUniform", [], kind, [3, 5], shape=[3, 5], dtype=kind, low=-2.0, high=3.0, **attrs), {})
    _both(_one("RandomNormal", [], kind, [3, 5], shape=[3, 5], dtype=kind, mean=1.0, scale=2.0, **attrs), {})
    _both(_one("RandomUniformLike", [x], kind, [2, "n"], dtype=kind, **attrs), feed)
    _both(_one("RandomNormalLike", [x], kind, [2, "n"], dtype=kind, **attrs), feed)


@pytest.mark.parametrize("seed", [None, 1.0])
@pytest.mark.parametrize(("kind", "out"), [(FLOAT, FLOAT), (DOUBLE, TensorProto.BOOL), (HALF, INT32)])
def test_bernoulli(kind: int, out: int, seed: float | None) -> None:
    attrs: dict[str, Any] = {"dtype": out} | ({} if seed is None else {"seed": seed})
    chances = np.linspace(0, 1, 60).reshape(3, 20).astype(helper.tensor_dtype_to_np_dtype(kind))
    _both(_one("Bernoulli", [tensor("x", kind, [3, "n"])], out, [3, "n"], **attrs), {"x": chances})


@pytest.mark.parametrize("seed", [None, 7.0])
@pytest.mark.parametrize(("rows", "classes", "samples"), [(1, 1, 1), (1, 5, 1), (4, 33, 40), (3, 200, 7)])
@pytest.mark.parametrize(("kind", "out"), [(FLOAT, INT32), (DOUBLE, INT64), (HALF, INT64)])
def test_multinomial(rows: int, classes: int, samples: int, kind: int, out: int, seed: float | None) -> None:
    attrs: dict[str, Any] = {"dtype": out, "sample_size": samples} | ({} if seed is None else {"seed": seed})
    rng = np.random.default_rng(classes)
    logits = (3 * rng.standard_normal((rows, classes))).astype(helper.tensor_dtype_to_np_dtype(kind))
    logits[:, ::3] = logits[:, :1]
    if classes > 4:
        logits[:, 1] = -np.inf  # never chosen
    _both(_one("Multinomial", [tensor("x", kind, [rows, "c"])], out, [rows, samples], **attrs), {"x": logits})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_distribution_is_refused(bad: float) -> None:
    with rv.load(_one("Multinomial", [tensor("x", FLOAT, [2, 3])], INT32, [2, 1]), providers=["cpu"]) as session:
        good = np.zeros((2, 3), np.float32)
        assert session.run({"x": good})["y"].shape == (2, 1)
        with pytest.raises(InvalidValue, match="finite largest"):
            session.run({"x": np.array([[0, 1, 2], [0, bad, 1]], np.float32)})
        with pytest.raises(InvalidValue, match="finite largest"):
            session.run({"x": np.full((2, 3), -np.inf, np.float32)})
    with rv.load(_one("Bernoulli", [tensor("x", FLOAT, [2])], FLOAT, [2]), providers=["cpu"]) as session:
        for wrong in (1.5, -0.5, np.nan):
            with pytest.raises(InvalidValue, match="probability"):
                session.run({"x": np.array([0.5, wrong], np.float32)})


def test_fresh_numbers_in_every_run_and_a_part_with_work_around_them() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("RandomNormalLike", ["z"], ["noise"]),
        helper.make_node("Mul", ["noise", "small"], ["scaled"]),
        helper.make_node("Add", ["z", "scaled"], ["y"]),
    ]
    weights = {"w": np.eye(4, dtype=np.float32), "small": np.float32(1e-3)}
    model = model_of(nodes, [tensor("x", FLOAT, ["n", 4])], [tensor("y", FLOAT, ["n", 4])], weights)
    with rv.load(model, providers=["cpu"]) as session:
        x = np.ones((6, 4), np.float32)
        first, second = session.run({"x": x})["y"], session.run({"x": x})["y"]
        assert not np.array_equal(first, second)
        np.testing.assert_allclose(first, x, atol=0.01)
        for n in range(7, 12):  # as many numbers as rows: planned call by call
            assert session.run({"x": np.ones((n, 4), np.float32)})["y"].shape == (n, 4)
