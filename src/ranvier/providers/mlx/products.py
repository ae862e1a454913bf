"""Matrix products and convolutions. mlx has channels last; what comes and goes has them second. Products of halves it
sums as float32."""

from __future__ import annotations

from typing import Any

from ranvier.graph.ir import Node
from ranvier.ops.nn.conv import transposed_frame
from ranvier.ops.nn.window import extents, per_axis, resolve_pads
from ranvier.providers.foreign import rank_of
from ranvier.providers.mlx.library import mx
from ranvier.providers.mlx.table import Call, lowers

_SPATIAL = (1, 2, 3)  # axes that mlx convolves over


@lowers("MatMul")
def matmul(call: Call, a: Any, b: Any) -> Any:
    return mx.matmul(a, b)


@lowers("Gemm", since=7)
def gemm(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    left = mx.transpose(a) if call.attr("transA", 0) else a
    right = mx.transpose(b) if call.attr("transB", 0) else b
    if c is None:
        return alpha * mx.matmul(left, right) if alpha != 1 else mx.matmul(left, right)
    if beta == 0:
        return alpha * mx.matmul(left, right)
    return mx.addmm(c, left, right, alpha=alpha, beta=beta)


def _odd_equation(node: Node) -> str | None:
    terms = str(node.attrs.get("equation", "")).replace(" ", "").partition("->")[0].split(",")
    if "->" not in node.attrs.get("equation", ""):
        return "an equation without '->' is not lowered to mlx"
    if any("..." in term or len(set(term)) < len(term) for term in terms):
        return "an equation with an ellipsis or a diagonal is not lowered to mlx"
    return None


@lowers("Einsum", since=12, refuses=_odd_equation)
def einsum(call: Call, *operands: Any) -> Any:
    return mx.einsum(call.attr("equation").replace(" ", ""), *operands)


def _unfit_for_windows(node: Node) -> str | None:
    rank = rank_of(node, 0)
    if rank is None:
        return "the rank of its operand is not known"
    if rank == 5 and node.attrs.get("group", 1) != 1:
        return "mlx has no groups over three axes"
    return None if rank - 2 in _SPATIAL else f"mlx has no convolution over {rank - 2} axes"


def _channels_last(w: Any, node: Node) -> Any:
    return mx.contiguous(mx.moveaxis(w, 1, -1))


@lowers("Conv", refuses=_unfit_for_windows, prepares={1: _channels_last})
def conv(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    spatial, kernel = x.shape[2:], w.shape[1:-1]
    rank = len(kernel)
    strides = per_axis(call.attr("strides"), rank, "strides", "Conv")
    dilations = per_axis(call.attr("dilations"), rank, "dilations", "Conv")
    pads = resolve_pads(call.attr("auto_pad", "NOTSET"), call.attr("pads"), spatial, kernel, strides, dilations)
    y = mx.conv_general(
        mx.moveaxis(x, 1, -1),
        w,
        stride=list(strides),
        padding=(list(pads[:rank]), list(pads[rank:])),
        kernel_dilation=list(dilations),
        groups=call.attr("group", 1),
    )
    return mx.moveaxis(y if bias is None else y + bias, -1, 1)


def _turned(w: Any, node: Node) -> Any:
    """``[in, out / groups, *kernel]`` as mlx wants it: ``[out, *kernel, in / groups]``."""
    groups = node.attrs.get("group", 1)
    kernel = w.shape[2:]
    w = mx.swapaxes(mx.reshape(w, (groups, w.shape[0] // groups, w.shape[1], *kernel)), 1, 2)
    return mx.contiguous(mx.moveaxis(mx.reshape(w, (-1, w.shape[2], *kernel)), 1, -1))


@lowers("ConvTranspose", refuses=_unfit_for_windows, prepares={1: _turned})
def conv_transpose(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    spatial, kernel = tuple(x.shape[2:]), w.shape[1:-1]
    rank = len(kernel)
    strides = per_axis(call.attr("strides"), rank, "strides", "ConvTranspose")
    dilations = per_axis(call.attr("dilations"), rank, "dilations", "ConvTranspose")
    extra = call.attr("output_padding") or (0,) * rank
    reach = extents(kernel, dilations)
    full = tuple(s * (n - 1) + e for s, n, e in zip(strides, spatial, reach))
    natural = tuple(f + p for f, p in zip(full, extra))
    begins, sizes = transposed_frame(
        call.attr("auto_pad", "NOTSET"), call.attr("pads"), call.attr("output_shape"), natural, spatial, strides
    )
    y = mx.conv_general(
        mx.moveaxis(x, 1, -1),
        w,
        stride=1,
        padding=([e - 1 for e in reach], [e - 1 for e in reach]),
        kernel_dilation=list(dilations),
        input_dilation=list(strides),
        groups=call.attr("group", 1),
        flip=True,
    )
    # everything the windows touch; now zeros where the frame reaches beyond, and the frame
    before = [max(-b, 0) for b in begins]
    after = [max(b + n - f, 0) for b, n, f in zip(begins, sizes, full)]
    if any(before) or any(after):
        y = mx.pad(y, [(0, 0), *zip(before, after), (0, 0)])
    first = [max(b, 0) for b in begins]
    y = y[(slice(None), *(slice(b, b + n) for b, n in zip(first, sizes)))]
    return mx.moveaxis(y if bias is None else y + bias, -1, 1)
