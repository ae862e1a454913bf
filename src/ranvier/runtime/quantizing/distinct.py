"""A name of its own for every value and node: models are compared value by value and layer by layer, by names.

Files need not have distinct names for nodes, and what a pass makes may be called like something else that is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ranvier.graph.ir import Graph, Value
from ranvier.graph.names import Names

_GIVEN = re.compile(r"v(\d+)")  # names that graphs give


def make_values_distinct(graph: Graph, first: Iterable[Value] = ()) -> None:
    """Inputs and outputs keep their names, then those that come ``first`` and are still there; of others that are
    called the same, the first one does."""
    names, named = Names(), set[int]()
    there = {id(value) for each in graph.all_graphs() for value in each.values()}

    def settle(value: Value) -> None:
        if id(value) not in named:
            named.add(id(value))
            value.name = names.unique(value.name)

    for value in (*graph.inputs, *graph.outputs, *(each for each in first if id(each) in there)):
        settle(value)
    for each in graph.all_graphs():
        for value in each.values():
            settle(value)
        each.constants = {value.name: value for value in each.constants.values()}


def number_after(graph: Graph) -> None:
    """Let values without a name that will be made have other names than those that are there: one that takes the place
    of another goes by its name."""
    names = (value.name for each in graph.all_graphs() for value in each.values())
    last = max((int(found[1]) for name in names if (found := _GIVEN.fullmatch(name))), default=0)
    for each in graph.all_graphs():
        each.number_from(last)


def make_nodes_distinct(graph: Graph) -> None:
    """Nodes without a name are called by their operator and result."""
    names = Names()
    for node in graph.all_nodes():
        node.name = names.unique(node.name or f"{node.op}:{node.output.name}")
