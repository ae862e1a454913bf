"""Convolutions: channels-last inside, whatever the model says outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import HALVES, add, cast
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import conv as kernels
from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.loops.ir import Epilogue, Expr
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops.nn.conv import transposed_frame
from ranvier.ops.nn.window import extents, per_axis, resolve_pads
from ranvier.providers.cpu.lower.contraction import ACTIVATIONS, content, folded_stride
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.narrow.rates import Pace, depthwise_pace, product_pace
from ranvier.providers.cpu.realise import Realiser
from ranvier.providers.cpu.target import Same, Target

BF16 = DType.bfloat16
MICROSOFT = "com.microsoft"
_PHASES = 64  # the largest stride of a transposed convolution: each residue is a convolution of its own


def channels_last(rank: int) -> tuple[int, ...]:
    """The axes of [N, C, …] from outermost to innermost in memory."""
    return (0, *range(2, rank), 1)


def _fold(shape: Sequence[int]) -> Any:
    out = tuple(shape)

    def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
        pixels = folded_stride(out[2:], strides[2:])
        return None if pixels is None else (strides[0], pixels, strides[1])

    return fold


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


def _widened(b: Definitions, x: Value, w: Value) -> list[Value]:
    """Operands that kernels take: bfloat16 with constant weights as it is, other 16-bit types as float32."""
    if b.dtype(x) is BF16 and _is_constant(b, w):
        return [x, w]
    return [
        b.pointwise([v], lambda e: cast(e[0], DType.float32), DType.float32) if b.dtype(v) in HALVES else v
        for v in (x, w)
    ]


def convolve(
    b: Definitions,
    x: Value,
    w: Value,
    out_shape: Sequence[int],
    shape: ConvShape,
    out: Value | None = None,
    *,
    transposed: bool = False,
) -> Value:
    """The bare convolution of float32 or float64 tensors, or of bfloat16 ones with constant weights: then the result is
    float32."""
    rank = len(out_shape)
    takes_narrow = kernels.transposed_takes_bfloat if transposed else kernels.takes_bfloat

    def narrow(target: Target) -> str | None:
        if target.narrow is not BF16:
            return "there are no float16 convolutions"
        if not _is_constant(b, w):
            return "its weights are not constant"
        return None if takes_narrow(shape, target.isa) else "no bfloat16 kernel for its shape is quicker"

    def pace(target: Target) -> Pace:
        if shape.is_depthwise:
            return depthwise_pace()
        plain = shape.kernel == (1, 3, 3) and shape.strides == shape.dilations == (1, 1, 1) and shape.group == 1
        transformed = plain and target.winograd and not transposed and min(shape.cin, shape.cout) >= 16
        depth = max(1, shape.cin // shape.group * shape.taps)
        return product_pace(target.isa, BF16, depth, transformed=transformed)

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        image, weights = views
        constant = weights.storage.kind == "const"
        free = constant and not transposed and r.target.winograd  # of the two ways that mix neighbours, this is one
        if free and image.dtype is DType.float32 and r.multiplies is None:
            made = _side_by_side(r, image, weights, target, epilogue, shape)
            if made is not None:
                return made
        if not (kernels.takes_any_layout(shape) and not transposed):
            image = r.ordered(image, channels_last(rank))
        how: dict[str, Any] = {"epilogue": epilogue, "threads": r.threads}
        dtype = BF16 if BF16 in (image.dtype, r.multiplies) else None
        if transposed:
            if not constant:
                return kernels.conv_transpose_dynamic(image, weights, target, shape, r.isa, **how)
            key = ("transposed", dtype, Same(weights.storage.array), weights.offset, weights.strides, shape)
            phases = r.packs.get(key, lambda: kernels.pack_transposed(_array(weights), r.isa, shape, dtype=dtype))
            return kernels.conv_transpose(image, phases, target, shape, r.isa, **how)
        if not constant:
            return kernels.conv_dynamic(image, weights, target, shape, r.isa, **how)
        winograd = r.target.winograd
        kind = kernels.packing(shape, r.isa, item=max(4, weights.dtype.numpy.itemsize), winograd=winograd, dtype=dtype)
        wide = kernels.panel_width(shape, r.isa, kind, item=max(4, weights.dtype.numpy.itemsize))
        place = ("conv", kind, wide, Same(weights.storage.array), weights.offset, weights.strides)
        packed = r.packs.get(
            place, lambda: kernels.pack_weights(_array(weights), r.isa, shape, winograd=winograd, dtype=dtype)
        )
        return kernels.conv(image, packed, target, shape, r.isa, **how)

    return b.contraction(
        [x, w],
        realise,
        _fold(out_shape),
        DType.float32 if b.dtype(x) is BF16 else b.dtype(x),
        out_shape,
        out,
        order=channels_last(rank),
        unit_axis=1,
        flops=shape.flops,
        narrow=narrow,
        rounds=True,
        pace=pace,
    )


def _side_by_side(
    r: Realiser, image: View, weights: View, target: View, epilogue: Epilogue | None, shape: ConvShape
) -> Sequence[Launch] | None:
    """The launches with neighbouring pixels taken as one, where that is quicker and everything lies as it needs."""
    p = kernels.pixels_together(shape, r.isa)
    out = kernels.joined_output(target, p) if p > 1 else None
    if out is None:
        return None
    try:
        after = kernels.joined_epilogue(epilogue, shape.cout, p)
    except ValueError:
        return None
    wide = kernels.joined_shape(shape, p)
    if not kernels.takes_any_layout(wide):
        image = r.ordered(image, channels_last(image.rank))
    kind = kernels.packing(wide, r.isa, winograd=False)
    place = ("joined conv", p, kind, kernels.panel_width(wide, r.isa, kind), Same(weights.storage.array))
    packed = r.packs.get(
        (*place, weights.offset, weights.strides, shape.strides),
        lambda: kernels.pack_weights(kernels.joined_weights(_array(weights), shape, p), r.isa, wide, winograd=False),
    )
    return kernels.conv(image, packed, out, wide, r.isa, epilogue=after, threads=r.threads)


def _is_constant(b: Definitions, value: Value) -> bool:
    return value.const is not None or value in b.known


def _array(view: View) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(content(view))


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
    shape = ConvShape.conv(n.shape(0), n.shape(1), strides=strides, dilations=dilations, pads=pads, group=group)
    x, w = _widened(b, n.input(0), n.input(1))
    more = n.has(2) or n.has(3) or n.dtype(0) in HALVES or n.attr("activation")
    product = convolve(b, x, w, n.out_shape(), shape, None if more else n.outputs[0])
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
    if max(strides, default=1) > _PHASES:
        raise Declined(f"ConvTranspose: strides {strides}")
    group = int(n.attr("group", 1))
    _fits(n, group, n.shape(1)[0], n.shape(1)[1] * group)
    # what the end needs, so that the size comes out as the standard says
    ends = tuple(t - b0 - s for t, b0, s in zip(natural, begins, sizes))
    shape = ConvShape.transpose(
        n.shape(0),
        n.shape(1),
        strides=strides,
        dilations=dilations,
        pads=(*begins, *ends),
        output_padding=extra,
        group=group,
    )
    x, w = _widened(b, n.input(0), n.input(1))
    more = n.has(2) or n.dtype(0) in HALVES
    product = convolve(b, x, w, n.out_shape(), shape, None if more else n.outputs[0], transposed=True)
    if more:
        _finish(n, b, product, n.input(2) if n.has(2) else None, None)
