"""Models whose inputs give one name to sizes that differ.

By ONNX's rules a name of a dimension means one size in the whole graph, and a session holds a call to that. Exporters
write ``height`` and ``width`` for every input all the same, and ONNX Runtime asks nobody. For such a model the names of
each input are made its own, and what was inferred from their being one is inferred anew. It takes the option
``dims_apart``; a session behind ONNX Runtime's interface does it by itself when a call disagrees with the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ranvier.graph.ir import Graph, Value
from ranvier.graph.types import Symbol, TensorType
from ranvier.ops import annotate


def set_dims_apart(graph: Graph) -> None:
    """Give every symbolic dim of an input that stands elsewhere among the inputs too a name of its own."""
    count = Counter(symbol.name for value in graph.inputs for _, symbol in _symbols(value))
    shared = dict.fromkeys(name for name, times in count.items() if times > 1)
    if not shared:
        return
    inputs = set(graph.inputs)
    for each in graph.all_graphs():
        for value in each.values():
            if value.type is not None and value not in inputs:
                value.type = value.type.bind(shared)
    for value in graph.inputs:
        found = ((k, s) for k, s in _symbols(value) if s.name in shared)
        own = {k: Symbol(f"{value.name}.{s.name}.{k}", s.lo, s.hi) for k, s in found}
        if own:
            assert isinstance(value.type, TensorType) and value.type.shape is not None
            value.type = TensorType(value.type.dtype, tuple(own.get(k, d) for k, d in enumerate(value.type.shape)))
    graph.metadata["problems"] = annotate(graph)


def _symbols(value: Value) -> Iterator[tuple[int, Symbol]]:
    shape = value.type.shape if isinstance(value.type, TensorType) else None
    return ((axis, dim) for axis, dim in enumerate(shape or ()) if isinstance(dim, Symbol))


__all__ = ["set_dims_apart"]
