"""What a value of an option may be: one rule checks it, whether it comes from code, from text or from a file.

A rule knows the range of an option and says so when a value is outside it; ``parse`` reads the text of an environment
variable or of a string in a file. Option sets (:class:`Checked`) are frozen dataclasses with one rule for each field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

from ranvier.errors import InvalidConfig, nearest
from ranvier.records import dataclass

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.ASCII)
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def amount(text: str) -> float | int | None:
    """A number, with k, M, G or T for powers of 1024; None for ``none``. ValueError for anything else."""
    folded = text.strip().lower()
    if folded == "none":
        return None
    match = _AMOUNT.fullmatch(folded)
    if match is None:
        raise ValueError(f"must be a number such as 30, 0.5, 512M or 4G, or none, got {text!r}")
    if "." not in match[1]:
        return int(match[1]) * _FACTORS[match[2]]
    number = float(match[1]) * _FACTORS[match[2]]
    return int(number) if number.is_integer() else number


def flag(text: str) -> bool:
    """True for 1, true, yes, on; False for 0, false, no, off; ValueError for anything else."""
    found = _FLAGS.get(text.strip().lower())
    if found is None:
        raise ValueError(f"must be one of 1, true, yes, on, 0, false, no, off, got {text!r}")
    return found


class Rule:
    """Anything at all; the base of the other rules."""

    def check(self, value: Any) -> Any:
        """The value in its normal form; ValueError with what it must be, to be read after the option's name."""
        return value

    def parse(self, text: str) -> Any:
        """The value that a text stands for; ValueError where it stands for none."""
        return text

    def __call__(self, owner: str, name: str, value: Any) -> Any:
        try:
            return self.check(value)
        except ValueError as error:
            raise InvalidConfig(f"{owner}: {name} {error}") from None


class Text(Rule):
    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be text, got {value!r}")
        return value


@dataclass(frozen=True)
class Flag(Rule):
    optional: bool = False

    def check(self, value: Any) -> bool | None:
        if not isinstance(value, bool) and not (value is None and self.optional):
            raise ValueError(f"must be True or False{' or None' if self.optional else ''}, got {value!r}")
        return value

    def parse(self, text: str) -> bool:
        return flag(text)


@dataclass(frozen=True)
class Choice(Rule):
    known: tuple[str, ...]
    optional: bool = False

    def check(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        if not isinstance(value, str) or value not in self.known:
            hint = nearest(value, self.known) if isinstance(value, str) else f" (known: {', '.join(self.known)})"
            raise ValueError(f"cannot be {value!r}{hint}")
        return value

    def parse(self, text: str) -> str:
        return text.strip().lower()


@dataclass(frozen=True)
class Positive(Rule):
    """A number above zero, or None for no limit; a count of bytes or nodes is whole."""

    whole: bool = True

    def check(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"must be a positive number or None, got {value!r}")
        if self.whole and isinstance(value, float) and not value.is_integer():
            raise ValueError(f"must be a whole number or None, got {value!r}")
        return int(value) if self.whole else value

    def parse(self, text: str) -> Any:
        return amount(text)


@dataclass(frozen=True)
class Whole(Rule):
    """A whole number within bounds."""

    low: int
    high: int | None = None
    optional: bool = False
    power_of_two: bool = False
    unit: str = ""

    def check(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        wrong = isinstance(value, bool) or not isinstance(value, int) or value < self.low
        wrong = wrong or (self.high is not None and value > self.high)
        if wrong or (self.power_of_two and value & (value - 1)):
            raise ValueError(f"must be {self._range()}, got {value!r}")
        return value

    def _range(self) -> str:
        kind = "a power of two" if self.power_of_two else "a whole number"
        unit = f" {self.unit}" if self.unit else ""
        bounds = (
            f" of {self.low:,} or more{unit}" if self.high is None else f" from {self.low:,} to {self.high:,}{unit}"
        )
        return f"{kind}{bounds}{' or None' if self.optional else ''}"

    def parse(self, text: str) -> Any:
        return amount(text)


@dataclass(frozen=True)
class Names(Rule):
    """Names in order; a text holds them separated by commas."""

    empty: bool = True

    def check(self, value: Any) -> tuple[str, ...]:
        found = self.parse(value) if isinstance(value, str) else value
        names = tuple(found) if isinstance(found, Sequence | set | frozenset) else ()
        if not isinstance(found, Sequence | set | frozenset) or not all(isinstance(n, str) and n for n in names):
            raise ValueError(f"must be names, got {value!r}")
        if not names and not self.empty:
            raise ValueError(f"must be names, at least one, got {value!r}")
        return names

    def parse(self, text: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())


class OptionsByName(Rule):
    """Options of providers: ``{"cpu": {"winograd": False}}``. What each provider takes, it checks itself."""

    def check(self, value: Any) -> Mapping[str, Mapping[str, Any]]:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a mapping from names of providers to their options, got {value!r}")
        for name, options in value.items():
            if not isinstance(name, str) or not isinstance(options, Mapping):
                raise ValueError(f"must give a mapping of options for each provider, got {options!r} for {name!r}")
            if not all(isinstance(option, str) for option in options):
                raise ValueError(f"for {name!r} must have names of options, got {list(options)!r}")
        return {name: dict(options) for name, options in value.items()}


@dataclass(frozen=True)
class Instance(Rule):
    """An option set within another."""

    kind: type[Checked]
    optional: bool = False

    def check(self, value: Any) -> Any:
        if not isinstance(value, self.kind) and not (value is None and self.optional):
            raise ValueError(f"must be a {self.kind.__name__}, got {type(value).__name__}")
        return value


Config = TypeVar("Config", bound="Checked")


class _Named(type):
    """Makes an option set only from names it has."""

    def __call__(cls, *values: Any, **given: Any) -> Any:
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in names:
                raise InvalidConfig(f"{cls.__name__}: unknown option {name!r}{nearest(name, names)}")
        return super().__call__(*values, **given)


@dataclass(frozen=True)
class Checked(metaclass=_Named):
    """Base of all option sets: each field has a rule, and unknown names raise with the nearest known one."""

    RULES: ClassVar[Mapping[str, Rule]] = {}

    def __post_init__(self) -> None:
        for name, rule in self.RULES.items():
            object.__setattr__(self, name, rule(type(self).__name__, name, getattr(self, name)))

    @classmethod
    def make(cls: type[Config], options: Mapping[str, Any] | None = None, **more: Any) -> Config:
        return cls(**{**(options or {}), **more})

    def updated(self: Config, **changes: Any) -> Config:
        """A copy with some options changed, validated again."""
        return replace(self, **changes)


__all__ = [
    "Checked",
    "Choice",
    "Flag",
    "Instance",
    "Names",
    "OptionsByName",
    "Positive",
    "Rule",
    "Text",
    "Whole",
    "amount",
    "flag",
]
