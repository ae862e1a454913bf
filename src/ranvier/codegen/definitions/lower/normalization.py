"""Normalisations: mean and variance over rows, then one pass that scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import add, cast, compare, const, div, mul, op, sub
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, from_onnx
from ranvier.graph.ir import Node, Value

MICROSOFT = "com.microsoft"


def moments(x: Expr, count: int, first: int = 0) -> tuple[list[Reduce], Expr, Expr]:
    """Stages for mean and variance in two passes (the second over what is then in cache), and both as expressions."""
    dtype = x.dtype
    mean = div(Result(first, dtype), cast(Size(count), dtype))
    off = sub(x, mean)
    variance = div(Result(first + 1, dtype), cast(Size(count), dtype))
    return [Reduce("sum", x, dtype), Reduce("sum", mul(off, off), dtype)], mean, variance


def inverse_deviation(variance: Expr, epsilon: float) -> Expr:
    return op("rsqrt", add(variance, const(epsilon, variance)))


def normalized(
    b: Definitions,
    x: Value | Use,
    axes: Sequence[int],
    epsilon: float,
    scale: Value | Use | None,
    bias: Value | Use | None,
    out: Value | None,
    *,
    domain: tuple[int, ...],
    dtype: DType,
    centred: bool = True,
    added: Sequence[Value | Use] = (),
    stash: DType | None = None,
    others: Sequence[Value | None] = (),
) -> list[Value]:
    """(x - mean) / deviation * scale + bias over ``axes``; without ``centred`` by the root mean square.

    ``added`` are summed to ``x`` first. With ``stash``, mean and inverse deviation are results too (of that type),
    and with ``added`` the sum is the last one.
    """
    count = math.prod(domain[a] for a in axes)
    wide = wide_type(dtype)
    extra = [v for v in (scale, bias) if v is not None]
    with_sum = bool(added) and len(others) > 2 and others[2] is not None

    def build(e: list[Expr]) -> RowBody:
        value = cast(e[0], wide)
        for term in e[1 : 1 + len(added)]:
            value = add(value, cast(term, wide))
        if centred:
            reduces, mean, variance = moments(value, count)
            centre = sub(value, mean)
        else:
            reduces = [Reduce("sum", mul(value, value), wide)]
            mean, variance = const(0.0, wide), div(Result(0, wide), cast(Size(count), wide))
            centre = value
        inverse = inverse_deviation(variance, epsilon)
        result = mul(centre, inverse)
        rest = e[1 + len(added) :]
        if scale is not None:
            result = mul(result, cast(rest[0], wide))
        if bias is not None:
            result = add(result, cast(rest[-1], wide))
        maps = {0: cast(result, dtype)}
        finals: dict[int, Expr] = {}
        if stash is not None:
            finals = {1: cast(mean, stash), 2: cast(inverse, stash)}
        if with_sum:
            maps[3 if stash is not None else 1] = cast(value, dtype)
        return RowBody(reduces, maps, finals)

    outs = [(dtype, True)]
    results: list[Value | None] = [out]
    if stash is not None:
        outs += [(stash, False), (stash, False)]
        results += [others[0] if others else None, others[1] if len(others) > 1 else None]
    if with_sum:
        outs.append((dtype, True))
        results.append(others[2])
    return b.rows([x, *added, *extra], axes, build, outs, domain=domain, results=results)


def _suffix_axes(n: NodeView) -> tuple[int, ...]:
    rank = n.rank(0)
    return tuple(range(n.attr("axis", -1) % max(1, rank), rank))


@lowers("LayerNormalization", dtypes=FLOATS)
def layer_norm(n: NodeView, b: Definitions) -> None:
    wanted = n.wants(1) or n.wants(2)
    stash = from_onnx(int(n.attr("stash_type", 1))) if wanted else None
    normalized(
        b,
        n.input(0),
        _suffix_axes(n),
        n.attr("epsilon", 1e-5),
        n.input(1) if n.has(1) else None,
        n.input(2) if n.has(2) else None,
        n.outputs[0],
        domain=n.shape(0),
        dtype=n.dtype(0),
        stash=stash,
        others=n.outputs[1:],
    )


def _by_root_mean_square(n: NodeView, b: Definitions) -> None:
    normalized(
        b,
        n.input(0),
        _suffix_axes(n),
        n.attr("epsilon", 1e-5),
        n.input(1),
        None,
        n.outputs[0],
        domain=n.shape(0),
        dtype=n.dtype(0),
        centred=False,
    )


@lowers("RMSNormalization", dtypes=FLOATS)
def rms_norm(n: NodeView, b: Definitions) -> None:
    if n.dtype(0) is not n.dtype(1):
        raise Declined("RMSNormalization: scale of another type")
    _by_root_mean_square(n, b)


@lowers("SimplifiedLayerNormalization", domain=MICROSOFT, dtypes=FLOATS)
@lowers("SimplifiedLayerNormalization", dtypes=FLOATS)
def simplified_layer_norm(n: NodeView, b: Definitions) -> None:
    if n.wants(1):
        raise Declined("SimplifiedLayerNormalization: the inverse deviation is asked for")
    _by_root_mean_square(n, b)


def _plain_skip(node: Node) -> str | None:
    if any(v.uses or v.is_graph_output for v in node.outputs[1:3]):
        return "mean or inverse deviation is asked for"
    return None


@lowers(
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT, dtypes=FLOATS, check=_plain_skip
)
def skip_layer_norm(n: NodeView, b: Definitions) -> None:
    centred = n.op == "SkipLayerNormalization"
    gamma, beta = n.input(2), n.input(3) if centred and n.has(3) else None
    last = 4 if centred else 3
    added = [n.input(1), *([n.input(last)] if n.has(last) else [])]
    total = n.outputs[3] if n.wants(3) else None
    normalized(
        b,
        n.input(0),
        (n.rank(0) - 1,),
        n.attr("epsilon", 1e-12 if centred else 1e-5),
        gamma,
        beta,
        n.outputs[0],
        domain=n.shape(0),
        dtype=n.dtype(0),
        centred=centred,
        added=added,
        others=[None, None, total],
    )


def _per_channel(value: Value, b: Definitions, rank: int) -> Use:
    """A [C] operand beside [N, C, …]."""
    return Use(value, (b.shape(value)[0], *(1,) * (rank - 2)))


@lowers("InstanceNormalization", dtypes=FLOATS)
def instance_norm(n: NodeView, b: Definitions) -> None:
    rank = n.rank(0)
    normalized(
        b,
        n.input(0),
        tuple(range(2, rank)),
        n.attr("epsilon", 1e-5),
        _per_channel(n.input(1), b, rank),
        _per_channel(n.input(2), b, rank),
        n.outputs[0],
        domain=n.shape(0),
        dtype=n.dtype(0),
    )


@lowers("GroupNormalization", dtypes=FLOATS)
def group_norm(n: NodeView, b: Definitions) -> None:
    batch, channels, *spatial = n.shape(0)
    groups = int(n.attr("num_groups"))
    domain = (batch, groups, channels // groups, *spatial)
    tail = (1,) * len(spatial)
    per_group = n.version < 21
    shape = (groups, 1, *tail) if per_group else (groups, channels // groups, *tail)
    split = b.reshape(n.input(0), domain)
    (made,) = normalized(
        b,
        split,
        tuple(range(2, len(domain))),
        n.attr("epsilon", 1e-5),
        Use(n.input(1), shape),
        Use(n.input(2), shape),
        None,
        domain=domain,
        dtype=n.dtype(0),
    )
    b.reshape(made, n.out_shape(), out=n.outputs[0])


def _batch_norm_training(n: NodeView, b: Definitions) -> None:
    """Normalised by the batch's own moments, which also move the running ones."""
    shape, dtype, epsilon = n.shape(0), n.dtype(0), n.attr("epsilon", 1e-5)
    wide, kind, rank = wide_type(n.dtype(0)), n.dtype(3), n.rank(0)
    momentum = float(n.attr("momentum", 0.9))
    axes = (0, *range(2, rank))
    if rank < 2 or n.shape(1) != shape[1:2]:
        raise Declined(f"BatchNormalization: X {list(shape)}, scale {list(n.shape(1))}")
    count = math.prod(shape[a] for a in axes)

    def build(e: list[Expr]) -> RowBody:
        reduces, mean, variance = moments(cast(e[0], wide), count)
        return RowBody(reduces, finals={0: mean, 1: variance})

    now = b.rows([n.input(0)], axes, build, [(wide, False), (wide, False)], domain=shape, keepdims=False)

    def moved(e: list[Expr]) -> Expr:
        old, new = cast(e[0], wide), cast(e[1], wide)
        return cast(add(mul(old, const(momentum, wide)), mul(new, const(1 - momentum, wide))), kind)

    for k, statistic in enumerate(now):
        if n.wants(1 + k):
            b.pointwise([n.input(3 + k), statistic], moved, kind, out=n.outputs[1 + k])
        if n.version < 14 and n.wants(3 + k):
            b.pointwise([statistic], lambda e: cast(e[0], kind), kind, out=n.outputs[3 + k])
    if not n.wants(0):
        return

    def compute(e: list[Expr]) -> Expr:
        x, scale, bias, mean, variance = (cast(v, wide) for v in e)
        return cast(add(mul(sub(x, mean), mul(inverse_deviation(variance, epsilon), scale)), bias), dtype)

    column = (shape[1], *(1,) * (rank - 2))
    operands = [Use(n.input(0)), *(Use(v, column) for v in (n.input(1), n.input(2), *now))]
    b.pointwise(operands, compute, dtype, shape=shape, out=n.outputs[0])


