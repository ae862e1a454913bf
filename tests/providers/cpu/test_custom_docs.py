"""The page on custom kernels says what is true: its examples run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

import ranvier as rv
from ranvier.providers.cpu.custom import unlower_op

PAGE = Path(__file__).parents[3] / "docs" / "custom-kernels.md"


def test_the_examples_of_the_page_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(block, names)
        ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in "xy"]
        node = helper.make_node("SoftClip", ["x"], ["y"], domain="my.domain", limit=2.0)
        graph = helper.make_graph([node], "g", ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("my.domain", 1)])
        with rv.load(model.SerializeToString(), providers=["cpu"]) as session:
            x = np.linspace(-9, 9, 50, dtype=np.float32)
            np.testing.assert_allclose(session.run({"x": x})["y"], 2 * np.tanh(x / 2), rtol=1e-5)
    finally:
        unlower_op("my.domain", "SoftClip")
        rv.unregister_op("my.domain", "SoftClip")
