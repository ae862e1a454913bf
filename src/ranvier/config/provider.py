"""The few options that suit a machine rather than a model, and ready-made sets of them.

A :class:`ProviderConfig` says only what it is given; the rest is left to the environment, files and defaults. Its
values become options of the session: ``threads``, ``limits.memory_bytes``, ``optimization``, ``provider_options`` and
``memory``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar

from ranvier.config.memory import MemoryConfig
from ranvier.config.session import LEVELS, Level
from ranvier.devices import usable_cores, usable_memory
from ranvier.errors import InvalidConfig, nearest
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Instance, OptionsByName, Positive, Rule, Whole

_MB, _GB = 1 << 20, 1 << 30
_EDGE_CORES = 4  # what small machines have


@dataclass(frozen=True)
class ProviderConfig(Checked):
    """Options of the providers of a session; None leaves an option to the other sources."""

    threads: int | None = None
    memory_limit: int | None = None  # bytes that the runs of a session may take together
    optimization_level: Level | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of single providers, by their names
    memory: MemoryConfig | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "threads": Whole(1, optional=True),
        "memory_limit": Positive(),
        "optimization_level": Choice(LEVELS, optional=True),
        "options": OptionsByName(),
        "memory": Instance(MemoryConfig, optional=True),
    }

    @classmethod
    def edge(cls) -> ProviderConfig:
        """A small machine that does other work too: few threads, little memory, and that given back soon.

        Its runs take at most 1 GB together, or half of a smaller machine. Optimization is aggressive, because what is
        deployed there runs the same model for long.
        """
        memory = usable_memory()
        return cls(
            threads=min(_EDGE_CORES, usable_cores()),
            memory_limit=_GB if memory is None else max(1, min(_GB, memory // 2)),
            optimization_level="aggressive",
            memory=MemoryConfig(pool_size=16 * _MB, growth="incremental"),
        )

    @classmethod
    def cloud(cls) -> ProviderConfig:
        """A machine, or a container, that is there for this work: every core, and memory kept for the next run.

        A run ends with an error at four fifths of the memory, before the container's limit ends the process. Results
        are those of every other machine: optimization stays basic.
        """
        memory = usable_memory()
        return cls(
            threads=usable_cores(),
            memory_limit=None if memory is None else max(1, memory * 4 // 5),
            optimization_level="basic",
            memory=MemoryConfig(pool_size=_GB if memory is None else max(64 * _MB, min(4 * _GB, memory // 8))),
        )

    def session_options(self) -> dict[str, Any]:
        """What is said here, by the names of :class:`~ranvier.config.session.SessionConfig`."""
        found: dict[str, Any] = {
            "threads": self.threads,
            "limits": None if self.memory_limit is None else {"memory_bytes": self.memory_limit},
            "optimization": self.optimization_level,
            "provider_options": self.options or None,
            "memory": self.memory,
        }
        return {name: value for name, value in found.items() if value is not None}


PRESETS: dict[str, Callable[[], ProviderConfig]] = {"edge": ProviderConfig.edge, "cloud": ProviderConfig.cloud}


def preset(name: str) -> ProviderConfig:
    """The preset of that name; InvalidConfig with the nearest for an unknown one."""
    if name not in PRESETS:
        raise InvalidConfig(f"unknown preset {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]()


__all__ = ["PRESETS", "ProviderConfig", "preset"]
