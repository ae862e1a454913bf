"""com.microsoft operators on plain tensors: Fourier transforms, indexing, cropping, distances, alignment.

Several of them are early forms of operators that the standard adopted later; those call the standard's body.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.contrib.rules import MICROSOFT, at, broadcasting, divided, plus, rounded, same_as, tensor, times
from ranvier.ops.costs import dims, traffic
from ranvier.ops.operands import integers, normal_axis, scalar
from ranvier.ops.registry import Array, Cost, TypeCall, evaluate, op

# -- linear algebra and Fourier transforms ----------------------------------------------------------------------------


@op("Inverse", domain=MICROSOFT)
def inverse(x: Array) -> Array:
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeMismatch(f"Inverse: needs square matrices, got shape {list(x.shape)}")
    try:
        return rounded(np.linalg.inv(widened(x)), x.dtype)
    except np.linalg.LinAlgError:
        raise InvalidValue("Inverse: a matrix is singular", op="Inverse") from None


def _check_transform(name: str, rank: int, signal_ndim: int, normalized: int, onesided: int) -> None:
    if normalized or not onesided:
        raise InvalidValue(f"{name}: only normalized=0 and onesided=1 are defined", op=name)
    if not 1 <= signal_ndim <= rank:
        raise InvalidValue(f"{name}: signal_ndim {signal_ndim} does not fit rank {rank}", op=name)


@op("Rfft", domain=MICROSOFT)
def rfft(x: Array, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> Array:
    """The half spectrum of real signals; real and imaginary part stand in a new last axis."""
    _check_transform("Rfft", x.ndim, signal_ndim, normalized, onesided)
    spectrum = np.fft.rfftn(widened(x), axes=tuple(range(-signal_ndim, 0)))
    return rounded(np.stack((spectrum.real, spectrum.imag), axis=-1), x.dtype)


@op("Irfft", domain=MICROSOFT)
def irfft(x: Array, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> Array:
    """Real signals of even length from their half spectrum."""
    _check_transform("Irfft", x.ndim - 1, signal_ndim, normalized, onesided)
    if x.shape[-1] != 2 or x.shape[-2] < 2:
        raise ShapeMismatch(f"Irfft: expected [..., at least 2 frequencies, 2], got {list(x.shape)}")
    wide = widened(x)
    spectrum = wide[..., 0] + 1j * wide[..., 1]
    return rounded(np.fft.irfftn(spectrum, axes=tuple(range(-signal_ndim, 0))), x.dtype)


def _complex_product(name: str, a: Array, b: Array, conjugate: bool) -> Array:
    if not (a.ndim and b.ndim and a.shape[-1] == b.shape[-1] == 2):
        raise ShapeMismatch(f"{name}: the last axis holds two parts, got {list(a.shape)} and {list(b.shape)}")
    p, q = widened(a), widened(b)
    sign = -1.0 if conjugate else 1.0
    real = p[..., 0] * q[..., 0] - sign * p[..., 1] * q[..., 1]
    imag = p[..., 1] * q[..., 0] + sign * p[..., 0] * q[..., 1]
    return rounded(np.stack((real, imag), axis=-1), a.dtype)


@op("ComplexMul", domain=MICROSOFT)
def complex_mul(a: Array, b: Array) -> Array:
    return _complex_product("ComplexMul", a, b, False)


@op("ComplexMulConj", domain=MICROSOFT)
def complex_mul_conj(a: Array, b: Array) -> Array:
    return _complex_product("ComplexMulConj", a, b, True)


@op("CDist", domain=MICROSOFT)
def cdist(a: Array, b: Array, *, metric: str = "sqeuclidean") -> Array:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ShapeMismatch(f"CDist: expected [m, k] and [n, k], got {list(a.shape)} and {list(b.shape)}")
    if metric not in ("sqeuclidean", "euclidean"):
        raise InvalidValue(f"CDist: metric must be sqeuclidean or euclidean, got {metric!r}", op="CDist")
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)
    distances = np.maximum(squares, 0)  # cancellation may leave a hair below zero
    return rounded(np.sqrt(distances) if metric == "euclidean" else distances, a.dtype)


# -- indexing ---------------------------------------------------------------------------------------------------------


@op("ExpandDims", domain=MICROSOFT, traits=("view",))
def expand_dims(x: Array, axis: Array) -> Array:
    position = normal_axis("ExpandDims", int(scalar("ExpandDims", "axis", axis)), x.ndim + 1)
    return np.expand_dims(x, position)


@op("Trilu", domain=MICROSOFT)
def trilu(x: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    result: Array = evaluate("Trilu", x, k, upper=upper)
    return result


@op("GatherND", domain=MICROSOFT)
def gather_nd(data: Array, indices: Array) -> Array:
    result: Array = evaluate("GatherND", data, indices.astype(np.int64, copy=False))
    return result


@op("TorchEmbedding", domain=MICROSOFT)
def torch_embedding(
    weight: Array, indices: Array, padding_idx: Array | None = None, scale_grad_by_freq: Array | None = None
) -> Array:
    result: Array = evaluate("Gather", weight, indices, axis=0)
    return result


@op("Unique", domain=MICROSOFT)
def unique(x: Array) -> tuple[Array, Array, Array]:
    """Distinct values in the order of their first occurrence, where each element went, and how often each occurs."""
    if x.ndim != 1:
        raise ShapeMismatch(f"Unique: expected a vector, got {list(x.shape)}")
    values, first, where, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return values[order], rank[where].astype(np.int64), counts[order].astype(np.int64)


@op("Range", domain=MICROSOFT)
def range_(start: Array, limit: Array, delta: Array | None = None) -> Array:
    step = np.ones((), start.dtype) if delta is None else delta.reshape(())
    result: Array = evaluate("Range", start.reshape(()), limit.reshape(()), step)
    return result


@op("Pad", domain=MICROSOFT)
def pad(data: Array, pads: Array, value: Array | None = None, *, mode: str = "constant") -> Array:
    fill = None if value is None else value.reshape(())
    result: Array = evaluate("Pad", data, pads.reshape(-1), fill, mode=mode)
    return result


@op("UnfoldTensor", domain=MICROSOFT)
def unfold_tensor(x: Array, *, dim: int = -1, size: int, step: int = 1) -> Array:
    """Windows of ``size`` every ``step`` along one axis; the window's elements become a new last axis."""
    axis = normal_axis("UnfoldTensor", dim, x.ndim)
    if not 1 <= size <= x.shape[axis] or step < 1:
        raise InvalidValue(
            f"UnfoldTensor: size {size} and step {step} do not fit axis {axis} of {list(x.shape)}", op="UnfoldTensor"
        )
    count = (x.shape[axis] - size) // step + 1
    checked_shape((*x.shape[:axis], count, *x.shape[axis + 1 :], size), x.dtype, "UnfoldTensor")
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis)
    return np.ascontiguousarray(windows[(slice(None),) * axis + (slice(None, None, step),)])


