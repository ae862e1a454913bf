"""Upgrades of old operator forms, held against the standard's own version converter where that is sound."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser, version_converter

import ranvier as rv
from ranvier.ops import NEWEST

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
MODELS = {
    "squeeze in a branch": (
        11,
        """g (bool c, float[1,3] x) => (float[3] y) { y = If(c) <
            then_branch = t () => (float[3] a) { a = Squeeze<axes=[0]>(x) },
            else_branch = e () => (float[3] b) { n = Neg(x) b = Squeeze<axes=[0]>(n) }> }""",
        {"c": np.array(False), "x": X[0, :1, :3]},
    ),
    "unsqueeze": (11, "g (float[2,3,4] x) => (float[2,1,3,4] y) { y = Unsqueeze<axes=[1]>(x) }", {"x": X}),
    "softmax": (11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=1>(x) }", {"x": X}),
    "log softmax": (12, "g (float[2,3,4] x) => (float[2,3,4] y) { y = LogSoftmax<axis=1>(x) }", {"x": X}),
    "clip": (6, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Clip<max=0.5>(x) }", {"x": X}),
    "reduce": (7, "g (float[2,3,4] x) => (float[2,1,4] y) { y = ReduceMean<axes=[1]>(x) }", {"x": X}),
    "reduce sum": (7, "g (float[2,3,4] x) => (float[2,4] y) { y = ReduceSum<axes=[1], keepdims=0>(x) }", {"x": X}),
    "slice": (7, "g (float[2,3,4] x) => (float[2,2,4] y) { y = Slice<axes=[1], starts=[0], ends=[2]>(x) }", {"x": X}),
    "split": (7, "g (float[2,4] x) => (float[2,2] y, float[2,2] z) { y, z = Split<axis=1>(x) }", {"x": X[0, :2]}),
    "pad": (8, "g (float[2,3,4] x) => (float[2,3,6] y) { y = Pad<pads=[0,0,1,0,0,1], value=2.0>(x) }", {"x": X}),
    "dropout": (7, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Dropout<ratio=0.3>(x) }", {"x": X}),
    "upsample": (
        7,
        'g (float[1,2,3,4] x) => (float[1,2,6,8] y) { y = Upsample<mode="nearest", scales=[1.0,1.0,2.0,2.0]>(x) }',
        {"x": X[None]},
    ),
    "top k": (1, "g (float[2,3,4] x) => (float[2,3,2] y, int64[2,3,2] i) { y, i = TopK<k=2>(x) }", {"x": X}),
    "reshape": (1, "g (float[2,3,4] x) => (float[6,4] y) { y = Reshape<shape=[6,4]>(x) }", {"x": X}),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_results_as_the_converted_model(name: str) -> None:
    opset, text, feeds = MODELS[name]
    model = parser.parse_model(f'<ir_version: 7, opset_import: ["" : {opset}]>\n{text}')
    session = rv.load(model, optimization="basic", disabled_passes=("fold_constants", "cancel"))
    assert not any(node.version < opset for node in session.graph.all_nodes())
    newest = {n.op: onnx.defs.get_schema(n.op).since_version for n in session.graph.all_nodes()}
    assert all(node.version == newest[node.op] for node in session.graph.all_nodes())
    converted = rv.load(version_converter.convert_version(model, NEWEST), optimization="none")
    for got, want in zip(session.run(feeds).values(), converted.run(feeds).values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
