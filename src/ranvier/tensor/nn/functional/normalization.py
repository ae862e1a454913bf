"""Normalization. Statistics are computed in float32 at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor import reductions
from ranvier.tensor.autodiff import stop_gradient
from ranvier.tensor.core import Tensor, as_tensor, beside, call
from ranvier.tensor.elementwise import maximum, sqrt
from ranvier.tensor.expr import spec
from ranvier.tensor.linalg import vector_norm
from ranvier.tensor.manipulate import astype, reshape
from ranvier.tensor.nn.precision import raised
from ranvier.tensor.shapes import count


def _constant(value: float, shape: Sequence[int], like: Tensor) -> Tensor:
    return beside(Tensor(np.full(tuple(shape), value, like.dtype.numpy)), like)


def _gain(given: Any, value: float, shape: Sequence[int], like: Tensor) -> Tensor:
    return _constant(value, shape, like) if given is None else astype(as_tensor(given), like.dtype)


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalized over all axes but the second. While training by the batch's own statistics, with which running ones
    (states) are updated: the variance there is the unbiased one."""
    x = raised(as_tensor(input))
    if x.ndim < 2:
        raise ShapeMismatch(f"batch_norm needs a batch and channels; got shape {list(x.shape)}")
    channels = x.shape[1]
    own = training or running_mean is None or running_var is None
    if not own:
        operands = (
            x,
            _gain(weight, 1.0, (channels,), x),
            _gain(bias, 0.0, (channels,), x),
            astype(as_tensor(running_mean), x.dtype),
            astype(as_tensor(running_var), x.dtype),
        )
        return call(spec("BatchNormalization", (("epsilon", float(eps)),)), operands, x.dtype, x.shape)
    number = count(x.shape) // max(channels, 1)
    if number < 2 and training:
        raise ShapeMismatch(f"statistics of a single value for each channel: shape {list(x.shape)}")
    axes = (0, *range(2, x.ndim))
    along = (1, channels, *(1,) * (x.ndim - 2))
    mean = reductions.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    variance = reductions.mean(centred * centred, axis=axes, keepdims=True)
    if running_mean is not None and training:
        rest = 1.0 - momentum
        seen = stop_gradient(reshape(mean, (channels,)))
        spread = stop_gradient(reshape(variance, (channels,))) * (number / (number - 1))
        running_mean.assign(running_mean * rest + seen * momentum)
        running_var.assign(running_var * rest + spread * momentum)
    inverse = 1.0 / sqrt(variance + eps)
    if weight is not None:
        inverse = inverse * reshape(astype(as_tensor(weight), x.dtype), along)
    found = centred * inverse
    return found if bias is None else found + reshape(astype(as_tensor(bias), x.dtype), along)


def layer_norm(
    input: Any, normalized_shape: Sequence[int] | int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """Normalized over the last axes, which have these sizes."""
    x = raised(as_tensor(input))
    shape = _last(x, normalized_shape)
    operands = [x, _gain(weight, 1.0, shape, x)]
    if bias is not None:
        operands.append(_gain(bias, 0.0, shape, x))
    attrs = (("axis", x.ndim - len(shape)), ("epsilon", float(eps)))
    return call(spec("LayerNormalization", attrs), tuple(operands), x.dtype, x.shape)


def rms_norm(input: Any, normalized_shape: Sequence[int] | int, weight: Any = None, eps: float | None = None) -> Tensor:
    """Over the square root of the mean square of the last axes."""
    x = raised(as_tensor(input))
    shape = _last(x, normalized_shape)
    small = float(np.finfo(np.float32).eps) if eps is None else float(eps)
    attrs = (("axis", x.ndim - len(shape)), ("epsilon", small))
    return call(spec("RMSNormalization", attrs), (x, _gain(weight, 1.0, shape, x)), x.dtype, x.shape)


def _last(x: Tensor, shape: Sequence[int] | int) -> tuple[int, ...]:
    found = (shape,) if isinstance(shape, int) else tuple(shape)
    if not found or x.shape[-len(found) :] != found:
        raise ShapeMismatch(f"a shape of {list(x.shape)} does not end in {list(found)}")
    return found


def group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Each group of channels normalized by itself."""
    x = raised(as_tensor(input))
    if x.ndim < 2 or x.shape[1] % num_groups:
        raise ShapeMismatch(f"a shape of {list(x.shape)} does not come apart into {num_groups} groups of channels")
    channels = x.shape[1:2]
    operands = (x, _gain(weight, 1.0, channels, x), _gain(bias, 0.0, channels, x))
    attrs = (("epsilon", float(eps)), ("num_groups", int(num_groups)))
    return call(spec("GroupNormalization", attrs), operands, x.dtype, x.shape)


def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel of each example normalized by itself."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise InvalidInput("instance_norm uses the statistics of its input; running ones are not kept")
    x = raised(as_tensor(input))
    if x.ndim < 3:
        raise ShapeMismatch(f"instance_norm needs a batch, channels and more; got shape {list(x.shape)}")
    channels = x.shape[1:2]
    operands = (x, _gain(weight, 1.0, channels, x), _gain(bias, 0.0, channels, x))
    return call(spec("InstanceNormalization", (("epsilon", float(eps)),)), operands, x.dtype, x.shape)


def normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Over its norm along an axis."""
    x = as_tensor(input)
    return x / maximum(vector_norm(x, axis=dim, keepdims=True, ord=p), eps)


_OF_TENSORS = True
