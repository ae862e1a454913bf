"""The operator ``Gradient`` of ai.onnx.preview.training, written out.

It names values of its own graph: ``y``, what it is derived by (``xs``), and what is held (``zs``); its operands say at
which point. Where those are the named values themselves the graph is derived as it stands; else the part of it that
leads from them to ``y`` is repeated with the operands in their place.
"""

from __future__ import annotations

from ranvier.config import SessionConfig
from ranvier.errors import InvalidGraph
from ranvier.graph.attributes import text_of
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import substitute
from ranvier.graph.topology import topological_order
from ranvier.ops.gradients import Backward
from ranvier.passes.differentiate import differentiate
from ranvier.passes.edit import builder
from ranvier.passes.manager import PassManager
from ranvier.passes.modernise import Modernise

DOMAIN = "ai.onnx.preview.training"


def expand_gradients(graph: Graph) -> None:
    """Replace every Gradient node of a graph; it must still have the names its model gave its values."""
    found = [node for node in graph.all_nodes() if node.op == "Gradient" and node.domain == DOMAIN]
    for node in found:
        assert node.graph is not None
        _expand(node.graph, node)
    if found:
        # gradients are of today's operators; the others become so too, so that one opset fits all
        PassManager([Modernise()]).run(graph, SessionConfig())


def _expand(graph: Graph, node: Node) -> None:
    values = {value.name: value for value in graph.values()}

    def named(key: str) -> list[Value]:
        names = [text_of(name) for name in node.attrs.get(key, ())]
        for name in names:
            if name not in values:
                raise InvalidGraph(f"Gradient {node.name!r} refers to {name!r}, which is no value of its graph")
        return [values[name] for name in names]

    wanted, held = named("xs"), named("zs")
    target = text_of(node.attrs.get("y", ""))
    if target not in values:
        raise InvalidGraph(f"Gradient {node.name!r} derives {target!r}, which is no value of its graph")
    points = [v for v in node.inputs if v is not None]
    if len(points) != len(wanted) + len(held):
        raise InvalidGraph(f"Gradient {node.name!r} has {len(points)} operands for {len(wanted) + len(held)} names")
    y = values[target]
    if any(a is not b for a, b in zip(points, [*wanted, *held])):
        y = _repeated(graph, node, y, dict(zip([*wanted, *held], points)))
        wanted = points[: len(wanted)]
    found = differentiate(graph, [(y, None)], wanted)
    ops = Backward(graph)
    for value, grad, source in zip(node.outputs, found, wanted):
        # an Identity each, because one gradient may be that of several and still every output has a name of its own
        substitute(value, ops.Identity(ops.zeros(source) if grad is None else grad), ops)
    graph.remove(node)
    graph.sort()


def _repeated(graph: Graph, before: Node, target: Value, instead: dict[Value, Value]) -> Value:
    """``target`` computed again with other values in place of some."""
    ops = builder(before, "gradient")
    for node in topological_order(graph):
        if node is before or not any(v in instead for v in node.dependencies()):
            continue
        operands = [None if v is None else instead.get(v, v) for v in node.inputs]
        made = ops.node(
            node.op, operands, dict(node.attrs), outputs=len(node.outputs), domain=node.domain, version=node.version
        )
        instead.update(zip(node.outputs, made.outputs))
        if target in instead:
            break
    return instead.get(target, target)
