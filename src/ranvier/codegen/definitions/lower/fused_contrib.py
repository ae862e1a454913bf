"""com.microsoft operators that join two or three steps: sums, gates, products and convolutions with activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import HALVES, add, cast, clamp, compare, const, mul, sub, where, wide
from ranvier.codegen.definitions.lower.activation import gelu, gelu_tanh, silu
from ranvier.codegen.definitions.lower.contraction import ACTIVATIONS, MICROSOFT, matmul_of, multiply
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.normalization import normalized
from ranvier.codegen.definitions.lower.reduction import share_of, weight_of
from ranvier.codegen.definitions.lower.tables import looked_up, part, widened
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.products import Window
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Reduce, Result
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops.nn.window import per_axis, resolve_pads

# -- sums and gates ---------------------------------------------------------------------------------------------------


@lowers("BiasAdd", domain=MICROSOFT, dtypes=FLOATS)
def bias_add(n: NodeView, b: Definitions) -> None:
    if n.shape(2) != n.shape(0) or n.shape(1) != n.shape(0)[-1:]:
        raise Declined(f"{n.op}: {n.shape(0)}, {n.shape(1)}, {n.shape(2)}")
    total = wide(lambda x, y, z: add(add(x, y), z))
    b.pointwise([n.input(k) for k in range(3)], lambda e: total(*e), n.out_dtype(), out=n.outputs[0])


@lowers("GatedAdd", domain=MICROSOFT, dtypes=FLOATS)
def gated_add(n: NodeView, b: Definitions) -> None:
    if n.shape(1) != n.shape(0) or n.shape(2) != (*n.shape(0)[:-1], 1):
        raise Declined(f"{n.op}: {n.shape(0)}, {n.shape(1)}, {n.shape(2)}")
    gated = wide(lambda x, y, gate: add(x, mul(y, gate)))
    b.pointwise([n.input(k) for k in range(3)], lambda e: gated(*e), n.out_dtype(), out=n.outputs[0])


@lowers("BiasSplitGelu", domain=MICROSOFT, dtypes=FLOATS)
def bias_split_gelu(n: NodeView, b: Definitions) -> None:
    axis, width = n.rank(0) - 1, n.shape(0)[-1]
    if width % 2 or n.shape(1) != (width,):
        raise Declined(f"{n.op}: {n.shape(0)}, {n.shape(1)}")
    halves = [part(b, n.input(0), axis, k * width // 2, width // 2) for k in range(2)]
    biases = [part(b, n.input(1), 0, k * width // 2, width // 2) for k in range(2)]
    gated = wide(lambda x, p, y, q: mul(add(x, p), gelu(add(y, q))))
    b.pointwise([halves[0], biases[0], halves[1], biases[1]], lambda e: gated(*e), n.out_dtype(), out=n.outputs[0])


@lowers("ScaledSiLU", domain=MICROSOFT, dtypes=FLOATS)
def scaled_silu(n: NodeView, b: Definitions) -> None:
    alpha = float(n.attr("alpha", 1.0))
    if not n.has(1):
        b.pointwise(
            [n.input(0)], lambda e: wide(lambda x: silu(mul(x, const(alpha, x))))(e[0]), n.out_dtype(), out=n.outputs[0]
        )
        return
    if math.prod(n.shape(1)) != 1:
        raise Declined(f"{n.op}: a scale of shape {n.shape(1)}")
    scaled = wide(lambda x, scale: silu(mul(x, cast(scale, x.dtype))))
    b.pointwise([n.input(0), Use(n.input(1), ())], lambda e: scaled(*e), n.out_dtype(), out=n.outputs[0])


@lowers("BiasSoftmax", domain=MICROSOFT, dtypes=FLOATS)
def bias_softmax(n: NodeView, b: Definitions) -> None:
    shape, dtype = n.shape(0), n.dtype(0)
    split = int(n.attr("axis", 1)) % max(1, len(shape))
    width, count = math.prod(shape[split:]), math.prod(shape[:split])
    have = math.prod(n.shape(1))
    rows = have // width if width else 0
    if not rows or have % width or count % rows:
        raise Declined(f"{n.op}: {shape} and {n.shape(1)}")
    inner = bool(n.attr("is_inner_broadcast"))
    domain = (rows, count // rows, width) if inner else (count // rows, rows, width)
    work = DType.float32 if dtype in HALVES else dtype

    def build(e: list[Expr]) -> RowBody:
        score = add(cast(e[0], work), cast(e[1], work))
        weight = weight_of(sub(score, Result(0, work)))
        share = cast(share_of(weight, Result(1, work)), dtype)
        return RowBody([Reduce("max", score, work), Reduce("sum", weight, work)], maps={0: share})

    bias = Use(n.input(1), (rows, 1, width) if inner else (1, rows, width))
    (made,) = b.rows([Use(n.input(0), domain), bias], [2], build, [(dtype, True)], domain=domain)
    b.reshape(made, shape, out=n.outputs[0])


# -- embeddings -------------------------------------------------------------------------------------------------------


@lowers("EmbedLayerNormalization", domain=MICROSOFT, dtypes=FLOATS | {DType.int32, DType.int64})
def embed_layer_norm(n: NodeView, b: Definitions) -> None:
    batch, time = n.shape(0)
    dtype = n.dtype(2)
    terms = [looked_up(n, b, 2, n.input(0))]
    if n.has(8):
        terms.append(looked_up(n, b, 3, n.input(8)))
    else:
        if n.shape(3)[0] < time:
            raise Declined(f"{n.op}: {time} tokens, {n.shape(3)[0]} positions")
        terms.append(part(b, n.input(3), 0, 0, time))
    if n.has(1) and n.has(4):
        terms.append(looked_up(n, b, 4, n.input(1)))
    hidden = n.shape(2)[1]
    normalized(
        b,
        terms[0],
        (2,),
        float(n.attr("epsilon", 1e-12)),
        n.input(5),
        n.input(6),
        n.outputs[0],
        domain=(batch, time, hidden),
        dtype=dtype,
        added=terms[1:],
        others=[None, None, n.outputs[2] if n.wants(2) else None],
    )
    if n.wants(1):
        mask_lengths(n, b, batch)


def mask_lengths(n: NodeView, b: Definitions, batch: int) -> None:
    if not n.has(7):
        b.pointwise([], lambda e: const(0, DType.int32), DType.int32, shape=(batch,), out=n.outputs[1])
        return

    def build(e: list[Expr]) -> RowBody:
        real = cast(compare("eq", e[0], const(1, e[0])), DType.int32)
        return RowBody([Reduce("sum", real, DType.int32)], finals={0: Result(0, DType.int32)})

    b.rows([n.input(7)], [1], build, [(DType.int32, False)], keepdims=False, results=[n.outputs[1]])


# -- products ---------------------------------------------------------------------------------------------------------

_FORMULAS: dict[str, Callable[[Expr, Sequence[float]], Expr]] = {
    "LeakyRelu": lambda x, p: where(compare("lt", x, const(0.0, x)), mul(x, const(p[0], x)), x),
    "HardSigmoid": lambda x, p: clamp(add(mul(x, const(p[0], x)), const(p[1], x)), const(0.0, x), const(1.0, x)),
    "Clip": lambda x, p: clamp(x, const(p[0], x), const(p[1], x)),
}
_DEFAULTS = {"LeakyRelu": (0.01,), "HardSigmoid": (0.2, 0.5)}


def _name(node: Node) -> str:
    found = node.attrs.get("activation", "")
    return found.decode() if isinstance(found, bytes) else str(found)


def _known_activation(node: Node) -> str | None:
    name = _name(node)
    if name in ACTIVATIONS or name in _DEFAULTS or not name:
        return None
    return f"activation {name}"


def _formula(name: str, params: Sequence[float]) -> Callable[[Expr], Expr]:
    if not name:
        return lambda x: x
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    return lambda x: _FORMULAS[name](x, params)


@lowers("FusedMatMulActivation", domain=MICROSOFT, dtypes=FLOATS, check=_known_activation)
def matmul_activation(n: NodeView, b: Definitions) -> None:
    x, y = (_turned(n, b, k, side) for k, side in enumerate("AB"))
    product = matmul_of(n, b, x, y, n.out_shape(), None, float(n.attr("alpha", 1.0)))
    name = _name(n.node)
    defaults = _DEFAULTS.get(name, ())
    given = [n.attr(f"activation_{which}") for which in ("alpha", "beta")]
    params = [float(d if g is None else g) for d, g in zip(defaults, given)]
    formula = wide(_formula(name, params))
    b.pointwise([product], lambda e: formula(e[0]), n.out_dtype(), out=n.outputs[0])


def _turned(n: NodeView, b: Definitions, k: int, side: str) -> Value:
    value, rank = n.input(k), n.rank(k)
    if n.attr(f"transBatch{side}", 0) and rank > 2:
        value = b.transpose(value, (*range(1, rank - 1), 0, rank - 1))
    if n.attr(f"trans{side}", 0) and rank > 1:
        value = b.transpose(value, (*range(rank - 2), rank - 1, rank - 2))
    return value


@lowers("GemmFastGelu", domain=MICROSOFT, dtypes=FLOATS)
def gemm_fast_gelu(n: NodeView, b: Definitions) -> None:
    dtype, shape = n.out_dtype(), n.out_shape()
    x, y = widened(b, n.input(0)), widened(b, n.input(1))
    if min(n.rank(0), n.rank(1)) < 2:
        raise Declined(f"{n.op}: vectors")
    product = multiply(b, x, y, shape)
    terms = [product, *([widened(b, n.input(2))] if n.has(2) else [])]
    b.pointwise(
        terms, lambda e: cast(gelu_tanh(add(*e) if len(e) > 1 else e[0]), dtype), dtype, shape=shape, out=n.outputs[0]
    )


# -- convolutions with channels last ----------------------------------------------------------------------------------


def _conv_check(node: Node) -> str | None:
    weights = node.input(1)
    shape = getattr(weights.type, "shape", None) if weights is not None else None
    if shape is not None and not 3 <= len(shape) <= 5:
        return f"{len(shape) - 2} spatial axes"
    name = _name(node)
    if name not in ACTIVATIONS and name not in _FORMULAS and name:
        return f"activation {name}"
    expected = {"LeakyRelu": 1, "Clip": 2, "HardSigmoid": 2}.get(name, 0)
    if expected and len(node.attrs.get("activation_params") or ()) != expected:
        return f"parameters of {name}"
    return None


@lowers("NhwcConv", "NhwcFusedConv", domain=MICROSOFT, dtypes=FLOATS, check=_conv_check)
def nhwc_conv(n: NodeView, b: Definitions) -> None:
    rank, dtype = n.rank(0), n.dtype(0)
    first = (0, rank - 1, *range(1, rank - 1))
    last = (0, *range(2, rank), 1)
    x = b.transpose(widened(b, n.input(0)), first)
    w = widened(b, n.input(1))
    if n.op == "NhwcConv":
        w = b.transpose(w, first)
    kernel = b.shape(w)[2:]
    strides = per_axis(n.attr("strides"), rank - 2, "strides", n.op)
    dilations = per_axis(n.attr("dilations"), rank - 2, "dilations", n.op)
    auto = n.attr("auto_pad", "NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else str(auto)
    pads = resolve_pads(auto, n.attr("pads"), b.shape(x)[2:], kernel, strides, dilations, op=n.op)
    if min(pads, default=0) < 0:
        raise Declined(f"{n.op}: negative pads")
    group = int(n.attr("group", 1))
    made = tuple(n.out_shape()[a] for a in first)
    result = b.products.convolve(b, x, w, made, Window(strides, dilations, pads, group))
    uses: list[Use] = [Use(result)]
    if n.has(2):
        uses.append(Use(n.input(2), (n.shape(2)[0], *(1,) * (rank - 2))))
    if n.has(3):
        if n.shape(3) != n.out_shape():
            raise Declined(f"{n.op}: a summand of shape {n.shape(3)}")
        uses.append(Use(b.transpose(n.input(3), first)))
    formula = _formula(_name(n.node), [float(p) for p in n.attr("activation_params") or ()])

    def compute(e: list[Expr]) -> Expr:
        value = e[0]
        for term in e[1:]:
            value = add(value, cast(term, value.dtype))
        return cast(formula(value), dtype)

    if len(uses) > 1 or _name(n.node) or dtype in HALVES:
        result = b.pointwise(uses, compute, dtype, shape=made)
    b.transpose(result, last, out=n.outputs[0])
