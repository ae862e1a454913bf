"""Random numbers from explicit keys: the same key gives the same numbers, on every machine and every provider.

A key is two 32-bit words, and numbers are words of the counter-based generator Philox-4x32-10 under that key: word *n*
is a function of the key and of *n* alone, so nothing is remembered between calls. Draw from a key once; ``split``
makes new ones. Words are made on the host, in whole numbers, and what follows from them is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput
from ranvier.tensor import random_traced
from ranvier.tensor.core import Tensor, as_tensor, wrapped
from ranvier.tensor.expr import Array, known
from ranvier.tensor.manipulate import astype, reshape, take
from ranvier.tensor.shapes import check_sizes, count, shape_of
from ranvier.tensor.types import DEFAULT_FLOAT, DEFAULT_INT, FLOATS

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_DRAW, _SPLIT, _FOLD = 0, 1, 2  # what a counter is used for, so that new keys are not numbers that were drawn


def key(seed: int) -> Tensor:
    """A key from a number."""
    number = index(seed) & 0xFFFFFFFFFFFFFFFF
    return Tensor(np.array([number >> 32, number & 0xFFFFFFFF], np.uint32))


def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys, one in each row."""
    if random_traced.is_traced(key):
        _check(key)
        return reshape(astype(random_traced.words(key, 2 * num, _SPLIT), DType.uint32), (num, 2))
    return Tensor(_words(key, 2 * num, _SPLIT).reshape(num, 2))


def fold_in(key: Tensor, data: int) -> Tensor:
    """A new key from a key and a number: that of a step, a device or a layer."""
    number = index(data)
    if random_traced.is_traced(key):
        _check(key)
        return random_traced.folded(key, number, _FOLD)
    words = philox((number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF, _FOLD, 0), _pair(key))
    return Tensor(words[:2].copy())


def bits(key: Tensor, shape: Any = ()) -> Tensor:
    """Words of 32 random bits."""
    target = check_sizes(shape_of(shape))
    if random_traced.is_traced(key):
        _check(key)
        return reshape(astype(random_traced.words(key, count(target), _DRAW), DType.uint32), target)
    return _kept(_words(key, count(target), _DRAW).reshape(target), DType.uint32)


def uniform(key: Tensor, shape: Any = (), *, low: float = 0.0, high: float = 1.0, dtype: Any = DEFAULT_FLOAT) -> Tensor:
    """Numbers from ``low`` up to ``high``, which is left out, all equally likely."""
    target, kind = check_sizes(shape_of(shape)), _float_type(dtype)
    if random_traced.is_traced(key):
        _check(key)
        return random_traced.uniform(key, target, low, high, kind, _DRAW)
    found = low + (high - low) * _unit(key, count(target), kind)
    edge = np.nextafter(kind.numpy.type(high), kind.numpy.type(low))
    return _kept(np.minimum(found.astype(kind.numpy), edge).reshape(target), kind)


def normal(key: Tensor, shape: Any = (), *, mean: float = 0.0, std: float = 1.0, dtype: Any = DEFAULT_FLOAT) -> Tensor:
    """Normally distributed numbers."""
    target, kind = check_sizes(shape_of(shape)), _float_type(dtype)
    if random_traced.is_traced(key):
        _check(key)
        return random_traced.normal(key, target, mean, std, kind, _DRAW)
    number = count(target)
    half = (number + 1) // 2
    unit = _unit(key, 2 * half, DType.float64)  # by Box and Muller: two numbers of two
    radius = np.sqrt(-2.0 * np.log1p(-unit[:half]))
    angle = 2.0 * np.pi * unit[half:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:number]
    return _kept((mean + std * both).astype(kind.numpy).reshape(target), kind)


def truncated_normal(
    key: Tensor, shape: Any = (), *, low: float = -2.0, high: float = 2.0, dtype: Any = DEFAULT_FLOAT
) -> Tensor:
    """Normally distributed numbers that lie between two bounds."""
    target, kind = check_sizes(shape_of(shape)), _float_type(dtype)
    if not low < high:
        raise InvalidInput(f"the bounds [{low}, {high}] leave no room")
    found = np.zeros(count(target))
    missing = np.arange(found.size)
    turn = 0
    while missing.size:  # those outside are drawn again
        drawn = normal(fold_in(key, turn), (missing.size,), dtype=DType.float64).numpy()
        inside = (drawn >= low) & (drawn <= high)
        found[missing[inside]] = drawn[inside]
        missing = missing[~inside]
        turn += 1
        if turn > 10_000:
            raise InvalidInput(f"nothing falls between {low} and {high}")
    return _kept(np.clip(found, low, high).astype(kind.numpy).reshape(target), kind)