def _trains(node: Node) -> bool:
    """Whether the batch's own statistics are used: said by an attribute, or by the number of outputs."""
    if node.version >= 14:
        return bool(node.attrs.get("training_mode", 0))
    return len(node.outputs) > 1 if node.version >= 7 else not node.attrs.get("is_test", 0)


def _spatial(node: Node) -> str | None:
    return "not spatial" if node.version < 9 and not node.attrs.get("spatial", 1) else None


@lowers("BatchNormalization", dtypes=FLOATS, check=_spatial)
def batch_norm(n: NodeView, b: Definitions) -> None:
    if _trains(n.node):
        _batch_norm_training(n, b)
        return
    rank, epsilon, dtype = n.rank(0), n.attr("epsilon", 1e-5), n.dtype(0)
    wide = wide_type(dtype)
    shape = (n.shape(1)[0], *(1,) * (rank - 2)) if rank > 1 else n.shape(1)
    known = [n.known(k) for k in range(1, 5)]
    if not any(array is None for array in known):
        scale, bias, mean, variance = (np.asarray(array, np.float64) for array in known)
        with np.errstate(all="ignore"):
            gain = scale / np.sqrt(variance + epsilon)
            steps = [Use(b.constant(v.astype(wide.numpy)), shape) for v in (gain, bias - mean * gain)]

        def scaled(e: list[Expr]) -> Expr:
            return cast(add(mul(cast(e[0], wide), e[1]), e[2]), dtype)

        b.pointwise([Use(n.input(0)), *steps], scaled, dtype, shape=n.shape(0), out=n.outputs[0])
        return

    def compute(e: list[Expr]) -> Expr:
        x, scale, bias, mean, variance = (cast(v, wide) for v in e)
        return cast(add(mul(mul(sub(x, mean), inverse_deviation(variance, epsilon)), scale), bias), dtype)

    operands = [Use(n.input(0)), *(Use(n.input(k), shape) for k in range(1, 5))]
    b.pointwise(operands, compute, dtype, shape=n.shape(0), out=n.outputs[0])


