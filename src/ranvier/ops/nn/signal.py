"""Fourier transforms, mel filters and window functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Array, Cost, TypeCall, op


def _scalar(x: Array, op: str, what: str) -> Any:
    if x.size != 1:
        raise ShapeMismatch(f"{op}: {what} must be one number, got shape {list(x.shape)}")
    return x.reshape(-1)[0].item()


def _as_complex(x: Array) -> Array:
    """``[…, 2]`` (real and imaginary part) or ``[…, 1]`` (real) as numbers, at least in single precision."""
    wide = widened(x)
    if x.shape[-1] == 1:
        return wide[..., 0]
    return np.asarray(wide[..., 0] + wide.dtype.type(1) * 1j * wide[..., 1])


def _as_pairs(z: Array, dtype: np.dtype[Any]) -> Array:
    return np.stack([z.real, z.imag], axis=-1).astype(dtype, copy=False)


@op("DFT", since=17)
def dft_17(x: Array, dft_length: Array | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0) -> Array:
    return _dft(x, dft_length, axis, bool(inverse), bool(onesided))


@op("DFT", since=20)
def dft(
    x: Array, dft_length: Array | None = None, axis: Array | None = None, *, inverse: int = 0, onesided: int = 0
) -> Array:
    at = -2 if axis is None else int(_scalar(axis, "DFT", "axis"))
    return _dft(x, dft_length, at, bool(inverse), bool(onesided))


def _dft(x: Array, dft_length: Array | None, axis: int, inverse: bool, onesided: bool) -> Array:
    if x.ndim < 2 or x.shape[-1] not in (1, 2):
        raise ShapeMismatch(f"DFT: the input must end in an axis of 1 (real) or 2 (complex), got {list(x.shape)}")
    # the last axis holds the parts of a number and cannot be transformed
    if not -x.ndim <= axis < x.ndim or axis % x.ndim == x.ndim - 1:
        raise InvalidValue(f"DFT: axis {axis} is not a signal axis of shape {list(x.shape)}", op="DFT")
    along = axis % x.ndim
    signal = _as_complex(x)
    if dft_length is not None:
        length = int(_scalar(dft_length, "DFT", "dft_length"))
    elif inverse and onesided:
        length = 2 * (x.shape[along] - 1)
    else:
        length = x.shape[along]
    if length < 1:
        raise InvalidValue(f"DFT: dft_length must be at least 1, got {length}", op="DFT")
    checked_shape((*x.shape[:along], length, *x.shape[along + 1 : -1], 2), signal.dtype, "DFT")
    if inverse and onesided:
        return np.fft.irfft(signal, n=length, axis=along)[..., None].astype(x.dtype, copy=False)
    if inverse:
        return _as_pairs(np.fft.ifft(signal, n=length, axis=along), x.dtype)
    if onesided and np.iscomplexobj(signal):
        raise InvalidValue("DFT: a complex signal has no one-sided transform", op="DFT")
    transform = np.fft.rfft if onesided else np.fft.fft
    return _as_pairs(transform(signal, n=length, axis=along), x.dtype)


@op("STFT", since=17)
def stft(
    signal: Array,
    frame_step: Array,
    window: Array | None = None,
    frame_length: Array | None = None,
    *,
    onesided: int = 1,
) -> Array:
    name = "STFT"
    if signal.ndim == 2:
        signal = signal[..., None]
    if signal.ndim != 3 or signal.shape[2] not in (1, 2):
        raise ShapeMismatch(f"{name}: the signal must be [batch, length, 1 or 2], got {list(signal.shape)}")
    values = _as_complex(signal)
    if frame_length is not None:
        length = int(_scalar(frame_length, name, "frame_length"))
    else:
        length = values.shape[1] if window is None else window.shape[0]
    step = int(_scalar(frame_step, name, "frame_step"))
    if window is not None and window.shape != (length,):
        raise ShapeMismatch(f"{name}: the window must be [{length}], got {list(window.shape)}")
    if step < 1 or not 1 <= length <= values.shape[1]:
        raise InvalidValue(
            f"{name}: frame_step {step} and frame_length {length} do not fit a signal of {values.shape[1]}", op=name
        )
    if onesided and np.iscomplexobj(values):
        raise InvalidValue(f"{name}: a complex signal has no one-sided transform", op=name)
    count = (values.shape[1] - length) // step + 1
    bins = length // 2 + 1 if onesided else length
    checked_shape((len(values), count, bins, 2), values.dtype, name)
    frames = np.lib.stride_tricks.sliding_window_view(values, length, axis=1)[:, ::step]
    if window is not None:
        frames = frames * widened(window)
    return _as_pairs((np.fft.rfft if onesided else np.fft.fft)(frames, axis=-1), signal.dtype)


@stft.infer
def _stft_type(call: TypeCall) -> list[Type | None]:
    """The standard's own rule takes an absent ``onesided`` for 0, its text says 1."""
    signal = call.type(0)
    if not isinstance(signal, TensorType) or signal.shape is None:
        return [TensorType(signal.dtype) if isinstance(signal, TensorType) else None]
    step, given, window = call.value(1), call.value(3), call.type(2)
    total = signal.shape[1]
    length: Dim = None
    if given is not None:
        length = int(given.reshape(-1)[0])
    elif isinstance(window, TensorType) and window.shape:
        length = window.shape[0]
    frames: Dim = None
    bins: Dim = None
    if isinstance(length, int):
        bins = length // 2 + 1 if call.attr("onesided", 1) else length
        if isinstance(total, int) and step is not None and int(step.reshape(-1)[0]) > 0:
            frames = (total - length) // int(step.reshape(-1)[0]) + 1
    return [TensorType(signal.dtype, (signal.shape[0], frames, bins, 2))]


