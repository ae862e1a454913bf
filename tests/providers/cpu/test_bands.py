"""Layers of models by bands: convolutions and pools from a loaded model, against ONNX's own evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ranvier as rv
from ranvier.codegen.llvm.conv import bands

SHAPE = (2, 3, 70, 66)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "_FAR", 0)
    monkeypatch.setattr(bands, "_SAVED", 1e6)
    monkeypatch.setattr(bands, "_NEAR", 48 << 10)


def stem(**pool: object) -> onnx.ModelProto:
    """A first layer, a pool and what follows them."""
    rng = np.random.default_rng(3)
    weights = {
        "w0": rng.standard_normal((16, 3, 3, 3)),
        "b0": rng.standard_normal(16),
        "w1": rng.standard_normal((16, 1, 3, 3)),
        "w2": rng.standard_normal((24, 16, 1, 1)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], pads=[1, 1, 1, 1], strides=[2, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("MaxPool", ["r0"], ["p"], **pool),
        helper.make_node("Conv", ["p", "w1"], ["c1"], pads=[1, 1, 1, 1], group=16),
        helper.make_node("Conv", ["c1", "w2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "stem",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "pool",
    [
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1},
        {"kernel_shape": [2, 3], "dilations": [2, 1], "pads": [1, 0, 1, 2]},
    ],
    ids=["plain", "padded", "rounded up", "dilated"],
)
def test_a_pool_inside_of_a_chain(pool: dict[str, object], threads: int) -> None:
    model = stem(**pool)
    x = np.random.default_rng(4).standard_normal(SHAPE).astype(np.float32)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    session = rv.load(model.SerializeToString(), threads=threads)
    with session.profile() as profile:
        found = session.run({"x": x})["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    names = [record.kernel for record in profile.records()]
    assert any("bands" in name for name in names)
    assert not any(name.startswith("max") for name in names)  # the pool is in there
