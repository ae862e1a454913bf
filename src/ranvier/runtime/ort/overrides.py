"""Changes to a freshly loaded graph: dims fixed to sizes, initializers replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranvier.errors import DTypeMismatch, InvalidConfig, ShapeMismatch, nearest
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, TensorType
from ranvier.interop import to_array
from ranvier.ops import annotate


def fix_dims(graph: Graph, sizes: Mapping[str, int]) -> None:
    """Give symbolic dims of the inputs their sizes, everywhere in the graph, and infer the types anew."""
    free = graph.symbols
    for name, size in sizes.items():
        symbol = free.get(name)
        if symbol is None:
            raise InvalidConfig(f"the model has no free dimension {name!r}{nearest(name, free)}")
        if not symbol.admits(size):
            raise InvalidConfig(f"dimension {name!r} cannot be {size}: bounds [{symbol.lo}, {symbol.hi}]")
    for each in graph.all_graphs():
        for value in each.values():
            if value.type is not None:
                value.type = value.type.bind(sizes)
    graph.metadata["problems"] = annotate(graph)


def replace_initializers(graph: Graph, tensors: Mapping[str, Any]) -> None:
    """Put other data in the place of initializers; element type and shape must be those of the model."""
    for name, given in tensors.items():
        constant = graph.constants.get(name)
        old = constant.const if constant is not None else graph.defaults.get(name)
        if old is None:
            raise InvalidConfig(f"the model has no initializer {name!r}{nearest(name, _initializers(graph))}")
        new = ConstTensor.of(to_array(given, old.dtype))
        if new.dtype is not old.dtype:
            raise DTypeMismatch(f"initializer {name!r}: expected {old.type}, got {new.type}")
        if new.shape != old.shape:
            raise ShapeMismatch(f"initializer {name!r}: expected {old.type}, got {new.type}")
        if constant is not None:
            constant.const = new
        else:
            graph.defaults[name] = new
    graph.metadata["problems"] = annotate(graph)


def _initializers(graph: Graph) -> list[str]:
    return [*graph.constants, *graph.defaults]


def fix_denoted(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Give the free dims of the inputs that carry a denotation its size; returns the sizes of named ones."""
    inputs = {value.name: value for value in graph.inputs}
    denoted: Mapping[str, list[tuple[str, int]]] = graph.metadata.get("denotations", {})
    named: dict[str, int] = {}
    for meaning, size in sizes.items():
        if meaning not in denoted:
            hint = nearest(meaning, denoted)
            raise InvalidConfig(f"no dimension of the model's inputs is denoted {meaning!r}{hint}")
        for name, axis in denoted[meaning]:
            value = inputs.get(name)
            if value is None or not isinstance(value.type, TensorType) or value.type.shape is None:
                continue
            dim = value.type.shape[axis]
            if isinstance(dim, Symbol):
                named[dim.name] = size
            elif dim is None:
                shape = (*value.type.shape[:axis], size, *value.type.shape[axis + 1 :])
                value.type = TensorType(value.type.dtype, shape)
    fix_dims(graph, named)
    return named


__all__ = ["fix_denoted", "fix_dims", "replace_initializers"]
