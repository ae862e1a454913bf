"""Values inside branches and loops among the outputs of a graph, so that a run shows them.

What a body computes is computed each time that it runs: never in a branch that is not taken, in a loop at every step,
with shapes that may change from step to step. So it is handed out as a sequence, which is made before and which bodies
are given: they put the value into it and hand it on. A branch that is not taken hands it on as it is, loops carry it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ranvier.dtypes import DType
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import SequenceType, TensorType

_LEAST_VERSIONS = {"If": 1, "Loop": 1, "Scan": 9}  # before, Scan had an axis for batches
_SEQUENCES = 11  # the version of operators on them


def can_be_shown(value: Value) -> bool:
    """Whether :func:`exposed` can show a value of a graph, or of a body in it. Constants need no run."""
    if value.const is not None or not isinstance(value.type, TensorType) or value.type.dtype is None:
        return False
    around = value.owner.parent if value.owner is not None else None
    while around is not None:
        if around.domain or around.version < _LEAST_VERSIONS.get(around.op, around.version + 1):
            return False
        around = around.graph.parent if around.graph is not None else None
    return True


def exposed(graph: Graph, names: Iterable[str]) -> Graph:
    """A copy that shares the constants, with further values of it and of its bodies, by names that nothing else has,
    among its outputs; those of bodies as sequences, of what each time gave that they were computed."""
    names = list(names)
    there = {value.name for value in graph.values()}
    made = copied(graph, [name for name in names if name in there])
    inside = {value.name: value for body in made.all_graphs() if body is not made for value in body.values()}
    for name in names:
        if name not in there:
            made.outputs.append(_Shown(inside[name], made).result)
    return made


class _Shown:
    """Hands a value of a body out of it, by its name."""

    def __init__(self, value: Value, top: Graph) -> None:
        assert isinstance(value.type, TensorType) and value.type.dtype is not None
        self._value = value
        self._dtype: DType = value.type.dtype
        self._way: list[Graph] = []  # the bodies around it, the innermost first
        graph = value.owner
        while graph is not None and graph is not top:
            self._way.append(graph)
            graph = graph.parent.graph if graph.parent is not None else None
        attrs, first = {"dtype": self._dtype.onnx}, next(iter(top))
        empty = top.add("SequenceEmpty", [], attrs, [self._new()], version=_SEQUENCES, before=first)
        self._name, value.name = value.name, f"{value.name}.inside"
        self.result = self._within(top, empty.output, len(self._way))
        self.result.name = self._name

    def _new(self) -> Value:
        return Value("", SequenceType(TensorType(self._dtype, None)))

    def _within(self, graph: Graph, given: Value, depth: int) -> Value:
        """The sequence at the end of a graph, that was given at its beginning; it lies so deep in it."""
        if not depth:
            made = graph.add("SequenceInsert", [given, self._value], None, [self._new()], version=_SEQUENCES)
            return made.output
        body = self._way[depth - 1]
        node = body.parent
        assert node is not None
        if node.op == "If":
            return self._through_branch(node, body, given, depth)
        return self._through_loop(node, body, given, depth)

    def _through_branch(self, node: Node, body: Graph, given: Value, depth: int) -> Value:
        for branch in node.subgraphs():
            if branch is body:
                branch.outputs.append(self._within(branch, given, depth - 1))
            else:
                branch.outputs.append(branch.add("Identity", [given], None, [self._new()], version=16).output)
        return self._result(node, len(node.outputs))

    def _through_loop(self, node: Node, body: Graph, given: Value, depth: int) -> Value:
        """A further state, behind the others."""
        if node.op == "Loop":
            operands, place = [*node.inputs, None, None][: max(2, len(node.inputs))], max(0, len(node.inputs) - 2)
            node.set_inputs([*operands, given])
            first = 1  # of a body's results: before states there is whether to go on
            state = body.add_input("", self._new().type)
        else:
            place = len(node.inputs) - int(node.attrs["num_scan_inputs"])
            node.set_inputs([*node.inputs[:place], given, *node.inputs[place:]])
            first = 0
            state = body.add_input("", self._new().type)
            body.inputs.insert(place, body.inputs.pop())
        state.name = f"{self._name}.so_far"
        body.outputs.insert(first + place, self._within(body, state, depth - 1))
        while len(node.outputs) < place:  # the last, where nobody reads them, may be left out
            self._result(node, len(node.outputs)).type = None
        return self._result(node, place)

    def _result(self, node: Node, place: int) -> Value:
        value = self._new()
        value.name = f"{node.name}:{self._name}.{place}"
        value.producer = node
        node.outputs.insert(place, value)
        for k, each in enumerate(node.outputs):
            each.index = k
        return value
