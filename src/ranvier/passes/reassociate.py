"""``(x + a) + b`` becomes ``x + (a + b)``, and likewise for products: two constants become one.

Integers wrap, so for them this is exact. Floats round differently, which only the level ``aggressive`` allows.
"""

from __future__ import annotations

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.passes.edit import builder, prune
from ranvier.passes.facts import SMALL, dtype_of, only_use

# by (inner, outer) operator: the operator that remains, and how its constant is made of both
_COMBINED = {
    ("Add", "Add"): ("Add", np.add),
    ("Add", "Sub"): ("Add", np.subtract),
    ("Sub", "Add"): ("Sub", np.subtract),
    ("Sub", "Sub"): ("Sub", np.add),
    ("Mul", "Mul"): ("Mul", np.multiply),
    ("Mul", "Div"): ("Mul", np.divide),
    ("Div", "Mul"): ("Div", np.divide),
    ("Div", "Div"): ("Div", np.multiply),
}
_WRAPPING = frozenset({"Add", "Sub", "Mul"})


def reassociate(node: Node, aggressive: bool) -> bool:
    """Merge the constant of the node before into this one's; True when that was done."""
    found = _with_constant(node)
    inner = found[0].producer if found is not None else None
    if found is None or inner is None or inner.domain or (inner.op, node.op) not in _COMBINED or inner.version < 7:
        return False
    operand, constant = found
    before = _with_constant(inner)
    dtype = dtype_of(operand)
    if before is None or dtype is None or only_use(operand) is None or dtype_of(node.output) is not dtype:
        return False
    exact = dtype.is_integer and dtype.bits >= 8 and {inner.op, node.op} <= _WRAPPING
    if not (exact or (aggressive and dtype.is_float)):
        return False
    op, combine = _COMBINED[inner.op, node.op]
    first, second = before[1].const, constant.const
    assert first is not None and second is not None
    try:
        shape = np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        return False
    if np.prod(shape) > max(first.size, second.size, 1) or max(first.size, second.size) > SMALL:
        return False
    wide = dtype.numpy if exact else np.dtype(np.float64)
    with np.errstate(all="ignore"):
        merged = combine(first.numpy().astype(wide), second.numpy().astype(wide)).astype(dtype.numpy)
    if not exact and (not np.all(np.isfinite(merged)) or (not np.all(merged) and op in ("Mul", "Div"))):
        return False  # overflow or underflow that the two steps did not have
    node.op = op
    node.set_inputs([before[0], builder(node, "fold_affine").constant(np.asarray(merged))])
    prune([operand])
    return True


def _with_constant(node: Node) -> tuple[Value, Value] | None:
    """Operand and constant of ``operand ∘ constant``; also of ``constant ∘ operand`` where that is the same."""
    if len(node.inputs) != 2:
        return None
    a, b = node.inputs
    if a is None or b is None:
        return None
    if a.const is None and b.const is not None:
        return a, b
    if a.const is not None and b.const is None and node.op in ("Add", "Mul"):
        return b, a
    return None
