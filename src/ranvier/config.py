"""Options: frozen dataclasses, validated when they are made; environment variables only set defaults.

An unknown name raises with the nearest known one; a value out of range raises with the range.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from ranvier.errors import InvalidConfig, nearest

Level = Literal["none", "basic", "aggressive"]
LEVELS: tuple[Level, ...] = ("none", "basic", "aggressive")
PRECISIONS = ("float32",)
FALLBACKS = ("on", "off")

Config = TypeVar("Config", bound="_Checked")


@dataclass(frozen=True)
class _Checked:
    """Base of all option sets: ``make(**names)`` rejects unknown names with a hint."""

    @classmethod
    def make(cls: type[Config], options: Mapping[str, Any] | None = None, **more: Any) -> Config:
        given = {**(options or {}), **more}
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidConfig(f"{cls.__name__}: unknown option {name!r}{nearest(name, known)}")
        return cls(**given)

    def updated(self: Config, **changes: Any) -> Config:
        """A copy with some options changed, validated again."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise InvalidConfig(f"{type(self).__name__}: unknown option {name!r}{nearest(name, known)}")
        return replace(self, **changes)


def _positive(owner: str, name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidConfig(f"{owner}: {name} must be a positive number or None, got {value!r}")


def _one_of(owner: str, name: str, value: Any, known: Iterable[str]) -> None:
    if value not in tuple(known):
        hint = nearest(value, known) if isinstance(value, str) else f" (known: {', '.join(known)})"
        raise InvalidConfig(f"{owner}: {name} cannot be {value!r}{hint}")


@dataclass(frozen=True)
class Limits(_Checked):
    """What a model may take. ``None`` means no limit. Crossing one raises ResourceLimit before the damage is done."""

    model_bytes: int | None = None  # size of the model file, external data not counted
    tensor_bytes: int | None = 1 << 34  # any single tensor, while loading or running
    graph_depth: int | None = 64  # nesting of subgraphs and functions
    graph_nodes: int | None = 1_000_000  # nodes in all graphs together
    run_seconds: float | None = None  # wall time of one run; checked between nodes
    memory_bytes: int | None = None  # planned buffers and live tensors of one run

    def __post_init__(self) -> None:
        for option in fields(self):
            _positive("Limits", option.name, getattr(self, option.name))


@dataclass(frozen=True)
class SessionConfig(_Checked):
    """Everything a session is made with."""

    providers: tuple[str, ...] = ("auto",)
    provider_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optimization: Level = "basic"
    disabled_passes: tuple[str, ...] = ()
    precision: str = "float32"
    threads: int | None = None  # for providers that run threads; the reference leaves them to NumPy
    fold_limit: int = 1 << 24  # constant folding makes no constant larger than this many bytes
    plan_cache: int = 16  # how many shapes keep their plan
    symbol_bounds: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    fallback: str = "on"  # "off": only the first provider may run anything, and an absent one raises
    debug: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.providers, str):
            object.__setattr__(self, "providers", tuple(p.strip() for p in self.providers.split(",") if p.strip()))
        else:
            object.__setattr__(self, "providers", tuple(self.providers))
        object.__setattr__(self, "disabled_passes", tuple(self.disabled_passes))
        if not self.providers or not all(isinstance(p, str) for p in self.providers):
            raise InvalidConfig(f"SessionConfig: providers must be names, got {self.providers!r}")
        _one_of("SessionConfig", "optimization", self.optimization, LEVELS)
        _one_of("SessionConfig", "precision", self.precision, PRECISIONS)
        _one_of("SessionConfig", "fallback", self.fallback, FALLBACKS)
        _positive("SessionConfig", "threads", self.threads)
        _positive("SessionConfig", "plan_cache", self.plan_cache)
        if not isinstance(self.fold_limit, int) or self.fold_limit < 0:
            raise InvalidConfig(f"SessionConfig: fold_limit must be 0 or more bytes, got {self.fold_limit!r}")
        if not isinstance(self.limits, Limits):
            raise InvalidConfig(f"SessionConfig: limits must be a Limits, got {type(self.limits).__name__}")
        if not isinstance(self.debug, int) or not 0 <= self.debug <= 4:
            raise InvalidConfig(f"SessionConfig: debug must be 0 to 4, got {self.debug!r}")

    @classmethod
    def default(cls) -> SessionConfig:
        """The built-in defaults with what the environment sets laid over them."""
        return cls.make(environment())


def _level(text: str) -> str:
    return text.lower()


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "RANVIER_PROVIDERS": ("providers", _names),
    "RANVIER_OPTIMIZATION": ("optimization", _level),
    "RANVIER_THREADS": ("threads", int),
    "RANVIER_DEBUG": ("debug", int),
}


def environment(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Session options that environment variables set; a malformed value raises and names the variable."""
    env = os.environ if env is None else env
    found: dict[str, Any] = {}
    for variable, (option, parse) in _ENVIRONMENT.items():
        text = env.get(variable)
        if not text:
            continue
        try:
            found[option] = parse(text)
        except ValueError:
            raise InvalidConfig(f"environment variable {variable}: {text!r} is not a valid value") from None
    return found