@lowers("MeanVarianceNormalization", dtypes=FLOATS)
def mean_variance_norm(n: NodeView, b: Definitions) -> None:
    axes = tuple(a % n.rank(0) for a in n.attr("axes", (0, 2, 3)))
    count = math.prod(n.shape(0)[a] for a in axes)
    dtype, wide = n.dtype(0), wide_type(n.dtype(0))

    def build(e: list[Expr]) -> RowBody:
        value = cast(e[0], wide)
        reduces, mean, variance = moments(value, count)
        scaled = div(sub(value, mean), add(op("sqrt", variance), const(1e-9, value)))
        return RowBody(reduces, maps={0: cast(scaled, dtype)})

    b.rows([n.input(0)], axes, build, [(dtype, True)], domain=n.shape(0), results=[n.outputs[0]])


@lowers("LpNormalization", dtypes=FLOATS)
def lp_norm(n: NodeView, b: Definitions) -> None:
    axis, p = n.attr("axis", -1) % max(1, n.rank(0)), int(n.attr("p", 2))
    dtype, wide = n.dtype(0), wide_type(n.dtype(0))

    def build(e: list[Expr]) -> RowBody:
        value = cast(e[0], wide)
        size = Result(0, wide)
        norm = op("sqrt", size) if p == 2 else size
        safe = op("where", compare("eq", norm, const(0.0, norm)), const(1.0, norm), norm, dtype=wide)
        energy = mul(value, value) if p == 2 else op("abs", value)
        return RowBody([Reduce("sum", energy, wide)], maps={0: cast(div(value, safe), dtype)})

    b.rows([n.input(0)], [axis], build, [(dtype, True)], domain=n.shape(0), results=[n.outputs[0]])


