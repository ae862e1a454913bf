"""Rules that tie nodes to providers: ``{"op:Conv": "cpu", "decoder/*": ["cpu", "reference"], "re:.*_bn$": "cpu"}``.

A rule is a node's name, an operator, a pattern with ``*``, ``?`` or ``[…]`` for either, or one of these said outright
by ``name:``, ``op:``, ``glob:`` or ``re:`` (a regular expression that must match a whole name or operator). Where
several rules match a node, the last one counts, so exceptions come after what they are exceptions from.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Node

Rules = Mapping[str, str | Sequence[str]]
KINDS = ("name", "op", "glob", "re")


class Named(Protocol):
    """What a rule can name: a provider, as far as its names go."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Iterable[str]: ...


def resolve_pins(
    rules: Rules, nodes: Sequence[Node], providers: Sequence[Named], *, must_match: bool = True
) -> dict[int, tuple[frozenset[int], str]]:
    """For every node (by position) that a rule ties: the providers (by position) it may go to, and that rule.

    A rule that matches no node, where it must, or names an unknown provider raises, with the nearest name that would
    have fitted.
    """
    known: dict[str, int] = {}
    for position, provider in enumerate(providers):
        for name in (provider.name, *provider.aliases):
            known.setdefault(name.lower(), position)
    found: dict[int, tuple[frozenset[int], str]] = {}
    for rule, wanted in rules.items():
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        if not names:
            raise InvalidConfig(f"pin {rule!r} names no provider")
        for name in names:
            if name.lower() not in known:
                hint = nearest(name, [provider.name for provider in providers])
                raise InvalidConfig(f"pin {rule!r}: unknown provider {name!r}{hint}")
        targets = frozenset(known[name.lower()] for name in names)
        matches = matching(rule)
        hits = [k for k, node in enumerate(nodes) if matches(node)]
        if not hits and must_match:
            hint = nearest(_bare(rule)[1], {node.name for node in nodes if node.name} | {node.op for node in nodes})
            raise InvalidConfig(f"pin {rule!r} matches no node{hint}")
        for k in hits:
            found[k] = (targets, rule)
    return found


def _bare(rule: str) -> tuple[str, str]:
    """The kind of a rule and its text; a prefix that is no kind belongs to the text, for names may hold colons."""
    kind, colon, text = rule.partition(":")
    if colon and kind in KINDS:
        return kind, text
    return ("glob" if any(c in rule for c in "*?[") else "either"), rule


def matching(rule: str) -> Callable[[Node], bool]:
    """Whether a rule names a node."""
    kind, text = _bare(rule)
    if kind == "name":
        return lambda node: node.name == text
    if kind == "op":
        return lambda node: text in (node.op, f"{node.domain}::{node.op}")
    if kind == "either":
        return lambda node: text in (node.name, node.op)
    try:
        pattern = re.compile(fnmatch.translate(text) if kind == "glob" else text)
    except re.error as error:
        raise InvalidConfig(f"pin {rule!r} is no regular expression: {error}") from None
    return lambda node: bool(pattern.fullmatch(node.name) or pattern.fullmatch(node.op))