@op("NGramRepeatBlock", domain=MICROSOFT)
def ngram_repeat_block(input_ids: Array, scores: Array, *, ngram_size: int) -> Array:
    """Scores with -inf at every token that would repeat an n-gram of its sequence."""
    if ngram_size < 1:
        raise InvalidValue(f"NGramRepeatBlock: ngram_size must be positive, got {ngram_size}", op="NGramRepeatBlock")
    if input_ids.ndim != 2 or scores.ndim != 2 or scores.shape[0] != input_ids.shape[0]:
        raise ShapeMismatch(
            f"NGramRepeatBlock: expected ids [batch, length] and scores [batch, vocabulary], got "
            f"{list(input_ids.shape)} and {list(scores.shape)}"
        )
    length = input_ids.shape[1]
    blocked = scores.copy()
    if length < ngram_size:
        return blocked
    grams = np.lib.stride_tricks.sliding_window_view(input_ids, ngram_size, axis=1)
    tail = input_ids[:, length - ngram_size + 1 :]
    row, position = np.nonzero((grams[..., :-1] == tail[:, None]).all(axis=-1))
    tokens = grams[row, position, -1]
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < scores.shape[1]):
        raise InvalidValue(f"NGramRepeatBlock: a token is outside [0, {scores.shape[1]})", op="NGramRepeatBlock")
    blocked[row, tokens] = -np.inf
    return blocked


