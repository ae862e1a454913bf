"""Philox-4x32 with ten rounds in operators of the graph: words of keys that are known only when a program runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.tensor.core import Tensor, call, wrapped
from ranvier.tensor.expr import known, spec
from ranvier.tensor.shapes import broadcast

RIGHT, LEFT = (spec("BitShift", (("direction", way),)) for way in ("RIGHT", "LEFT"))
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def constant(numbers: Any, beside: Tensor) -> Tensor:
    """Words that are known, where another tensor is."""
    array = np.array(numbers, np.uint64)
    array.flags.writeable = False
    return wrapped(known(array, DType.uint64, beside._expr.device))


def shifted(way: Any, x: Tensor, by: int) -> Tensor:
    other = constant(by, x)
    return call(way, (x, other), DType.uint64, broadcast(x.shape, other.shape))


def words(counter: Words, keys: tuple[Tensor, Tensor]) -> Words:
    """The four words of every counter of four, all of them 32 bits in 64."""
    beside = keys[0]
    low = constant(0xFFFFFFFF, beside)
    multipliers = [constant(number, beside) for number in _MULTIPLIERS]
    c0, c1, c2, c3 = counter
    for turn in range(_ROUNDS):
        k0, k1 = ((key + constant(turn * step, beside)) & low for key, step in zip(keys, _WEYL))
        left, right = multipliers[0] * c0, multipliers[1] * c2
        c0, c1 = shifted(RIGHT, right, 32) ^ c1 ^ k0, right & low
        c2, c3 = shifted(RIGHT, left, 32) ^ c3 ^ k1, left & low
    return c0, c1, c2, c3


_OF_TENSORS = True
