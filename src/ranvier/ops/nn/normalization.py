"""Normalisations and Dropout. Statistics are taken in float32 or wider, whatever the operands are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier import dtypes
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Type
from ranvier.ops.accumulate import widened
from ranvier.ops.pulse import pulse
from ranvier.ops.registry import Array, Call, TypeCall, op
from ranvier.ops.seed import fresh_generator


def _moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and variance over ``axes``, kept as axes of size 1."""
    mean = np.asarray(x.mean(axis=axes, keepdims=True))
    return mean, np.asarray(np.square(x - mean).mean(axis=axes, keepdims=True))


def _per_channel(v: Array, x: Array, name: str, what: str) -> Array:
    """One number per channel of ``x [N, C, …]``, shaped to broadcast against it and wide enough to compute with."""
    channels = x.shape[1] if x.ndim > 1 else 1
    if v.shape != (channels,):
        raise ShapeMismatch(f"{name}: {what} must be [{channels}], one per channel, got {list(v.shape)}")
    return widened(v).reshape(-1, *(1,) * max(x.ndim - 2, 0))


# -- batch ----------------------------------------------------------------------------------------------------------


@op("BatchNormalization", since=1)
def batch_normalization_1(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    var: Array,
    *,
    consumed_inputs: Sequence[int] = (),
    epsilon: float = 1e-5,
    is_test: int = 0,
    momentum: float = 0.9,
    spatial: int = 1,
) -> Array | tuple[Array, ...]:
    if is_test:
        return _batch_norm(x, scale, bias, mean, var, epsilon, spatial)
    return _batch_norm_training(x, scale, bias, mean, var, epsilon, momentum, spatial)


@op("BatchNormalization", since=7)
def batch_normalization_7(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    ctx: Call,
) -> Array | tuple[Array, ...]:
    """Between versions 7 and 13 a node trains when it lists more than one output."""
    if ctx.outputs <= 1:
        return _batch_norm(x, scale, bias, mean, var, epsilon, spatial)
    return _batch_norm_training(x, scale, bias, mean, var, epsilon, momentum, spatial)


