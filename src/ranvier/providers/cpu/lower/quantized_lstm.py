"""DynamicQuantizeLSTM: 8-bit weights, inputs and states quantized as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Use
from ranvier.codegen.definitions.exprs import add, cast, mul
from ranvier.codegen.definitions.lower.quantization import DERIVED, quantized_dynamically
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.integer import Recurrent, dot_of, moved_right, pack_codes, quantized_lstm
from ranvier.codegen.loops.ir import Expr
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import Same
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.lower.integer_product import FLOAT, INT, MICROSOFT, QUANTIZED, multiply, product_of_scales
from ranvier.providers.cpu.products.matmul import content
from ranvier.providers.cpu.realise import Realiser

Array = np.ndarray[Any, Any]
_CONSTANT = (1, 2, 3, 8, 9, 10, 11)  # weights, bias, scales and zero points
_USUAL = ("sigmoid", "tanh", "tanh")


def _usual(node: Node) -> str | None:
    for k in _CONSTANT:
        value = node.input(k)
        if value is not None and value.const is None:
            return f"operand {k} is not constant"
    if node.input(4) is not None or node.input(7) is not None:
        return "lengths of sequences, or peepholes"
    functions = [str(a).lower() for a in node.attrs.get("activations") or ()]
    if node.attrs.get("input_forget", 0) or node.attrs.get("clip"):
        return "coupled gates, or gates that are clipped"
    if any(f != _USUAL[k % 3] for k, f in enumerate(functions)):
        return "activations other than the usual ones"
    return None


def _along_columns(parameter: Array, directions: int) -> Array:
    """A scale or zero point as [directions, 1, one or all columns]."""
    return parameter.reshape(directions, 1, -1)


@lowers("DynamicQuantizeLSTM", domain=MICROSOFT, dtypes=QUANTIZED, check=_usual)
def dynamic_quantize_lstm(n: NodeView, b: Definitions) -> None:
    steps, batch, width = n.shape(0)
    directions, hidden, columns = n.shape(2)
    codes, step, shift = quantized_dynamically(b, n.input(0))
    flat = b.reshape(codes, (steps * batch, width))
    zero = b.constant(_along_columns(n.need(9), directions))
    total = multiply(b, flat, n.input(1), shift, zero)
    w_scale = _along_columns(n.need(8), directions)
    scale = product_of_scales(b, (step, ()), (b.constant(w_scale), w_scale.shape))
    uses = [Use(total), Use(scale)]
    if n.has(3):
        bias = n.need(3).reshape(directions, 1, 2, columns)
        uses.append(Use(b.constant(bias[:, :, 0] + bias[:, :, 1])))

    def compute(e: list[Expr]) -> Expr:
        value = mul(cast(e[0], FLOAT), e[1])
        return value if len(e) == 2 else add(value, e[2])

    inputs = b.pointwise(uses, compute, FLOAT, shape=(directions, steps * batch, columns))
    shape = (directions, batch, hidden)
    states = [n.input(k) if n.has(k) else b.constant(np.zeros(shape, np.float32)) for k in (5, 6)]
    constants = _recurrent_constants(n, b)
    reverse = n.attr("direction", "forward") in ("reverse", b"reverse")

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        weights = views[1]
        few = batch <= 16
        key = ("lstm codes", Same(weights.storage.array), weights.offset, few)
        packed = r.packs.get(
            key,
            lambda: pack_codes(
                np.ascontiguousarray(content(weights)), r.isa, rows_hint=1 if few else 256, dot=dot_of(r.isa)
            ),
        )
        recurrent = Recurrent(packed, *views[4:])
        return quantized_lstm(
            views[0], recurrent, (views[2], views[3]), (outs[0], outs[1], outs[2]), r.isa, reverse=reverse
        )

    results = [n.outputs[k] if k < len(n.outputs) and n.wants(k) else None for k in range(3)]
    outs = [(FLOAT, (steps, *shape)), (FLOAT, shape), (FLOAT, shape)]
    b.opaque([inputs, n.input(2), *states, *constants], realise, outs, results)


def _recurrent_constants(n: NodeView, b: Definitions) -> list[Value]:
    """Per column of the recurrent weights: their sums less zero points, zero points, scales."""
    codes, scale, zero = n.need(2), n.need(10), n.need(11)
    directions, hidden, columns = codes.shape
    moved = moved_right(n.dtype(2))
    spread = (directions, columns)
    zeros = np.broadcast_to(_along_columns(zero, directions)[:, 0].astype(np.int32) + np.int32(moved), spread)

    def sums() -> Array:
        total = codes.sum(axis=1, dtype=np.int32) + np.int32(moved * hidden)
        return np.asarray(total - np.int32(hidden) * zeros, np.int32)

    scales = np.broadcast_to(_along_columns(scale, directions)[:, 0].astype(np.float32), spread)
    made = [
        DERIVED.get([codes, zero], "recurrent sums", sums),
        np.ascontiguousarray(zeros),
        np.ascontiguousarray(scales),
    ]
    return [b.constant(array, dtype) for array, dtype in zip(made, (INT, INT, DType.float32))]
