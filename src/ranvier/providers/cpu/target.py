"""What a partition is realised for, with, and into."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage

T = TypeVar("T")


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
