"""Random numbers inside of compiled functions: the words of a key that is not known yet, in operators of the graph.

They are the words that :mod:`ranvier.tensor.random` makes on the host, so a compiled function draws the same numbers as
one that is not; where they go through a logarithm or a cosine, up to the last bit.
"""

from __future__ import annotations

import math

import numpy as np

from ranvier.dtypes import DType
from ranvier.tensor.composed import log1p
from ranvier.tensor.core import Tensor
from ranvier.tensor.elementwise import cos, less, minimum, sin, sqrt
from ranvier.tensor.expr import Array
from ranvier.tensor.manipulate import astype, concat, reshape, stack
from ranvier.tensor.philox import LEFT, RIGHT, constant, shifted
from ranvier.tensor.philox import words as philox_words
from ranvier.tensor.shapes import count
from ranvier.tensor.tracing import now


def is_traced(key: object) -> bool:
    """Whether the numbers of a key come only when the function is called that is being compiled."""
    return now.tracing is not None and isinstance(key, Tensor) and key._expr.array is None


def words(key: Tensor, number: int, purpose: int) -> Tensor:
    """As many words of 32 bits, in 64."""
    blocks = np.arange((number + 3) // 4, dtype=np.uint64)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    return reshape(_drawn((blocks & mask, blocks >> half, purpose, 0), key), (-1,))[:number]


def folded(key: Tensor, data: int, purpose: int) -> Tensor:
    """A new key from a key and a number."""
    drawn = _drawn((np.array([data & 0xFFFFFFFF], np.uint64), data >> 32 & 0xFFFFFFFF, purpose, 0), key)
    return astype(reshape(drawn, (-1,))[:2], DType.uint32)


def unit(key: Tensor, number: int, kind: DType, purpose: int) -> Tensor:
    """Numbers in [0, 1) in float64: 24 bits for float32 and smaller ones, 53 for float64."""
    if kind is DType.float64:
        pairs = reshape(words(key, 2 * number, purpose), (number, 2))
        wide = shifted(LEFT, pairs[:, 0], 32) | pairs[:, 1]
        return astype(shifted(RIGHT, wide, 11), DType.float64) * 2.0**-53
    return astype(shifted(RIGHT, words(key, number, purpose), 8), DType.float64) * 2.0**-24


def uniform(key: Tensor, shape: tuple[int, ...], low: float, high: float, kind: DType, purpose: int) -> Tensor:
    found = low + (high - low) * unit(key, count(shape), kind, purpose)
    edge = float(np.nextafter(kind.numpy.type(high), kind.numpy.type(low)))
    return reshape(minimum(astype(found, kind), edge), shape)


def normal(key: Tensor, shape: tuple[int, ...], mean: float, std: float, kind: DType, purpose: int) -> Tensor:
    number = count(shape)
    half = (number + 1) // 2
    drawn = unit(key, 2 * half, DType.float64, purpose)
    radius, angle = sqrt(-2.0 * log1p(-drawn[:half])), 2.0 * math.pi * drawn[half:]
    both = concat([radius * cos(angle), radius * sin(angle)])[:number]
    return reshape(astype(mean + std * both, kind), shape)


def bernoulli(key: Tensor, p: float, shape: tuple[int, ...], purpose: int) -> Tensor:
    return reshape(less(unit(key, count(shape), DType.float64, purpose), p), shape)


def _drawn(counter: tuple[Array, Array | int, int, int], key: Tensor) -> Tensor:
    """Four words (the last axis) for each counter of four."""
    parts = astype(key, DType.uint64)
    keys = parts[0:1], parts[1:2]
    c0, c1, c2, c3 = (constant(each, parts) for each in counter)
    found = philox_words((c0, c1, c2, c3), keys)
    whole = found[0].shape
    return stack([_spread(each, whole) for each in found], axis=-1)


def _spread(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x if x.shape == shape else x + constant(np.zeros(shape, np.uint64), x)


_OF_TENSORS = True
