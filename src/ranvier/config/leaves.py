"""Options one by one: ``limits.memory_bytes`` is an option of its own, whichever source sets it.

An option set within another (limits, memory) and the options of providers are taken apart into single options with
dotted names, so that each can come from another source, and put together again at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ranvier.config.memory import MemoryConfig
from ranvier.config.session import Limits, SessionConfig
from ranvier.errors import InvalidConfig, nearest
from ranvier.rules import Checked, Rule

GROUPS: dict[str, type[Checked]] = {"limits": Limits, "memory": MemoryConfig}
OF_PROVIDERS = "provider_options"
OF_A_MODEL = ("name", "symbol_bounds")  # options that make sense for one model only: set in code
_RULES: dict[str, Rule] = {
    **{name: rule for name, rule in SessionConfig.RULES.items() if name not in GROUPS and name != OF_PROVIDERS},
    **{f"{group}.{name}": rule for group, kind in GROUPS.items() for name, rule in kind.RULES.items()},
}
NAMES = tuple(_RULES)  # of every option but those of providers, whose names only they know


def taken_apart(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of a dotted name and a value, neither of them checked."""
    for name, value in given.items():
        if name in GROUPS and isinstance(value, GROUPS[name]):
            yield from ((f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value))
        elif name in GROUPS and isinstance(value, Mapping):
            yield from ((f"{name}.{option}", inner) for option, inner in value.items())
        elif name == OF_PROVIDERS and isinstance(value, Mapping):
            for provider, options in value.items():
                if isinstance(options, Mapping):
                    yield from ((f"{name}.{provider}.{option}", inner) for option, inner in options.items())
                else:
                    yield f"{name}.{provider}", options
        else:
            yield name, value


def checked(name: str, value: Any, *, text: bool = False) -> Any:
    """The value of one option in its normal form; InvalidConfig for a name or a value that cannot be.

    ``text``: a text may stand for a number, a flag or names.
    """
    rule = _RULES.get(name)
    if rule is None:
        _check_name(name, value)
        return value  # of a provider's option, which the provider checks
    try:
        return rule.check(rule.parse(value) if text and isinstance(value, str) else value)
    except ValueError as error:
        raise InvalidConfig(f"{name} {error}") from None


def read_text(name: str, text: str) -> Any:
    """The value that a text on the command line stands for; unchecked."""
    rule = _RULES.get(name)
    if rule is None:
        return _literal(text)  # what a provider takes is not known here: read it as a file would
    try:
        return rule.parse(text)
    except ValueError as error:
        raise InvalidConfig(f"{name} {error}") from None


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _check_name(name: str, value: Any) -> None:
    group = name.split(".")[0]
    if group == OF_PROVIDERS:
        if name.count(".") != 2 or not all(name.split(".")):
            raise InvalidConfig(f"{name} must give the options of a provider by their names, got {value!r}")
        return
    if name in GROUPS:
        raise InvalidConfig(f"{name} must be a {GROUPS[name].__name__} or give its options by name, got {value!r}")
    if group in GROUPS:
        hint = nearest(name.partition(".")[2], GROUPS[group].RULES)
    else:
        hint = nearest(name, {n.split(".")[0] for n in [*NAMES, OF_PROVIDERS]})
    raise InvalidConfig(f"unknown option {name!r}{hint}")


def put_together(leaves: Mapping[str, Any]) -> SessionConfig:
    """The session's options from single ones; InvalidConfig where they contradict each other."""
    made: dict[str, Any] = {name: leaves[name] for name in NAMES if "." not in name}
    for group, kind in GROUPS.items():
        made[group] = kind.make({f.name: leaves[f"{group}.{f.name}"] for f in fields(kind)})
    of_providers: dict[str, dict[str, Any]] = {}
    for name, value in leaves.items():
        if name.startswith(f"{OF_PROVIDERS}."):
            _, provider, option = name.split(".", 2)
            of_providers.setdefault(provider, {})[option] = value
    return SessionConfig.make(made, provider_options=of_providers)


__all__ = ["GROUPS", "NAMES", "OF_A_MODEL", "OF_PROVIDERS", "checked", "put_together", "read_text", "taken_apart"]
