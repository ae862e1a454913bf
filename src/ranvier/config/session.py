"""The options of a session. Where they come from is told in :mod:`ranvier.config.resolve`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

from ranvier.config.memory import MemoryConfig
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Flag, Instance, Names, OptionsByName, Positive, Rule, Text, Whole

Level = Literal["none", "basic", "aggressive"]
LEVELS: tuple[Level, ...] = ("none", "basic", "aggressive")
PRECISIONS = ("float32", "bf16", "fp16")
_SPELLINGS = {
    **dict.fromkeys(("float32", "f32", "fp32", "float", "single"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("fp16", "f16", "float16", "half"), "fp16"),
}
FALLBACKS = ("on", "off")
POLICIES = ("cost", "priority")


@dataclass(frozen=True)
class Limits(Checked):
    """What a model may take. ``None`` means no limit. Crossing one raises ResourceLimit before the damage is done."""

    model_bytes: int | None = None  # size of the model file, external data not counted
    tensor_bytes: int | None = 1 << 34  # any single tensor, while loading or running
    graph_depth: int | None = 64  # nesting of subgraphs and functions
    graph_nodes: int | None = 1_000_000  # nodes in all graphs together
    run_seconds: float | None = None  # wall time of one run; checked between nodes
    memory_bytes: int | None = None  # all runs at once: weights in the form they use, buffers, outputs, live tensors

    RULES: ClassVar[Mapping[str, Rule]] = {
        "model_bytes": Positive(),
        "tensor_bytes": Positive(),
        "graph_depth": Positive(),
        "graph_nodes": Positive(),
        "run_seconds": Positive(whole=False),
        "memory_bytes": Positive(),
    }


class _Precision(Choice):
    """The name of a type as people write it, in the spelling used here."""

    def check(self, value: Any) -> str | None:
        return super().check(_SPELLINGS.get(value.strip().lower(), value) if isinstance(value, str) else value)


class _Sample(Rule):
    """Inputs by name, or the .npz file that holds them; empty for none."""

    def check(self, value: Any) -> Any:
        if not isinstance(value, str | os.PathLike | Mapping) or not all(isinstance(n, str) for n in _keys(value)):
            raise ValueError(f"must be the name of an .npz file or arrays by the names of inputs, got {value!r}")
        return os.fspath(value) if isinstance(value, os.PathLike) else value


def _keys(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, Mapping) else ()


class _Bounds(Rule):
    """Bounds of symbolic dimensions: ``{"batch": (1, 8), "length": (1, None)}``."""

    def check(self, value: Any) -> Mapping[str, tuple[int, int | None]]:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a mapping from names of dimensions to (least, most), got {value!r}")
        return {name: _bounds(name, pair) for name, pair in value.items()}


def _bounds(name: Any, pair: Any) -> tuple[int, int | None]:
    low, high = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
    if not isinstance(name, str) or not isinstance(low, int) or not isinstance(high, int | None) or low < 0:
        raise ValueError(f"must give (least, most) for each dimension, got {pair!r} for {name!r}")
    if high is not None and high < low:
        raise ValueError(f"of {name!r} are empty: from {low} to {high}")
    return low, high


class _Pins(Rule):
    """Rules that tie nodes to providers: ``{"op:Conv": "cpu", "decoder/*": ("cpu", "reference")}``.

    As text: ``op:Conv=cpu; decoder/*=cpu|reference``.
    """

    def check(self, value: Any) -> Mapping[str, tuple[str, ...]]:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a mapping from rules to providers, got {value!r}")
        return {_rule(rule): _pinned(rule, providers) for rule, providers in value.items()}

    def parse(self, text: str) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for part in text.split(";"):
            rule, sign, names = part.strip().rpartition("=")
            if part.strip() and not (sign and rule):
                raise ValueError(f"must be like 'op:Conv=cpu; decoder/*=cpu|reference', got {text!r}")
            if part.strip():
                found[rule.strip()] = [name.strip() for name in names.split("|") if name.strip()]
        return found


def _rule(rule: Any) -> str:
    if not isinstance(rule, str) or not rule:
        raise ValueError(f"must have names, operators or patterns of nodes as keys, got {rule!r}")
    return rule


def _pinned(rule: str, providers: Any) -> tuple[str, ...]:
    names = (providers,) if isinstance(providers, str) else providers
    if not isinstance(names, tuple | list) or not names or not all(isinstance(n, str) and n for n in names):
        raise ValueError(f"must name at least one provider for {rule!r}, got {providers!r}")
    return tuple(names)


@dataclass(frozen=True)
class SessionConfig(Checked):
    """Everything a session is made with."""

    providers: tuple[str, ...] = ("auto",)
    provider_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    policy: str | None = None  # who gets a node; None: "cost" for the providers "auto", "priority" for a list
    pins: Mapping[str, str | Sequence[str]] = field(default_factory=dict)  # nodes tied to providers
    optimization: Level = "basic"
    disabled_passes: tuple[str, ...] = ()
    precision: str = "float32"  # what float32 values may be stored and multiplied in; see docs/precision.md
    keep_f32: tuple[str, ...] = ()  # names or patterns of nodes that a narrower precision leaves alone
    calibration: str | Mapping[str, Any] = ""  # inputs on which it is found out what else must be left alone …
    max_error: float = 0.01  # … so that no output is further off than this part of its largest value
    tune: float | None = None  # seconds in which to look for faster code while loading; see docs/tuning.md
    threads: int | None = None  # for providers that run threads; the reference leaves them to NumPy
    fold_limit: int = 1 << 24  # constant folding makes no constant larger than this many bytes
    plan_cache: int = 16  # how many shapes keep their plan
    symbol_bounds: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    dims_apart: bool = False  # a name of a dimension that several inputs have may be another size in each
    limits: Limits = field(default_factory=Limits)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    fallback: str = "on"  # "off": only the first provider may run anything, and an absent one raises
    debug: int = 0
    name: str = ""

    RULES: ClassVar[Mapping[str, Rule]] = {
        "providers": Names(empty=False),
        "provider_options": OptionsByName(),
        "policy": Choice(POLICIES, optional=True),
        "pins": _Pins(),
        "optimization": Choice(LEVELS),
        "disabled_passes": Names(),
        "precision": _Precision(PRECISIONS),
        "keep_f32": Names(),
        "calibration": _Sample(),
        "max_error": Positive(whole=False),
        "tune": Positive(whole=False),
        "threads": Whole(1, optional=True),
        "fold_limit": Whole(0, unit="bytes"),
        "plan_cache": Whole(1),
        "symbol_bounds": _Bounds(),
        "dims_apart": Flag(),
        "limits": Instance(Limits),
        "memory": Instance(MemoryConfig),
        "fallback": Choice(FALLBACKS),
        "debug": Whole(0, 4),
        "name": Text(),
    }

    @property
    def placing(self) -> str:
        """The policy in effect."""
        return self.policy or ("cost" if self.providers == ("auto",) else "priority")

    @classmethod
    def default(cls, *, preset: str | None = None, **options: Any) -> SessionConfig:
        """These options, laid over what the environment, files, and a preset set; see :mod:`ranvier.config.resolve`."""
        from ranvier.config.resolve import resolve  # which puts together the sets of this module

        return resolve(options, preset=preset).config
