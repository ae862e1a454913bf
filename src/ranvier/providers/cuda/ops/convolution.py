"""Convolutions. Those of halves have their channels last, which is how a GPU's matrix units read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ranvier.errors import InvalidValue
from ranvier.graph.ir import Node
from ranvier.ops.nn.conv import transposed_frame
from ranvier.ops.nn.window import extents, per_axis, resolve_pads
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.ops.products import activated, unknown_activation
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers
from ranvier.providers.foreign import rank_of

_AXES = (1, 2, 3)  # spatial, that torch has convolutions for
_LARGEST_FILTER = 49  # places of filters that networks have


def _spatial(position: int = 0) -> Any:
    def refuses(node: Node) -> str | None:
        rank = rank_of(node, position)
        if rank is None:
            return "the rank of its input is not known"
        return None if rank - 2 in _AXES else f"convolutions of {rank - 2} spatial axes are not lowered to torch"

    return refuses


def padded(x: Any, pads: Sequence[int], value: float = 0.0) -> Any:
    """Spatial axes with room at both ends; ``pads`` has the beginnings of all, then the ends."""
    rank = len(pads) // 2
    if not any(pads):
        return x
    backwards = [n for k in reversed(range(rank)) for n in (pads[k], pads[k + rank])]
    return functional.pad(x, backwards, value=value)


def convolved(call: Call, x: Any, w: Any, bias: Any = None, *, op: str = "Conv") -> Any:
    """``x`` by filters ``w``; both of floating point."""
    rank = x.ndim - 2
    strides = per_axis(call.attr("strides"), rank, "strides", op)
    dilations = per_axis(call.attr("dilations"), rank, "dilations", op)
    kernel = tuple(w.shape[2:])
    around = (tuple(x.shape[2:]), kernel, strides, dilations)
    pads = resolve_pads(call.attr("auto_pad", "NOTSET"), call.attr("pads"), *around, op=op)
    group = call.attr("group", 1)
    if x.shape[1] != w.shape[1] * group:
        raise InvalidValue(f"{op}: X {list(x.shape)} and W {list(w.shape)} do not fit {group} group(s)", op=op)
    dtype = x.dtype
    if call.low is not None and dtype == torch.float32:
        x, w = x.to(call.low), w.to(call.low)
        bias = None if bias is None else bias.to(call.low)
    if pads[:rank] == pads[rank:]:
        within: Any = pads[:rank]
    else:
        x, within = padded(x, pads), (0,) * rank
    if bias is None and group == 1 and set(strides) == {1} and _gathers(x, w, within, dilations):
        return _by_weights(x, w, within, dilations).to(dtype)
    if x.dtype in (torch.float16, torch.bfloat16) and rank == 2:
        x = x.contiguous(memory_format=torch.channels_last)
        w = w.contiguous(memory_format=torch.channels_last)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    return function(x, w, bias, strides, within, dilations, group).to(dtype)


def _gathers(x: Any, w: Any, pads: Sequence[int], dilations: Sequence[int]) -> bool:
    """Whether a convolution has more places in its filters than in its result: that is how a gradient by the filters of
    another one is written, and no library has a fast kernel for such filters."""
    kernel = tuple(w.shape[2:])
    sizes = [n + 2 * p - (k - 1) * d for n, k, p, d in zip(x.shape[2:], kernel, pads, dilations)]
    swapped = w.stride(0) < w.stride(1)  # somebody has put images and channels in each other's place
    least = math.prod(sizes) if swapped else max(_LARGEST_FILTER, math.prod(sizes))
    return bool(math.prod(kernel) > least and min(sizes) > 0)


def _by_weights(x: Any, w: Any, pads: Sequence[int], dilations: Sequence[int]) -> Any:
    """The same sums, asked for as what they are: ``x`` has channels and images in each other's place, and so have the
    gradients ``w``; steps between their places are the strides of the convolution that is derived."""
    kernel = tuple(w.shape[2:])
    sizes = [n + 2 * p - (k - 1) * d for n, k, p, d in zip(x.shape[2:], kernel, pads, dilations)]
    like = x.new_empty(1).expand(w.shape[0], x.shape[0], *sizes)  # only its form is looked at
    ones = (1,) * len(sizes)
    how = (list(dilations), list(pads), list(ones), False, [0] * len(sizes), 1, [False, True, False])
    found = torch.ops.aten.convolution_backward(w.transpose(0, 1), x.transpose(0, 1), like, None, *how)[1]
    return found.transpose(0, 1)


def _filters(w: Any, node: Node) -> Any:
    """Filters of halves with their channels last, once."""
    halves = w.dtype in (torch.float16, torch.bfloat16)
    return w.contiguous(memory_format=torch.channels_last) if halves and w.ndim == 4 else w


@lowers("Conv", refuses=_spatial(), prepares={1: _filters})
def conv(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    return convolved(call, x, w, bias)


def _fused(node: Node) -> str | None:
    return unknown_activation(node) or _spatial()(node)


@lowers("FusedConv", domain=CONTRIB, refuses=_fused, prepares={1: _filters})
def fused_conv(call: Call, x: Any, w: Any, bias: Any = None, z: Any = None) -> Any:
    y = convolved(call, x, w, bias)
    return activated(y if z is None else y + z, call.attr("activation", ""), call.attr("activation_params"))


@lowers("NhwcFusedConv", domain=CONTRIB, refuses=_fused)
def nhwc_fused_conv(call: Call, x: Any, w: Any, bias: Any = None, z: Any = None) -> Any:
    y = convolved(call, x.movedim(-1, 1), w, bias)
    y = y if z is None else y + z.movedim(-1, 1)
    return activated(y, call.attr("activation", ""), call.attr("activation_params")).movedim(1, -1)


@lowers("NhwcConv", domain=CONTRIB, refuses=_spatial())
def nhwc_conv(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    return convolved(call, x.movedim(-1, 1), w.movedim(-1, 1), bias).movedim(1, -1)


@lowers("ConvTranspose", refuses=_spatial(), prepares={1: _filters})
def conv_transpose(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    rank = x.ndim - 2
    strides = per_axis(call.attr("strides"), rank, "strides", "ConvTranspose")
    dilations = per_axis(call.attr("dilations"), rank, "dilations", "ConvTranspose")
    kernel = tuple(w.shape[2:])
    spatial = tuple(x.shape[2:])
    added = call.attr("output_padding") or (0,) * rank
    reach = extents(kernel, dilations)
    natural = tuple((n - 1) * s + e + o for n, s, e, o in zip(spatial, strides, reach, added))
    how = (call.attr("auto_pad", "NOTSET"), call.attr("pads"), call.attr("output_shape"))
    begins, sizes = transposed_frame(*how, natural, spatial, strides)
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    whole = function(x, w, bias, strides, 0, 0, call.attr("group", 1), dilations)
    # the window of the whole result that the pads leave; beyond it there is only the bias
    for k, (size, begin) in enumerate(zip(sizes, begins)):
        axis = 2 + k
        before, after = max(-begin, 0), max(begin + size - whole.shape[axis], 0)
        pieces = [_filler(whole, axis, before, bias), whole, _filler(whole, axis, after, bias)]
        if before or after:
            whole = torch.cat(pieces, dim=axis)
        whole = whole.narrow(axis, max(begin, 0), size)
    return whole


def _filler(like: Any, axis: int, size: int, bias: Any) -> Any:
    shape = list(like.shape)
    shape[axis] = size
    empty = like.new_zeros(shape)
    return empty if bias is None else empty + bias.reshape(-1, *[1] * (like.ndim - 2))


@lowers("Col2Im", since=18, host=(1, 2), wide=True)
def col2im(call: Call, x: Any, image_shape: Array, block_shape: Array) -> Any:
    image, block = [int(v) for v in image_shape.reshape(-1)], [int(v) for v in block_shape.reshape(-1)]
    rank = len(image)
    strides = per_axis(call.attr("strides"), rank, "strides", "Col2Im")
    dilations = per_axis(call.attr("dilations"), rank, "dilations", "Col2Im")
    pads = list(call.attr("pads") or [0] * (2 * rank))
    grown = [n + pads[k] + pads[k + rank] for k, n in enumerate(image)]
    counts = [(grown[k] - (block[k] - 1) * dilations[k] - 1) // strides[k] + 1 for k in range(rank)]
    taps = math.prod(block)
    columns = x.reshape(x.shape[0], x.shape[1] // taps, taps, *counts)
    y = columns.new_zeros(x.shape[0], x.shape[1] // taps, *grown)
    for tap in range(taps):
        at: list[int] = []
        rest = tap
        for k in reversed(range(rank)):
            at.insert(0, rest % block[k])
            rest //= block[k]
        where = [slice(a * d, a * d + (n - 1) * s + 1, s) for a, d, n, s in zip(at, dilations, counts, strides)]
        y[(slice(None), slice(None), *where)] += columns[:, :, tap]
    return y[(slice(None), slice(None), *[slice(pads[k], pads[k] + n) for k, n in enumerate(image)])]


@lowers("CausalConvWithState", since=1, types=FLOATS, wide=True)
def causal_conv(call: Call, x: Any, w: Any, bias: Any = None, past: Any = None) -> Any:
    reach = w.shape[-1] - 1
    before = x.new_zeros(x.shape[0], x.shape[1], reach) if past is None else past
    whole = torch.cat([before, x], dim=2)
    y = functional.conv1d(whole, w, bias, groups=x.shape[1])
    if call.attr("activation", "none") in ("silu", "swish"):
        y = functional.silu(y)
    return y, whole[:, :, whole.shape[2] - reach :] if reach else before
