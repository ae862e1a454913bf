"""The lazy tensor: NumPy's habits over expressions that are computed when somebody looks.

A tensor never changes: ``x += y`` and ``x[i] = v`` let the name stand for a new value, and other names for the old one
keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

import ranvier.tensor as _functions  # its modules need the class whose operators are theirs, and come later
from ranvier import dlpack, dtypes
from ranvier.devices import CPU, Device
from ranvier.dtypes import DType
from ranvier.errors import DeviceMismatch, DTypeMismatch, InvalidInput, ShapeMismatch, TracingError
from ranvier.interop import to_array
from ranvier.providers.registry import REGISTRY
from ranvier.tensor.expr import HERE, Array, Expr, Shape, Spec, applied, known, spec
from ranvier.tensor.groups import DEEPEST, realise
from ranvier.tensor.methods import Methods
from ranvier.tensor.shapes import broadcast, count
from ranvier.tensor.tracing import now
from ranvier.tensor.types import DEFAULT_FLOAT, promoted, with_number

IDENTITY = spec("Identity")
_PLAIN = (bool, int, float, complex)
_NUMBERS = frozenset(_PLAIN)


class Tensor(Methods):
    """A multidimensional array whose numbers are computed on need. Made of anything NumPy makes arrays of; Python's
    floats become float32 unless ``dtype`` says otherwise, arrays keep their type."""

    __slots__ = ("__weakref__", "_expr")
    __array_ufunc__ = None  # an operator between an array and a tensor is the tensor's
    __hash__ = None  # type: ignore[assignment]  # == compares element by element

    _expr: Expr

    def __init__(self, data: Any, dtype: Any = None, device: Any = None) -> None:
        kind = None if dtype is None else dtypes.of(dtype)
        place = device_of(device)
        if isinstance(data, Tensor):
            found = data if kind is None or kind is data.dtype else _functions.manipulate.astype(data, kind)
            found = found if device is None else found.to_device(device)
            self._expr = found._expr
        else:
            self._expr = known(*host_array(data, kind), place)

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> DType:
        return self._expr.dtype

    @property
    def shape(self) -> Shape:
        return self._expr.shape

    @property
    def ndim(self) -> int:
        return len(self._expr.shape)

    @property
    def size(self) -> int:
        return count(self._expr.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.size)

    @property
    def device(self) -> Device:
        return self._expr.device or CPU

    @property
    def T(self) -> Tensor:
        """All axes in reverse order."""
        return _functions.manipulate.permute_dims(self, tuple(reversed(range(self.ndim))))

    @property
    def mT(self) -> Tensor:
        """The last two axes swapped."""
        return _functions.manipulate.matrix_transpose(self)

    def __len__(self) -> int:
        if not self._expr.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self._expr.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[k] for k in range(len(self))])

    # -- its numbers ------------------------------------------------------------------------------------------------

    def realise(self) -> Tensor:
        """Compute it now."""
        if self._expr.array is None:
            realise((self._expr,))
        return self

    def numpy(self) -> Array:
        """The numbers as a NumPy array that cannot be written to; nothing is copied."""
        expr = self._expr
        if expr.array is None:
            realise((expr,))
        assert expr.array is not None
        return expr.array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.numpy()
        if dtype is not None and np.dtype(dtype) != found.dtype:
            if copy is False:
                raise ValueError(f"a copy is needed to convert {found.dtype} to {np.dtype(dtype)}")
            return found.astype(dtype)
        return found.copy() if copy else found

    def item(self) -> Any:
        """The one number it has, as Python's own."""
        if self.size != 1:
            raise TypeError(f"only a tensor of one element is a number; this one has shape {list(self.shape)}")
        return self.numpy().item()

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise TypeError(f"only integers are indices; this is a tensor of {self.dtype}")
        return int(self.item())

    def __repr__(self) -> str:
        try:
            body = np.array2string(self.numpy(), separator=", ", prefix="Tensor(")
        except TracingError:
            return f"Tensor(traced, shape={list(self.shape)}, dtype={self.dtype})"
        place = "" if self._expr.device is HERE else f", device={str(self.device)!r}"
        return f"Tensor({body}, dtype={self.dtype}{place})"

    def __str__(self) -> str:
        try:
            return str(self.numpy())
        except TracingError:
            return repr(self)

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how else str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensor, (self.numpy(), None, None if self._expr.device is HERE else str(self.device))

    # -- where it is ------------------------------------------------------------------------------------------------

    def to_device(self, device: Any, /, *, stream: Any = None) -> Tensor:
        """The same numbers, from which others are computed on that device."""
        if stream is not None:
            raise InvalidInput("streams are not used here")
        place = device_of(device)
        if place == self._expr.device:
            return self
        self.realise()
        expr = self._expr
        assert expr.array is not None
        moved = applied(IDENTITY, (expr,), expr.dtype, expr.shape, place)
        moved.array = expr.array
        if moved.trace is None:
            moved.release()
        return wrapped(moved)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if stream is not None:
            raise InvalidInput("streams are not used here")
        if dl_device is not None and tuple(map(int, dl_device)) != dlpack.CPU_DEVICE:
            raise BufferError(f"the numbers are in host memory and cannot be handed out on DLPack device {dl_device}")
        found = self.numpy()
        if copy or max_version is None or max_version[0] < 1:
            found = found.copy()  # what is shared could be written to by consumers that cannot be told not to
        return dlpack.to_dlpack(found, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise ValueError(f"version {api_version!r} of the array API is not offered; 2024.12 is")
        import ranvier

        return ranvier.numpy

    # -- operators --------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.add, self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.add, self, other, swap=True)

    def __sub__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.subtract, self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.subtract, self, other, swap=True)

    def __mul__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.multiply, self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.multiply, self, other, swap=True)

    def __truediv__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.divide, self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.divide, self, other, swap=True)

    def __floordiv__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.floor_divide, self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.floor_divide, self, other, swap=True)

    def __mod__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.remainder, self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.remainder, self, other, swap=True)

    def __pow__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.pow, self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.pow, self, other, swap=True)

    def __matmul__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.linalg.matmul, self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.linalg.matmul, self, other, swap=True)

    def __and__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.bitwise_and, self, other)

    def __or__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.bitwise_or, self, other)

    def __xor__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.bitwise_xor, self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.bitwise_left_shift, self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.bitwise_left_shift, self, other, swap=True)

    def __rshift__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.bitwise_right_shift, self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.bitwise_right_shift, self, other, swap=True)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _functions.elementwise.operated(_functions.elementwise.equal, self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _functions.elementwise.operated(_functions.elementwise.not_equal, self, other)

    def __lt__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.less, self, other)

    def __le__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.less_equal, self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.greater, self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _functions.elementwise.operated(_functions.elementwise.greater_equal, self, other)

    def __neg__(self) -> Tensor:
        return _functions.elementwise.negative(self)

    def __pos__(self) -> Tensor:
        return _functions.elementwise.positive(self)

    def __abs__(self) -> Tensor:
        return _functions.elementwise.abs(self)

    def __invert__(self) -> Tensor:
        return _functions.elementwise.bitwise_invert(self)

    # -- parts ------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Tensor:
        return _functions.indexing.get(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        become(self, _functions.indexing.put(self, key, value))


def _in_place(name: str) -> Callable[[Tensor, Any], Tensor]:
    """``x op= y``: the tensor ``x`` stands for the result from now on; its element type and shape stay."""

    def operate(self: Tensor, other: Any) -> Tensor:
        found = getattr(self, name)(other)
        if found is NotImplemented:
            return found  # type: ignore[no-any-return]
        if found.shape != self.shape:
            raise ShapeMismatch(f"a tensor of shape {list(self.shape)} cannot hold a result of {list(found.shape)}")
        if found.dtype is not self.dtype:
            if promoted(found.dtype, self.dtype) is not self.dtype:
                raise DTypeMismatch(f"a tensor of {self.dtype} cannot hold a result of {found.dtype}")
            found = _functions.manipulate.astype(found, self.dtype)
        become(self, found)
        return self

    return operate


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():  # noqa: SIM905
    setattr(Tensor, f"__i{_name}__", _in_place(f"__{_name}__"))


def become(tensor: Tensor, other: Tensor) -> None:
    """Let a tensor stand for the value of another from now on."""
    tensor._expr = other._expr


def wrapped(expr: Expr) -> Tensor:
    """The tensor through which a user holds an expression."""
    made = Tensor.__new__(Tensor)
    made._expr = expr
    if expr.depth > DEEPEST and expr.array is None and now.tracing is None:
        realise((expr,))
    return made


def call(of: Spec, inputs: tuple[Tensor, ...], dtype: DType, shape: Shape) -> Tensor:
    """An operator applied to tensors."""
    if len(inputs) == 1:  # a loop over one or two takes longer than all the rest
        own = inputs[0]._expr
        return wrapped(applied(of, (own,), dtype, shape, own.device))
    if len(inputs) == 2:
        a, b = inputs[0]._expr, inputs[1]._expr
        place = a.device if a.device is b.device else common_device(inputs)
        return wrapped(applied(of, (a, b), dtype, shape, place))
    return wrapped(applied(of, tuple([x._expr for x in inputs]), dtype, shape, common_device(inputs)))


def common_device(inputs: tuple[Tensor, ...]) -> Device | None:
    if not inputs:
        return HERE
    first = inputs[0]._expr.device
    for other in inputs:
        theirs = other._expr.device
        if theirs is not first and theirs != first:
            raise DeviceMismatch(f"operands are on {first or CPU} and on {theirs or CPU}; see to_device")
    return first


def beside(x: Tensor, own: Tensor) -> Tensor:
    """A tensor that was made for use with another one, where that is; what the user put elsewhere stays there."""
    place, theirs = own._expr.device, x._expr.device
    if theirs is place or theirs is not HERE:
        return x
    return x.to_device(place)


def device_of(device: Any) -> Device | None:
    """A device from its name; this machine's processor, which is where tensors are by default, has none here."""
    if device is None:
        return HERE
    if isinstance(device, Device):
        found = device
    elif isinstance(device, str):
        kind, _, number = device.partition(":")
        if number and not number.isdigit():
            raise InvalidInput(f"not a device: {device!r}")
        found = Device(kind, int(number or 0))
    else:
        raise InvalidInput(f"not a device: {device!r}")
    if found == CPU:
        return HERE
    there = [REGISTRY.get(name).device for name in REGISTRY.available()]
    if found not in there:
        known_names = sorted({str(d) for d in there})
        raise DeviceMismatch(f"nothing computes on {found} here; there is {', '.join(known_names)}")
    return found


def host_array(data: Any, dtype: DType | None) -> tuple[Array, DType]:
    """An array of our own from anything that has numbers: nobody else can change it."""
    if isinstance(data, bool | int | float | complex) and not isinstance(data, np.generic):
        kind = dtype or with_number(DType.bool, data)
        try:
            found = np.array(data, kind.numpy)
        except OverflowError as error:
            raise InvalidInput(str(error)) from None
        found.flags.writeable = False
        return found, kind
    if isinstance(data, list | tuple):
        found = _from_lists(data)
        kind = dtype or (DEFAULT_FLOAT if found.dtype == np.float64 and not _typed(data) else dtypes.of(found))
        kind = DType.complex64 if dtype is None and kind is DType.complex128 and not _typed(data) else kind
    else:
        found = np.array(to_array(data))
        kind = dtype or dtypes.of(found)
    if kind is DType.string:
        raise DTypeMismatch("tensors hold numbers, not strings or objects")
    made = np.ascontiguousarray(found, kind.numpy)
    found = made if made.shape == found.shape else made.reshape(found.shape)
    found.flags.writeable = False
    return found, kind


def _typed(data: Any) -> bool:
    """Whether something in nested lists has an element type of its own."""
    if isinstance(data, list | tuple):
        return any(_typed(x) for x in data)
    return hasattr(data, "dtype")


def _from_lists(data: Any) -> Array:
    if _typed(data):
        data = _as_arrays(data)
    try:
        found = np.array(data)
    except ValueError as error:
        raise InvalidInput(f"not an array: {error}") from None
    return found if found.size else found.reshape(np.shape(data))


def _as_arrays(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_as_arrays(x) for x in data]
    return data.numpy() if isinstance(data, Tensor) else data


def as_tensor(x: Any, like: Tensor | None = None) -> Tensor:
    """``x`` as an operand beside ``like``: numbers take its type where they can."""
    if type(x) is Tensor:
        return x
    if type(x) in _NUMBERS or (isinstance(x, _PLAIN) and not isinstance(x, np.generic)):
        if like is None:
            return Tensor(x)
        kind = with_number(like._expr.dtype, x)
        try:
            array = np.array(x, kind.numpy)
        except OverflowError as error:
            raise InvalidInput(str(error)) from None
        return wrapped(known(array, kind, like._expr.device))
    if isinstance(x, Tensor):
        return x
    return Tensor(x, device=None if like is None or like._expr.device is HERE else like.device)


def both(x: Any, y: Any) -> tuple[Tensor, Tensor, DType, Shape]:
    """Two operands in their common type, and the shape of what they give."""
    if type(x) is not Tensor and not isinstance(x, Tensor):
        y = as_tensor(y)
        x = as_tensor(x, y)
    elif type(y) is not Tensor:
        y = as_tensor(y, x)
    a, b = x._expr, y._expr
    dtype = a.dtype
    if dtype is not b.dtype:
        dtype = promoted(dtype, b.dtype)
        if a.dtype is not dtype:
            x = _functions.manipulate.astype(x, dtype)
        if b.dtype is not dtype:
            y = _functions.manipulate.astype(y, dtype)
    return x, y, dtype, a.shape if a.shape == b.shape else broadcast(a.shape, b.shape)


_OF_TENSORS = True
