"""How the tests of com.microsoft operators run one node: by its reference here, by ONNX Runtime there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ranvier.dtypes import of
from ranvier.graph.types import TensorType
from ranvier.ops import registry

MICROSOFT = "com.microsoft"


class Draw:
    """Seeded test data, one short name per kind."""

    def __init__(self, seed: int = 7) -> None:
        self.rng = np.random.default_rng(seed)

    def restart(self, seed: int = 7) -> None:
        self.rng = np.random.default_rng(seed)

    def floats(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def steps(self, *shape: int, top: float = 0.02) -> np.ndarray:
        """Positive numbers that can be scales."""
        return (self.rng.random(shape) * top + top / 10).astype(np.float32)

    def codes(self, dtype: type, *shape: int) -> np.ndarray:
        limits = np.iinfo(dtype)
        return self.rng.integers(limits.min, limits.max + 1, shape).astype(dtype)

    def weights(self, *shape: int) -> np.ndarray:
        """Signed codes of 7 bits: two products of these and unsigned ones are within 16 bits, in which ONNX Runtime
        adds them up on x86 without VNNI."""
        return self.ints(-64, 65, *shape, dtype=np.int8)

    def ints(self, low: int, high: int, *shape: int, dtype: type = np.int32) -> np.ndarray:
        return self.rng.integers(low, high, shape).astype(dtype)

    def bits(self, *shape: int) -> np.ndarray:
        return (self.rng.random(shape) > 0.4).astype(np.int32)


def scalar(value: float, dtype: type = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def run(name: str, *inputs: Any, domain: str = MICROSOFT, outputs: int = 1, **attrs: Any) -> Any:
    """One operator by its reference."""
    with np.errstate(all="ignore"):
        return registry.evaluate(name, *inputs, domain=domain, outputs=outputs, **attrs)


def peer(
    name: str, inputs: Sequence[Any], attrs: Mapping[str, Any], outputs: Sequence[str], domain: str
) -> list[np.ndarray]:
    """One operator by ONNX Runtime's CPU provider; float outputs that it cannot type by itself are float32."""
    ort = pytest.importorskip("onnxruntime")
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
    node = helper.make_node(name, names, outputs, domain=domain, **attrs)
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs)
        if n
    ]
    results = [
        helper.make_tensor_value_info(o, TensorProto.FLOAT, None) if o == "float" else onnx.ValueInfoProto(name=o)
        for o in outputs
        if o
    ]
    graph = helper.make_graph([node], "one", given, results)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {n: x for n, x in zip(names, inputs) if n})


def check(
    name: str,
    inputs: Sequence[Any],
    outputs: Sequence[str] = ("y",),
    *,
    domain: str = MICROSOFT,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    off_by_one: float = 0.0,
    **attrs: Any,
) -> None:
    """Reference and ONNX Runtime agree, and the type rule says what came out.

    ``outputs`` names the outputs, "" for one left out and "float" for one whose type must be told. ``off_by_one`` is
    the share of integer codes that may differ by one: results that lie between two codes.
    """
    expected = peer(name, inputs, attrs, outputs, domain)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in attrs.items()}
    found = run(name, *inputs, domain=domain, outputs=len(outputs), **given)
    results = (found,) if len(outputs) == 1 else found
    kept = [r for r, o in zip(results, outputs) if o]
    assert len(kept) == len(expected)
    for got, want in zip(kept, expected):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if want.dtype.kind in "iu" and off_by_one:
            apart = np.abs(got.astype(np.int64) - want.astype(np.int64))
            assert apart.max(initial=0) <= 1
            assert (apart > 0).mean() <= off_by_one
        else:
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol)
    check_rules(name, inputs, results, outputs, given, domain)


def check_rules(
    name: str,
    inputs: Sequence[Any],
    results: Sequence[Any],
    outputs: Sequence[str],
    attrs: Mapping[str, Any],
    domain: str = MICROSOFT,
) -> None:
    """The type rule agrees with real results, survives unknown operands; the cost is not negative."""
    definition = registry.get(domain, name)
    assert definition.infer_rule is not None
    exact = [None if x is None else TensorType(of(x), x.shape) for x in inputs]
    vague = [None if x is None else TensorType(None, None) for x in inputs]
    nothing = [None] * len(inputs)
    inferred = definition.infer_rule(registry.TypeCall(exact, list(inputs), attrs, len(outputs), 1))
    for kind, result, output in zip(inferred, results, outputs):
        if not output or kind is None:
            continue
        assert isinstance(kind, TensorType)
        assert kind.dtype is of(result)
        assert kind.shape is not None
        assert len(kind.shape) == result.ndim
        assert all(d is None or d == n for d, n in zip(kind.shape, result.shape))
    for types in (vague, nothing):
        definition.infer_rule(registry.TypeCall(types, nothing, attrs, len(outputs), 1))
    if definition.cost_rule is not None:
        real = [TensorType(of(r), r.shape) if isinstance(r, np.ndarray) else None for r in results]
        cost = definition.cost_rule(registry.TypeCall(exact, nothing, attrs, len(outputs), 1, result_types=real))
        assert cost.flops > 0
        assert cost.bytes > 0
        definition.cost_rule(registry.TypeCall(vague, nothing, attrs, len(outputs), 1, result_types=[None]))
        definition.cost_rule(registry.TypeCall(nothing, nothing, attrs, len(outputs), 1))
