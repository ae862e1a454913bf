"""Losses over scores of classes."""

from __future__ import annotations

from typing import Any

from ranvier.dtypes import DType
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import FLOATS, Call, lowers

_TYPES = FLOATS | {DType.int32, DType.int64}


def _loss(call: Call, log_prob: Any, labels: Any, weights: Any) -> Any:
    """Minus the log-probability of each label, weighted by class; the mean divides by the weights that counted."""
    classes, ignored = log_prob.shape[1], call.attr("ignore_index")
    labels = labels.to(torch.int64)
    counted = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
    call.require((~counted | ((labels >= 0) & (labels < classes))).all(), f"a label is not one of {classes} classes")
    safe = torch.where(counted, labels, torch.zeros_like(labels)).clamp(0, classes - 1)
    weight = counted.to(log_prob.dtype)
    if weights is not None:
        weight = weight * weights[safe]
    loss = -torch.gather(log_prob, 1, safe.unsqueeze(1)).squeeze(1)
    loss = torch.where(counted, loss * weight, torch.zeros_like(loss))
    reduction = call.attr("reduction", "mean")
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / weight.sum()


@lowers("NegativeLogLikelihoodLoss", since=12, types=_TYPES, wide=True)
def negative_log_likelihood(call: Call, log_prob: Any, target: Any, weights: Any = None) -> Any:
    return _loss(call, log_prob, target, weights)


@lowers("SoftmaxCrossEntropyLoss", since=12, types=_TYPES, wide=True)
def softmax_cross_entropy(call: Call, scores: Any, labels: Any, weights: Any = None) -> Any:
    log_prob = torch.log_softmax(scores, dim=1)
    return _loss(call, log_prob, labels, weights), log_prob
