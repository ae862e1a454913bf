"""What a partition is realised for, with, and into."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage

T = TypeVar("T")


class Same:
    """An array as part of a key: equal to itself only, and kept alive, so that no other can come to stand in its
    place in memory and be taken for it."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray[Any, Any] | None) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.array is other.array

    def __hash__(self) -> int:
        return id(self.array)


class Packs:
    """Constants in the form kernels want them: made once, shared by all specialisations of a partition."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return cast(T, found)

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(made, "nbytes", 0)) for made in self._made.values())


@dataclass
class Realised:
    """Launches in order, where the outputs are, and which results may take over an operand's memory."""

    launches: list[Launch] = field(default_factory=list)
    reuse: dict[Storage, list[Storage]] = field(default_factory=dict)
    checks: list[tuple[Storage, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """What code is made for."""

    isa: Isa
    threads: int
    winograd: bool = True
