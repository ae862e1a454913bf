"""Convolutions: Conv, ConvTranspose, DeformConv, Col2Im, CausalConvWithState."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import wide, widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.costs import dims, traffic
from ranvier.ops.nn.window import Index, convolve, extents, output_sizes, per_axis, resolve_pads, taps
from ranvier.ops.registry import Array, Cost, TypeCall, op

Ints = Sequence[int] | None


@op("Conv")
def conv(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    kernel = _kernel(x, w, kernel_shape, "Conv")
    steps = per_axis(strides, len(kernel), "strides", "Conv")
    spread = per_axis(dilations, len(kernel), "dilations", "Conv")
    edges = resolve_pads(auto_pad, pads, x.shape[2:], kernel, steps, spread)
    y = convolve(x, w, strides=steps, dilations=spread, pads=edges, group=group, accumulate=wide(x.dtype))
    return _with_bias(y, bias, "Conv").astype(x.dtype, copy=False)


@conv.cost
def _conv_cost(call: TypeCall) -> Cost:
    """Every weight meets every output position once."""
    w = dims(call.type(1))
    y = dims(call.result_types[0]) if call.result_types else dims(call.type(0))
    positions = math.prod(y[:1] + y[2:])
    return Cost(2.0 * math.prod(w) * positions, traffic(call))


@op("ConvTranspose")
def conv_transpose(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    name = "ConvTranspose"
    kernel = _kernel(x, w, kernel_shape, name)
    if group < 1 or x.shape[1] != w.shape[0] or w.shape[0] % group:
        raise ShapeMismatch(
            f"{name}: X {list(x.shape)} and W {list(w.shape)} do not fit {group} group(s): W's first axis must be X's "
            "channels, a multiple of the groups"
        )
    rank = len(kernel)
    steps = per_axis(strides, rank, "strides", name)
    spread = per_axis(dilations, rank, "dilations", name)
    extra = per_axis(output_padding, rank, "output_padding", name, least=0) if output_padding else (0,) * rank
    reach = extents(kernel, spread)
    # everything the windows touch, before the pads are cut off
    full = tuple(s * (n - 1) + e for s, n, e in zip(steps, x.shape[2:], reach))
    natural = tuple(f + p for f, p in zip(full, extra))
    begins, sizes = transposed_frame(auto_pad, pads, output_shape, natural, x.shape[2:], steps)
    canvas = checked_shape((x.shape[0], w.shape[1] * group, *full), wide(x.dtype), name)
    y = _scatter_windows(widened(x), widened(w), canvas, group, steps, spread)
    framed = np.zeros(checked_shape((*canvas[:2], *sizes), y.dtype, name), y.dtype)
    source: Index = (..., *(slice(max(b, 0), min(b + n, f)) for b, n, f in zip(begins, sizes, full)))
    target: Index = (..., *(slice(max(-b, 0), max(min(f - b, n), 0)) for b, n, f in zip(begins, sizes, full)))
    framed[target] = y[source]
    return _with_bias(framed, bias, name).astype(x.dtype, copy=False)


def transposed_frame(
    auto_pad: str,
    pads: Ints,
    output_shape: Ints,
    natural: tuple[int, ...],
    spatial: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the output starts within the unpadded result, and its size. A negative start adds zeros in front."""
    rank = len(natural)
    wanted = tuple(int(s) for s in output_shape)[-rank:] if output_shape else None
    if wanted is not None and len(wanted) != rank:
        raise ShapeMismatch(f"ConvTranspose: output_shape needs {rank} entries, got {list(wanted)}")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") and wanted is None:
        wanted = tuple(n * s for n, s in zip(spatial, strides))
    if wanted is None:
        edges = resolve_pads(auto_pad, pads, spatial, (1,) * rank, strides, (1,) * rank, op="ConvTranspose")
        sizes = tuple(n - b - e for n, b, e in zip(natural, edges[:rank], edges[rank:]))
        if min(sizes, default=0) < 0:
            raise ShapeMismatch(f"ConvTranspose: pads {list(edges)} leave nothing of an output of {list(natural)}")
        return edges[:rank], sizes
    totals = [max(n - s, 0) for n, s in zip(natural, wanted)]
    return tuple(t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in totals), wanted


