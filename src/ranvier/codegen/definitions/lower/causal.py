"""Causal convolutions that keep their last inputs for the next call."""

from __future__ import annotations

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import HALVES, add, cast, compare, mul, sub
from ranvier.codegen.definitions.lower.activation import silu
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.tables import part
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Index, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value

_TAPS = 16  # of a filter, written out one after the other


def _few_taps(node: Node) -> str | None:
    weights = node.input(1)
    shape = getattr(weights.type, "shape", None) if weights is not None else None
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int) or not 1 <= shape[2] <= _TAPS:
        return "a kernel of many taps, or of unknown size"
    if _text(node.attrs.get("activation", "none")) not in ("none", "silu", "swish"):
        return f"activation {node.attrs.get('activation')}"
    return None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@lowers("CausalConvWithState", dtypes=FLOATS, check=_few_taps)
def causal_conv(n: NodeView, b: Definitions) -> None:
    (batch, channels, time), taps, dtype = n.shape(0), n.shape(1)[2], n.dtype(0)
    before = taps - 1
    if n.shape(1) != (channels, 1, taps) or (n.has(3) and n.shape(3) != (batch, channels, before)):
        raise Declined(f"{n.op}: {n.shape(0)}, {n.shape(1)}")
    seen = _after(n, b, before) if before else n.input(0)
    weights = b.reshape(n.input(1), (channels, taps))
    operands: list[Value | Use] = []
    for tap in range(taps):
        operands.append(part(b, seen, 2, tap, time))
        operands.append(Use(part(b, weights, 1, tap, 1), (channels, 1)))
    if n.has(2):
        operands.append(Use(n.input(2), (channels, 1)))
    work = DType.float32 if dtype in HALVES else dtype
    gated = _text(n.attr("activation", "none")) != "none"

    def compute(e: list[Expr]) -> Expr:
        e = [cast(x, work) for x in e]
        total = mul(e[0], e[1])
        for tap in range(1, taps):
            total = add(total, mul(e[2 * tap], e[2 * tap + 1]))
        if len(e) > 2 * taps:
            total = add(total, e[-1])
        return cast(silu(total) if gated else total, dtype)

    b.pointwise(operands, compute, dtype, shape=(batch, channels, time), out=n.outputs[0])
    if n.wants(1):
        if before:
            b.identity(part(b, seen, 2, time, before), out=n.outputs[1])
        else:
            b.reshape(part(b, n.input(0), 2, 0, 0), (batch, channels, 0), out=n.outputs[1])


def _after(n: NodeView, b: Definitions, before: int) -> Value:
    """The input behind the last inputs of an earlier call, or behind zeros."""
    batch, channels, time = n.shape(0)
    shape = (batch, channels, before + time)
    if n.has(3):
        return b.joined([n.input(3), n.input(0)], 2, shape)

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        (x,) = views
        at = sub(Index(2), Size(before))
        inside = compare("ge", Index(2), Size(before))
        return nest.load(x, (x.strides[0], x.strides[1], 0), at=mul(at, Size(x.strides[2])), guard=inside)

    return b.moved([n.input(0)], compute, n.dtype(0), shape)
