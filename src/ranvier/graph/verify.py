"""``verify(graph)``: the invariants of the IR, checked in one walk.

Run between passes in tests and under ``RANVIER_DEBUG``. Each breach raises InvalidGraph and names the thing.
"""

from __future__ import annotations

from ranvier.errors import InvalidGraph
from ranvier.graph.ir import Graph, Node, Value


def verify(graph: Graph) -> None:
    """Raise InvalidGraph unless the graph keeps its invariants:

    - the node list is linked both ways and its length is right;
    - every operand is defined before its use, in this graph or an enclosing one;
    - use lists and operands agree in both directions;
    - a value has one definition; outputs are defined in the graph that lists them;
    - names of graph inputs and constants are unique.
    """
    _verify(graph, {}, set())


def _verify(graph: Graph, visible: dict[int, Value], seen: set[int]) -> None:
    here = f"graph {graph.name!r}"
    defined = dict(visible)

    def define(value: Value, what: str) -> None:
        if id(value) in seen:
            raise InvalidGraph(f"{here}: {value} is defined twice, the second time as {what}")
        seen.add(id(value))
        defined[id(value)] = value

    names: set[str] = set()
    for value in graph.inputs:
        define(value, "an input")
        if value.producer is not None or value.const is not None or value.graph is not graph:
            raise InvalidGraph(f"{here}: input {value} has a producer, a constant or another owner")
        if value.name in names:
            raise InvalidGraph(f"{here}: two inputs are named {value.name!r}")
        names.add(value.name)
    for name, value in graph.constants.items():
        define(value, "a constant")
        if value.const is None or value.producer is not None or value.graph is not graph or value.name != name:
            raise InvalidGraph(f"{here}: constant {value} is not set up as one")
    for name in graph.defaults:
        if name not in names:
            raise InvalidGraph(f"{here}: default for {name!r}, which is no input")

    count = 0
    before: Node | None = None
    for node in graph:
        count += 1
        label = f"{here}: {node.op} {node.name!r}"
        if node.graph is not graph or node._prev is not before:
            raise InvalidGraph(f"{label} is not linked properly")
        before = node
        for position, operand in enumerate(node.inputs):
            if operand is None:
                continue
            if id(operand) not in defined:
                raise InvalidGraph(f"{label}: operand {operand} is not defined before it is used")
            if (node, position) not in operand.uses:
                raise InvalidGraph(f"{label}: {operand} does not know this use (input {position})")
        for body in node.subgraphs():
            if body.parent is not node:
                raise InvalidGraph(f"{label}: subgraph {body.name!r} has another parent")
            _verify(body, defined, seen)
        for position, result in enumerate(node.outputs):
            if result.producer is not node or result.index != position:
                raise InvalidGraph(f"{label}: output {result} does not know its producer")
            define(result, f"an output of {node.op} {node.name!r}")
    if count != len(graph) or graph._last is not before:
        raise InvalidGraph(f"{here}: node list of length {len(graph)} holds {count} nodes")

    own = {id(v) for v in graph.values()}
    for value in graph.outputs:
        if id(value) not in own:
            raise InvalidGraph(f"{here}: output {value} is not defined in it")
    for value in graph.values():
        for user, position in value.uses:
            if user.graph is None or user.input(position) is not value:
                raise InvalidGraph(f"{here}: {value} lists a use by {user.op} {user.name!r} that is not there")