# -- images and sequences ---------------------------------------------------------------------------------------------


@op("GridSample", domain=MICROSOFT)
def grid_sample(
    x: Array, grid: Array, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Array:
    today = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    result: Array = evaluate("GridSample", x, grid, align_corners=align_corners, mode=today, padding_mode=padding_mode)
    return result


@op("CropAndResize", domain=MICROSOFT)
def crop_and_resize(
    x: Array,
    rois: Array,
    batch_indices: Array,
    crop_size: Array,
    *,
    extrapolation_value: float = 0.0,
    mode: str = "bilinear",
) -> Array:
    name = "CropAndResize"
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 4 or batch_indices.shape != rois.shape[:1]:
        raise ShapeMismatch(
            f"{name}: expected X [n, c, h, w], rois [r, 4] and batch_indices [r], got {list(x.shape)}, "
            f"{list(rois.shape)} and {list(batch_indices.shape)}"
        )
    size = integers(name, crop_size)
    if len(size) != 2 or min(size) < 1:
        raise InvalidValue(f"{name}: crop_size must be two positive sizes, got {size}", op=name)
    if mode not in ("bilinear", "nearest"):
        raise InvalidValue(f"{name}: mode must be bilinear or nearest, got {mode!r}", op=name)
    if batch_indices.size and not (batch_indices.min() >= 0 and batch_indices.max() < x.shape[0]):
        raise InvalidValue(f"{name}: a batch index is outside [0, {x.shape[0]})", op=name)
    checked_shape((len(rois), x.shape[1], *size), x.dtype, name)
    boxes = widened(rois)
    y, y_inside = _crop_positions(boxes[:, 0], boxes[:, 2], size[0], x.shape[2])
    z, z_inside = _crop_positions(boxes[:, 1], boxes[:, 3], size[1], x.shape[3])
    planes = widened(x).transpose(0, 2, 3, 1)  # channels last: one gather fetches a pixel
    image = batch_indices.astype(np.intp)[:, None, None]

    def pixel(rows: Array, columns: Array) -> Array:
        found: Array = planes[image, rows.astype(np.intp)[:, :, None], columns.astype(np.intp)[:, None, :]]
        return found

    if mode == "nearest":
        result = pixel(np.floor(y + 0.5), np.floor(z + 0.5))
    else:
        top, left = np.floor(y), np.floor(z)
        down, across = (y - top)[:, :, None, None], (z - left)[:, None, :, None]
        upper = pixel(top, left) * (1 - across) + pixel(top, np.ceil(z)) * across
        lower = pixel(np.ceil(y), left) * (1 - across) + pixel(np.ceil(y), np.ceil(z)) * across
        result = upper * (1 - down) + lower * down
    inside = y_inside[:, :, None, None] & z_inside[:, None, :, None]
    result = np.where(inside, result, result.dtype.type(extrapolation_value))
    return rounded(np.ascontiguousarray(result.transpose(0, 3, 1, 2)), x.dtype)


def _crop_positions(start: Array, end: Array, count: int, size: int) -> tuple[Array, Array]:
    """Sampling positions along one axis per box (both corners included), and which of them lie in the image."""
    reach = size - 1
    if count == 1:
        position = ((start + end) * 0.5 * reach)[:, None]
    else:
        steps = np.arange(count, dtype=start.dtype)
        position = start[:, None] * reach + steps * ((end - start) * reach / (count - 1))[:, None]
        position[:, -1] = end * reach
    inside = (position >= 0) & (position <= reach)  # false for NaN
    return np.where(inside, position, 0), inside


@op("DynamicTimeWarping", domain=MICROSOFT)
def dynamic_time_warping(x: Array) -> Array:
    """The cheapest monotone path from the first to the last cell of a cost matrix: row indices, column indices."""
    if x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[0] != 1) or not x.size:
        raise ShapeMismatch(f"DynamicTimeWarping: expected [m, n] or [1, m, n], not empty, got {list(x.shape)}")
    costs = x.reshape(x.shape[-2:])
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    move = np.empty((rows + 1, columns + 1), np.int8)
    for diagonal in range(2, rows + columns + 1):  # the cells of one diagonal do not depend on each other
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        # a step takes both only when that is strictly cheaper; ties go right
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        move[i, j] = step
        total[i, j] = np.choose(step, (both, down, right)) + costs[i - 1, j - 1]
    path = []
    i, j = rows, columns
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        step = move[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return np.ascontiguousarray(np.array(path[::-1], np.int32).T)


# -- types and costs --------------------------------------------------------------------------------------------------

for _op in (inverse, trilu, ngram_repeat_block):
    _op.infer(same_as(1 if _op is ngram_repeat_block else 0))
for _op in (complex_mul, complex_mul_conj):
    _op.infer(broadcasting(0, 1))


@rfft.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    half = plus(divided(at(x.shape, -1), 2), 1)
    return [TensorType(x.dtype, None if x.shape is None else (*x.shape[:-1], half, 2))]


@irfft.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    length = times(plus(at(x.shape, -2), -1), 2)
    return [TensorType(x.dtype, None if x.shape is None else (*x.shape[:-2], length))]


@cdist.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    a, b = tensor(call, 0), tensor(call, 1)
    return [TensorType(a.dtype, (at(a.shape, 0), at(b.shape, 0)))]


@cdist.cost
def _(call: TypeCall) -> Cost:
    return Cost(2.0 * math.prod(dims(call.type(0))) * (dims(call.type(1)) or (1,))[0], traffic(call))


@expand_dims.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, axis = tensor(call, 0), call.value(1)
    if x.shape is None:
        return [TensorType(x.dtype, None)]
    if axis is None:
        return [TensorType(x.dtype, (None,) * (len(x.shape) + 1))]
    position = int(axis.reshape(())) % (len(x.shape) + 1)
    return [TensorType(x.dtype, (*x.shape[:position], 1, *x.shape[position:]))]


@gather_nd.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    data, indices = tensor(call, 0), tensor(call, 1)
    depth = at(indices.shape, -1)
    if data.shape is None or indices.shape is None or not isinstance(depth, int):
        return [TensorType(data.dtype, None)]
    return [TensorType(data.dtype, (*indices.shape[:-1], *data.shape[depth:]))]


@torch_embedding.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    weight, indices = tensor(call, 0), tensor(call, 1)
    return [TensorType(weight.dtype, None if indices.shape is None else (*indices.shape, at(weight.shape, 1)))]


@unique.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    return [TensorType(x.dtype, (None,)), TensorType(DType.int64, x.shape), TensorType(DType.int64, (None,))]


@range_.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    start, limit, delta = call.value(0), call.value(1), call.value(2)
    count: Dim = None
    if start is not None and limit is not None and (delta is not None or call.type(2) is None):
        step = 1 if delta is None else delta.reshape(()).item()
        count = max(0, math.ceil((limit.reshape(()).item() - start.reshape(()).item()) / step)) if step else None
    return [TensorType(tensor(call, 0).dtype, (count,))]


@pad.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    data, pads = tensor(call, 0), call.value(1)
    if data.shape is None or pads is None:
        return [TensorType(data.dtype, None if data.shape is None else (None,) * len(data.shape))]
    edges = pads.reshape(2, -1).sum(axis=0)
    return [TensorType(data.dtype, tuple(plus(d, int(e)) for d, e in zip(data.shape, edges)))]


@unfold_tensor.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, size = tensor(call, 0), int(call.attr("size", 1))
    if x.shape is None:
        return [TensorType(x.dtype, None)]
    axis = call.attr("dim", -1) % len(x.shape)
    count = plus(divided(plus(x.shape[axis], -size), call.attr("step", 1)), 1)
    return [TensorType(x.dtype, (*x.shape[:axis], count, *x.shape[axis + 1 :], size))]


@grid_sample.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, grid = tensor(call, 0), tensor(call, 1).shape
    return [TensorType(x.dtype, (at(x.shape, 0), at(x.shape, 1), at(grid, 1), at(grid, 2)))]


@crop_and_resize.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, rois, size = tensor(call, 0), tensor(call, 1).shape, call.value(3)
    height, width = (None, None) if size is None else (int(size[0]), int(size[1]))
    return [TensorType(x.dtype, (at(rois, 0), at(x.shape, 1), height, width))]


@dynamic_time_warping.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [TensorType(DType.int32, (2, None))]
