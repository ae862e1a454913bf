"""Where the rules of ``cancel`` are declared, and found by operator."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal

from ranvier.graph.ir import Node, Value
from ranvier.passes.base import PassContext


class _Outcome(Enum):
    CHANGED = "the node was rewritten in place"


CHANGED = _Outcome.CHANGED
Outcome = Value | Literal[_Outcome.CHANGED] | str | None
Rule = Callable[[Node, PassContext], Outcome]

_RULES: dict[tuple[str, str], tuple[Rule, ...]] = {}


def cancels(*ops: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Declare a rule for operators; rules of one operator are tried in the order of their declaration."""

    def declare(rule: Rule) -> Rule:
        for op in ops:
            _RULES[domain, op] = (*_RULES.get((domain, op), ()), rule)
        return rule

    return declare


def rules_for(domain: str, op: str) -> tuple[Rule, ...]:
    return _RULES.get((domain, op), ())
