"""Loaded models that learn: the same numbers, gradients, training mode, adapters, heads, and files again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import InvalidConfig, InvalidInput, NotSupported, ShapeMismatch

DIGITS = Path(rv.__file__).parent / "models" / "digits.onnx"
Array = np.ndarray[Any, Any]


def random(*shape: int, seed: int = 0, scale: float = 0.5) -> Array:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def model(
    nodes: list[Any], weights: dict[str, Array], shape: list[Any], output: list[Any] | None = None, opset: int = 17
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "model", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def ran(source: Any, x: Array) -> Array:
    (found,) = rv.load(source).run({"x": x}).values()
    return np.asarray(found)


def normalised(opset: int = 17) -> onnx.ModelProto:
    """Convolution, normalization, dropout, product."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "gain", "shift", "mean", "var"], ["n"], momentum=0.9),
        helper.make_node("Dropout", ["n"], ["d"]),
        helper.make_node("Flatten", ["d"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["p"], name="product"),
        helper.make_node("Add", ["p", "a"], ["y"]),
    ]
    weights = {
        "w": random(4, 2, 3, 3, seed=1),
        "b": random(4, seed=2),
        "gain": 1 + random(4, seed=3),
        "shift": random(4, seed=4),
        "mean": random(4, seed=5),
        "var": 1 + random(4, seed=6) ** 2,
        "m": random(100, 3, seed=7),
        "a": random(3, seed=8),
    }
    return model(nodes, weights, ["n", 2, 5, 5], ["n", 3], opset)


def test_it_computes_what_the_session_computes() -> None:
    x = random(3, 1, 8, 8)
    module = rv.trainable(DIGITS).eval()
    (wanted,) = rv.load(str(DIGITS)).run({"image": x}).values()
    np.testing.assert_allclose(module(x).numpy(), wanted, atol=2e-6)
    np.testing.assert_allclose(module(image=x).numpy(), wanted, atol=2e-6)
    np.testing.assert_allclose(rv.jit(module)(x).numpy(), wanted, atol=2e-6)


def test_parameters_have_the_names_of_the_file() -> None:
    module = rv.trainable(normalised())
    assert [name for name, _ in module.named_parameters()] == ["w", "b", "gain", "shift", "m", "a"]
    assert [name for name, _ in module.named_buffers()] == ["mean", "var"]
    assert sum(p.size for p in module.parameters()) == 72 + 4 * 3 + 300 + 3


def test_gradients_are_those_of_finite_differences() -> None:
    module = rv.trainable(normalised()).eval()
    x, direction = random(2, 2, 5, 5, seed=9), random(2, 3, seed=10)
    (module(x) * direction).sum().backward()
    step = 1e-2
    for name, at in (("w", (1, 0, 2, 1)), ("gain", (2,)), ("m", (17, 1)), ("a", (0,))):
        parameter = dict(module.named_parameters())[name]
        before, values = parameter.numpy().copy(), []
        for sign in (1, -1):
            moved = before.copy()
            moved[at] += sign * step
            parameter.assign(rv.Tensor(moved))
            values.append(float((module(x).numpy().astype(np.float64) * direction).sum()))
        parameter.assign(rv.Tensor(before))
        assert parameter.grad is not None
        assert parameter.grad.numpy()[at] == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2, abs=2e-3)


def test_normalization_takes_the_batch_while_it_learns() -> None:
    nodes = [helper.make_node("BatchNormalization", ["x", "gain", "shift", "mean", "var"], ["y"], momentum=0.8)]
    weights = {"gain": 1 + random(3), "shift": random(3), "mean": random(3), "var": np.ones(3, np.float32)}
    module = rv.trainable(model(nodes, weights, ["n", 3], ["n", 3])).train()
    x = random(16, 3, seed=2, scale=3)
    wanted = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * weights["gain"] + weights["shift"]
    np.testing.assert_allclose(module(x).numpy(), wanted, atol=1e-5)
    states = dict(module.named_buffers())
    np.testing.assert_allclose(states["mean"].numpy(), 0.8 * weights["mean"] + 0.2 * x.mean(0), atol=1e-6)
    np.testing.assert_allclose(states["var"].numpy(), 0.8 + 0.2 * x.var(0), rtol=1e-5)
    module.freeze("gain", "shift")
    held = states["mean"].numpy().copy()
    module(x)
    assert np.array_equal(states["mean"].numpy(), held)  # frozen: what was learned around it relies on its means


