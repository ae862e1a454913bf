"""What a value can be: a tensor with a (possibly symbolic) shape, a sequence, an optional, a map.

Types are small immutable objects. A dimension is an ``int``, a :class:`Symbol` (a size known by name until a call
binds it) or ``None`` (nothing known). A shape of ``None`` means that even the rank is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ranvier.dtypes import DType


class Symbol:
    """A dimension known by name, with bounds. Two symbols with one name are the same dimension."""

    __slots__ = ("hi", "lo", "name")

    def __init__(self, name: str, lo: int = 0, hi: int | None = None) -> None:
        if lo < 0 or (hi is not None and hi < lo):
            raise ValueError(f"dimension {name!r}: bounds [{lo}, {hi}] are not a range of sizes")
        self.name = name
        self.lo = lo
        self.hi = hi

    def admits(self, size: int) -> bool:
        return size >= self.lo and (self.hi is None or size <= self.hi)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        bounds = "" if self.lo == 0 and self.hi is None else f", lo={self.lo}, hi={self.hi}"
        return f"Symbol({self.name!r}{bounds})"


Dim: TypeAlias = int | Symbol | None
Shape: TypeAlias = tuple[Dim, ...]


class Type:
    """Base of all value types."""

    __slots__ = ()

    def bind(self, dims: Mapping[str, Dim]) -> Type:
        """This type with symbols replaced by what ``dims`` says: sizes, other symbols, or nothing known."""
        return self

    def merge(self, other: Type | None) -> Type:
        """The more precise of two descriptions of one value, part by part; ``other`` fills what is unknown here."""
        return self


class TensorType(Type):
    """A dense tensor. ``dtype`` or ``shape`` is ``None`` where it is not known."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: DType | None, shape: Shape | None = None) -> None:
        self.dtype = dtype
        self.shape = shape

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def is_static(self) -> bool:
        """True when every dimension is a number."""
        if self.shape is None:
            return False
        for dim in self.shape:  # noqa: SIM110 - asked of every value many times, and a generator is slow to start
            if not isinstance(dim, int):
                return False
        return True

    @property
    def size(self) -> int | None:
        """The number of elements, or None where a dimension is not a number."""
        if self.shape is None:
            return None
        total = 1
        for dim in self.shape:
            if not isinstance(dim, int):
                return None
            total *= dim
        return total

    @property
    def nbytes(self) -> int | None:
        size = self.size
        return None if size is None or self.dtype is None else self.dtype.nbytes(size)

    def bind(self, dims: Mapping[str, Dim]) -> TensorType:
        if not dims or self.shape is None or not any(type(d) is Symbol for d in self.shape):
            return self
        return TensorType(self.dtype, tuple(dims.get(d.name, d) if isinstance(d, Symbol) else d for d in self.shape))

    def merge(self, other: Type | None) -> Type:
        if other is self or not isinstance(other, TensorType):
            return self
        shape = self.shape
        if shape is None:
            shape = other.shape
        elif other.shape is not None and len(other.shape) == len(shape):
            shape = tuple(_sharper(a, b) for a, b in zip(shape, other.shape))
        return TensorType(self.dtype if self.dtype is not None else other.dtype, shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and self.dtype is other.dtype and self.shape == other.shape

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))

    def __str__(self) -> str:
        name = "?" if self.dtype is None else self.dtype.name
        if self.shape is None:
            return f"{name}[…]"
        return f"{name}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"

    __repr__ = __str__


class SparseTensorType(TensorType):
    """A sparse tensor; at run time it is held dense."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"sparse {super().__str__()}"

    __repr__ = __str__


class _Wrapping(Type):
    """A type made of one element type."""

    __slots__ = ("elem",)
    _word = ""

    def __init__(self, elem: Type | None) -> None:
        self.elem = elem

    def bind(self, dims: Mapping[str, Dim]) -> Type:
        return self if self.elem is None else type(self)(self.elem.bind(dims))

    def merge(self, other: Type | None) -> Type:
        if type(other) is not type(self):
            return self
        theirs = other.elem
        return type(self)(theirs if self.elem is None else self.elem.merge(theirs))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.elem == self.elem

    def __hash__(self) -> int:
        return hash((self._word, self.elem))

    def __str__(self) -> str:
        return f"{self._word}({self.elem})"

    __repr__ = __str__


class SequenceType(_Wrapping):
    """A list of values of one type; a Python ``list`` at run time."""

    __slots__ = ()
    _word = "sequence"


class OptionalType(_Wrapping):
    """A value or nothing; ``None`` at run time when empty."""

    __slots__ = ()
    _word = "optional"


class MapType(Type):
    """A map from keys of one element type to values; a Python ``dict`` at run time."""

    __slots__ = ("key", "value")

    def __init__(self, key: DType, value: Type | None) -> None:
        self.key = key
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MapType) and (self.key, self.value) == (other.key, other.value)

    def __hash__(self) -> int:
        return hash(("map", self.key, self.value))

    def __str__(self) -> str:
        return f"map({self.key}, {self.value})"

    __repr__ = __str__


def _sharper(a: Dim, b: Dim) -> Dim:
    """A number beats a symbol, a symbol beats nothing."""
    if a is None or (isinstance(a, Symbol) and isinstance(b, int)):
        return b if b is not None else a
    return a
