"""One node (or a few) on the CPU provider against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.providers.cpu.kernel import CpuKernel

Array = np.ndarray[Any, Any]
NEWEST = 24


def one_node(
    op: str,
    inputs: Sequence[Array | None],
    attrs: dict[str, Any] | None = None,
    *,
    outputs: int = 1,
    constant: Sequence[int] = (),
    opset: int = NEWEST,
    domain: str = "",
) -> onnx.ModelProto:
    """A model of one node; inputs whose positions are in ``constant`` become initializers."""
    names = ["" if x is None else f"x{k}" for k, x in enumerate(inputs)]
    results = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op, names, results, domain=domain, **(attrs or {}))
    given, stored = [], []
    for k, x in enumerate(inputs):
        if x is None:
            continue
        if k in constant:
            stored.append(onnx.numpy_helper.from_array(x, names[k]))
        else:
            kind = helper.np_dtype_to_tensor_dtype(x.dtype)
            given.append(helper.make_tensor_value_info(names[k], kind, x.shape))
    made = [onnx.ValueInfoProto(name=name) for name in results]
    graph = helper.make_graph([node], "one", given, made, stored)
    opsets = [helper.make_opsetid("", opset)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, feeds: dict[str, Array], provider: str) -> list[Array]:
    with rv.load(model, providers=[provider], optimization="none") as session:
        if provider == "cpu":
            elsewhere = [(node.op, node.declined) for node in session.report.nodes if node.provider != "cpu"]
            assert not elsewhere, elsewhere
        return list(session.run(feeds).values())


def agree(model: onnx.ModelProto, feeds: dict[str, Array], *, rtol: float = 1e-5, atol: float = 1e-6) -> list[Array]:
    """Both providers' results are close, and the CPU's came from generated code."""

    def no_reference(*_: Any) -> None:
        pytest.fail("the partition ran by the reference")

    expected = run(model, feeds, "reference")
    with mock.patch.object(CpuKernel, "_interpret", no_reference):
        found = run(model, feeds, "cpu")
    for have, want in zip(found, expected, strict=True):
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        if want.dtype.kind in "iub":
            np.testing.assert_array_equal(have, want)
        else:
            np.testing.assert_allclose(
                have.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True
            )
    return found


def check(op: str, inputs: Sequence[Array | None], attrs: dict[str, Any] | None = None, **how: Any) -> list[Array]:
    """One node, all its inputs fed (or constant), on both providers."""
    close = {name: how.pop(name) for name in ("rtol", "atol") if name in how}
    model = one_node(op, inputs, attrs, **how)
    constant = how.get("constant", ())
    feeds = {f"x{k}": x for k, x in enumerate(inputs) if x is not None and k not in constant}
    return agree(model, feeds, **close)