@pytest.mark.parametrize("opset", [10, 17])
def test_dropout_drops_while_it_learns(opset: int) -> None:
    ratio = {"ratio": 0.25} if opset < 12 else {}
    inputs = ["x"] if opset < 12 else ["x", "r"]
    weights = {} if opset < 12 else {"r": np.array(0.25, np.float32)}
    nodes = [helper.make_node("Dropout", inputs, ["d"], **ratio), helper.make_node("Mul", ["d", "s"], ["y"])]
    module = rv.trainable(model(nodes, {**weights, "s": np.ones(50, np.float32)}, ["n", 50], ["n", 50], opset))
    nn.manual_seed(3)
    x = np.ones((200, 50), np.float32)
    first, second = module.train()(x).numpy(), module(x).numpy()
    assert set(np.unique(first.round(4)).tolist()) <= {0.0, float(np.float32(1.3333))} and not np.array_equal(
        first, second
    )
    assert np.mean(first == 0) == pytest.approx(0.25, abs=0.03)
    assert np.array_equal(module.eval()(x).numpy(), x)


def test_a_model_for_one_sample_learns_from_several() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[1, 1]),
        helper.make_node("Reshape", ["c", "shape"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["y"]),
    ]
    weights = {"w": random(2, 3, 1, 1), "m": random(8, 4), "shape": np.array([1, -1])}
    source = model(nodes, weights, [1, 3, 2, 2], [1, 4])
    x = random(5, 3, 2, 2, seed=1)
    wanted = np.concatenate([ran(source, x[k : k + 1]) for k in range(5)])
    module = rv.trainable(source)
    np.testing.assert_allclose(module(x).numpy(), wanted, atol=1e-6)
    with pytest.raises(ShapeMismatch, match="not of shape"):
        module(random(5, 3, 2, 3))


def test_frozen_parameters_do_not_learn() -> None:
    module = rv.trainable(normalised(), frozen="*").unfreeze("m", "?")
    assert {p.name for p in module.learned()} == {"w", "b", "m", "a"}
    module.freeze("[wb]")
    optimizer = optim.SGD(module.learned(), lr=0.1)
    before = module.state_dict()
    (module(random(2, 2, 5, 5)) ** 2).sum().backward()
    optimizer.step()
    changed = {n for n, value in module.state_dict().items() if not np.array_equal(value.numpy(), before[n].numpy())}
    assert changed == {"m", "a"}
    with pytest.raises(InvalidConfig, match="no parameter fits 'gian'"):
        module.freeze("gian")


@pytest.mark.parametrize("opset", [13, 17])
def test_an_exported_file_has_what_was_learned(tmp_path: Path, opset: int) -> None:
    module = rv.trainable(normalised(opset)).train()
    x = random(6, 2, 5, 5, seed=3)
    optimizer = optim.SGD(module.learned(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        (module(x) ** 2).mean().backward()
        optimizer.step()
    module.eval().export(tmp_path / "m.onnx")
    onnx.checker.check_model(str(tmp_path / "m.onnx"))
    np.testing.assert_allclose(ran(str(tmp_path / "m.onnx"), x), module(x).numpy(), atol=1e-5)
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == opset
    again = rv.trainable(tmp_path / "m.onnx")
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in module.named_parameters()]


def gemm(transposed: bool) -> onnx.ModelProto:
    weight = random(5, 7, seed=2) if transposed else random(7, 5, seed=2)
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5, transB=int(transposed))
    return model([node], {"w": weight, "b": random(5, seed=3)}, ["n", 7], ["n", 5])