@lowers("LRN", dtypes=FLOATS)
def local_response_norm(n: NodeView, b: Definitions) -> None:
    size, shape, rank = int(n.attr("size")), n.shape(0), n.rank(0)
    alpha, beta, bias = n.attr("alpha", 1e-4), n.attr("beta", 0.75), n.attr("bias", 1.0)
    dtype, wide = n.dtype(0), wide_type(n.dtype(0))
    # zeros on either side instead of a guard: where channels lie together, every lane would have one of its own
    sides = [(shape[0], count, *shape[2:]) for count in ((size - 1) // 2, size // 2)]
    none = b.constant(np.zeros((), dtype.numpy), dtype)
    borders = [b.alias(none, functools.partial(_expanded, side), side) if side[1] else None for side in sides]
    parts = [each for each in (borders[0], n.input(0), borders[1]) if each is not None]
    widened = (shape[0], shape[1] + size - 1, *shape[2:])
    around = b.joined(parts, 1, widened) if len(parts) > 1 else n.input(0)

    def window(nest: NestBuilder, views: list[View]) -> list[Expr]:
        beside, view = views
        return [nest.load(beside, (*beside.strides, beside.strides[1])), nest.load(view, (*view.strides, 0))]

    def build(e: list[Expr]) -> RowBody:
        beside, x = (cast(v, wide) for v in e)
        energy = add(mul(Result(0, wide), const(alpha / size, wide)), const(bias, wide))
        return RowBody(
            [Reduce("sum", mul(beside, beside), wide)], finals={0: cast(_over_power(x, energy, beta), dtype)}
        )

    b.rows(
        [],
        [rank],
        build,
        [(dtype, False)],
        domain=(*shape, size),
        keepdims=False,
        results=[n.outputs[0]],
        sources=[around, n.input(0)],
        gather=window,
    )


def _expanded(shape: Sequence[int], view: View) -> View:
    return view.expanded(tuple(shape))


def _over_power(x: Expr, base: Expr, exponent: float) -> Expr:
    """``x / base ** exponent``; by roots where the exponent is one of those that networks have."""
    if exponent == 1.0:
        return div(x, base)
    root = op("sqrt", base)
    if exponent == 0.5:
        return div(x, root)
    if exponent == 0.75:
        return div(x, mul(root, op("sqrt", root)))
    return mul(x, op("pow", base, const(-exponent, base)))
