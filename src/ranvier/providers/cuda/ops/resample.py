"""Resize and Upsample, axis after axis, by the tables that the reference makes of sizes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.ops.nn.resample import AxisSampling, resize_steps, scaled_steps
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import BOOL, NUMBERS, Call, lowers


def interpolated(call: Call, x: Any, steps: Sequence[AxisSampling]) -> Any:
    """Whole numbers in float64, halves in float32."""
    plain = all(step.weights is None for step in steps)
    if plain:
        y = x
    elif x.dtype.is_floating_point:
        y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    else:
        y = x.to(torch.float64)
    for step in steps:
        y = _resampled(call, y, step)
    if plain or x.dtype.is_floating_point:
        return y
    limits = torch.iinfo(x.dtype)
    return torch.trunc(y + torch.copysign(torch.full_like(y, 1e-9), y)).clamp(limits.min, limits.max)


def _resampled(call: Call, x: Any, step: AxisSampling) -> Any:
    if step.same:
        return x
    if step.weights is None:
        return x.index_select(step.axis, call.constant(lambda: step.index.astype(np.int64)))
    index, weights = step.index, step.weights
    if index.shape[1] > 4:
        matrix = np.zeros((len(index), x.shape[step.axis]))
        np.add.at(matrix, (np.arange(len(index))[:, None], index), weights)
        factor = call.constant(lambda: matrix).to(x.dtype)
        return torch.tensordot(x, factor, dims=([step.axis], [1])).movedim(-1, step.axis)
    at = call.constant(lambda: np.ascontiguousarray(index.T).astype(np.int64))
    factor = call.constant(lambda: np.ascontiguousarray(weights.T)).to(x.dtype)
    shape = [1] * x.ndim
    shape[step.axis] = len(index)
    total = x.index_select(step.axis, at[0]) * factor[0].reshape(shape)
    for tap in range(1, index.shape[1]):
        total = total + x.index_select(step.axis, at[tap]) * factor[tap].reshape(shape)
    return total


@lowers("Resize", since=11, types=NUMBERS | BOOL, host=(1, 2, 3))
def resize(
    call: Call, x: Any, roi: Array | None = None, scales: Array | None = None, sizes: Array | None = None
) -> Any:
    names = [
        "antialias",
        "axes",
        "coordinate_transformation_mode",
        "cubic_coeff_a",
        "exclude_outside",
        "keep_aspect_ratio_policy",
        "mode",
        "nearest_mode",
    ]
    given = {name: call.attr(name) for name in names if call.attr(name) is not None}
    _, steps = resize_steps(tuple(x.shape), roi, scales, sizes, **given)
    y = interpolated(call, x, steps)
    for step in steps:
        if step.outside is not None and step.outside.any():
            shape = [1] * y.ndim
            shape[step.axis] = len(step.outside)
            outside = call.constant(lambda step=step: step.outside.astype(bool)).reshape(shape)  # type: ignore[misc]
            y = y.masked_fill(outside, call.attr("extrapolation_value", 0.0))
    return y


@lowers("Resize", since=10, types=NUMBERS, host=(1,))
def resize_by_scales(call: Call, x: Any, scales: Array) -> Any:
    return _by_scales(call, x, scales.reshape(-1).tolist())


@lowers("Upsample", since=9, types=NUMBERS, host=(1,))
def upsample(call: Call, x: Any, scales: Array) -> Any:
    return _by_scales(call, x, scales.reshape(-1).tolist())


@lowers("Upsample", since=7, types=NUMBERS)
def upsample_by_attribute(call: Call, x: Any) -> Any:
    return _by_scales(call, x, call.attr("scales"))


@lowers("Upsample", since=1, types=NUMBERS)
def upsample_images(call: Call, x: Any) -> Any:
    return _by_scales(call, x, (1.0, 1.0, call.attr("height_scale"), call.attr("width_scale")))


def _by_scales(call: Call, x: Any, scales: Sequence[float]) -> Any:
    return interpolated(call, x, scaled_steps(tuple(x.shape), scales, call.attr("mode", "nearest"), call.node.op))
