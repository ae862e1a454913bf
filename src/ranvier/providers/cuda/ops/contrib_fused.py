"""Small fused operators of ONNX Runtime's domain."""

from __future__ import annotations

import math
from typing import Any

from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.table import CONTRIB, Call, lowers


@lowers("BiasAdd", domain=CONTRIB, wide=True)
def bias_add(call: Call, x: Any, bias: Any, skip: Any) -> Any:
    return x + bias + skip


@lowers("GatedAdd", domain=CONTRIB, wide=True)
def gated_add(call: Call, x: Any, y: Any, gate: Any) -> Any:
    return x + y * gate


@lowers("BiasSplitGelu", domain=CONTRIB, wide=True)
def bias_split_gelu(call: Call, x: Any, bias: Any) -> Any:
    left, right = (x + bias).chunk(2, dim=-1)
    return left * functional.gelu(right)


@lowers("BiasSoftmax", domain=CONTRIB, wide=True)
def bias_softmax(call: Call, x: Any, bias: Any) -> Any:
    """Over all axes from ``axis`` on; the bias has fewer rows: neighbours share one, or its rows repeat as a whole."""
    split = call.attr("axis", 1) % x.ndim
    width = math.prod(x.shape[split:])
    if x.numel() == 0:
        return x
    rows = bias.numel() // width
    inner = call.attr("is_inner_broadcast", 1)
    scores = x.reshape((rows, -1, width) if inner else (-1, rows, width))
    shift = bias.reshape((rows, 1, width) if inner else (1, rows, width))
    return torch.softmax(scores + shift, dim=-1).reshape(x.shape)