def _fft_cost(call: TypeCall, points: float, length: int) -> Cost:
    return Cost(5.0 * points * max(math.log2(max(length, 1)), 1.0), traffic(call))


@dft_17.cost
@dft.cost
def _dft_cost(call: TypeCall) -> Cost:
    """Of the order of a fast transform; the axis may be known only when running, so the longest one stands in."""
    shape = dims(call.type(0))[:-1]
    return _fft_cost(call, math.prod(shape), max(shape, default=1))


@stft.cost
def _stft_cost(call: TypeCall) -> Cost:
    shape = dims(call.result_types[0]) if call.result_types else dims(call.type(0))
    return _fft_cost(call, math.prod(shape[:-1]), shape[-2] if len(shape) > 1 else 1)


@op("MelWeightMatrix", since=17)
def mel_weight_matrix(
    num_mel_bins: Array,
    dft_length: Array,
    sample_rate: Array,
    lower_edge_hertz: Array,
    upper_edge_hertz: Array,
    *,
    output_datatype: int = 1,
) -> Array:
    """Triangles on the mel scale: column ``m`` weighs the bins of a spectrum that make up band ``m``."""
    name = "MelWeightMatrix"
    bands = int(_scalar(num_mel_bins, name, "num_mel_bins"))
    length = int(_scalar(dft_length, name, "dft_length"))
    rate = int(_scalar(sample_rate, name, "sample_rate"))
    low = float(_scalar(lower_edge_hertz, name, "lower_edge_hertz"))
    high = float(_scalar(upper_edge_hertz, name, "upper_edge_hertz"))
    if bands < 0 or length < 1 or rate < 1 or not 0 <= low <= high:
        raise InvalidValue(
            f"{name}: {bands} bands from {low} to {high} Hz of {length} points at {rate} Hz make no sense", op=name
        )
    dtype = dtypes.from_onnx(output_datatype).numpy
    checked_shape((length // 2 + 1, bands), np.float64, name)
    edges_mel = np.array([low, high])
    start, stop = 2595 * np.log10(1 + edges_mel / 700)
    mels = start + np.arange(bands + 2) * ((stop - start) / (bands + 2))
    hertz = 700 * (10 ** (mels / 2595) - 1)
    edges = (length + 1) * hertz // rate
    left, center, right = edges[:-2], edges[1:-1], edges[2:]
    spectrum = np.arange(length // 2 + 1)[:, None]
    # a side of no width is a step: the center itself counts fully
    rising = np.where(center > left, (spectrum - left) / np.maximum(center - left, 1), spectrum == center)
    falling = (right - spectrum) / np.maximum(right - center, 1)
    weights = np.where(spectrum <= center, rising, falling)
    return np.asarray(np.maximum(weights, 0)).astype(dtype)


def _cosine_window(size: Array, periodic: int, output_datatype: int, coefficients: Sequence[float], op: str) -> Array:
    """``Σ (-1)ᵏ cₖ cos(2πkn / N)``; a periodic window is one sample longer, with the last one left out."""
    length = int(_scalar(size, op, "size"))
    dtype = dtypes.from_onnx(output_datatype).numpy
    checked_shape((length,), np.float64, op)
    turn = 2 * np.pi * np.arange(length) / max(length if periodic else length - 1, 1)
    terms = [(-1) ** k * c * np.cos(k * turn) for k, c in enumerate(coefficients)]
    return np.asarray(sum(terms)).astype(dtype)


@op("HannWindow", since=17)
def hann_window(size: Array, *, output_datatype: int = 1, periodic: int = 1) -> Array:
    return _cosine_window(size, periodic, output_datatype, (0.5, 0.5), "HannWindow")


@op("HammingWindow", since=17)
def hamming_window(size: Array, *, output_datatype: int = 1, periodic: int = 1) -> Array:
    return _cosine_window(size, periodic, output_datatype, (25 / 46, 21 / 46), "HammingWindow")


@op("BlackmanWindow", since=17)
def blackman_window(size: Array, *, output_datatype: int = 1, periodic: int = 1) -> Array:
    return _cosine_window(size, periodic, output_datatype, (0.42, 0.5, 0.08), "BlackmanWindow")
