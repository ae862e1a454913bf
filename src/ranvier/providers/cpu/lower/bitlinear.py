"""BitLinear: tokens become codes once for all layers that read them, the product takes the rest as its epilogue."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import add, cast, div, mul, sub
from ranvier.codegen.definitions.lower.quantization import DERIVED
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.products import folded_stride
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.ternary import Packed, form_of, row_bytes, ternary_matmul, token_codes
from ranvier.codegen.loops.ir import Epilogue, Expr, Load, Map, Nest, Operand
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.ops.own.bitlinear import DOMAIN, LEAST, are_codes
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.lower.weight_only import constant
from ranvier.providers.cpu.realise import Realiser

INT, FLOAT = DType.int32, DType.float32


class _Layers:
    """What the layers of a program share: ``tokens`` that are codes already, by the value they come from, and how many
    ``weights`` they have together, by their codes."""

    def __init__(self) -> None:
        self.tokens: dict[Value, list[Value]] = {}
        self.weights: dict[ConstTensor, int] = {}


_LAYERS: weakref.WeakKeyDictionary[Definitions, _Layers] = weakref.WeakKeyDictionary()


def _check(node: Node) -> str | None:
    codes = node.input(1)
    return None if codes is not None and codes.const is not None else "its weights are no constant"


@lowers("BitLinear", domain=DOMAIN, dtypes=FLOATS | {DType.uint8}, check=_check)
def bitlinear(n: NodeView, b: Definitions) -> None:
    depth, width = int(n.attr("K")), int(n.attr("N"))
    x, codes, dtype = n.input(0), constant(n, 1), n.dtype(0)
    shape, result = b.shape(x), n.out_shape()
    if not shape or shape[-1] != depth or codes.shape != (width, -(-depth // 4)):
        raise Declined(f"{n.op}: {width} x {depth} weights, x {list(shape)}, codes {list(codes.shape)}")
    if math.prod(n.shape(2)) not in (1, width) or (n.has(3) and n.shape(3) != (width,)):
        raise Declined(f"{n.op}: scale or bias do not fit {width} results")
    if not depth:
        raise Declined(f"{n.op}: nothing to multiply")
    if not DERIVED.get([codes.origin], ("ternary", depth), lambda: np.asarray(are_codes(codes.numpy(), depth))):
        raise Declined(f"{n.op}: codes that are none")
    layers = _LAYERS.setdefault(b, _Layers())
    layers.weights[codes] = depth * width
    tokens, factors, sums = _quantized(b, x, layers.tokens)

    def packed(r: Realiser) -> Packed:
        form = form_of(r.isa, math.prod(result[:-1]), depth, width, sum(layers.weights.values()))
        return r.packs.shared([codes], (form.name, depth, r.isa), lambda: form.pack(codes.numpy(), depth))

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        flat, copies = _rows_apart_evenly(target, r)
        made = ternary_matmul(views[0], packed(r), flat, r.isa, epilogue=epilogue, threads=r.threads)
        return [*made, *copies]

    def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
        row = folded_stride(result[:-1], strides[:-1])
        return None if row is None else (0, row, strides[-1])

    flops = 2.0 * math.prod(result) * depth
    raw = b.contraction([tokens], realise, fold, INT, result, flops=flops)
    uses = [Use(raw), Use(sums), Use(factors), Use(n.input(2), (width,) if math.prod(n.shape(2)) > 1 else ())]
    if n.has(3):
        uses.append(Use(n.input(3)))

    def compute(e: list[Expr]) -> Expr:
        # what was multiplied are codes, larger than weights by one
        value = mul(cast(sub(e[0], e[1]), FLOAT), div(cast(e[3], FLOAT), e[2]))
        return cast(value if len(e) == 4 else add(value, cast(e[4], FLOAT)), dtype)

    b.pointwise(uses, compute, dtype, shape=result, out=n.outputs[0])


def _quantized(b: Definitions, x: Value, known: dict[Value, list[Value]]) -> list[Value]:
    """Codes of the tokens, what each was multiplied by, and the sum of its codes."""
    if x in known:
        return known[x]
    shape = b.shape(x)
    source = x if b.dtype(x) is FLOAT else b.pointwise([x], lambda e: cast(e[0], FLOAT), FLOAT)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        return token_codes(views[0], outs[0], outs[1], outs[2], LEAST, r.threads)

    one = (*shape[:-1], 1)
    outs = [(DType.int8, (*shape[:-1], row_bytes(shape[-1]))), (FLOAT, one), (INT, one)]
    known[x] = b.opaque([source], realise, outs, flops=4.0 * math.prod(shape))
    return known[x]


def _rows_apart_evenly(target: View, r: Realiser) -> tuple[View, list[Launch]]:
    """The target as a matrix; where its rows do not lie evenly apart, another one and the copy from there."""
    rows, n = math.prod(target.shape[:-1]), target.shape[-1]
    step = folded_stride(target.shape[:-1], target.strides[:-1])
    if step is not None:
        return View(target.storage, target.dtype, (rows, n), (step, target.strides[-1]), target.offset), []
    dense = View.temporary(target.dtype, target.shape)
    operands = (Operand(dense, dense.strides), Operand(target, target.strides))
    copy = Nest(target.shape, operands, (Map(((1, Load(0, dense.element)),)),), label="ternary rows")
    flat = dense.reshaped((rows, n))
    assert flat is not None
    return flat, nests.launches(copy, r.isa, r.threads)
