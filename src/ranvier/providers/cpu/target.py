"""What a partition is realised for, with, and into."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage
from ranvier.codegen.tuning import Decision, Table
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.graph.tensors import ConstTensor, Same
from ranvier.providers.base import NodePrecision
from ranvier.records import dataclass

T = TypeVar("T")


# by what they are made of: graphs of one module for several sizes have its codes once
_IN_USE: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


class Packs:
    """Constants in the form kernels want them: made once, shared by all specialisations of a partition."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return cast(T, found)

    def shared(self, sources: Sequence[ConstTensor | None], more: Hashable, make: Callable[[], T]) -> T:
        """As ``get``, of constants and all ``more`` that it depends on, and the same that other partitions have in use.
        Constants are not looked at again then."""
        key = (*(None if each is None else Same(each.origin) for each in sources), more)

        def found() -> T:
            made = _IN_USE.get(key)
            if made is None:
                made = _IN_USE[key] = make()
                for each in sources:
                    if each is not None:
                        each.release()
            return cast(T, made)

        return self.get(key, found)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in {id(a): a for a in _arrays(list(self._made.values()))}.values())


def _arrays(made: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Every array of what was made: packed forms are arrays, storages, and structures of them."""
    if isinstance(made, np.ndarray):
        yield made
    elif isinstance(made, Storage):
        yield from _arrays(made.array)
    elif isinstance(made, list | tuple):
        for item in made:
            yield from _arrays(item)
    elif hasattr(made, "storage"):
        yield from _arrays(made.storage)
    elif is_dataclass(made):
        for each in fields(made):
            yield from _arrays(getattr(made, each.name))


@dataclass
class Assignment:
    """``stored``: the type of 16 bits of the values that have one in memory. ``products``: definitions, by identity,
    that multiply in it. ``coarse``: those that compute in float32 what would be float64 otherwise."""

    stored: dict[Value, DType] = field(default_factory=dict)
    products: set[int] = field(default_factory=set)
    coarse: set[int] = field(default_factory=set)
    choices: dict[str, NodePrecision] = field(default_factory=dict)  # by the label of definitions: the node's name


@dataclass
class Realised:
    """Launches in order, where the outputs are, and which results may take over an operand's memory."""

    launches: list[Launch] = field(default_factory=list)
    reuse: dict[Storage, list[Storage]] = field(default_factory=dict)
    checks: list[tuple[Storage, str, str]] = field(default_factory=list)
    assignment: Assignment = field(default_factory=Assignment)
    decisions: list[Decision] = field(default_factory=list)
    joined: list[tuple[str, ...]] = field(default_factory=list)  # labels of products of one tensor that are one step


@dataclass(frozen=True)
class Target:
    """What code is made for.

    ``precision``: "f32", or "bf16" or "fp16" where float32 values may be stored and multiplied in 16 bits. Nodes whose
    names fit a pattern of ``keep_f32`` are left as they are; ``ranges`` are the largest absolute values seen of
    tensors, by name, which float16 needs to know. ``tuning`` holds decisions that were measured.
    ``int8_activations``: what meets weights of few bits may be rounded to 8 bits. ``joined_products``: those of one
    tensor may be one step. ``flush_subnormals``: code takes them for zeros. ``coarse``: what is computed in float64 for
    the sake of its sums may be in float32, as it is wherever values may have 16 bits.
    """

    isa: Isa
    threads: int
    winograd: bool = True
    precision: str = "f32"
    keep_f32: tuple[str, ...] = ()
    ranges: Mapping[str, float] | None = None
    tuning: Table | None = None
    int8_activations: bool = False
    joined_products: bool = True
    flush_subnormals: bool = False
    coarse: bool = False

    @property
    def narrow(self) -> DType | None:
        """The type of 16 bits that float32 values may be stored in; None where they stay as they are."""
        return _NARROW.get(self.precision)


_NARROW = {"bf16": DType.bfloat16, "fp16": DType.float16}
