"""Which provider for one operation: the one that is predicted to be fastest, results on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, UnsupportedOp, nearest
from ranvier.graph.ir import Graph, Node
from ranvier.graph.types import TensorType
from ranvier.ops import complete, registry
from ranvier.providers.base import Decline, ExecutionProvider
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration.lazy import figures_for
from ranvier.runtime.calibration.model import MachineCosts
from ranvier.runtime.partition import missing_ops
from ranvier.runtime.preferred import preferred


def select_backend(
    op: str,
    sizes: int | Sequence[int] | Sequence[Sequence[int]],
    devices: Sequence[str] | None = None,
    *,
    dtype: str | DType = DType.float32,
    attrs: Mapping[str, Any] | None = None,
) -> str:
    """The provider that is predicted to be fastest for one operator on operands of these shapes, results on the host.

    ``sizes``: a shape for each operand; one shape, or a number of elements, for an operator with one. ``devices``
    limits the choice to providers of these names or on these devices (``cpu``, ``sim:0``). What
    ``set_backend`` and ``set_backend_priority`` prefer comes first where it takes the operator.
    """
    node = _node(op, _shapes(sizes), _dtype(dtype), attrs)
    candidates, declined = _takers(node, _providers(devices))
    if not candidates:
        raise UnsupportedOp(missing_ops([node], {id(node): declined}))
    for name in preferred():
        if any(provider.name == name for provider in candidates):
            return name
    candidates = [p for p in candidates if not p.capability().last_resort] or candidates
    if len(candidates) == 1:
        return candidates[0].name
    model = MachineCosts(candidates, figures_for(candidates, SessionConfig()))
    return min(candidates, key=lambda provider: _seconds(node, provider, model)).name


def _seconds(node: Node, provider: ExecutionProvider, model: MachineCosts) -> float:
    """The node alone: operands go there, the results come back."""
    seconds = model.node_seconds(node, provider)
    if seconds is None:
        return math.inf
    device = str(provider.device)
    if device != "cpu":
        there, back = model.transfer("cpu", device), model.transfer(device, "cpu")
        seconds += sum(there.seconds(model.nbytes(v)) for v in node.inputs if v is not None)
        seconds += sum(back.seconds(model.nbytes(v)) for v in node.outputs)
    return seconds + model.launch(provider)


def _takers(
    node: Node, providers: Sequence[ExecutionProvider]
) -> tuple[list[ExecutionProvider], list[tuple[str, str]]]:
    assert node.graph is not None
    found: list[ExecutionProvider] = []
    declined: list[tuple[str, str]] = []
    for provider in providers:
        reasons = [a.reason for a in REGISTRY.claims.claims(provider, node.graph) if isinstance(a, Decline)]
        if reasons:
            declined.append((provider.name, reasons[0]))
        else:
            found.append(provider)
    return found, declined


def _providers(devices: Sequence[str] | None) -> list[ExecutionProvider]:
    here = [REGISTRY.get(name) for name in dict.fromkeys([*preferred(), *REGISTRY.available(auto=True)])]
    if devices is None:
        return here
    found: dict[str, ExecutionProvider] = {}
    for each in (devices,) if isinstance(devices, str) else devices:
        known = [p for p in here if each == p.name] or [p for p in here if each in (str(p.device), p.device.kind)]
        found.update({p.name: p for p in known or [REGISTRY.get(each.partition(":")[0])]})
    return list(found.values())


def _shapes(sizes: Any) -> list[tuple[int, ...]]:
    given = [(sizes,)] if isinstance(sizes, int) else list(sizes) if isinstance(sizes, tuple | list) else None
    if given is not None and all(isinstance(d, int) for d in given):
        given = [tuple(given)]
    valid = given is not None and all(
        isinstance(shape, tuple | list) and all(isinstance(d, int) and d >= 0 for d in shape) for shape in given
    )
    if given is None or not valid:
        raise InvalidConfig(f"sizes must be a shape for each operand, got {sizes!r}")
    return [tuple(shape) for shape in given]


def _dtype(dtype: str | DType) -> DType:
    if isinstance(dtype, DType):
        return dtype
    if dtype not in DType.__members__:
        raise InvalidConfig(f"unknown element type {dtype!r}{nearest(str(dtype), DType.__members__)}")
    return DType[dtype]


def _node(op: str, shapes: Sequence[tuple[int, ...]], dtype: DType, attrs: Mapping[str, Any] | None) -> Node:
    known = sorted({definition.name for definition in registry.declared() if not definition.domain})
    if op not in known:
        raise InvalidConfig(f"unknown operator {op!r}{nearest(op, known)}")
    graph = Graph("one operation", opsets={"": 21})
    inputs = [graph.add_input(f"x{k}", TensorType(dtype, shape)) for k, shape in enumerate(shapes)]
    node = graph.add(op, inputs, dict(attrs or {}), name=op)
    complete(node)
    graph.outputs = [node.outputs[0]]
    return node


__all__ = ["select_backend"]
