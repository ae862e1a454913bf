"""The gradient of a graph as more graph.

Walking backwards from the results, every node between them and what is asked for hands gradients on by its rule
(``ops/gradients``). A node without a rule of its own is first written out in plain operators; what that does not
help is named, all of it at once. The nodes that are made stand behind those that were there, so optimization,
placement and every provider treat them as they treat any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.topology import topological_order
from ranvier.ops import annotate
from ranvier.ops.gradients import Backward, by_parts, comes_apart, needs, reason_against, rule_of, stands_for_numbers
from ranvier.ops.gradients.sequences import carries
from ranvier.passes.differentiate_control import CONTROL, Kept, control_gradients, prepared
from ranvier.passes.edit import sharpen


def differentiate(
    graph: Graph, targets: Sequence[tuple[Value, Value | None]], wanted: Sequence[Value]
) -> list[Value | None]:
    """The gradients of the targets with respect to the wanted values; None where they do not depend on them.

    Each target comes with the gradient it has itself, None for ones (the sum of its elements is what is derived).
    Targets and wanted values are of this graph, not of one nested in it. Operators are in their newest form: rules do
    not know what broadcasting or defaults meant in old ones, which ``Modernise`` rewrites.
    """
    between, now, kept = _written_out(graph, [t for t, _ in targets], wanted)
    backward = Backward(graph)
    grads: dict[Value, list[Value]] = {}
    for given, seed in targets:
        target = now.get(given, given)
        grads.setdefault(target, []).append(backward.filled(1.0, target) if seed is None else seed)
    for node in reversed(between):
        found = [_total(backward, grads, value) for value in node.outputs]
        if all(each is None for each in found):
            continue
        for value, grad in _handed_on(backward, node, found, kept.get(node)):
            if value is not None and grad is not None and needs(value):
                if not stands_for_numbers(value):
                    sharpen(grad, value)  # a gradient has the shape of what it is the gradient of
                grads.setdefault(value, []).append(grad)
    return [_total(backward, grads, now.get(value, value)) for value in wanted]


def _handed_on(
    backward: Backward, node: Node, grads: list[Value | None], kept: Kept | None
) -> Iterable[tuple[Value | None, Value | None]]:
    """What a node reads, each with its gradient."""
    try:
        if node.op in CONTROL and not node.domain:
            return control_gradients(backward, node, grads, kept, differentiate).items()
        rule = rule_of(node.domain, node.op)
        assert rule is not None
        return zip(node.inputs, rule(backward, node, grads))
    except NotSupported as error:
        error.node = error.node or node.name or node.op
        raise


def _total(backward: Backward, grads: dict[Value, list[Value]], value: Value) -> Value | None:
    """The sum of what has come for a value, made once."""
    have = grads.get(value)
    if not have:
        return None
    if len(have) > 1:
        grads[value] = have = [backward.add_all(have)]
    return have[0]


def _written_out(
    graph: Graph, targets: Sequence[Value], wanted: Sequence[Value]
) -> tuple[list[Node], dict[Value, Value], dict[Node, Kept]]:
    """The nodes that lie between, in order, each with a rule; those that are others in disguise are replaced first, and
    the values that took the place of theirs are told. Loops keep from now on what their gradients need."""
    now: dict[Value, Value] = {}
    kept: dict[Node, Kept] = {}
    while True:
        between = _between(graph, [now.get(v, v) for v in targets], [now.get(v, v) for v in wanted])
        loops = [n for n in between if n.op in ("Loop", "Scan") and not n.domain and n not in kept]
        for node in loops:
            loop, replaced, keeps = prepared(graph, node)
            assert keeps is not None
            kept[loop] = keeps
            now = _followed(now, replaced)
        if loops:
            continue
        disguised = [n for n in between if comes_apart(n)]
        if not disguised:
            break
        for node in disguised:
            now = _followed(now, _replace(graph, node))
        annotate(graph)  # definitions compute shapes, which only a walk through the whole graph follows
    missing = [n for n in between if rule_of(n.domain, n.op) is None and n.op not in CONTROL]
    if missing:
        raise _unknown(missing)
    return between, now, kept


def _followed(now: dict[Value, Value], replaced: dict[Value, Value]) -> dict[Value, Value]:
    """What took whose place, after more has: a part can itself be made of parts."""
    return {**{old: replaced.get(new, new) for old, new in now.items()}, **replaced}


def _unknown(missing: Sequence[Node]) -> NotSupported:
    """All that has no gradient at once, with the reasons there are."""
    kinds = sorted({(n.op, reason_against(n.domain, n.op)) for n in missing}, key=lambda kind: kind[0])
    error = NotSupported(
        "no gradient is known of " + ", ".join(op if not why else f"{op} ({why})" for op, why in kinds)
    )
    error.node = missing[0].name or missing[0].op
    return error


def _replace(graph: Graph, node: Node) -> dict[Value, Value]:
    replaced = dict(zip(node.outputs, by_parts(node)))
    for old, new in replaced.items():
        new.type = new.type if old.type is None or new.type is None else new.type.merge(old.type)
        old.replace_by(new)
    graph.remove(node)
    return replaced


def _between(graph: Graph, targets: Sequence[Value], wanted: Sequence[Value]) -> list[Node]:
    """Nodes that depend on a wanted value and that a target depends on, in order."""
    order = topological_order(graph)
    touched: set[Value] = set(wanted)
    after: set[Node] = set()
    for node in order:
        if any(v in touched for v in node.dependencies()):
            after.add(node)
            touched.update(v for v in node.outputs if carries(v))
    needed: set[Value] = set(targets)
    found: list[Node] = []
    for node in reversed(order):
        if node in after and any(v in needed and carries(v) for v in node.outputs):
            found.append(node)
            needed.update(v for v in node.dependencies())
    return found[::-1]
