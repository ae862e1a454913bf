"""One node as its lowering sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import NeedsValue, Shape
from ranvier.codegen.definitions.program import Definitions
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.varying import whole

Array = np.ndarray[Any, Any]


class NodeView:
    """Static types, attributes, and the operands whose content is known."""

    __slots__ = ("_defs", "attrs", "inputs", "node", "op", "outputs", "version")

    def __init__(self, node: Node, defs: Definitions) -> None:
        self.node = node
        self.op = node.op
        self.version = node.version
        self.attrs: Mapping[str, Any] = node.attrs
        self.inputs = node.inputs
        self.outputs = node.outputs
        self._defs = defs

    def has(self, k: int) -> bool:
        return k < len(self.inputs) and self.inputs[k] is not None

    def wants(self, k: int) -> bool:
        """Is output ``k`` there and used?"""
        return k < len(self.outputs) and (bool(self.outputs[k].uses) or self.outputs[k].is_graph_output)

    def input(self, k: int) -> Value:
        value = self.inputs[k]
        assert value is not None
        return value

    def type(self, k: int) -> TensorType:
        return self._defs.types[self.input(k)]

    def shape(self, k: int) -> Shape:
        return self._defs.shape(self.input(k))

    def rank(self, k: int) -> int:
        return len(self.shape(k))

    def dtype(self, k: int) -> DType:
        return self._defs.dtype(self.input(k))

    def out_shape(self, k: int = 0) -> Shape:
        return self._defs.shape(self.outputs[k])

    def out_dtype(self, k: int = 0) -> DType:
        return self._defs.dtype(self.outputs[k])

    def attr(self, name: str, default: Any = None) -> Any:
        found = self.attrs.get(name)
        return default if found is None else found

    def constant(self, k: int) -> ConstTensor | None:
        """Operand ``k`` where it is a constant, whose content need not be in memory."""
        return self.input(k).const if self.has(k) else None

    def known(self, k: int) -> Array | None:
        """The content of operand ``k`` where it is a constant or follows from shapes."""
        if not self.has(k):
            return None
        value = self.input(k)
        if value.const is not None:
            return value.const.numpy()
        return self._defs.known.get(value)

    def need(self, k: int) -> Array:
        found = self.known(k)
        if found is None:
            raise NeedsValue(self.input(k))
        return found

    def ints(self, k: int) -> tuple[int, ...]:
        """The content of an integer operand as a flat tuple; NeedsValue where it is not known."""
        return tuple([whole(x) for x in np.ravel(self.need(k))])

    def axes(self, k: int = 1, attribute: str = "axes") -> tuple[int, ...] | None:
        """Axes from the operand (newer versions) or the attribute; None where neither is given."""
        if self.has(k):
            return self.ints(k)
        found = self.attrs.get(attribute)
        return None if found is None else tuple(int(a) for a in found)
