"""Features of classical models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.graph.ir import Node
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import ML, NUMBERS, Call, lowers

_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")


@lowers("Binarizer", domain=ML, types=NUMBERS)
def binarizer(call: Call, x: Any) -> Any:
    return x > call.attr("threshold", 0.0)


@lowers("Scaler", domain=ML, types=NUMBERS)
def scaler(call: Call, x: Any) -> Any:
    y = x if x.dtype == torch.float64 else x.float()
    offset, scale = call.attr("offset"), call.attr("scale")
    if offset:
        y = y - call.constant(lambda: np.asarray(offset, np.float32))
    return y * call.constant(lambda: np.asarray(scale, np.float32)) if scale else y


@lowers("Normalizer", domain=ML, types=NUMBERS)
def normalizer(call: Call, x: Any) -> Any:
    rows = (x.reshape(1, -1) if x.ndim == 1 else x).to(torch.float64)
    norm = call.attr("norm", "MAX")
    if norm == "MAX":
        size = rows.amax(dim=1, keepdim=True)
    elif norm == "L1":
        size = rows.abs().sum(dim=1, keepdim=True)
    else:
        size = (rows * rows).sum(dim=1, keepdim=True).sqrt()
    return (rows / torch.where(size == 0, torch.ones_like(size), size)).reshape(x.shape)


@lowers("Imputer", domain=ML, types=NUMBERS)
def imputer(call: Call, x: Any) -> Any:
    if x.dtype.is_floating_point:
        values, gap = call.attr("imputed_value_floats"), call.attr("replaced_value_float", 0.0)
        missing = torch.isnan(x) if math.isnan(gap) else x == gap
    else:
        values, missing = call.attr("imputed_value_int64s"), x == call.attr("replaced_value_int64", 0)
    return torch.where(missing, call.constant(lambda: np.asarray(values)).to(x.dtype), x)


def unknown_transform(node: Node) -> str | None:
    kind = node.attrs.get("post_transform", "NONE")
    return None if kind in (*_TRANSFORMS, 0, 1, 2, 3) else f"the transform {kind} is not lowered to torch"


def transformed(scores: Any, kind: str) -> Any:
    if kind == "LOGISTIC":
        return torch.sigmoid(scores)
    if kind == "SOFTMAX":
        return torch.softmax(scores, dim=1)
    if kind == "SOFTMAX_ZERO":
        voted = scores.abs() > 1e-7
        powers = torch.where(voted, torch.exp(scores - scores.amax(dim=1, keepdim=True)), torch.zeros_like(scores))
        total = powers.sum(dim=1, keepdim=True)
        return powers / torch.where(total == 0, torch.ones_like(total), total)
    return scores


@lowers("LinearRegressor", domain=ML, types=NUMBERS, refuses=unknown_transform)
def linear_regressor(call: Call, x: Any) -> Any:
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    rows = rows if rows.dtype == torch.float64 else rows.float()
    targets, intercepts = call.attr("targets", 1), call.attr("intercepts")
    weights = call.constant(lambda: np.asarray(call.attr("coefficients"), np.float32).reshape(targets, -1))
    y = torch.matmul(rows, weights.to(rows.dtype).mT)
    if intercepts:
        y = y + call.constant(lambda: np.asarray(intercepts, np.float32))
    return transformed(y, call.attr("post_transform", "NONE"))
