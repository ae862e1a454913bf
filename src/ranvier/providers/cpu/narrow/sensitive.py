"""Values that keep all their bits, whatever it costs: where a rounding of 1 in 256 would show in the results.

* what is raised to a power of e, or is an angle: an error of x is a relative error of exp(x), and x may be large
* what becomes a whole number or a position, or decides between them
* sums along a deep network that every layer adds to: rounding them again and again adds up
* what a mean is taken of and subtracted from, and the difference: normalisations that a model spells out are as exact
  as those that are one operator
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ranvier.codegen.definitions.defs import Contraction, Def, Moved, Pointwise, Rows
from ranvier.codegen.definitions.groups import Group
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.fold import is_arg
from ranvier.codegen.loops.ir import Const, Expr, Load, Op
from ranvier.dtypes import DType
from ranvier.graph.ir import Value

LOG = "goes into log"
ROUNDED = "goes into log, and may be rounded"
SIGNAL = "goes into log as a part of sums"  # of either sign, before it does
_STEEP = frozenset({"exp", "expm1", "log", "log1p", "pow", "sin", "cos", "tan", "sinh", "cosh", "atan2"})
_STEPPED = frozenset({"mod", "fmod", "floor", "ceil", "trunc", "round", "eq", "ne", "bits", "floordiv"})
_HARMLESS_POWER = 4.0  # exponents up to here only multiply the relative error


def exact_reads(group: Group, program: Definitions, keeps: Callable[[Def], bool]) -> dict[Value, str]:
    """The values that a group must read as they are, and why; or :data:`ROUNDED`, where a logarithm shows as much of
    their rounding as there is. ``keeps``: whether results are as exact as operands."""
    found: dict[Value, str] = {}  # of the values the group reads and makes
    for each in reversed(group.defs):
        wanted = next((found[v] for v in each.outputs if v in found), "")
        if wanted in (LOG, ROUNDED):
            wanted = ROUNDED if keeps(each) else SIGNAL
        for value, why in _reads(each, program, wanted):
            if value not in found or found[value] == ROUNDED or (found[value] == LOG and why == SIGNAL):
                found[value] = why
    return found


def _reads(each: Def, program: Definitions, wanted: str) -> Iterable[tuple[Value, str]]:
    """Operands of a definition that it needs exactly; ``wanted``: why its result must be exact, if it must."""
    if isinstance(each, Moved | Rows) and len(each.operands) > 1:
        others = each.sources[1:] if isinstance(each, Moved) else each.sources[1 if not each.uses else 0 :]
        yield from ((v, "says where to read") for v in others)
    if wanted:
        yield from ((v, wanted) for v in each.operands)
    elif isinstance(each, Pointwise):
        yield from _named(each, _exact(expression(each, program)))
    elif isinstance(each, Rows) and each.gather is None:
        body = each.build([Load(k, program.dtype(v)) for k, v in enumerate(each.operands)])
        for reduce in body.reduces:
            why = "is searched for its largest" if is_arg(reduce.fold) else ""
            yield from _named(each, _exact(reduce.value, why))
        for value in (*body.maps.values(), *body.finals.values()):
            yield from _named(each, _exact(value))


def _named(each: Pointwise | Rows, loads: dict[int, str]) -> Iterable[tuple[Value, str]]:
    operands = each.operands
    return ((operands[k], why) for k, why in loads.items())


def _exact(expr: Expr, why: str = "") -> dict[int, str]:
    """Loads below an operation that needs its operands exactly, and why."""
    found: dict[int, str] = {}
    seen: set[tuple[int, bool]] = set()
    stack = [(expr, why)]
    while stack:
        each, reason = stack.pop()
        if (id(each), bool(reason)) in seen:
            continue
        seen.add((id(each), bool(reason)))
        if isinstance(each, Load) and reason:
            found.setdefault(each.operand, reason)
        elif isinstance(each, Op):
            below = reason or _needs(each)
            stack += [(a, below) for a in each.args]
    return found


def _needs(op: Op) -> str:
    if op.name in _STEEP:
        power = op.args[1] if op.name == "pow" else None
        small = isinstance(power, Const) and abs(float(power.value)) <= _HARMLESS_POWER
        return "" if small else f"goes into {op.name}"
    if op.name in _STEPPED:
        return f"goes into {op.name}"
    if op.name == "cast" and not op.dtype.is_float and op.dtype is not DType.bool:
        return "becomes a whole number"
    return ""


def running_sums(groups: Iterable[Group], program: Definitions, readers: dict[Value, list[Group]]) -> set[Value]:
    """Results that add to an earlier tensor of their shape, and go both on and into a normalisation: what every block
    of a transformer adds to."""
    return {
        g.last.out
        for g in groups
        if len(readers.get(g.last.out, ())) > 1
        and any(isinstance(r.anchor, Rows) and r.anchor.mapped for r in readers[g.last.out])
        and _adds(g, program)
    }


def centred(groups: Iterable[Group], program: Definitions, readers: dict[Value, list[Group]]) -> set[Value]:
    """Tensors that a reduction of theirs is subtracted from, and what is left of them."""
    found: set[Value] = set()
    for group in groups:
        row = group.anchor
        if not isinstance(row, Rows) or row.mapped or row.gather is not None:
            continue
        made = {v for d in group.defs for v in d.outputs}
        wholes = {v for d in group.defs for v in d.operands if v not in made}
        for reader in readers.get(group.last.out, ()):
            both = wholes & {v for d in reader.defs for v in d.operands}
            if both and any(isinstance(d, Pointwise) and _has(expression(d, program), "sub") for d in reader.defs):
                found |= {*both, reader.last.out}
    return found


def expression(each: Pointwise, program: Definitions) -> Expr:
    """What a definition computes, operand ``k`` as ``Load(k)``."""
    return each.compute([Load(k, program.dtype(u.value)) for k, u in enumerate(each.uses)])


def _adds(group: Group, program: Definitions) -> bool:
    shape = program.shape(group.last.out)
    made = {v for d in group.defs for v in d.outputs}
    inside = sum(isinstance(d, Contraction) for d in group.defs)
    outside = {
        v
        for d in group.defs
        if isinstance(d, Pointwise)
        for v in d.operands
        if v not in made and v.const is None and v not in program.known and program.shape(v) == shape
    }
    if inside + len(outside) < 2:
        return False
    return any(isinstance(d, Pointwise) and _has(expression(d, program), "add") for d in group.defs)


def _has(expr: Expr, name: str) -> bool:
    """Whether there is such an operation on tensors, not on a tensor and a number."""
    stack, seen = [expr], set()
    while stack:
        each = stack.pop()
        if isinstance(each, Op) and id(each) not in seen:
            seen.add(id(each))
            if each.name == name and not any(isinstance(a, Const) for a in each.args):
                return True
            stack.extend(each.args)
    return False
