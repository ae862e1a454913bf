"""Shapes that follow from the content of small inputs: code is made per content, of those inputs only."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

import ranvier as rv
from ranvier.codegen.definitions.reasons import shape_sources
from ranvier.providers.cpu.lower.index import LOWERINGS


def test_other_small_inputs_do_not_decide() -> None:
    text = """
    reshapes (int64[N] ids, float[10, 4] table, int64[2] shape) => (float[A, B] y)
    {
        rows = Gather <axis = 0> (table, ids)
        one = Constant <value = int64[1] {1}> ()
        wanted = Mul (shape, one)
        y = Reshape (rows, wanted)
    }
    """
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>{text}')
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    with rv.load(model, providers=["cpu"]) as session:
        kernel = session._parts[0].kernel
        for ids in ([1, 2], [3, 4], [9, 0]):
            for shape in ([4, 2], [1, 8]):
                feeds = {"ids": np.array(ids), "table": table, "shape": np.array(shape)}
                np.testing.assert_array_equal(session.run(feeds)["y"], table[ids].reshape(shape))
        assert len(kernel._made) == 2  # type: ignore[attr-defined]
        names = {v.name for v in shape_sources(kernel.part.nodes, LOWERINGS)}  # type: ignore[attr-defined]
    assert "shape" in names and "ids" not in names
