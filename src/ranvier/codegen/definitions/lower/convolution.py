"""Convolutions, with their bias and activation as elementwise work that fusion takes in."""

from __future__ import annotations

from typing import Any

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import add, cast
from ranvier.codegen.definitions.lower.contraction import ACTIVATIONS, MICROSOFT
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.products import Window
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr
from ranvier.graph.ir import Node, Value
from ranvier.ops.nn.conv import transposed_frame
from ranvier.ops.nn.window import extents, per_axis, resolve_pads


def _text(value: Any, default: str) -> str:
    if value is None:
        return default
    return value.decode() if isinstance(value, bytes) else str(value)


def _spatial(node: Node) -> str | None:
    weights = node.input(1)
    shape = getattr(weights.type, "shape", None) if weights is not None else None
    if shape is not None and not 3 <= len(shape) <= 5:
        return f"{len(shape) - 2} spatial axes"
    name = node.attrs.get("activation", "")
    if name and name not in ACTIVATIONS:
        return f"activation {name}"
    return None


def _fits(n: NodeView, group: int, channels: int, made: int) -> None:
    """Do the operands belong together? Generated code would read beyond them otherwise."""
    ranks = {n.rank(0), n.rank(1), len(n.out_shape())}
    sizes = {n.shape(0)[1], channels}
    bias = n.shape(2) if n.has(2) else (made,)
    if len(ranks) > 1 or len(sizes) > 1 or group < 1 or channels % group or made % group or bias != (made,):
        shapes = ", ".join(str(list(n.shape(k))) for k in range(len(n.inputs)) if n.has(k))
        raise Declined(f"{n.op}: operands of shapes {shapes} in {group} groups do not fit")


def _finish(n: NodeView, b: Definitions, product: Value, bias: Value | None, added: Value | None) -> None:
    """Bias, a second summand and an activation, left to fusion as elementwise work."""
    rank, dtype = len(n.out_shape()), n.out_dtype()
    activation = ACTIVATIONS.get(_text(n.attr("activation"), ""))
    uses: list[Use] = [Use(product)]
    if bias is not None:
        uses.append(Use(bias, (b.shape(bias)[0], *(1,) * (rank - 2))))
    if added is not None:
        uses.append(Use(added))

    def compute(e: list[Expr]) -> Expr:
        value = e[0]
        for term in e[1:]:
            value = add(value, cast(term, value.dtype))
        return cast(value if activation is None else activation(value), dtype)

    b.pointwise(uses, compute, dtype, shape=n.out_shape(), out=n.outputs[0])


@lowers("Conv", dtypes=FLOATS, check=_spatial)
@lowers("FusedConv", domain=MICROSOFT, dtypes=FLOATS, check=_spatial)
def conv(n: NodeView, b: Definitions) -> None:
    rank = n.rank(0) - 2
    kernel = n.shape(1)[2:]
    strides = per_axis(n.attr("strides"), rank, "strides", n.op)
    dilations = per_axis(n.attr("dilations"), rank, "dilations", n.op)
    pads = resolve_pads(
        _text(n.attr("auto_pad"), "NOTSET"), n.attr("pads"), n.shape(0)[2:], kernel, strides, dilations, op=n.op
    )
    if min(pads, default=0) < 0:
        raise Declined(f"{n.op}: negative pads")
    group = int(n.attr("group", 1))
    _fits(n, group, n.shape(1)[1] * group, n.shape(1)[0])
    window = Window(strides, dilations, pads, group)
    more = n.has(2) or n.has(3) or n.attr("activation")
    product = b.products.convolve(b, n.input(0), n.input(1), n.out_shape(), window, None if more else n.outputs[0])
    if more:
        _finish(n, b, product, n.input(2) if n.has(2) else None, n.input(3) if n.has(3) else None)


@lowers("ConvTranspose", dtypes=FLOATS, check=_spatial)
def conv_transpose(n: NodeView, b: Definitions) -> None:
    rank = n.rank(0) - 2
    kernel = n.shape(1)[2:]
    strides = per_axis(n.attr("strides"), rank, "strides", n.op)
    dilations = per_axis(n.attr("dilations"), rank, "dilations", n.op)
    extra = tuple(n.attr("output_padding") or (0,) * rank)
    natural = tuple(
        s * (i - 1) + e + p for s, i, e, p in zip(strides, n.shape(0)[2:], extents(kernel, dilations), extra)
    )
    begins, sizes = transposed_frame(
        _text(n.attr("auto_pad"), "NOTSET"), n.attr("pads"), n.attr("output_shape"), natural, n.shape(0)[2:], strides
    )
    if min(begins, default=0) < 0:
        raise Declined("ConvTranspose: negative pads")
    group = int(n.attr("group", 1))
    _fits(n, group, n.shape(1)[0], n.shape(1)[1] * group)
    # what the end needs, so that the size comes out as the standard says
    ends = tuple(t - b0 - s for t, b0, s in zip(natural, begins, sizes))
    window = Window(strides, dilations, (*begins, *ends), group, True, extra)
    more = n.has(2)
    product = b.products.convolve(b, n.input(0), n.input(1), n.out_shape(), window, None if more else n.outputs[0])
    if more:
        _finish(n, b, product, n.input(2) if n.has(2) else None, None)