def _scatter_windows(
    x: Array, w: Array, canvas: tuple[int, ...], group: int, strides: Sequence[int], dilations: Sequence[int]
) -> Array:
    """Add every input pixel, times the kernel, into its window of an output of shape ``canvas``."""
    batch, spatial, kernel = x.shape[0], x.shape[2:], w.shape[2:]
    pixels = x.reshape(batch, group, x.shape[1] // group, math.prod(spatial))
    # [taps, group, out channels, in channels]: one contiguous matrix per kernel position
    filters = w.reshape(group, w.shape[0] // group, w.shape[1], math.prod(kernel)).transpose(3, 0, 2, 1).copy()
    y = np.zeros(canvas, x.dtype)
    for weight, (_, where) in zip(filters, taps(kernel, strides, dilations, spatial)):
        y[where] += np.matmul(weight, pixels).reshape(batch, canvas[1], *spatial)
    return y


@conv_transpose.cost
def _conv_transpose_cost(call: TypeCall) -> Cost:
    x, w = dims(call.type(0)), dims(call.type(1))
    return Cost(2.0 * math.prod(w) * math.prod(x[:1] + x[2:]), traffic(call))


@op("DeformConv", since=19)
def deform_conv(
    x: Array,
    w: Array,
    offset: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    offset_group: int = 1,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    name = "DeformConv"
    kernel = _kernel(x, w, kernel_shape, name)
    rank, taps_count = len(kernel), math.prod(kernel)
    steps = per_axis(strides, rank, "strides", name)
    spread = per_axis(dilations, rank, "dilations", name)
    edges = resolve_pads("NOTSET", pads, x.shape[2:], kernel, steps, spread, op=name)
    counts = output_sizes(x.shape[2:], kernel, steps, spread, edges, op=name)
    batch, channels = x.shape[:2]
    if group < 1 or channels != w.shape[1] * group or w.shape[0] % group:
        raise ShapeMismatch(f"{name}: X {list(x.shape)} and W {list(w.shape)} do not fit {group} group(s)")
    if offset_group < 1 or channels % offset_group:
        raise ShapeMismatch(f"{name}: {channels} channels cannot be divided by offset_group {offset_group}")
    for what, given, wanted in (
        ("offset", offset, (batch, offset_group * taps_count * rank, *counts)),
        ("mask", mask, (batch, offset_group * taps_count, *counts)),
    ):
        if given is not None and given.shape != wanted:
            raise ShapeMismatch(f"{name}: {what} must be {list(wanted)}, got {list(given.shape)}")
    where = _tap_positions(kernel, steps, spread, edges, counts) + widened(offset).reshape(
        batch, offset_group, taps_count, rank, *counts
    )
    filters = widened(w).reshape(group, w.shape[0] // group, -1)
    images = widened(x).reshape(batch, offset_group, channels // offset_group, math.prod(x.shape[2:]))
    y = np.empty((batch, group, filters.shape[1], math.prod(counts)), images.dtype)
    for n in range(batch):
        sampled = np.stack([_sample(i, p, x.shape[2:]) for i, p in zip(images[n], where[n])])
        if mask is not None:
            sampled *= widened(mask[n]).reshape(offset_group, 1, taps_count, -1)
        y[n] = np.matmul(filters, sampled.reshape(group, filters.shape[2], -1))
    y = y.reshape(batch, w.shape[0], *counts)
    return _with_bias(y, bias, name).astype(x.dtype, copy=False)


def _tap_positions(
    kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int], counts: Sequence[int]
) -> Array:
    """Where each kernel tap of each window meets the unpadded image: ``[taps, axis, *counts]``."""
    rank = len(kernel)
    positions = np.empty((math.prod(kernel), rank, *counts))
    for axis in range(rank):
        start = np.arange(counts[axis]) * strides[axis] - pads[axis]
        tap = np.indices(kernel)[axis].reshape(-1, 1) * dilations[axis]
        shape = [len(tap)] + [1] * rank
        shape[1 + axis] = counts[axis]
        positions[:, axis] = (tap + start).reshape(shape)
    return positions


def _sample(image: Array, positions: Array, spatial: Sequence[int]) -> Array:
    """Linear interpolation of ``image [C, pixels]`` at ``positions [taps, axis, *counts]``; zero outside."""
    taps_count, rank = positions.shape[:2]
    flat = positions.reshape(taps_count, rank, -1)
    low = np.floor(flat)
    part = (flat - low).astype(image.dtype)
    total = np.zeros((image.shape[0], taps_count, flat.shape[2]), image.dtype)
    for corner in itertools.product((0, 1), repeat=rank):
        index = np.zeros((taps_count, flat.shape[2]), np.intp)
        weight = np.ones((taps_count, flat.shape[2]), image.dtype)
        for axis, (side, size) in enumerate(zip(corner, spatial)):
            at = low[:, axis] + side
            inside = (at >= 0) & (at < size)  # also False for NaN
            weight *= np.where(inside, part[:, axis] if side else 1 - part[:, axis], 0)
            index = index * size + np.where(inside, at, 0).astype(np.intp)
        total += image[:, index] * weight
    return total


@deform_conv.cost
def _deform_conv_cost(call: TypeCall) -> Cost:
    """The product of a convolution, and an interpolation for every value it reads."""
    w, y = dims(call.type(1)), dims(call.result_types[0]) if call.result_types else dims(call.type(0))
    x = dims(call.type(0))
    positions = math.prod(y[:1] + y[2:])
    corners = 2 ** max(len(w) - 2, 0)
    sampled = math.prod(x[1:2] + w[2:]) * positions
    return Cost(2.0 * math.prod(w) * positions + 2.0 * corners * sampled, traffic(call))


@op("Col2Im", since=18)
def col2im(
    columns: Array,
    image_shape: Array,
    block_shape: Array,
    *,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    name = "Col2Im"
    if columns.dtype.kind == "O":
        raise DTypeMismatch(f"{name}: strings cannot be added up")
    spatial, block = tuple(map(int, image_shape)), tuple(map(int, block_shape))
    rank = len(spatial)
    if len(block) != rank or min(block, default=0) < 1:
        raise ShapeMismatch(f"{name}: block_shape {list(block)} does not fit image_shape {list(spatial)}")
    steps = per_axis(strides, rank, "strides", name)
    spread = per_axis(dilations, rank, "dilations", name)
    edges = resolve_pads("NOTSET", pads, spatial, block, steps, spread, op=name)
    counts = output_sizes(spatial, block, steps, spread, edges, op=name)
    if columns.ndim != 3 or columns.shape[1] % math.prod(block) or columns.shape[2] != math.prod(counts):
        raise ShapeMismatch(
            f"{name}: needs [N, C * {math.prod(block)}, {math.prod(counts)}] for blocks {list(block)} of an image "
            f"{list(spatial)}, got {list(columns.shape)}"
        )
    batch, channels = columns.shape[0], columns.shape[1] // math.prod(block)
    parts = columns.reshape(batch, channels, *block, *counts)
    padded = [s + b + e for s, b, e in zip(spatial, edges[:rank], edges[rank:])]
    summed = wide(columns.dtype)
    image = np.zeros(checked_shape((batch, channels, *padded), summed, name), summed)
    for tap, where in taps(block, steps, spread, counts):
        at: Index = (slice(None), slice(None), *tap)
        image[where] += parts[at]
    inner: Index = (..., *(slice(b, b + s) for b, s in zip(edges[:rank], spatial)))
    return image[inner].astype(columns.dtype, copy=False)


@op("CausalConvWithState", since=27)
def causal_conv_with_state(
    x: Array, w: Array, bias: Array | None = None, past_state: Array | None = None, *, activation: str = "none"
) -> tuple[Array, Array]:
    name = "CausalConvWithState"
    if activation not in ("none", "silu", "swish"):
        raise InvalidValue(f"{name}: activation must be none, silu or swish, got {activation!r}", op=name)
    if x.ndim != 3 or w.ndim != 3 or w.shape[:2] != (x.shape[1], 1) or w.shape[2] < 1:
        raise ShapeMismatch(f"{name}: needs [N, C, L] and a kernel [C, 1, k], got {list(x.shape)}, {list(w.shape)}")
    batch, channels, _ = x.shape
    state = (batch, channels, w.shape[2] - 1)
    if past_state is None:
        past_state = np.zeros(state, x.dtype)
    elif past_state.shape != state:
        raise ShapeMismatch(f"{name}: past_state must be {list(state)}, got {list(past_state.shape)}")
    seen = np.concatenate([past_state, x], axis=2)
    y = convolve(seen, w, strides=(1,), dilations=(1,), pads=(0, 0), group=channels, accumulate=wide(x.dtype), op=name)
    y = _with_bias(y, bias, name)
    if activation != "none":
        y = y / (1 + np.exp(-y))
    return y.astype(x.dtype, copy=False), seen[:, :, seen.shape[2] - state[2] :]


@causal_conv_with_state.cost
def _causal_conv_cost(call: TypeCall) -> Cost:
    x, w = dims(call.type(0)), dims(call.type(1))
    return Cost(2.0 * math.prod(x) * (w[2] if len(w) > 2 else 1), traffic(call))


def _kernel(x: Array, w: Array, kernel_shape: Ints, op: str) -> tuple[int, ...]:
    if x.ndim < 3 or w.ndim != x.ndim:
        raise ShapeMismatch(
            f"{op}: needs X [N, C, spatial …] and W of the same rank, got {list(x.shape)} and {list(w.shape)}"
        )
    kernel: tuple[int, ...] = w.shape[2:]
    if kernel_shape and tuple(kernel_shape) != kernel:
        raise ShapeMismatch(f"{op}: kernel_shape {list(kernel_shape)} differs from W's {list(kernel)}")
    if 0 in kernel:
        raise ShapeMismatch(f"{op}: the kernel {list(kernel)} is empty")
    return kernel


def _with_bias(y: Array, bias: Array | None, op: str) -> Array:
    """``y`` plus one number per channel, in place: ``y`` is the operator's own."""
    if bias is None:
        return y
    if bias.shape != (y.shape[1],):
        raise ShapeMismatch(f"{op}: bias must be [{y.shape[1]}], got {list(bias.shape)}")
    y += bias.astype(y.dtype, copy=False).reshape(-1, *(1,) * (y.ndim - 2))
    return y
