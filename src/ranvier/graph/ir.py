"""The graph every front end produces and every later stage reads.

Three slotted classes. A :class:`Value` knows who made it and who uses it; a :class:`Node` is one operator call;
a :class:`Graph` is an ordered, mutable set of nodes with inputs, outputs and constants. Nodes form an intrusive
linked list, so inserting or removing one is O(1) and iteration survives changes to the node just visited.

Subgraphs (the bodies of If, Loop, Scan) are attributes that hold a :class:`Graph`. A node inside a subgraph refers
to a value of an enclosing graph directly; the use is recorded on that value like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranvier.errors import InvalidGraph
from ranvier.graph.types import Symbol, TensorType

if TYPE_CHECKING:
    from ranvier.graph.tensors import ConstTensor
    from ranvier.graph.types import Type

STANDARD = ""  # the ai.onnx domain


class Value:
    """One edge of the graph: the result of a node, a graph input, or a constant."""

    __slots__ = ("const", "graph", "index", "name", "producer", "type", "uses")

    def __init__(self, name: str = "", type: Type | None = None) -> None:
        self.name = name
        self.type = type
        self.producer: Node | None = None
        self.index = 0  # position among the producer's outputs
        # (node, input position) of every use, in order; a dict, because a constant may have thousands of them
        self.uses: dict[tuple[Node, int], None] = {}
        self.const: ConstTensor | None = None
        self.graph: Graph | None = None  # set for graph inputs and constants: the graph that owns them

    @property
    def owner(self) -> Graph | None:
        """The graph in which this value is defined."""
        return self.producer.graph if self.producer is not None else self.graph

    @property
    def is_graph_output(self) -> bool:
        owner = self.owner
        return owner is not None and any(v is self for v in owner.outputs)

    def replace_by(self, other: Value) -> None:
        """Make every user of this value, graph outputs included, use ``other`` instead."""
        if other is self:
            return
        for node, position in self.uses:
            node._inputs[position] = other
        other.uses.update(self.uses)
        self.uses = {}
        owner = self.owner
        if owner is not None and owner._outputs_hold(self):
            owner.outputs = [other if v is self else v for v in owner.outputs]

    def __str__(self) -> str:
        return f"%{self.name}"

    def __repr__(self) -> str:
        return f"<Value %{self.name}: {self.type}>"


class Node:
    """One call of an operator.

    ``version`` is the ``since_version`` of the operator's definition, so a node means the same wherever it is moved.
    Bodies of control flow are among ``attrs`` from the start; attributes that come later are other ones.
    ``origin`` names the rule or pass that made the node; it is empty for nodes of the loaded model.
    """

    __slots__ = ("_inputs", "_next", "_prev", "attrs", "domain", "graph", "name", "op", "origin", "outputs", "version")

    def __init__(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        outputs: int | Sequence[Value] = 1,
        *,
        domain: str = STANDARD,
        version: int = 0,
        name: str = "",
        origin: str = "",
    ) -> None:
        self.op = op
        self.domain = domain
        self.version = version
        self.name = name
        self.origin = origin
        self.attrs: dict[str, Any] = dict(attrs) if attrs else {}
        self.graph: Graph | None = None
        self._prev: Node | None = None
        self._next: Node | None = None
        self._inputs: list[Value | None] = list(inputs)
        for position, value in enumerate(self._inputs):
            if value is not None:
                value.uses[self, position] = None
        if type(outputs) is int:
            self.outputs: list[Value] = [Value() for _ in range(outputs)] if outputs != 1 else [Value()]
        else:
            self.outputs = list(outputs)  # type: ignore[arg-type]
        for position, result in enumerate(self.outputs):
            result.producer = self
            result.index = position

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """The operands; ``None`` stands for an optional input that was left out. Change them by ``set_input``."""
        return tuple(self._inputs)

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def input(self, position: int) -> Value | None:
        """The operand at ``position``, or None where it is absent."""
        return self._inputs[position] if position < len(self._inputs) else None

    def set_input(self, position: int, value: Value | None) -> None:
        """Replace one operand; positions past the end grow the list, with absent inputs between."""
        while len(self._inputs) <= position:
            self._inputs.append(None)
        old = self._inputs[position]
        if old is value:
            return
        if old is not None:
            _forget_use(old, self, position)
        self._inputs[position] = value
        if value is not None:
            value.uses[self, position] = None

    def set_inputs(self, values: Sequence[Value | None]) -> None:
        """Replace all operands."""
        for position, old in enumerate(self._inputs):
            if old is not None:
                _forget_use(old, self, position)
        self._inputs = list(values)
        for position, value in enumerate(self._inputs):
            if value is not None:
                value.uses[self, position] = None

    def subgraphs(self) -> Sequence[Graph]:
        """The graphs among the attributes (bodies of control flow)."""
        found: list[Graph] = []
        for attr in self.attrs.values():
            kind = type(attr)
            if kind is Graph:
                found.append(attr)
            elif (kind is list or kind is tuple) and attr and type(attr[0]) is Graph:
                found += attr
        return found

    @property
    def has_subgraphs(self) -> bool:
        """Asked all the time, and false nearly always: a graph remembers whether a node with bodies ever came in."""
        graph = self.graph
        return (graph is None or graph._nested) and bool(self.attrs) and bool(self.subgraphs())

    def captures(self) -> list[Value]:
        """Values of enclosing graphs that the subgraphs of this node use, each once, in order of first use."""
        found: dict[int, Value] = {}
        for body in self.subgraphs():
            for value in body.captured():
                found.setdefault(id(value), value)
        return list(found.values())

    def dependencies(self) -> list[Value]:
        """Everything that must exist before this node runs: its operands and what its subgraphs capture."""
        operands = [v for v in self._inputs if v is not None]
        return operands + self.captures() if self.has_subgraphs else operands

    def __repr__(self) -> str:
        operands = ", ".join("_" if v is None else str(v) for v in self._inputs)
        domain = f"{self.domain}::" if self.domain else ""
        return f"<{', '.join(map(str, self.outputs))} = {domain}{self.op}({operands})>"


def _forget_use(value: Value, node: Node, position: int) -> None:
    try:
        del value.uses[node, position]
    except KeyError:
        raise InvalidGraph(f"use list of {value} lacks ({node.op} {node.name!r}, input {position})") from None


class Graph:
    """Inputs, outputs, constants, and nodes in an order that computes each value before its uses."""

    __slots__ = (
        "_first",
        "_last",
        "_length",
        "_names",
        "_nested",
        "constants",
        "defaults",
        "doc",
        "inputs",
        "metadata",
        "name",
        "opsets",
        "outputs",
        "parent",
    )

    def __init__(self, name: str = "graph", *, opsets: Mapping[str, int] | None = None) -> None:
        self.name = name
        self.doc = ""
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.constants: dict[str, Value] = {}  # by name
        self.defaults: dict[str, ConstTensor] = {}  # of inputs that a call may leave out, by input name
        self.opsets: dict[str, int] = dict(opsets or {})
        self.metadata: dict[str, Any] = {}
        self.parent: Node | None = None  # the node whose attribute this graph is
        self._first: Node | None = None
        self._last: Node | None = None
        self._length = 0
        self._names = 0
        self._nested = False  # a node with graphs among its attributes was put here, so one may still be

    # -- building ---------------------------------------------------------------------------------------------------

    def add_input(self, name: str, type: Type | None = None) -> Value:
        value = Value(name, type)
        value.graph = self
        self.inputs.append(value)
        return value

    def add_constant(self, tensor: ConstTensor, name: str = "") -> Value:
        """A value that holds ``tensor``; the name is made unique among the constants of this graph."""
        name = self.unique_name(name or "const") if not name or name in self.constants else name
        value = Value(name, tensor.type)
        value.const = tensor
        value.graph = self
        self.constants[name] = value
        return value

    def add(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        outputs: int | Sequence[Value] = 1,
        *,
        domain: str = STANDARD,
        version: int = 0,
        name: str = "",
        origin: str = "",
        before: Node | None = None,
    ) -> Node:
        """Make a node and put it at the end, or before another node."""
        node = Node(op, inputs, attrs, outputs, domain=domain, version=version, name=name, origin=origin)
        for value in node.outputs:
            if not value.name:
                self._names += 1
                value.name = f"v{self._names}"
        if attrs:
            for attr in attrs.values():
                if type(attr) is Graph:
                    attr.parent = node
                    self._nested = True
                elif type(attr) in (list, tuple) and attr and type(attr[0]) is Graph:
                    self._nested = True
                    for body in attr:
                        body.parent = node
        if before is None:  # `insert`, without its checks: this is the hot path of every front end
            node.graph = self
            last = self._last
            node._prev = last
            if last is None:
                self._first = node
            else:
                last._next = node
            self._last = node
            self._length += 1
            return node
        return self.insert(node, before)

    def insert(self, node: Node, before: Node | None = None) -> Node:
        """Link a node that is in no graph: at the end, or before another node."""
        if node.graph is not None:
            raise InvalidGraph(f"node {node.name!r} ({node.op}) is already in a graph")
        node.graph = self
        self._nested = self._nested or node.has_subgraphs
        if before is None:
            node._prev, node._next = self._last, None
            if self._last is None:
                self._first = node
            else:
                self._last._next = node
            self._last = node
        else:
            node._prev, node._next = before._prev, before
            if before._prev is None:
                self._first = node
            else:
                before._prev._next = node
            before._prev = node
        self._length += 1
        return node

    def unlink(self, node: Node) -> None:
        """Take a node out of the order, keeping its edges; ``insert`` puts it elsewhere."""
        if node.graph is not self:
            raise InvalidGraph(f"node {node.name!r} ({node.op}) is not in graph {self.name!r}")
        if node._prev is None:
            self._first = node._next
        else:
            node._prev._next = node._next
        if node._next is None:
            self._last = node._prev
        else:
            node._next._prev = node._prev
        # node._next stays: an iteration standing on this node can still go on
        node.graph = None
        self._length -= 1

    def remove(self, node: Node) -> None:
        """Delete a node whose results nobody uses, with everything inside its subgraphs."""
        for value in node.outputs:
            if value.uses or self._outputs_hold(value):
                raise InvalidGraph(f"cannot remove {node.op} {node.name!r}: its output {value} is still used")
        for body in node.subgraphs():
            body.clear()
        node.set_inputs(())
        self.unlink(node)

    def clear(self) -> None:
        """Remove all nodes; captured values lose their uses."""
        self.outputs = []
        for node in reversed(list(self)):
            for body in node.subgraphs():
                body.clear()
            node.set_inputs(())
            self.unlink(node)

    def remove_constant(self, value: Value) -> None:
        if value.uses:
            raise InvalidGraph(f"constant {value} is still used")
        del self.constants[value.name]
        value.graph = None

    def number_from(self, count: int) -> None:
        """Values that are made without a name are numbered from after this one on."""
        self._names = max(self._names, count)

    def unique_name(self, stem: str = "v") -> str:
        """A name no constant has and no generated value has had."""
        while True:
            self._names += 1
            name = f"{stem}.{self._names}"
            if name not in self.constants:
                return name

    # -- reading ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Node]:
        node = self._first
        while node is not None:
            yield node
            # a node removed during the visit keeps its link; skip links into removed territory
            following = node._next
            while following is not None and following.graph is not self:
                following = following._next
            node = following

    def __reversed__(self) -> Iterator[Node]:
        node = self._last
        while node is not None:
            before = node._prev
            yield node
            node = before

    def __len__(self) -> int:
        return self._length

    @property
    def nodes(self) -> list[Node]:
        return list(self)

    def all_nodes(self) -> Iterator[Node]:
        """Nodes of this graph and of all nested ones."""
        if not self._nested:
            yield from self
            return
        for node in self:
            yield node
            for body in node.subgraphs():
                yield from body.all_nodes()

    def all_graphs(self) -> Iterator[Graph]:
        """This graph, then the nested ones."""
        yield self
        for node in self if self._nested else ():
            for body in node.subgraphs():
                yield from body.all_graphs()

    def captured(self) -> list[Value]:
        """Values defined outside this graph that it (or a graph nested in it) uses."""
        local = {id(v) for v in self.inputs} | {id(v) for v in self.constants.values()}
        found: dict[int, Value] = {}
        for node in self:
            for value in node.dependencies():
                if id(value) not in local:
                    found.setdefault(id(value), value)
            local.update(id(v) for v in node.outputs)
        for value in self.outputs:
            if id(value) not in local:
                found.setdefault(id(value), value)
        return list(found.values())

    def constant_bytes(self) -> int:
        """Bytes of all constants and defaults, nested graphs included, loaded or not."""
        constants = [v.const for g in self.all_graphs() for v in g.constants.values() if v.const is not None]
        defaults = [tensor for g in self.all_graphs() for tensor in g.defaults.values()]
        return sum(tensor.nbytes for tensor in constants + defaults)

    def root(self) -> Graph:
        """The outermost graph around this one."""
        graph = self
        while graph.parent is not None and graph.parent.graph is not None:
            graph = graph.parent.graph
        return graph

    def values(self) -> Iterator[Value]:
        """Every value defined in this graph: inputs, constants, node outputs."""
        yield from self.inputs
        yield from self.constants.values()
        for node in self:
            yield from node.outputs

    @property
    def symbols(self) -> dict[str, Symbol]:
        """The dimensions a caller decides: symbols in the shapes of the inputs, by name."""
        return {
            dim.name: dim
            for value in self.inputs
            if isinstance(value.type, TensorType)
            for dim in value.type.shape or ()
            if isinstance(dim, Symbol)
        }

    def required_inputs(self) -> list[Value]:
        """Inputs without a default, the ones a call must give."""
        return [v for v in self.inputs if v.name not in self.defaults]

    def sort(self) -> None:
        """Put the nodes in a topological order, keeping the present order where it is one."""
        from ranvier.graph.topology import topological_order

        self.reorder(topological_order(self))

    def reorder(self, nodes: Iterable[Node]) -> None:
        """Relink the nodes in the given order; it must hold each node of the graph once."""
        nodes = list(nodes)
        if len(nodes) != self._length or len({id(n) for n in nodes}) != len(nodes):
            raise InvalidGraph(f"graph {self.name!r}: the new order does not hold each node once")
        for node in nodes:
            if node.graph is not self:
                raise InvalidGraph(f"node {node.name!r} is not in graph {self.name!r}")
        before: Node | None = None
        for node in nodes:
            node._prev, node._next = before, None
            if before is not None:
                before._next = node
            before = node
        self._first, self._last = nodes[0] if nodes else None, before

    def _outputs_hold(self, value: Value) -> bool:
        return any(v is value for v in self.outputs)

    def __str__(self) -> str:
        from ranvier.graph.text import graph_text

        return graph_text(self)

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {len(self.inputs)} inputs, {self._length} nodes, {len(self.outputs)} outputs>"
