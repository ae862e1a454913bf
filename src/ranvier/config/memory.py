"""How memory is taken, kept and given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from ranvier.errors import InvalidConfig
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Flag, Rule, Whole

Growth = Literal["static", "dynamic", "incremental"]
GROWTHS: tuple[Growth, ...] = ("static", "dynamic", "incremental")
LEAST_ALIGNMENT = 64  # a cache line, and the widest vector register: generated code counts on it
MOST_ALIGNMENT = 1 << 21  # a huge page


@dataclass(frozen=True)
class MemoryConfig(Checked):
    """The pool an allocator keeps.

    ``growth`` says when the pool takes memory from the system: ``static``, all of ``pool_size`` at once and never
    more, so that a request beyond it raises OutOfMemory; ``dynamic``, chunks that double in size, which small requests
    share; ``incremental``, for each request that nothing in the pool serves a chunk of its own size.
    """

    pool_size: int | None = None  # bytes kept for reuse; None: what the allocator thinks right
    alignment: int = LEAST_ALIGNMENT  # bytes; a power of two
    pooling: bool = True  # False: what is freed goes back to the system at once
    growth: Growth = "dynamic"
    secure: bool = False  # buffers are zeroed when they are freed

    RULES: ClassVar[Mapping[str, Rule]] = {
        "pool_size": Whole(0, optional=True, unit="bytes"),
        "alignment": Whole(LEAST_ALIGNMENT, MOST_ALIGNMENT, power_of_two=True, unit="bytes"),
        "pooling": Flag(),
        "growth": Choice(GROWTHS),
        "secure": Flag(),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth == "static" and not (self.pooling and self.pool_size):
            raise InvalidConfig("MemoryConfig: growth='static' needs a pool_size above 0, and pooling")


__all__ = ["GROWTHS", "LEAST_ALIGNMENT", "MOST_ALIGNMENT", "Growth", "MemoryConfig"]
