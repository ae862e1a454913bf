"""Data rounded to codes of 8 bits whose range is an input of the graph, so that one graph serves any range."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.quantize import Integers

Array = np.ndarray[Any, Any]
Range = tuple[float, float]


class RangeInputs:
    """Makes such inputs, by stems of their names, and what is given for them."""

    def __init__(self, signed: bool) -> None:
        self._scheme = Integers(8, signed, "tensor", signed=signed)
        self._code = DType.int8 if signed else DType.uint8

    def rounded(self, graph: Graph, ops: GraphOps, data: Value, stem: str) -> Value:
        """``graph`` gets the inputs; the data may lie in a body of it."""
        step = graph.add_input(f"{stem}.scale", TensorType(DType.float32, ()))
        zero = graph.add_input(f"{stem}.zero", TensorType(self._code, ()))
        made: Value = ops.DequantizeLinear(ops.QuantizeLinear(data, step, zero), step, zero)
        return made

    def given(self, stem: str, bounds: Range) -> dict[str, Array]:
        low, high = bounds
        scale, zero = self._scheme.parameters(np.array(min(0.0, low)), np.array(max(0.0, high)))
        return {
            f"{stem}.scale": np.asarray(scale, np.float32).reshape(()),
            f"{stem}.zero": np.asarray(zero, self._code.numpy).reshape(()),
        }