@op("BatchNormalization", since=14)
def batch_normalization(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Array | tuple[Array, ...]:
    if not training_mode:
        return _batch_norm(x, scale, bias, mean, var, epsilon)
    return _batch_norm_training(x, scale, bias, mean, var, epsilon, momentum)[:3]


@batch_normalization_7.infer
def _(call: TypeCall) -> list[Type | None]:
    """The statistics of a node that trains are as many as the ones it is given."""
    return [call.type(0), *(call.type(3 + k % 2) for k in range(call.outputs - 1))]


def _statistic(v: Array, x: Array, what: str, spatial: int) -> Array:
    """A parameter per channel, or with ``spatial=0`` (version 8 and below) one per element of an image."""
    if spatial:
        return _per_channel(v, x, "BatchNormalization", what)
    if v.shape != x.shape[1:]:
        raise ShapeMismatch(f"BatchNormalization: {what} must be {list(x.shape[1:])}, got {list(v.shape)}")
    return widened(v)


def _batch_norm(
    x: Array, scale: Array, bias: Array, mean: Array, var: Array, epsilon: float, spatial: int = 1
) -> Array:
    deviation = np.sqrt(_statistic(var, x, "var", spatial) + np.float32(epsilon))
    gain = _statistic(scale, x, "scale", spatial) / deviation
    shift = _statistic(bias, x, "B", spatial) - _statistic(mean, x, "mean", spatial) * gain
    return np.asarray(widened(x) * gain + shift).astype(x.dtype, copy=False)


def _batch_norm_training(
    x: Array, scale: Array, bias: Array, mean: Array, var: Array, epsilon: float, momentum: float, spatial: int = 1
) -> tuple[Array, ...]:
    """Y, running mean and variance, mean and variance of this batch."""
    axes = (0, *range(2, x.ndim)) if spatial else (0,)
    now_mean, now_var = (m.reshape(mean.shape) for m in _moments(widened(x), axes))
    y = _batch_norm(x, scale, bias, now_mean, now_var, epsilon, spatial)
    running_mean = widened(mean) * momentum + now_mean * (1 - momentum)
    running_var = widened(var) * momentum + now_var * (1 - momentum)
    return y, *(s.astype(mean.dtype) for s in (running_mean, running_var, now_mean, now_var))


# -- one sample -----------------------------------------------------------------------------------------------------


@op("InstanceNormalization")
def instance_normalization(
    x: Array, scale: Array, bias: Array, *, consumed_inputs: Sequence[int] = (), epsilon: float = 1e-5
) -> Array:
    name = "InstanceNormalization"
    if x.ndim < 3:
        raise ShapeMismatch(f"{name}: needs [N, C, spatial …], got shape {list(x.shape)}")
    wide = widened(x)
    mean, var = _moments(wide, tuple(range(2, x.ndim)))
    gain = _per_channel(scale, x, name, "scale") / np.sqrt(var + np.float32(epsilon))
    y = (wide - mean) * gain + _per_channel(bias, x, name, "B")
    return np.asarray(y).astype(x.dtype, copy=False)


@op("GroupNormalization", since=18)
def group_normalization_18(x: Array, scale: Array, bias: Array, *, num_groups: int, epsilon: float = 1e-5) -> Array:
    """The first form: one scale and bias per group."""
    for what, v in (("scale", scale), ("bias", bias)):
        if v.shape != (num_groups,):
            raise ShapeMismatch(f"GroupNormalization: {what} must be [{num_groups}], got {list(v.shape)}")
    repeats = x.shape[1] // num_groups if num_groups > 0 else 0
    return _group_norm(x, np.repeat(scale, repeats), np.repeat(bias, repeats), num_groups, epsilon)


@op("GroupNormalization", since=21)
def group_normalization(
    x: Array, scale: Array, bias: Array, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Array:
    return _group_norm(x, scale, bias, num_groups, epsilon, stash_type)


def _group_norm(x: Array, scale: Array, bias: Array, groups: int, epsilon: float, stash_type: int = 1) -> Array:
    name = "GroupNormalization"
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise ShapeMismatch(f"{name}: channels of {list(x.shape)} cannot be divided into {groups} groups")
    grouped = _stashed(x, stash_type, name).reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    mean, var = _moments(grouped, (2,))
    unit = ((grouped - mean) / np.sqrt(var + np.float32(epsilon))).reshape(x.shape)
    y = unit * _per_channel(scale, x, name, "scale") + _per_channel(bias, x, name, "bias")
    return np.asarray(y).astype(x.dtype, copy=False)


def _stashed(x: Array, stash_type: int, name: str) -> Array:
    """``x`` in the precision ``stash_type`` asks for, and never a narrower one than its own or than float32."""
    if stash_type not in (1, 10, 11, 16):
        raise InvalidValue(f"{name}: stash_type must be a float type (1, 10, 11 or 16), got {stash_type}", op=name)
    return x.astype(np.float64, copy=False) if stash_type == 11 else widened(x)


def _normal_axes(x: Array, axis: int, name: str) -> tuple[int, ...]:
    if not -x.ndim <= axis < x.ndim:
        raise InvalidValue(f"{name}: axis {axis} is out of range for shape {list(x.shape)}", op=name)
    return tuple(range(axis % x.ndim, x.ndim))


def _check_suffix(v: Array, x: Array, name: str, what: str) -> None:
    if v.ndim > x.ndim or any(s not in (1, t) for s, t in zip(v.shape[::-1], x.shape[::-1])):
        raise ShapeMismatch(f"{name}: {what} {list(v.shape)} does not broadcast to X {list(x.shape)}")


@op("LayerNormalization", since=17)
def layer_normalization(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Array, Array, Array]:
    name = "LayerNormalization"
    axes = _normal_axes(x, axis, name)
    wide = _stashed(x, stash_type, name)
    mean, var = _moments(wide, axes)
    inverse = 1 / np.sqrt(var + np.float32(epsilon))
    _check_suffix(scale, x, name, "scale")
    y = (wide - mean) * inverse * widened(scale)
    if bias is not None:
        _check_suffix(bias, x, name, "B")
        y += widened(bias)
    stash = dtypes.from_onnx(stash_type).numpy
    return y.astype(x.dtype, copy=False), mean.astype(stash, copy=False), inverse.astype(stash, copy=False)


@op("RMSNormalization", since=23)
def rms_normalization(x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Array:
    name = "RMSNormalization"
    axes = _normal_axes(x, axis, name)
    wide = _stashed(x, stash_type, name)
    power = np.square(wide).mean(axis=axes, keepdims=True)
    _check_suffix(scale, x, name, "scale")
    y = wide / np.sqrt(power + np.float32(epsilon)) * widened(scale)
    return np.asarray(y).astype(scale.dtype, copy=False)


@op("MeanVarianceNormalization", since=9)
def mean_variance_normalization(x: Array, *, axes: Sequence[int] = (0, 2, 3)) -> Array:
    name = "MeanVarianceNormalization"
    if any(not -x.ndim <= a < x.ndim for a in axes):
        raise InvalidValue(f"{name}: axes {list(axes)} are out of range for shape {list(x.shape)}", op=name)
    wide = widened(x)
    mean, var = _moments(wide, tuple(axes))
    return np.asarray((wide - mean) / (np.sqrt(var) + np.float32(1e-9))).astype(x.dtype, copy=False)


@op("LRN")
def lrn(x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Array:
    """Each value is divided by the energy of ``size`` channels around its own."""
    if x.ndim < 2 or size < 1:
        raise InvalidValue(f"LRN: needs [N, C, …] and a positive size, got {list(x.shape)} and {size}", op="LRN")
    wide = widened(x)
    channels = x.shape[1]
    # a window that reaches beyond the channels on a side meets nothing more there
    before, after = min((size - 1) // 2, channels), min(math.ceil((size - 1) / 2), channels)
    padded = np.zeros((x.shape[0], channels + before + after, *x.shape[2:]), wide.dtype)
    np.square(wide, out=padded[:, before : padded.shape[1] - after])
    energy = padded[:, :channels].copy()
    for shift in range(1, before + after + 1):
        pulse("channels")
        energy += padded[:, shift : shift + channels]
    scale = np.power(energy * wide.dtype.type(alpha / size) + wide.dtype.type(bias), -wide.dtype.type(beta))
    return np.asarray(wide * scale).astype(x.dtype, copy=False)


# -- dropout --------------------------------------------------------------------------------------------------------


@op("Dropout", since=1, traits=("random",))
def dropout_1(
    x: Array, *, consumed_inputs: Sequence[int] = (), is_test: int = 0, ratio: float = 0.5
) -> tuple[Array, Array]:
    y, mask = _drop(x, ratio, not is_test, None)
    return y, mask.astype(x.dtype)


@op("Dropout", since=7)
def dropout_7(x: Array, *, ratio: float = 0.5, ctx: Call) -> tuple[Array, Array]:
    """Versions 7 to 11 know only inference. The mask was of the data's type before version 10."""
    return x, np.ones(x.shape, x.dtype if ctx.version < 10 else np.bool_)


@op("Dropout", since=12, traits=("random",))
def dropout(
    x: Array, ratio: Array | None = None, training_mode: Array | None = None, *, seed: int | None = None
) -> tuple[Array, Array]:
    rate = 0.5 if ratio is None else float(ratio)
    return _drop(x, rate, training_mode is not None and bool(training_mode), seed)


def _drop(x: Array, ratio: float, training: bool, seed: int | None) -> tuple[Array, Array]:
    if not 0 <= ratio < 1:
        raise InvalidValue(f"Dropout: ratio must be in [0, 1), got {ratio}", op="Dropout")
    if not training or ratio == 0:
        return x, np.ones(x.shape, np.bool_)
    if seed is None:
        drawn = fresh_generator().random(x.shape)
    else:
        # the legacy generator: its sequence for a seed is frozen, and is what the conformance data was made with
        drawn = np.random.RandomState(seed & 0xFFFFFFFF).uniform(0.0, 1.0, x.shape)
    mask = np.asarray(drawn >= ratio)
    y = widened(x) * mask * np.float32(1 / (1 - ratio))
    return np.asarray(y).astype(x.dtype, copy=False), mask
