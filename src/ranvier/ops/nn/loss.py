"""Losses over class scores: NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss."""

from __future__ import annotations

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import widened
from ranvier.ops.registry import Array, op


@op("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood_loss(
    log_prob: Array,
    target: Array,
    weight: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Array:
    loss = _loss(widened(log_prob), target, weight, ignore_index, reduction, "NegativeLogLikelihoodLoss")
    return loss.astype(log_prob.dtype, copy=False)


@op("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy_loss(
    scores: Array,
    labels: Array,
    weights: Array | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Array, Array]:
    name = "SoftmaxCrossEntropyLoss"
    if scores.ndim < 2:
        raise ShapeMismatch(f"{name}: scores must be [N, C, …], got {list(scores.shape)}")
    shifted = widened(scores) - widened(scores.max(axis=1, keepdims=True))
    log_prob = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = _loss(log_prob, labels, weights, ignore_index, reduction, name)
    return loss.astype(scores.dtype, copy=False), log_prob.astype(scores.dtype, copy=False)


def _loss(
    log_prob: Array, labels: Array, weights: Array | None, ignore_index: int | None, reduction: str, name: str
) -> Array:
    """Minus the log-probability of each label, weighted by class; the mean divides by the weights that counted."""
    if reduction not in ("none", "sum", "mean"):
        raise InvalidValue(f"{name}: reduction must be none, sum or mean, got {reduction!r}", op=name)
    if log_prob.ndim < 2 or labels.shape != (log_prob.shape[0], *log_prob.shape[2:]):
        raise ShapeMismatch(
            f"{name}: scores [N, C, …] and labels [N, …] do not fit: {list(log_prob.shape)}, {list(labels.shape)}"
        )
    classes = log_prob.shape[1]
    if weights is not None and weights.shape != (classes,):
        raise ShapeMismatch(f"{name}: weights must be [{classes}], got {list(weights.shape)}")
    counted = np.ones(labels.shape, np.bool_) if ignore_index is None else labels != ignore_index
    bad = labels[counted & ((labels < 0) | (labels >= classes))]
    if bad.size:
        raise InvalidValue(f"{name}: label {bad.flat[0]} is out of range for {classes} classes", op=name)
    safe = np.where(counted, labels, 0)
    weight = counted.astype(log_prob.dtype)
    if weights is not None:
        weight = weight * widened(weights)[safe]
    loss = -np.take_along_axis(log_prob, safe[:, None], axis=1)[:, 0]
    loss = np.where(counted, loss * weight, 0)
    if reduction == "none":
        return loss
    total = np.asarray(loss.sum())
    return total if reduction == "sum" else np.asarray(total / weight.sum())
