"""What a kernel is called with: parameters are declared when it is loaded, arguments checked at every launch.

Generated code trusts its arguments, so whatever could make it read or write elsewhere is refused here, by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidConfig, InvalidInput, InvalidValue, RanvierError, ShapeMismatch
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
Access = Literal["in", "out", "inout"]
_SCALARS = frozenset(
    {DType.float16, DType.float32, DType.float64, DType.bool}
    | {DType[f"{sign}int{bits}"] for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_SLOT = 8  # bytes that a scalar is given
_LOCAL_ALIGN = 64
_LOCAL_LIMIT = 1 << 26  # bytes of local memory for every thread
_OVERLAP_WORK = 10_000  # steps of finding out whether two strided arrays have an element in common


@dataclass(frozen=True)
class Tensor:
    """An array. ``shape`` names a size per axis: a number, a symbol that is equal wherever it stands, None for any."""

    name: str
    dtype: DType
    shape: tuple[int | str | None, ...]
    access: Access = "in"


@dataclass(frozen=True)
class Buffer:
    """Bytes of any object that lends its memory; ``length`` names a symbol for their number."""

    name: str
    access: Access = "in"
    length: str = ""


@dataclass(frozen=True)
class Scalar:
    """A number, within bounds where they are given."""

    name: str
    dtype: DType
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Local:
    """Memory of the thread that runs a tile, with undefined contents; the argument is its size in bytes."""

    name: str


@dataclass(frozen=True)
class Size:
    """The size that a symbol has in the tensors of a launch; no argument is given for it."""

    name: str


Param = Tensor | Buffer | Scalar | Local | Size


@dataclass(frozen=True)
class Signature:
    """Parameters in order. ``axes``: of the grid. ``work``: operations of one tile, roughly, where more than the
    memory it touches decides whether a second thread pays."""

    params: tuple[Param, ...]
    axes: int = 1
    work: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", tuple(self.params))
        if isinstance(self.axes, bool) or not isinstance(self.axes, int) or not 1 <= self.axes <= 3:
            raise InvalidConfig(f"Signature: axes must be 1, 2 or 3, got {self.axes!r}")
        if isinstance(self.work, bool) or not isinstance(self.work, int | float) or not self.work >= 0:
            raise InvalidConfig(f"Signature: work must be 0 or more operations, got {self.work!r}")
        names: set[str] = set()
        for param in self.params:
            _check_param(param)
            if param.name in names:
                raise InvalidConfig(f"Signature: two parameters are called {param.name!r}")
            names.add(param.name)
        known = self.symbols()
        for param in self.params:
            if isinstance(param, Size) and param.name not in known:
                raise InvalidConfig(f"Signature: size {param.name!r} is no symbol of a tensor or buffer")

    def symbols(self) -> frozenset[str]:
        found = {d for p in self.params if isinstance(p, Tensor) for d in p.shape if isinstance(d, str)}
        return frozenset(found | {p.length for p in self.params if isinstance(p, Buffer) and p.length})

    @property
    def given(self) -> tuple[Param, ...]:
        """The parameters that a launch gives arguments for."""
        return tuple(p for p in self.params if not isinstance(p, Size))

    def __str__(self) -> str:
        return f"({', '.join(map(_shown, self.params))})"


def _check_param(param: Any) -> None:
    if not isinstance(param, Param):
        raise InvalidConfig(f"Signature: a parameter is a Tensor, Buffer, Scalar, Local or Size, got {param!r}")
    kind, name = type(param).__name__, param.name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise InvalidConfig(f"Signature: the name of a parameter must be an identifier, got {name!r}")
    if isinstance(param, Tensor | Buffer) and param.access not in get_args(Access):
        raise InvalidConfig(f"{kind} {name!r}: access must be one of in, out, inout, got {param.access!r}")
    if isinstance(param, Tensor | Scalar) and not isinstance(param.dtype, DType):
        raise InvalidConfig(f"{kind} {name!r}: dtype must be a DType, got {param.dtype!r}")
    if isinstance(param, Tensor):
        if param.dtype is DType.string or param.dtype.is_packed:
            raise InvalidConfig(f"Tensor {name!r}: elements of {param.dtype} have no address of their own")
        wrong = [d for d in param.shape if not _is_dim(d)]
        if wrong:
            raise InvalidConfig(f"Tensor {name!r}: a size is a number, a symbol or None, got {wrong[0]!r}")
    if isinstance(param, Scalar) and param.dtype not in _SCALARS:
        raise InvalidConfig(f"Scalar {name!r}: cannot be of {param.dtype}")


def _is_dim(dim: Any) -> bool:
    if isinstance(dim, int) and not isinstance(dim, bool):
        return dim >= 0
    return dim is None or (isinstance(dim, str) and dim.isidentifier())


def _shown(param: Param) -> str:
    if isinstance(param, Tensor):
        sizes = ", ".join("?" if d is None else str(d) for d in param.shape)
        return f"{param.access} {param.name}: {param.dtype}[{sizes}]"
    if isinstance(param, Scalar):
        return f"{param.name}: {param.dtype}"
    if isinstance(param, Buffer):
        return f"{param.access} {param.name}: bytes"
    return f"{param.name}: {'local bytes' if isinstance(param, Local) else 'size'}"


# -- arguments ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """Checked arguments. ``arrays`` are the tensors and buffers in order, then one array that holds the scalars."""

    arrays: list[Array]
    sizes: Mapping[str, int]
    locals: tuple[int, ...]  # bytes, rounded up

    @property
    def layout(self) -> tuple[Any, ...]:
        """All that code or its call depends on besides contents."""
        return (
            tuple((a.dtype, a.shape, a.strides) for a in self.arrays),
            tuple(sorted(self.sizes.items())),
            self.locals,
        )


def bind(kernel: str, signature: Signature, args: Sequence[Any], *, strided: bool) -> Arguments:
    """The arguments of one launch, or an error that names the one that is wrong and says what it must be."""
    given = signature.given
    if isinstance(args, str | bytes | np.ndarray) or not isinstance(args, Sequence):
        raise InvalidInput(f"kernel {kernel!r}: arguments are a list, got {type(args).__name__}")
    if len(args) != len(given):
        expected = ", ".join(p.name for p in given)
        raise InvalidInput(f"kernel {kernel!r}: takes {len(given)} arguments ({expected}), got {len(args)}")
    arrays: list[Array] = []
    written: list[tuple[int, str]] = []
    names: list[str] = []
    sizes: dict[str, int] = {}
    local: list[int] = []
    scalars = [p for p in given if isinstance(p, Scalar)]
    slots = np.zeros(_SLOT * max(1, len(scalars)), np.uint8)
    filled = 0
    for position, (param, arg) in enumerate(zip(given, args)):
        where = f"kernel {kernel!r}: argument {position} {param.name!r}"
        if isinstance(param, Scalar):
            _fill(slots[_SLOT * filled :], param, arg, where)
            filled += 1
            continue
        if isinstance(param, Local):
            local.append(_local(arg, where))
            continue
        assert not isinstance(param, Size)
        if isinstance(param, Tensor):
            array = _tensor(param, arg, where, sizes, strided=strided)
        else:
            array = _buffer(param, arg, where)
            if param.length:
                _same_size(sizes, param.length, array.size, where)
        if param.access != "in":
            if not array.flags.writeable:
                raise InvalidInput(f"{where} is written to, and its memory is read-only")
            written.append((len(arrays), where))
        arrays.append(array)
        names.append(param.name)
    for target, where in written:
        for other, array in enumerate(arrays):
            if other != target and _overlap(arrays[target], array):
                raise InvalidInput(f"{where} is written to and shares memory with {names[other]!r}; use one inout")
    return Arguments([*arrays, slots], sizes, tuple(local))


def _tensor(param: Tensor, arg: Any, where: str, sizes: dict[str, int], *, strided: bool) -> Array:
    if not isinstance(arg, np.ndarray):
        raise InvalidInput(f"{where} must be a NumPy array, got {type(arg).__name__}")
    try:
        found: DType | None = dtypes.of(arg)
    except RanvierError:
        found = None
    if found is not param.dtype:
        raise DTypeMismatch(f"{where} must be of {param.dtype}, got {found or arg.dtype}")
    if arg.ndim != len(param.shape):
        raise ShapeMismatch(f"{where} must have {len(param.shape)} axes, got shape {list(arg.shape)}")
    for axis, (want, have) in enumerate(zip(param.shape, arg.shape)):
        if isinstance(want, str):
            _same_size(sizes, want, have, f"{where}, axis {axis}")
        elif want is not None and want != have:
            raise ShapeMismatch(f"{where} must have size {want} along axis {axis}, got shape {list(arg.shape)}")
    if not arg.flags.aligned or not arg.dtype.isnative:
        raise InvalidInput(f"{where} must have its elements at multiples of their size, in the order of this machine")
    if not arg.flags.c_contiguous:
        if not strided:
            raise InvalidInput(f"{where} must be contiguous in row-major order, got strides {list(arg.strides)}")
        if any(step % arg.itemsize for step in arg.strides):
            raise InvalidInput(f"{where} must have strides of whole elements, got {list(arg.strides)} bytes")
        if param.access != "in" and any(s == 0 and d > 1 for s, d in zip(arg.strides, arg.shape)):
            raise InvalidInput(f"{where} is written to and shows one element several times")
    return arg if type(arg) is np.ndarray else arg.view(np.ndarray)


def _same_size(sizes: dict[str, int], symbol: str, size: int, where: str) -> None:
    if sizes.setdefault(symbol, size) != size:
        raise ShapeMismatch(f"{where}: {symbol} is {sizes[symbol]} elsewhere, here it is {size}")


def _buffer(param: Buffer, arg: Any, where: str) -> Array:
    if isinstance(arg, np.ndarray):
        if not arg.flags.c_contiguous or arg.dtype.hasobject:
            raise InvalidInput(f"{where} must be contiguous plain memory")
        return arg.reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(arg, np.uint8) if len(memoryview(arg)) else np.zeros(0, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidInput(f"{where} must lend its memory: {error}") from None


def _fill(slot: Array, param: Scalar, arg: Any, where: str) -> None:
    """Write a number into its slot."""
    kind = param.dtype.numpy
    whole = isinstance(arg, int | np.integer) and not isinstance(arg, bool | np.bool_)
    if param.dtype is DType.bool:
        if not isinstance(arg, bool | np.bool_):
            raise DTypeMismatch(f"{where} must be True or False, got {arg!r}")
    elif param.dtype.is_integer:
        if not whole:
            raise DTypeMismatch(f"{where} must be a whole number, got {arg!r}")
        limits = np.iinfo(kind)
        if not limits.min <= arg <= limits.max:
            raise InvalidValue(f"{where} must be from {limits.min} to {limits.max} as {param.dtype}, got {arg}")
    else:
        if not whole and not isinstance(arg, float | np.floating):
            raise DTypeMismatch(f"{where} must be a number, got {arg!r}")
        if math.isfinite(arg) and abs(float(arg)) > float(np.finfo(kind).max):
            raise InvalidValue(f"{where} is beyond what {param.dtype} holds: {arg}")
    if (param.low is not None and not arg >= param.low) or (param.high is not None and not arg <= param.high):
        low = "" if param.low is None else f" at least {param.low}"
        high = "" if param.high is None else f" at most {param.high}"
        raise InvalidValue(f"{where} must be{low}{' and' if low and high else ''}{high}, got {arg}")
    slot[: kind.itemsize].view(kind)[0] = arg


def _local(arg: Any, where: str) -> int:
    if isinstance(arg, bool) or not isinstance(arg, int | np.integer):
        raise InvalidInput(f"{where} is local memory: its size in bytes is wanted, got {arg!r}")
    if not 0 <= arg <= _LOCAL_LIMIT:
        raise InvalidValue(f"{where}: local memory can have 0 to {_LOCAL_LIMIT} bytes, got {arg}")
    return -(-int(arg) // _LOCAL_ALIGN) * _LOCAL_ALIGN


def _overlap(a: Array, b: Array) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=_OVERLAP_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def extents(kernel: str, what: str, given: Any, axes: int) -> tuple[int, ...]:
    """A grid or a block as a tuple of whole numbers, one per axis."""
    found = (given,) if isinstance(given, int | np.integer) else given
    if not isinstance(found, tuple | list) or len(found) != axes:
        raise InvalidInput(f"kernel {kernel!r}: {what} must be {axes} whole number{'s' * (axes > 1)}, got {given!r}")
    least = 1 if what == "block" else 0
    for size in found:
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not least <= size < 1 << 31:
            raise InvalidInput(f"kernel {kernel!r}: {what} must be {least} or more and below 2^31, got {given!r}")
    if math.prod(found) >= 1 << 40:
        raise InvalidInput(f"kernel {kernel!r}: {what} {tuple(found)} has too many tiles")
    return tuple(int(size) for size in found)
