"""Changes to a freshly loaded graph: dims fixed to sizes, initializers replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ranvier.config import Limits
from ranvier.errors import DTypeMismatch, InvalidConfig, ShapeMismatch, nearest
from ranvier.formats.onnx.source import open_source
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, TensorType, Type
from ranvier.interop import to_array
from ranvier.ops import annotate
from ranvier.ops.proto import type_from_proto


def fix_dims(graph: Graph, sizes: Mapping[str, int]) -> None:
    """Give symbolic dims of the inputs their sizes, everywhere in the graph, and infer the types anew."""
    free = _free_dims(graph)
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
    for name in sizes:
        graph.symbols.pop(name, None)
    graph.metadata["problems"] = annotate(graph)


def _free_dims(graph: Graph) -> dict[str, Symbol]:
    return {
        dim.name: dim
        for value in graph.inputs
        for dim in getattr(value.type, "shape", None) or ()
        if isinstance(dim, Symbol)
    }


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


class Declarations:
    """What the model file itself says about its interface, before inference sharpened it."""

    def __init__(self, model: Any, limits: Limits, base_dir: str | os.PathLike[str] | None = None) -> None:
        self._graph = open_source(model, limits, base_dir).proto.graph

    def outputs(self) -> dict[str, Type | None]:
        """Output types with the names the model gives to their dims."""
        return {info.name: type_from_proto(info.type) for info in self._graph.output}

    def fix_denoted(self, graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
        """Give the free dims of the inputs that carry a denotation its size; returns the sizes of named ones."""
        inputs = {value.name: value for value in graph.inputs}
        named: dict[str, int] = {}
        carried: set[str] = set()
        for info in self._graph.input:
            value = inputs.get(info.name)
            if value is None or not isinstance(value.type, TensorType) or value.type.shape is None:
                continue
            shape = list(value.type.shape)
            for axis, entry in enumerate(info.type.tensor_type.shape.dim):
                carried.add(entry.denotation)
                if entry.denotation not in sizes:
                    continue
                dim = shape[axis]
                if isinstance(dim, Symbol):
                    named[dim.name] = sizes[entry.denotation]
                elif dim is None:
                    shape[axis] = sizes[entry.denotation]
            value.type = TensorType(value.type.dtype, tuple(shape))
        for name in sizes:
            if name not in carried:
                hint = nearest(name, carried - {""})
                raise InvalidConfig(f"no dimension of the model's inputs is denoted {name!r}{hint}")
        fix_dims(graph, named)
        return named


__all__ = ["Declarations", "fix_dims", "replace_initializers"]
