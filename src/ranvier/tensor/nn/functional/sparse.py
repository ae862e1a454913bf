"""Tables looked up by number, and dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput
from ranvier.tensor.autodiff import stop_gradient
from ranvier.tensor.core import Tensor, as_tensor, beside
from ranvier.tensor.elementwise import equal, where
from ranvier.tensor.manipulate import astype, expand_dims, take
from ranvier.tensor.nn.generator import Generator, default_generator


def embedding(input: Any, weight: Any, padding_idx: int | None = None) -> Tensor:
    """Rows of a table; the one at ``padding_idx`` does not learn."""
    places, table = as_tensor(input), as_tensor(weight)
    if not places.dtype.is_integer:
        raise DTypeMismatch(f"rows are looked up by integers, not {places.dtype}")
    found = take(table, places, axis=0)
    if padding_idx is None:
        return found
    row = padding_idx % table.shape[0]
    return where(expand_dims(equal(places, row), axis=-1), stop_gradient(found), found)


def one_hot(input: Any, num_classes: int = -1) -> Tensor:
    """1 at the place that each number names, 0 elsewhere, along a new last axis."""
    places = as_tensor(input)
    if not places.dtype.is_integer:
        raise DTypeMismatch(f"places are integers, not {places.dtype}")
    size = int(places.numpy().max()) + 1 if num_classes < 0 else num_classes
    numbers = beside(Tensor(np.arange(size, dtype=places.dtype.numpy)), places)
    return astype(equal(expand_dims(places, axis=-1), numbers), DType.int64)


def dropout(input: Any, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """Elements set to 0 with a probability, the others enlarged so that the mean stays."""
    own = as_tensor(input)
    return _dropped(own, p, own.shape, training, generator)


def dropout_channels(
    input: Any, p: float = 0.5, training: bool = True, *, generator: Generator | None = None
) -> Tensor:
    """Whole channels (the first two axes) set to 0."""
    own = as_tensor(input)
    return _dropped(own, p, (*own.shape[:2], *(1,) * (own.ndim - 2)), training, generator)


dropout1d = dropout2d = dropout3d = dropout_channels


def _dropped(x: Tensor, p: float, shape: tuple[int, ...], training: bool, generator: Generator | None) -> Tensor:
    if not 0.0 <= p <= 1.0:
        raise InvalidInput(f"not a probability: {p}")
    if not training or p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    kept = (generator or default_generator).kept(p, shape, x.device)
    return where(kept, x * (1.0 / (1.0 - p)), 0.0)


_OF_TENSORS = True
