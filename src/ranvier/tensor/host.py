"""Functions that NumPy computes: those that no operator of the graph is, and those of complex numbers.

They run at once. While a gradient is being made of what they were given, the result remembers the function, so that
its missing gradient is an error at the user's line and not a silent zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.errors import InvalidValue
from ranvier.tensor.core import Tensor, common_device, wrapped
from ranvier.tensor.expr import HOSTED, Array, applied, known, spec


def hosted(function: Callable[..., Any], *operands: Any, **options: Any) -> Tensor:
    """What a function of NumPy makes of tensors."""
    return _kept(function, np.asarray(_run(function, operands, options)), _tensors(operands))


def hosted_several(function: Callable[..., Any], *operands: Any, **options: Any) -> tuple[Tensor, ...]:
    """What a function of NumPy with several results makes of tensors."""
    found = _run(function, operands, options)
    return tuple(_kept(function, np.asarray(each), _tensors(operands)) for each in found)


def _tensors(operands: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(x for x in operands if isinstance(x, Tensor))


def _run(function: Callable[..., Any], operands: Sequence[Any], options: Mapping[str, Any]) -> Any:
    arrays = [x.numpy() if isinstance(x, Tensor) else x for x in operands]
    try:
        with np.errstate(all="ignore"):
            return function(*arrays, **options)
    except np.linalg.LinAlgError as error:
        raise InvalidValue(str(error)) from error


def _kept(function: Callable[..., Any], array: Array, tensors: tuple[Tensor, ...]) -> Tensor:
    array = np.array(array, order="C", copy=None)
    if array.base is not None or not array.flags.writeable:
        array = array.copy()
    array.flags.writeable = False
    dtype, device = dtypes.of(array), common_device(tensors)
    if all(x._expr.trace is None for x in tensors):
        return wrapped(known(array, dtype, device))
    name = HOSTED + getattr(function, "__name__", "function")
    made = applied(spec(name), tuple(x._expr for x in tensors), dtype, array.shape, device)
    made.array = array
    if made.trace is None:
        made.release()
    return wrapped(made)


_OF_TENSORS = True
