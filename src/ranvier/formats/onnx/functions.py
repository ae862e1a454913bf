"""Functions of a model, inlined by the standard's inliner; what it would choke on is refused before.

A few functions that call each other twice each stand for a graph of any size, and one that calls itself for an
endless one. So calls are counted before anything is expanded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx.inliner
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto

from ranvier.config import Limits
from ranvier.domains import normal_domain
from ranvier.errors import InvalidModel, ResourceLimit

Key = tuple[str, str, str]  # domain, name, overload


def inlined(proto: ModelProto, limits: Limits) -> ModelProto:
    """The model without functions; weights are not handed to the inliner, and are missing in the result."""
    _Calls(proto, limits).check()
    light = _without_weights(proto)
    try:
        return onnx.inliner.inline_local_functions(light)
    except Exception:  # functions of another opset than the model's
        try:
            return onnx.inliner.inline_local_functions(light, convert_version=True)
        except Exception as error:
            raise InvalidModel(f"the functions of the model cannot be inlined: {error}") from error


class _Calls:
    """Who calls whom, and how many nodes a call stands for."""

    def __init__(self, proto: ModelProto, limits: Limits) -> None:
        self.proto = proto
        self.limits = limits
        self.functions: dict[Key, FunctionProto] = {}
        for function in proto.functions:
            key = (normal_domain(function.domain), function.name, function.overload)
            if key in self.functions:
                raise InvalidModel(f"two functions are named {_label(key)}")
            self.functions[key] = function
        self.sizes: dict[Key, int] = {}
        self.open: list[Key] = []  # the calls from the graph down to the function that is being counted

    def check(self) -> None:
        self._size(self.proto.graph.node)

    def _size(self, nodes: Iterable[NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = (normal_domain(node.domain), node.op_type, node.overload)
            total += self._called(key) if key in self.functions else 1
            for attr in node.attribute:
                if attr.type == AttributeProto.GRAPH:
                    total += self._size(attr.g.node)
                for graph in attr.graphs:
                    total += self._size(graph.node)
            if self.limits.graph_nodes is not None and total > self.limits.graph_nodes:
                where = _label(self.open[-1]) if self.open else "the graph"
                raise ResourceLimit(
                    "graph_nodes",
                    self.limits.graph_nodes,
                    total,
                    f"{where} with functions inlined",
                )
        return total

    def _called(self, key: Key) -> int:
        if key in self.sizes:
            return self.sizes[key]
        if key in self.open:
            circle = " → ".join(map(_label, [*self.open[self.open.index(key) :], key]))
            raise InvalidModel(f"functions call themselves: {circle}")
        depth = len(self.open) + 1
        if self.limits.graph_depth is not None and depth > self.limits.graph_depth:
            raise ResourceLimit("graph_depth", self.limits.graph_depth, depth, f"function {_label(key)}")
        self.open.append(key)
        self.sizes[key] = self._size(self.functions[key].node)
        self.open.pop()
        return self.sizes[key]


def _label(key: Key) -> str:
    domain, name, overload = key
    return repr(f"{domain}::{name}" + (f":{overload}" if overload else ""))


def _without_weights(proto: ModelProto) -> ModelProto:
    light = ModelProto()
    for descriptor, content in proto.ListFields():
        if descriptor.name != "graph":
            _copy_field(light, descriptor.name, content)
    for descriptor, content in proto.graph.ListFields():
        if descriptor.name not in ("initializer", "sparse_initializer"):
            _copy_field(light.graph, descriptor.name, content)
    return light


def _copy_field(message: Any, name: str, content: Any) -> None:
    target = getattr(message, name)
    if hasattr(target, "MergeFrom") and not isinstance(content, str | bytes | int | float):
        target.MergeFrom(content)
    elif hasattr(target, "extend"):
        target.extend(content)
    else:
        setattr(message, name, content)
