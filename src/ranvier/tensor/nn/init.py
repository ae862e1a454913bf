"""First values of parameters, by PyTorch's names. Numbers come from a key, or from the default generator's next one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor import random
from ranvier.tensor.core import Tensor
from ranvier.tensor.nn.generator import default_generator
from ranvier.tensor.state import State


class Keys:
    """Keys for the parameters of one layer: made from the one given, or drawn from the default generator."""

    def __init__(self, key: Tensor | None) -> None:
        self._key = key
        self._count = 0

    def next(self) -> Tensor:
        if self._key is None:
            return default_generator.key()
        self._count += 1
        return random.fold_in(self._key, self._count)


def _key(key: Tensor | None) -> Tensor:
    return default_generator.key() if key is None else key


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """By how much a function makes numbers smaller, which first values make up for."""
    if nonlinearity in ("linear", "sigmoid", "conv1d", "conv2d", "conv3d"):
        return 1.0
    if nonlinearity == "tanh":
        return 5.0 / 3.0
    if nonlinearity == "relu":
        return math.sqrt(2.0)
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else param
        return math.sqrt(2.0 / (1.0 + slope * slope))
    if nonlinearity == "selu":
        return 0.75
    raise InvalidInput(f"no gain is known of {nonlinearity!r}")


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """How many numbers come into each output, and how many go out of each input."""
    if len(shape) < 2:
        raise ShapeMismatch(f"a weight has outputs and inputs; got shape {list(shape)}")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _fill(state: State, array: Any) -> State:
    state.assign(Tensor(np.asarray(array).astype(state.dtype.numpy)))
    return state


def constant_(tensor: State, val: float) -> State:
    return _fill(tensor, np.full(tensor.shape, val))


def zeros_(tensor: State) -> State:
    return constant_(tensor, 0.0)


def ones_(tensor: State) -> State:
    return constant_(tensor, 1.0)


def eye_(tensor: State) -> State:
    rows, columns = tensor.shape
    return _fill(tensor, np.eye(rows, columns))


def dirac_(tensor: State) -> State:
    """A convolution that gives its input back."""
    found = np.zeros(tensor.shape)
    middle = tuple(n // 2 for n in tensor.shape[2:])
    for k in range(min(tensor.shape[:2])):
        found[(k, k, *middle)] = 1.0
    return _fill(tensor, found)


def uniform_(tensor: State, a: float = 0.0, b: float = 1.0, *, key: Tensor | None = None) -> State:
    tensor.assign(random.uniform(_key(key), tensor.shape, low=a, high=b, dtype=tensor.dtype))
    return tensor


def normal_(tensor: State, mean: float = 0.0, std: float = 1.0, *, key: Tensor | None = None) -> State:
    tensor.assign(random.normal(_key(key), tensor.shape, mean=mean, std=std, dtype=tensor.dtype))
    return tensor


def trunc_normal_(
    tensor: State,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    *,
    key: Tensor | None = None,
) -> State:
    """Normal numbers between ``a`` and ``b``."""
    drawn = random.truncated_normal(
        _key(key), tensor.shape, low=(a - mean) / std, high=(b - mean) / std, dtype="float64"
    )
    return _fill(tensor, drawn.numpy() * std + mean)


def xavier_uniform_(tensor: State, gain: float = 1.0, *, key: Tensor | None = None) -> State:
    bound = gain * math.sqrt(6.0 / sum(fans(tensor.shape)))
    return uniform_(tensor, -bound, bound, key=key)


def xavier_normal_(tensor: State, gain: float = 1.0, *, key: Tensor | None = None) -> State:
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / sum(fans(tensor.shape))), key=key)


def _kaiming(tensor: State, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise InvalidInput(f"mode is 'fan_in' or 'fan_out', not {mode!r}")
    return calculate_gain(nonlinearity, a) / math.sqrt(fans(tensor.shape)[mode == "fan_out"])


def kaiming_uniform_(
    tensor: State,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    *,
    key: Tensor | None = None,
) -> State:
    bound = math.sqrt(3.0) * _kaiming(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, key=key)


def kaiming_normal_(
    tensor: State,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    *,
    key: Tensor | None = None,
) -> State:
    return normal_(tensor, 0.0, _kaiming(tensor, a, mode, nonlinearity), key=key)


def orthogonal_(tensor: State, gain: float = 1.0, *, key: Tensor | None = None) -> State:
    """Rows (or columns, where there are fewer) of length ``gain`` at right angles."""
    if tensor.ndim < 2:
        raise ShapeMismatch(f"a weight has outputs and inputs; got shape {list(tensor.shape)}")
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
    drawn = random.normal(_key(key), (max(rows, columns), min(rows, columns)), dtype="float64").numpy()
    q, r = np.linalg.qr(drawn)
    q = q * np.sign(np.diag(r))
    return _fill(tensor, gain * (q if rows >= columns else q.T).reshape(tensor.shape))


def sparse_(tensor: State, sparsity: float, std: float = 0.01, *, key: Tensor | None = None) -> State:
    """Normal numbers, of which a share in each column is 0."""
    if tensor.ndim != 2:
        raise ShapeMismatch(f"a matrix is needed; got shape {list(tensor.shape)}")
    first, second = random.split(_key(key))
    rows, columns = tensor.shape
    found = random.normal(first, (rows, columns), std=std, dtype="float64").numpy().copy()
    zeros = math.ceil(sparsity * rows)
    for column in range(columns):
        order = random.permutation(random.fold_in(second, column), rows).numpy()
        found[order[:zeros], column] = 0.0
    return _fill(tensor, found)


_OF_TENSORS = True
