"""Codes of 3, 5 and 6 bits in exported files, which others read in 4 and 8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ranvier as rv
from ranvier import nn
from ranvier.dtypes import of
from ranvier.graph.ir import Graph
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops import complete, evaluate
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.quantize import Quantized
from ranvier.runtime.quantizing.wider import widen
from tests.providers.cpu.test_experts import EXPERTS, HIDDEN, INNER, floats
from tests.providers.cpu.test_experts import coded as experts_coded


def coded(bits: int, zeros: str) -> Quantized:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (24, 96)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.1, (24, 3)).astype(np.float32)
    zero: Any = rng.integers(0, 1 << bits, (24, 3)).astype(np.uint8)
    return Quantized("some", codes, scales, (1, 32), bits, zero + np.float32(0.5) if zeros == "float" else zero, axis=1)


@pytest.mark.parametrize("bits", [3, 5, 6])
@pytest.mark.parametrize("zeros", ["codes", "float"])
@pytest.mark.parametrize("kind", ["linear", "table"])
def test_other_runtimes_read_exported_codes(bits: int, zeros: str, kind: str, tmp_path: Path) -> None:
    weight = coded(bits, zeros)
    x: Any = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    model: Any = nn.QuantizedLinear(weight)
    if kind == "table":
        model, x = nn.QuantizedEmbedding(weight), np.array([3, 0, 7])
    found = model(rv.Tensor(x)).numpy()
    rv.export(model, rv.Tensor(x), tmp_path / "m.onnx")
    file = onnx.load(tmp_path / "m.onnx")
    (node,) = (n for n in file.graph.node if n.op_type in ("MatMulNBits", "GatherBlockQuantized"))
    assert next(a.i for a in node.attribute if a.name == "bits") == (4 if bits == 3 else 8)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    if kind == "linear" and zeros == "float":
        return  # its CPU provider has no 8-bit kernel for these
    (theirs,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(theirs, found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("zeros", [False, True, np.float32, np.float16])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize(
    ("bits", "told"), [((6, 5), (8, None)), ((8, 6), (8, None)), ((3, 6), (4, 8)), ((4, 3), (4, None))]
)
def test_layers_of_experts(bits: tuple[int, int], told: tuple[int, Any], block: int, zeros: Any) -> None:
    """The same numbers in other bits, which a layer says of its own only where it has others."""
    layers = [experts_coded(n, k, b, block, n, zeros) for n, k, b in zip((INNER, HIDDEN), (HIDDEN, INNER), bits)]
    stored: list[Any] = [x for layer, _ in layers for x in layer]
    stored += [None, None, None, *(zero for _, zero in layers)]
    given = [floats(3, HIDDEN), floats(3, EXPERTS, seed=9), *stored]
    attrs: Any = {"k": 2, "block_size": block, "expert_weight_bits": bits[0], "fc2_expert_weight_bits": bits[1]}
    graph = Graph("experts", opsets={"": 21, MICROSOFT: 1})
    values: list[Any] = [graph.add_input(f"x{k}", TensorType(of(x), x.shape)) for k, x in enumerate(given[:2])]
    values += [None if x is None else graph.add_constant(ConstTensor.of(x)) for x in given[2:]]
    while values[-1] is None:
        values.pop()
    node = GraphOps(graph, None, "", complete).node("QMoE", values, attrs, domain=MICROSOFT, version=1)
    widen(graph)
    found = tuple(node.attrs.get(f"{name}expert_weight_bits") for name in ("", "fc2_"))
    assert found == told and "fc1_expert_weight_bits" not in node.attrs
    raised = [None if v is None or v.const is None else v.const.numpy() for v in node.inputs[2:]]
    again = evaluate("QMoE", *given[:2], *raised, domain=MICROSOFT, **node.attrs)
    np.testing.assert_allclose(again, evaluate("QMoE", *given, domain=MICROSOFT, **attrs), rtol=1e-5, atol=1e-5)
