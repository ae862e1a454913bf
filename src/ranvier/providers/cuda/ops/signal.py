"""Fourier transforms; windows and mel filters, which follow from numbers that the host knows."""

from __future__ import annotations

from typing import Any

from ranvier.dtypes import DType
from ranvier.ops.registry import evaluate
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import ALL, FLOATS, Call, lowers


def _numbers(x: Any) -> Any:
    """``[…, 2]`` as complex numbers, ``[…, 1]`` as real ones."""
    return x[..., 0] if x.shape[-1] == 1 else torch.complex(x[..., 0].contiguous(), x[..., 1].contiguous())


def _pairs(z: Any) -> Any:
    return torch.stack([z.real, z.imag], dim=-1)


def _transformed(call: Call, x: Any, length: int | None, axis: int) -> Any:
    along = axis % x.ndim
    signal = _numbers(x)
    inverse, one_sided = call.flag("inverse"), call.flag("onesided")
    if inverse and one_sided:
        return torch.fft.irfft(signal, n=length or 2 * (x.shape[along] - 1), dim=along)[..., None]
    function = torch.fft.ifft if inverse else torch.fft.rfft if one_sided else torch.fft.fft
    return _pairs(function(signal, n=length or x.shape[along], dim=along))


_TYPES = FLOATS | {DType.int64, DType.int32}


@lowers("DFT", since=20, types=_TYPES, host=(1, 2), wide=True)
def dft(call: Call, x: Any, length: Array | None = None, axis: Array | None = None) -> Any:
    wanted = None if length is None else int(length.reshape(-1)[0])
    return _transformed(call, x, wanted, -2 if axis is None else int(axis.reshape(-1)[0]))


@lowers("DFT", since=17, types=_TYPES, host=(1,), wide=True)
def dft_by_attribute(call: Call, x: Any, length: Array | None = None) -> Any:
    return _transformed(call, x, None if length is None else int(length.reshape(-1)[0]), call.attr("axis", 1))


@lowers("STFT", since=17, types=_TYPES, host=(1, 3), wide=True)
def stft(call: Call, signal: Any, step: Array, window: Any = None, length: Array | None = None) -> Any:
    values = _numbers(signal if signal.ndim == 3 else signal[..., None])
    size = values.shape[1] if window is None else window.shape[0]
    if length is not None:
        size = int(length.reshape(-1)[0])
    frames = values.unfold(1, size, int(step.reshape(-1)[0]))
    if window is not None:
        frames = frames * window
    return _pairs((torch.fft.rfft if call.flag("onesided", 1) else torch.fft.fft)(frames, dim=-1))


def _by_reference(call: Call, *operands: Array) -> Any:
    return call.constant(lambda: evaluate(call.node.op, *operands, version=call.version, **call.node.attrs))


lowers("BlackmanWindow", "HammingWindow", "HannWindow", since=17, types=ALL, host=(0,))(_by_reference)
lowers("MelWeightMatrix", since=17, types=ALL, host=(0, 1, 2, 3, 4))(_by_reference)
