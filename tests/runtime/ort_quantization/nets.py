"""Small nets, readers of samples for them, and what tests ask of files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

import ranvier
from tests.exact_peer import exact
from tests.runtime.small_models import model_of, tensor

Array = np.ndarray[Any, Any]


def normal(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> Array:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def conv_net() -> ModelProto:
    """A convolution, a block with a sum around it, a pool, two products; nodes are named by what they are."""
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c1"], "first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "r1"], ["s"], "sum"),
        helper.make_node("Relu", ["s"], ["r2"], "relu2"),
        helper.make_node("Conv", ["r2", "w3", "b3"], ["c3"], "third"),
        helper.make_node("Relu", ["c3"], ["r3"], "relu3"),
        helper.make_node("GlobalAveragePool", ["r3"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["g"], "gemm", transB=1),
        helper.make_node("Relu", ["g"], ["r4"], "relu4"),
        helper.make_node("MatMul", ["r4", "w5"], ["scores"], "product"),
    ]
    weights = {
        "w1": normal((12, 3, 3, 3), 0.2),
        "b1": normal((12,), 0.1),
        "w2": normal((12, 12, 3, 3), 0.1),
        "w3": normal((24, 12, 1, 1), 0.3),
        "b3": normal((24,), 0.1),
        "w4": normal((32, 24), 0.2),
        "b4": normal((32,), 0.1),
        "w5": normal((32, 10), 0.2),
    }
    image = tensor("image", TensorProto.FLOAT, ["n", 3, 8, 8])
    return model_of(nodes, [image], [tensor("scores", TensorProto.FLOAT, ["n", 10])], weights)


def images(count: int = 4, seed: int = 1) -> list[dict[str, Array]]:
    return [{"image": normal((2, 3, 8, 8), seed=seed + k)} for k in range(count)]


def uneven_net() -> ModelProto:
    """Convolutions and such of single channels by turns, each with a normalization whose factors lie up to ten
    times apart; whoever reads a channel divides by its factor, so small ones matter as much as large ones."""
    nodes, weights = [], {}
    last, factors = "image", np.ones(3, np.float32)
    shapes = [(32, 3, 3, 3), (32, 1, 3, 3), (32, 32, 1, 1), (32, 1, 3, 3), (32, 32, 1, 1)]
    for k, shape in enumerate(shapes):
        groups = 32 if shape[1] == 1 else 1
        read = factors.reshape((-1, 1, 1, 1) if groups > 1 else (1, -1, 1, 1))
        factors = np.exp(normal((32,), 0.5, seed=k))
        weights |= {
            f"w{k}": normal(shape, float(np.sqrt(2 / np.prod(shape[1:]))), seed=k) / read,
            f"factors{k}": factors,
            f"shifts{k}": factors * normal((32,), 0.3, seed=10 + k),
            f"means{k}": normal((32,), 0.1, seed=20 + k),
            f"variances{k}": np.ones(32, np.float32),
        }
        pads = [shape[2] // 2] * 4
        nodes += [
            helper.make_node("Conv", [last, f"w{k}"], [f"c{k}"], f"conv{k}", pads=pads, group=groups),
            helper.make_node(
                "BatchNormalization",
                [f"c{k}", *(f"{name}{k}" for name in ("factors", "shifts", "means", "variances"))],
                [f"n{k}"],
                f"normalization{k}",
            ),
            helper.make_node("Relu", [f"n{k}"], [f"r{k}"], f"relu{k}"),
        ]
        last = f"r{k}"
    weights["last"] = normal((10, 32), 0.2) / factors
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "last"], ["scores"], "gemm", transB=1),
    ]
    image = tensor("image", TensorProto.FLOAT, ["n", 3, 8, 8])
    return model_of(nodes, [image], [tensor("scores", TensorProto.FLOAT, ["n", 10])], weights)


def block() -> ModelProto:
    """The products of a transformer's block: a normalization, two layers with a Gelu between, a sum around them."""
    nodes = [
        helper.make_node("LayerNormalization", ["tokens", "scale", "shift"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "up"], ["u"], "up"),
        helper.make_node("Add", ["u", "up_bias"], ["ub"], "up_bias"),
        helper.make_node("Gelu", ["ub"], ["a"], "gelu"),
        helper.make_node("MatMul", ["a", "down"], ["d"], "down"),
        helper.make_node("Add", ["d", "down_bias"], ["db"], "down_bias"),
        helper.make_node("Add", ["db", "tokens"], ["out"], "around"),
    ]
    weights = {
        "scale": 1 + normal((32,), 0.1),
        "shift": normal((32,), 0.1, seed=1),
        "up": normal((32, 96), 0.2),
        "up_bias": normal((96,), 0.1),
        "down": normal((96, 32), 0.1),
        "down_bias": normal((32,), 0.1, seed=2),
    }
    kind = TensorProto.FLOAT
    return model_of(nodes, [tensor("tokens", kind, ["b", "t", 32])], [tensor("out", kind, ["b", "t", 32])], weights)


def tokens(count: int = 4, seed: int = 1) -> list[dict[str, Array]]:
    return [{"tokens": normal((2, 7, 32), seed=seed + k)} for k in range(count)]


def reader(package: ModuleType, feeds: list[dict[str, Any]]) -> Any:
    """A reader as scripts write them."""

    class Reader(package.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.waiting = iter(feeds)

        def get_next(self) -> Any:
            return next(self.waiting, None)

    return Reader()


def results(model: Path | ModelProto, feed: dict[str, Array]) -> dict[str, Array]:
    """The first output by runtime."""
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    ours = ranvier.InferenceSession(source, providers=["CPUExecutionProvider"])
    return {name: each.run(None, feed)[0] for name, each in (("onnxruntime", exact(model)), ("ranvier", ours))}


def cosine(a: Array, b: Array) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def check_near(path: Path, original: ModelProto, feed: dict[str, Array], least: float) -> None:
    """Both runtimes read the file, with results near the original's and nearly the same."""
    expected = results(original, feed)["onnxruntime"]
    found = results(path, feed)
    for name, result in found.items():
        assert result.shape == expected.shape and result.dtype == expected.dtype
        assert cosine(result, expected) > least, name
    assert cosine(found["onnxruntime"], found["ranvier"]) > 0.9995  # a tie that rounds the other way is a step


def kinds(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def constants(path: Path) -> dict[str, Array]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def weight_scales(path: Path) -> dict[str, Array]:
    """Scales of weights by the layers that read them through a DequantizeLinear."""
    model = onnx.load(path)
    known = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for node in model.graph.node:
        back = makers.get(node.input[1]) if node.op_type in ("Conv", "Gemm", "MatMul") else None
        if back is not None and back.op_type == "DequantizeLinear":
            found[node.name] = known[back.input[1]]
    return found


def activation_zeros(path: Path) -> list[Array]:
    model = onnx.load(path)
    known = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    return [known[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"]


def activation_scales(path: Path) -> dict[str, float]:
    """Of values by their names."""
    model = onnx.load(path)
    known = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    return {n.input[0]: float(known[n.input[1]]) for n in model.graph.node if n.op_type == "QuantizeLinear"}
