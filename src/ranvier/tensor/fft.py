"""Fourier transforms, by NumPy on the host: at once and without gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch
from ranvier.tensor.core import Tensor, as_tensor
from ranvier.tensor.host import hosted
from ranvier.tensor.types import DEFAULT_FLOAT, kind_of

_DOUBLE = (DType.float64, DType.complex128)


def _single(function: Callable[..., Any], x: Any, real: bool, **options: Any) -> Tensor:
    own = as_tensor(x)
    if kind_of(own.dtype) < 2:
        raise DTypeMismatch(f"transforms are of floats or complex numbers, not {own.dtype}")
    wide = own.dtype in _DOUBLE  # NumPy may compute in more digits than it was given
    kind = (np.float64 if wide else np.float32) if real else (np.complex128 if wide else np.complex64)
    return hosted(lambda a: function(a, **options).astype(kind), own)


def fft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward") -> Tensor:
    return _single(np.fft.fft, x, False, n=n, axis=axis, norm=norm)


def ifft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward") -> Tensor:
    return _single(np.fft.ifft, x, False, n=n, axis=axis, norm=norm)


def fftn(x: Any, /, *, s: Any = None, axes: Any = None, norm: Any = "backward") -> Tensor:
    return _single(np.fft.fftn, x, False, **_several(x, s, axes), norm=norm)


def ifftn(x: Any, /, *, s: Any = None, axes: Any = None, norm: Any = "backward") -> Tensor:
    return _single(np.fft.ifftn, x, False, **_several(x, s, axes), norm=norm)


def rfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward") -> Tensor:
    return _single(np.fft.rfft, x, False, n=n, axis=axis, norm=norm)


def irfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward") -> Tensor:
    return _single(np.fft.irfft, x, True, n=n, axis=axis, norm=norm)


def rfftn(x: Any, /, *, s: Any = None, axes: Any = None, norm: Any = "backward") -> Tensor:
    return _single(np.fft.rfftn, x, False, **_several(x, s, axes), norm=norm)


def irfftn(x: Any, /, *, s: Any = None, axes: Any = None, norm: Any = "backward") -> Tensor:
    return _single(np.fft.irfftn, x, True, **_several(x, s, axes), norm=norm)


def hfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward") -> Tensor:
    return _single(np.fft.hfft, x, True, n=n, axis=axis, norm=norm)


def ihfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward") -> Tensor:
    return _single(np.fft.ihfft, x, False, n=n, axis=axis, norm=norm)


def _several(x: Any, s: Any, axes: Any) -> dict[str, Any]:
    """Sizes and axes, the latter told where only sizes are."""
    if s is not None and axes is None:
        rank = as_tensor(x).ndim
        axes = tuple(range(rank - len(s), rank))
    return {"s": s, "axes": axes}


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Tensor:
    """The frequencies of the results of ``fft``."""
    return Tensor(np.fft.fftfreq(n, d), dtype=_real_type(dtype), device=device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Tensor:
    """The frequencies of the results of ``rfft``."""
    return Tensor(np.fft.rfftfreq(n, d), dtype=_real_type(dtype), device=device)


def _real_type(dtype: Any) -> DType:
    found = DEFAULT_FLOAT if dtype is None else dtypes.of(dtype)
    if not found.is_float:
        raise DTypeMismatch(f"frequencies are real floating-point numbers, not {found}")
    return found


def fftshift(x: Any, /, *, axes: Any = None) -> Tensor:
    return hosted(np.fft.fftshift, as_tensor(x), axes=axes)


def ifftshift(x: Any, /, *, axes: Any = None) -> Tensor:
    return hosted(np.fft.ifftshift, as_tensor(x), axes=axes)


_OF_TENSORS = True
