"""Losses, by PyTorch's names and arguments. They are computed in float32 at least."""

from __future__ import annotations

import math
from typing import Any

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor import reductions
from ranvier.tensor.composed import clip
from ranvier.tensor.core import Tensor, as_tensor, beside
from ranvier.tensor.elementwise import abs as distance
from ranvier.tensor.elementwise import (
    equal,
    exp,
    less,
    log,
    logical_not,
    maximum,
    negative,
    not_equal,
    softplus,
    sqrt,
    where,
)
from ranvier.tensor.manipulate import astype, expand_dims, reshape, squeeze, take, take_along_axis
from ranvier.tensor.nn.precision import raised


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return reductions.mean(loss)
    if reduction == "sum":
        return reductions.sum(loss)
    if reduction == "none":
        return loss
    raise InvalidInput(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")


def _pair(input: Any, target: Any) -> tuple[Tensor, Tensor]:
    x = raised(as_tensor(input))
    t = raised(as_tensor(target, x))
    if x.shape != t.shape:
        raise ShapeMismatch(f"a target of shape {list(t.shape)} for an input of {list(x.shape)}")
    return x, beside(t, x)


def _weighed(loss: Tensor, weight: Any, reduction: str) -> Tensor:
    return _reduced(loss if weight is None else loss * weight, reduction)


# -- classes --------------------------------------------------------------------------------------------------------


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The negative logarithm of the probability of a target, from scores [batch, classes, …].

    The target has a class for each place, or (with the shape of the input) probabilities.
    """
    x, t = raised(as_tensor(input)), as_tensor(target)
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidInput(f"label_smoothing is between 0 and 1, not {label_smoothing}")
    classes = 0 if x.ndim == 1 else 1
    logarithms = reductions.log_softmax(x, axis=classes)
    if t.shape == x.shape and t.dtype.is_float:
        return _of_probabilities(logarithms, beside(t, x), classes, weight, reduction, label_smoothing)
    return _of_classes(logarithms, t, classes, weight, ignore_index, reduction, label_smoothing)


def nll_loss(input: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """The same from logarithms of probabilities."""
    x = raised(as_tensor(input))
    return _of_classes(x, as_tensor(target), 0 if x.ndim == 1 else 1, weight, ignore_index, reduction, 0.0)


def _of_probabilities(
    logarithms: Tensor, target: Tensor, classes: int, weight: Any, reduction: str, smoothing: float
) -> Tensor:
    number = logarithms.shape[classes]
    wanted = astype(target, logarithms.dtype)
    if smoothing:
        wanted = wanted * (1.0 - smoothing) + smoothing / number
    if weight is not None:
        wanted = wanted * _along(as_tensor(weight), logarithms, classes)
    loss = negative(reductions.sum(logarithms * wanted, axis=classes))
    if reduction == "mean":
        return reductions.sum(loss) / max(loss.size, 1)
    return _reduced(loss, reduction)


def _along(values: Tensor, like: Tensor, axis: int) -> Tensor:
    return reshape(values, tuple(values.size if k == axis else 1 for k in range(like.ndim)))


def _of_classes(
    logarithms: Tensor, target: Tensor, classes: int, weight: Any, ignored: int, reduction: str, smoothing: float
) -> Tensor:
    shape = (*logarithms.shape[:classes], *logarithms.shape[classes + 1 :])
    if target.shape != shape or not target.dtype.is_integer:
        raise ShapeMismatch(
            f"scores of shape {list(logarithms.shape)} have classes of shape {list(shape)} (integers) as their target; "
            f"got {target.dtype}{list(target.shape)}"
        )
    places = beside(target, logarithms)
    # -100 is no class of anybody: without a look at the target one cannot know that it is not there
    counted = not_equal(places, ignored)
    safe = where(counted, places, 0)
    picked = squeeze(take_along_axis(logarithms, expand_dims(safe, axis=classes), axis=classes), axis=classes)
    weights = None if weight is None else astype(as_tensor(weight), logarithms.dtype)
    share = astype(counted, logarithms.dtype)
    if weights is not None:
        share = share * take(weights, safe, axis=0)
    loss = negative(picked) * share
    number = logarithms.shape[classes]
    if smoothing:
        spread = logarithms if weights is None else logarithms * _along(weights, logarithms, classes)
        even = where(counted, negative(reductions.sum(spread, axis=classes)), 0.0)
        loss = loss * (1.0 - smoothing) + even * (smoothing / number)
    if reduction == "mean":
        return reductions.sum(loss) / reductions.sum(share)
    return _reduced(loss, reduction)


def binary_cross_entropy(input: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """From probabilities; logarithms go no lower than -100."""
    x, t = _pair(input, target)
    loss = negative(t * clip(log(x), -100.0) + (1.0 - t) * clip(log(1.0 - x), -100.0))
    return _weighed(loss, weight, reduction)


def binary_cross_entropy_with_logits(
    input: Any, target: Any, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> Tensor:
    """From scores, so that nothing leaves the range of numbers."""
    x, t = _pair(input, target)
    below = softplus(negative(x))  # -log of the probability
    if pos_weight is not None:
        below = below * ((as_tensor(pos_weight, x) - 1.0) * t + 1.0)
    return _weighed((1.0 - t) * x + below, weight, reduction)


def kl_div(input: Any, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """How far the target's probabilities are from those whose logarithms are given."""
    x, t = _pair(input, target)
    if log_target:
        loss = exp(t) * (t - x)
    else:
        positive = t > 0.0
        loss = where(positive, t * (log(where(positive, t, 1.0)) - x), 0.0)
    if reduction == "batchmean":
        return reductions.sum(loss) / max(x.shape[0] if x.ndim else 1, 1)
    return _reduced(loss, reduction)


# -- numbers --------------------------------------------------------------------------------------------------------


def mse_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    x, t = _pair(input, target)
    apart = x - t
    return _reduced(apart * apart, reduction)


def l1_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    x, t = _pair(input, target)
    return _reduced(distance(x - t), reduction)


def smooth_l1_loss(input: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Squares near zero, distances beyond ``beta``."""
    if beta < 0.0:
        raise InvalidInput(f"beta is 0 or more, not {beta}")
    if beta == 0.0:
        return l1_loss(input, target, reduction)
    x, t = _pair(input, target)
    apart = x - t
    size = distance(apart)
    return _reduced(where(less(size, beta), apart * apart * (0.5 / beta), size - 0.5 * beta), reduction)


def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Squares near zero, a line of slope ``delta`` beyond it."""
    if delta <= 0.0:
        raise InvalidInput(f"delta is more than 0, not {delta}")
    x, t = _pair(input, target)
    apart = x - t
    size = distance(apart)
    return _reduced(where(size <= delta, apart * apart * 0.5, (size - 0.5 * delta) * delta), reduction)


def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    x, t = _pair(input, target)
    spread = maximum(as_tensor(var, x), eps)
    loss = (log(spread) + (x - t) * (x - t) / spread) * 0.5
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def poisson_nll_loss(
    input: Any, target: Any, log_input: bool = True, eps: float = 1e-8, reduction: str = "mean"
) -> Tensor:
    x, t = _pair(input, target)
    return _reduced(exp(x) - t * x if log_input else x - t * log(x + eps), reduction)


# -- directions -----------------------------------------------------------------------------------------------------


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors along an axis."""
    x, y = raised(as_tensor(x1)), raised(as_tensor(x2))
    return reductions.sum(x / _length(x, dim, eps) * (y / _length(y, dim, eps)), axis=dim)


def _length(x: Tensor, dim: int, eps: float) -> Tensor:
    return sqrt(maximum(reductions.sum(x * x, axis=dim, keepdims=True), eps * eps))


def cosine_embedding_loss(
    input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Pairs with target 1 shall point the same way, pairs with -1 apart by a margin."""
    x = as_tensor(input1)
    close = cosine_similarity(x, input2, dim=x.ndim - 1, eps=1e-6)
    same = equal(as_tensor(target), 1)
    return _reduced(where(same, 1.0 - close, maximum(close - margin, 0.0)), reduction)


def triplet_margin_loss(
    anchor: Any, positive: Any, negative: Any, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    a = as_tensor(anchor)
    near, far = _distance(a, as_tensor(positive), p, eps), _distance(a, as_tensor(negative), p, eps)
    return _reduced(maximum(near - far + margin, 0.0), reduction)


def _distance(x: Tensor, y: Tensor, p: float, eps: float) -> Tensor:
    from ranvier.tensor.linalg import vector_norm

    return vector_norm(x - y + eps, axis=-1, ord=p)


def hinge_embedding_loss(input: Any, target: Any, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    x = raised(as_tensor(input))
    same = equal(as_tensor(target), 1)
    return _reduced(where(same, x, where(logical_not(same), maximum(margin - x, 0.0), 0.0)), reduction)


def margin_ranking_loss(input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean") -> Tensor:
    x, y = raised(as_tensor(input1)), raised(as_tensor(input2))
    return _reduced(maximum(negative(astype(as_tensor(target), x.dtype)) * (x - y) + margin, 0.0), reduction)


_OF_TENSORS = True