@pytest.mark.parametrize("source", [normalised(), gemm(True), gemm(False)], ids=["conv", "transposed", "plain"])
@pytest.mark.parametrize("merged", [True, False])
def test_adapters_begin_with_nothing_and_merge_into_the_same(
    tmp_path: Path, source: onnx.ModelProto, merged: bool
) -> None:
    shape = tuple(d.dim_value or 3 for d in source.graph.input[0].type.tensor_type.shape.dim)
    x = random(*shape, seed=4)
    module = rv.trainable(source).eval()
    plain = module(x).numpy()
    made = module.lora(rank=2, alpha=6)
    np.testing.assert_allclose(module(x).numpy(), plain, atol=1e-6)
    assert {p.name for p in module.learned()} == set(made)
    optimizer = optim.Adam(module.learned(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        (module(x) ** 2).mean().backward()
        optimizer.step()
    learned = module(x).numpy()
    assert np.abs(learned - plain).max() > 1e-3
    module.export(tmp_path / "m.onnx", merge_lora=merged)
    np.testing.assert_allclose(ran(str(tmp_path / "m.onnx"), x), learned, atol=2e-5)
    written = onnx.load(tmp_path / "m.onnx").graph
    assert any("lora" in t.name for t in written.initializer) is not merged
    assert (len(written.node) == len(source.graph.node)) is merged


def test_adapters_by_name() -> None:
    module = rv.trainable(normalised())
    assert module.lora(rank=2, targets="conv") == ["w.lora_A", "w.lora_B"]
    with pytest.raises(InvalidConfig, match="no product"):
        module.lora(targets="w")  # it has one


def test_another_head() -> None:
    module = rv.trainable(DIGITS).replace_head(3)
    assert module.head == ["dense2.weight", "dense2.bias"]
    x = random(4, 1, 8, 8)
    scores = module.eval()(x).numpy()
    assert scores.shape == (4, 3) and not np.allclose(scores.sum(1), 1)  # the softmax is gone
    kept = rv.trainable(DIGITS).replace_head(3, keep_softmax=True).eval()(x).numpy()
    np.testing.assert_allclose(kept.sum(1), 1, atol=1e-6)
    (out,) = rv.load(onnx_of(module)).run({"image": x}).values()
    np.testing.assert_allclose(out, scores, atol=1e-5)


def onnx_of(module: Any) -> bytes:
    from ranvier.formats import onnx as onnx_format

    return bytes(onnx_format.to_proto(module.exported()).SerializeToString())


def test_scores_without_the_softmax_of_the_file() -> None:
    x = random(4, 1, 8, 8)
    scores = rv.trainable(DIGITS, logits=True).eval()(x).numpy()
    e = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(e / e.sum(1, keepdims=True), rv.trainable(DIGITS).eval()(x).numpy(), atol=1e-6)


def test_weights_that_a_file_has_twice_are_one() -> None:
    tied = random(20, 20)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"]),
        helper.make_node("MatMul", ["h", "second"], ["y"]),
    ]
    module = rv.trainable(model(nodes, {"first": tied, "second": tied}, ["n", 20], ["n", 20]))
    assert [name for name, _ in module.named_parameters()] == ["first"]
    x = random(2, 20, seed=1)
    np.testing.assert_allclose(module(x).numpy(), x @ tied @ tied, atol=1e-5)


def test_what_is_no_weight() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "half"], ["a"]),
        helper.make_node("Add", ["a", "mask"], ["b"]),
        helper.make_node("Resize", ["b", "", "scales"], ["c"], mode="nearest"),
        helper.make_node("Mul", ["c", "slope"], ["y"]),
    ]
    weights = {
        "half": np.array(0.5, np.float32),
        "mask": np.array([0, -1e9], np.float32),
        "scales": np.array([1, 2], np.float32),
        "slope": random(4),
    }
    module = rv.trainable(model(nodes, weights, ["n", 2], ["n", 4]))
    assert [name for name, _ in module.named_parameters()] == ["slope"]


