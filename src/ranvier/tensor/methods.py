"""Functions that are methods too, as people know them from NumPy and PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ranvier.tensor as _functions  # its modules need the class whose methods are theirs, and come later

if TYPE_CHECKING:
    from ranvier.tensor.core import Tensor


class Methods:
    """What a tensor can be asked for beside the array API."""

    __slots__ = ()

    @property
    def _own(self) -> Tensor:
        return cast("Tensor", self)

    def astype(self, dtype: Any) -> Tensor:
        return _functions.manipulate.astype(self, dtype)

    def reshape(self, *shape: Any) -> Tensor:
        return _functions.manipulate.reshape(self, shape[0] if len(shape) == 1 else shape)

    def flatten(self) -> Tensor:
        return _functions.manipulate.flatten(self)

    def transpose(self, *axes: int) -> Tensor:
        return _functions.manipulate.permute_dims(self, axes or tuple(reversed(range(self._own.ndim))))

    def squeeze(self, axis: Any = None) -> Tensor:
        return _functions.manipulate.squeeze(self, axis)

    def repeat(self, repeats: Any, axis: int | None = None) -> Tensor:
        return _functions.manipulate.repeat(self, repeats, axis=axis)

    def copy(self) -> Tensor:
        return _functions.creation.copy(self)

    def sum(self, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Tensor:
        return _functions.reductions.sum(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def prod(self, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Tensor:
        return _functions.reductions.prod(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        return _functions.reductions.mean(self, axis=axis, keepdims=keepdims)

    def var(self, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False) -> Tensor:
        return _functions.reductions.var(self, axis=axis, correction=correction, keepdims=keepdims)

    def std(self, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False) -> Tensor:
        return _functions.reductions.std(self, axis=axis, correction=correction, keepdims=keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        return _functions.reductions.max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        return _functions.reductions.min(self, axis=axis, keepdims=keepdims)

    def any(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        return _functions.reductions.any(self, axis=axis, keepdims=keepdims)

    def all(self, axis: Any = None, *, keepdims: bool = False) -> Tensor:
        return _functions.reductions.all(self, axis=axis, keepdims=keepdims)

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        return _functions.reductions.argmax(self, axis=axis, keepdims=keepdims)

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        return _functions.reductions.argmin(self, axis=axis, keepdims=keepdims)

    def cumsum(self, axis: int | None = None) -> Tensor:
        return _functions.reductions.cumulative_sum(self, axis=axis)

    def softmax(self, axis: int = -1) -> Tensor:
        return _functions.reductions.softmax(self, axis=axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        return _functions.reductions.log_softmax(self, axis=axis)

    def sort(self, axis: int = -1, *, descending: bool = False) -> Tensor:
        return _functions.searching.sort(self, axis=axis, descending=descending)

    def argsort(self, axis: int = -1, *, descending: bool = False) -> Tensor:
        return _functions.searching.argsort(self, axis=axis, descending=descending)

    def clip(self, min: Any = None, max: Any = None) -> Tensor:
        return _functions.composed.clip(self, min, max)

    def dot(self, other: Any) -> Tensor:
        return _functions.linalg.matmul(self, other)

    def exp(self) -> Tensor:
        return _functions.elementwise.exp(self)

    def log(self) -> Tensor:
        return _functions.elementwise.log(self)

    def sqrt(self) -> Tensor:
        return _functions.elementwise.sqrt(self)

    def square(self) -> Tensor:
        return _functions.elementwise.square(self)

    def backward(self, gradient: Any = None, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Add gradients to ``grad`` of the parameters it was computed from; see :mod:`ranvier.tensor.state`."""
        _functions.state.backward(self._own, gradient, retain_graph=retain_graph, create_graph=create_graph)

    def abs(self) -> Tensor:
        return _functions.elementwise.abs(self)

    def sin(self) -> Tensor:
        return _functions.elementwise.sin(self)

    def cos(self) -> Tensor:
        return _functions.elementwise.cos(self)

    def tanh(self) -> Tensor:
        return _functions.elementwise.tanh(self)

    def sigmoid(self) -> Tensor:
        return _functions.elementwise.sigmoid(self)

    def relu(self) -> Tensor:
        return _functions.elementwise.relu(self)

    def gelu(self) -> Tensor:
        return _functions.elementwise.gelu(self)


_OF_TENSORS = True
