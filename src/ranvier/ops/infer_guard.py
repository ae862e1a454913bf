"""Questions that the standard's type inference must not be asked.

It is native code that trusts its caller: for the operators below, a wrong attribute makes it read outside its memory
or never come back, and with it the process that loads the model; or its answer is what the processor at hand makes of a
number that no integer holds. Each check refuses only what no run could compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue
from ranvier.graph.ir import Node
from ranvier.graph.types import TensorType, Type
from ranvier.ops.allocation import MAX_RANK

_TERM = r"[A-Za-z ]*(\.{3}[A-Za-z ]*)?"
_EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")


def check_question(
    node: Node, operands: Sequence[Type | None], known: Mapping[int, np.ndarray[Any, Any]] | None = None
) -> None:
    """Raise InvalidValue where the standard's inference could not be trusted with this node. ``known`` are contents of
    its operands."""
    guard = _GUARDS.get(node.op) if node.domain == "" else None
    if guard is not None:
        guard(node, operands)
    if node.op == "Range" and node.domain == "" and known:
        _range(known)


def _einsum(node: Node, operands: Sequence[Type | None]) -> None:
    equation = node.attrs.get("equation")
    if not isinstance(equation, str) or not _EQUATION.fullmatch(equation):
        raise InvalidValue(f"Einsum: {equation!r} is not an equation", op="Einsum")


def _expand(node: Node, operands: Sequence[Type | None]) -> None:
    target = operands[1] if len(operands) > 1 else None
    if isinstance(target, TensorType) and (target.size or 0) > MAX_RANK:
        raise InvalidValue(f"Expand: a shape of {target.size} dimensions; at most {MAX_RANK} are possible", op="Expand")


def _gather_nd(node: Node, operands: Sequence[Type | None]) -> None:
    count = node.attrs.get("batch_dims", 0)
    if not 0 <= count <= MAX_RANK:
        raise InvalidValue(f"GatherND: batch_dims {count} is out of range", op="GatherND")


def _layer_normalization(node: Node, operands: Sequence[Type | None]) -> None:
    axis = node.attrs.get("axis", -1)
    rank = operands[0].rank if operands and isinstance(operands[0], TensorType) else None
    if rank is not None and not -rank <= axis < rank:
        raise InvalidValue(f"{node.op}: axis {axis} is out of range for rank {rank}", op=node.op)


def _range(known: Mapping[int, np.ndarray[Any, Any]]) -> None:
    start, limit, delta = (float(known[k].reshape(-1)[0]) if k in known and known[k].size else None for k in range(3))
    if delta == 0:
        raise InvalidValue("Range: delta must not be 0", op="Range")
    if start is not None and limit is not None and delta is not None and not math.isfinite((limit - start) / delta):
        raise InvalidValue(f"Range: {start} to {limit} by {delta} has no end", op="Range")


def _split(node: Node, operands: Sequence[Type | None]) -> None:
    count = node.attrs.get("num_outputs", len(node.outputs))
    if count != len(node.outputs):
        raise InvalidValue(f"Split: num_outputs is {count}, the node has {len(node.outputs)} outputs", op="Split")


_GUARDS: dict[str, Callable[[Node, Sequence[Type | None]], None]] = {
    "Einsum": _einsum,
    "Expand": _expand,
    "GatherND": _gather_nd,
    "LayerNormalization": _layer_normalization,
    "Split": _split,
}
