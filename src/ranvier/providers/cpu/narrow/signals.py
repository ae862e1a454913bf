"""Signals whose logarithm is taken: spectra of sound, mostly.

What is soft is as visible in a logarithm as what is loud, but a sum of rounded numbers is only as exact as its largest
terms. So everything that is computed on the way to a logarithm stays in float32, back to where a network begins: an
activation or a normalisation, behind which no signal is left to be seen. Only the last steps may be rounded, where no
number is negative (:mod:`.positive`): powers, and bands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ranvier.codegen.definitions.defs import Def, Pointwise, Rows
from ranvier.codegen.definitions.groups import Group
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Const, Expr, Load, Op
from ranvier.graph.ir import Value
from ranvier.providers.cpu.narrow.sensitive import LOG, ROUNDED, SIGNAL, expression

_ACTIVATIONS = frozenset({"sigmoid", "tanh", "erf", "softplus", "exp", "expm1"})


def before_logarithms(
    groups: Sequence[Group], program: Definitions, exact: Iterable[tuple[Value, str]], keeps: Callable[[Def], bool]
) -> tuple[set[int], set[Value]]:
    """What goes into a logarithm without an activation in between: the definitions, by identity, that have to be
    computed exactly, and the results that have to be kept so; not those whose rounding shows as no more than it is.

    ``exact`` are the values that some group must read as they are, and why."""
    maker = {v: (g, d) for g in groups for d in g.defs for v in d.outputs}
    found: set[int] = set()
    kept: set[Value] = set()
    seen: set[tuple[int, bool]] = set()
    stack = [(v, why != SIGNAL) for v, why in exact if why in (LOG, ROUNDED, SIGNAL)]
    while stack:
        value, may_round = stack.pop()
        group, each = maker.get(value, (None, None))
        if group is None or each is None or _begins_a_network(group, program):
            continue
        if not may_round:
            kept.add(value)
        may_round = may_round and keeps(each)
        if (id(each), may_round) in seen or (id(each), False) in seen:
            continue
        seen.add((id(each), may_round))
        if not may_round:
            found.add(id(each))
        stack += [(v, may_round) for v in each.operands]
    return found, kept


def _begins_a_network(group: Group, program: Definitions) -> bool:
    for each in group.defs:
        if isinstance(each, Rows) and each.mapped:
            return True
        if isinstance(each, Pointwise) and _activates(expression(each, program)):
            return True
    return False


def _activates(expr: Expr) -> bool:
    stack, seen = [expr], set()
    while stack:
        each = stack.pop()
        if not isinstance(each, Op) or id(each) in seen:
            continue
        seen.add(id(each))
        rectified = each.name == "max" and any(isinstance(a, Const) and a.value == 0 for a in each.args)
        if each.name in _ACTIVATIONS or rectified:
            return True
        stack += [a for a in each.args if not isinstance(a, Load)]
    return False
