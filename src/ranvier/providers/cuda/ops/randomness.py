"""Random tensors. The numbers are drawn on the host, by the generator that every provider uses: a seed gives the same
ones everywhere. Those of a node with a seed are drawn once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.ops.tensor.randomness import draws, normal, uniform
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import tensor_over, torch
from ranvier.providers.cuda.table import ALL, FLOATS, Call, lowers

_FRESH = "fresh random numbers are drawn on the host"


def _drawn(call: Call, make: Any) -> Any:
    if call.attr("seed") is not None:
        return call.constant(make)
    return tensor_over(np.ascontiguousarray(make())).to(call.device)


def _normal(call: Call, shape: Any) -> Array:
    return normal(call.node.op, shape, call.dtype(), call.attr("mean", 0.0), call.attr("scale", 1.0), call.attr("seed"))


def _uniform(call: Call, shape: Any) -> Array:
    return uniform(call.node.op, shape, call.dtype(), call.attr("low", 0.0), call.attr("high", 1.0), call.attr("seed"))


@lowers("RandomNormal", stops=_FRESH)
def random_normal(call: Call) -> Any:
    return _drawn(call, lambda: _normal(call, call.attr("shape")))


@lowers("RandomUniform", stops=_FRESH)
def random_uniform(call: Call) -> Any:
    return _drawn(call, lambda: _uniform(call, call.attr("shape")))


@lowers("RandomNormalLike", types=ALL, stops=_FRESH)
def random_normal_like(call: Call, x: Any) -> Any:
    return _drawn(call, lambda: _normal(call, tuple(x.shape)))


@lowers("RandomUniformLike", types=ALL, stops=_FRESH)
def random_uniform_like(call: Call, x: Any) -> Any:
    return _drawn(call, lambda: _uniform(call, tuple(x.shape)))


@lowers("Bernoulli", since=15, types=ALL, stops=_FRESH)
def bernoulli(call: Call, x: Any) -> Any:
    chance = x.to(torch.float64)
    call.require(((chance >= 0) & (chance <= 1)).all(), "every input must be a probability in [0, 1]")
    return _drawn(call, lambda: draws(tuple(x.shape), call.attr("seed"))) < chance


@lowers("Multinomial", since=7, types=FLOATS | ALL, stops=_FRESH)
def multinomial(call: Call, x: Any) -> Any:
    shape = (x.shape[0], call.attr("sample_size", 1))
    wide = x.to(torch.float64)
    top = wide.amax(dim=1, keepdim=True)
    call.require(torch.isfinite(top).all(), "every row needs a finite largest log-probability, without NaN or inf")
    total = torch.exp(wide - top).cumsum(dim=1)
    at = _drawn(call, lambda: draws(shape, call.attr("seed"))) * total[:, -1:]
    return torch.searchsorted(total, at, right=True)
