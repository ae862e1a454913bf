"""A graph as text a person can read: one line a node, constants by type, subgraphs indented."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Type

_SHORT = 8  # longer lists and larger tensors are shown by size


def graph_text(graph: Graph, indent: str = "") -> str:
    """The whole graph; also what ``str(graph)`` gives."""
    inner = indent + "  "
    inputs = ", ".join(f"%{v.name}: {v.type}" for v in graph.inputs)
    outputs = ", ".join(f"%{v.name}: {v.type}" for v in graph.outputs)
    lines = [f"{indent}graph {graph.name or 'unnamed'}({inputs}) -> ({outputs}) {{"]
    for value in graph.constants.values():
        lines.append(f"{inner}%{value.name} = constant {constant_text(value)}")
    lines.extend(node_text(node, inner) for node in graph)
    lines.append(f"{indent}}}")
    return "\n".join(lines)


def node_text(node: Node, indent: str = "") -> str:
    """One node: ``%y: float32[1, 4] = Gemm-13(%x, %w, transB=1)  # name``."""
    results = ", ".join(f"%{v.name}: {v.type}" if v.type is not None else f"%{v.name}" for v in node.outputs)
    domain = f"{node.domain}::" if node.domain else ""
    version = f"-{node.version}" if node.version else ""
    arguments = ["_" if v is None else f"%{v.name}" for v in node.inputs]
    bodies: list[str] = []
    for key, attr in node.attrs.items():
        if isinstance(attr, Graph):
            bodies.append(f"{indent}  {key}:\n{graph_text(attr, indent + '    ')}")
        else:
            arguments.append(f"{key}={attr_text(attr)}")
    notes = " · ".join(filter(None, (node.name, f"by {node.origin}" if node.origin else "")))
    line = f"{indent}{results} = {domain}{node.op}{version}({', '.join(arguments)})"
    return "\n".join([line + (f"  # {notes}" if notes else ""), *bodies])


def constant_text(value: Value) -> str:
    """Type of a constant, and its elements when they are few and already in memory."""
    tensor = value.const
    assert tensor is not None
    if tensor.size <= _SHORT and tensor.is_loaded:
        return f"{tensor.type} = {np.array2string(tensor.numpy(), separator=', ')}".replace("\n", " ")
    return str(tensor.type)


def attr_text(attr: Any) -> str:
    """One attribute, shortened where it is long."""
    if isinstance(attr, np.ndarray):
        if attr.size <= _SHORT:
            return np.array2string(attr, separator=", ").replace("\n", " ")
        return f"<{attr.dtype}{list(attr.shape)}>"
    if isinstance(attr, list | tuple):
        if len(attr) > _SHORT:
            return f"[{', '.join(map(str, attr[:_SHORT]))}, … {len(attr)} in all]"
        return f"[{', '.join(map(str, attr))}]"
    if isinstance(attr, str) and len(attr) > 60:
        return repr(attr[:57] + "…")
    if isinstance(attr, float):
        return f"{attr:g}"
    if isinstance(attr, Type):
        return str(attr)
    return repr(attr)