def randint(key: Tensor, shape: Any, low: int, high: int, *, dtype: Any = DEFAULT_INT) -> Tensor:
    """Whole numbers from ``low`` up to ``high``, which is left out."""
    target, kind = check_sizes(shape_of(shape)), dtypes.of(dtype)
    if not kind.is_integer:
        raise DTypeMismatch(f"whole numbers have an integer type, not {kind}")
    width = index(high) - index(low)
    if not 0 < width <= 1 << 63:
        raise InvalidInput(f"no whole number lies in [{low}, {high})")
    wide = _wide(key, count(target))
    found = (wide % np.uint64(width)).astype(np.int64) + low  # 64 bits: the unevenness is below what can be seen
    return _kept(found.astype(kind.numpy).reshape(target), kind)


def bernoulli(key: Tensor, p: float = 0.5, shape: Any = ()) -> Tensor:
    """True with this probability."""
    if not 0.0 <= p <= 1.0:
        raise InvalidInput(f"not a probability: {p}")
    target = check_sizes(shape_of(shape))
    if random_traced.is_traced(key):
        _check(key)
        return random_traced.bernoulli(key, p, target, _DRAW)
    return _kept((_unit(key, count(target), DType.float64) < p).reshape(target), DType.bool)


def permutation(key: Tensor, x: int | Tensor, *, axis: int = 0) -> Tensor:
    """The numbers below one, or the slices of a tensor along an axis, in random order."""
    size = x.shape[axis] if isinstance(x, Tensor) else index(x)
    order = np.argsort(_wide(key, size), kind="stable").astype(np.int64)
    places = _kept(order, DType.int64)
    return take(x, places, axis=axis) if isinstance(x, Tensor) else places


def categorical(key: Tensor, logits: Any, *, axis: int = -1, shape: Any = None) -> Tensor:
    """Classes, by the logarithms of their (unnormalised) probabilities along an axis."""
    own = np.moveaxis(as_tensor(logits).numpy().astype(np.float64), axis, -1)
    target = own.shape[:-1] if shape is None else check_sizes(shape_of(shape))
    spread = np.broadcast_to(own, (*target, own.shape[-1]))
    unit = _unit(key, spread.size, DType.float64).reshape(spread.shape)
    with np.errstate(divide="ignore"):
        noise = -np.log(-np.log1p(-unit))  # the largest of logits with Gumbel's noise is one class by its probability
    return _kept(np.argmax(spread + noise, axis=-1).astype(np.int64), DType.int64)


def choice(key: Tensor, x: int | Tensor, shape: Any = (), *, replace: bool = True) -> Tensor:
    """Elements of a tensor's first axis, or numbers below one, chosen at random."""
    size = x.shape[0] if isinstance(x, Tensor) else index(x)
    target = check_sizes(shape_of(shape))
    if replace:
        places = randint(key, target, 0, size)
    else:
        if count(target) > size:
            raise InvalidInput(f"{count(target)} of {size} cannot be chosen without repeating one")
        places = permutation(key, size)[: count(target)].reshape(target)
    return take(x, places, axis=0) if isinstance(x, Tensor) else places


# -- words ----------------------------------------------------------------------------------------------------------


def philox(counter: Sequence[Any], key: tuple[int, int]) -> Array:
    """Four words (the last axis) for each counter of four: ten rounds of products whose halves change places."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    for turn in range(_ROUNDS):
        k0, k1 = (np.uint64((word + turn * step) & 0xFFFFFFFF) for word, step in zip(key, _WEYL))
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def _check(key: Tensor) -> None:
    if not isinstance(key, Tensor) or key.shape != (2,) or key.dtype is not DType.uint32:
        raise InvalidInput("a key is needed: random.key(seed), or a row of random.split(key)")


def _pair(key: Tensor) -> tuple[int, int]:
    _check(key)
    first, second = key.tolist()
    return first, second


def _words(key: Tensor, number: int, purpose: int) -> Array:
    blocks = np.arange((number + 3) // 4, dtype=np.uint64)
    return philox((blocks & _LOW, blocks >> _HALF, purpose, 0), _pair(key)).reshape(-1)[:number]


def _wide(key: Tensor, number: int) -> Array:
    words = _words(key, 2 * number, _DRAW).reshape(number, 2).astype(np.uint64)
    return (words[:, 0] << _HALF) | words[:, 1]


def _unit(key: Tensor, number: int, kind: DType) -> Array:
    """Numbers in [0, 1): 24 bits for float32 and smaller ones, 53 for float64."""
    if kind is DType.float64:
        return (_wide(key, number) >> np.uint64(11)) * 2.0**-53
    return (_words(key, number, _DRAW) >> np.uint32(8)) * np.float64(2.0**-24)


def _float_type(dtype: Any) -> DType:
    kind = dtypes.of(dtype)
    if kind not in FLOATS:
        raise DTypeMismatch(f"these numbers are floats, not {kind}")
    return kind


def _kept(array: Any, dtype: DType) -> Tensor:
    found = np.ascontiguousarray(array).reshape(np.shape(array))
    found.flags.writeable = False
    return wrapped(known(found, dtype))


_OF_TENSORS = True