@pytest.mark.parametrize("segments", [2, 3, 7])
def test_segments_change_no_gradient(segments: int) -> None:
    x, gradients = random(3, 2, 5, 5), []
    for number in (1, segments):
        module = rv.trainable(normalised()).train()
        module.segments = number
        nn.manual_seed(1)
        (module(x) ** 2).mean().backward()
        gradients.append({name: p.grad.numpy() for name, p in module.named_parameters()})
    for name, wanted in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], wanted, rtol=1e-3, atol=1e-4)


def test_inputs_that_do_not_fit() -> None:
    module = rv.trainable(normalised())
    with pytest.raises(InvalidInput, match="also needs x"):
        module()
    with pytest.raises(InvalidInput, match="no input"):
        module(random(1, 2, 5, 5), z=1)
    with pytest.raises(InvalidInput, match="file"):
        rv.trainable(rv.load(str(DIGITS)))


def branching() -> onnx.ModelProto:
    """A second input decides by which of two ways the first goes."""
    branches = {}
    for name, op in (("then_branch", "Relu"), ("else_branch", "Neg")):
        out = helper.make_tensor_value_info(f"{op}.out", TensorProto.FLOAT, None)
        branches[name] = helper.make_graph([helper.make_node(op, ["x"], [f"{op}.out"])], op, [], [out])
    nodes = [
        helper.make_node("Cast", ["positive"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["i"], name="choice", **branches),
        helper.make_node("Mul", ["i", "w"], ["y"]),
    ]
    made = model(nodes, {"w": random(4)}, ["n", 4], ["n", 4])
    made.graph.input.append(helper.make_tensor_value_info("positive", TensorProto.INT64, []))
    return made


def test_a_model_whose_course_depends_on_values_is_refused() -> None:
    with pytest.raises(NotSupported, match="If 'choice' has a body"):
        rv.trainable(branching())(random(2, 4), np.array(1))


def test_an_input_that_is_always_the_same_decides_the_course() -> None:
    x = random(2, 4)
    for positive in (0, 1):
        module = rv.trainable(branching(), fixed={"positive": positive})
        np.testing.assert_allclose(module(x).numpy(), (np.maximum(x, 0) if positive else -x) * random(4), atol=1e-6)
        (out,) = rv.load(onnx_of(module)).run({"x": x}).values()
        np.testing.assert_allclose(out, module(x).numpy(), atol=1e-6)
    with pytest.raises(InvalidInput, match="no input"):
        rv.trainable(branching(), fixed={"z": 1})


def test_an_operator_without_a_gradient_says_why() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Hardmax", ["p"], ["y"])]
    learning = rv.trainable(model(nodes, {"w": random(3, 2)}, [4, 3], [4, 2]))
    y = learning(rv.Tensor(random(4, 3, seed=1)))
    with pytest.raises(NotSupported, match=r"Hardmax.*it is constant between jumps"):
        (y * y).sum().backward()


def test_adapters_learn_beside_weights_of_few_bits() -> None:
    """What stands in front of codes gets its gradient through them; they stay what they are."""
    codes = np.random.default_rng(3).integers(0, 256, (3, 1, 8)).astype(np.uint8)
    scales = np.full((3, 1), 0.1, np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMulNBits", ["h", "codes", "scales"], ["y"], domain="com.microsoft", K=16, N=3, bits=4,
                         block_size=16),
    ]  # fmt: skip
    source = model(nodes, {"w": random(4, 16), "codes": codes, "scales": scales}, [5, 4], [5, 3])
    source.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    learning = rv.trainable(source)
    x, seed = random(5, 4, seed=1), random(5, 3, seed=2)
    (learning(rv.Tensor(x)) * rv.Tensor(seed)).sum().backward()
    weight = (np.stack([codes & 15, codes >> 4], -1).reshape(3, 16).astype(np.float32) - 8) * 0.1
    found = {name: parameter.grad for name, parameter in learning.named_parameters()}["w"]
    assert found is not None
    np.testing.assert_allclose(found.numpy(), x.T @ (seed @ weight), rtol=1e-4, atol=1e-5)
