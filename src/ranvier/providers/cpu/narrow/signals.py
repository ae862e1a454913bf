"""Signals whose logarithm is taken: spectra of sound, mostly.

What is soft is as visible in a logarithm as what is loud, but a sum of rounded numbers is only as exact as its largest
terms. So everything that is computed on the way to a logarithm stays in float32, back to where a network begins: an
activation or a normalisation, behind which no signal is left to be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ranvier.codegen.definitions.defs import Pointwise, Rows
from ranvier.codegen.definitions.groups import Group
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Const, Expr, Load, Op
from ranvier.graph.ir import Value
from ranvier.providers.cpu.narrow.sensitive import expression

_ACTIVATIONS = frozenset({"sigmoid", "tanh", "erf", "softplus", "exp", "expm1"})


def before_logarithms(groups: Sequence[Group], program: Definitions, exact: Iterable[tuple[Value, str]]) -> set[int]:
    """The groups, by identity, whose results go into a logarithm without an activation in between.

    ``exact`` are the values that some group must read as they are, and why."""
    maker = {v: g for g in groups for d in g.defs for v in d.outputs}
    found: set[int] = set()
    stack = [v for v, why in exact if why.startswith("goes into log")]
    while stack:
        group = maker.get(stack.pop())
        if group is not None and id(group) not in found and not _begins_a_network(group, program):
            found.add(id(group))
            stack += [v for d in group.defs for v in d.operands]
    return found


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
