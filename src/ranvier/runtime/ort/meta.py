"""What a model says about itself, in ONNX Runtime's words: ``NodeArg`` and ``ModelMetadata``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.types import MapType, OptionalType, SequenceType, SparseTensorType, Symbol, TensorType, Type
from ranvier.records import dataclass

_ELEMENT_NAMES = {
    DType.float32: "float",
    DType.float64: "double",
    DType.float8_e4m3fn: "float8e4m3fn",
    DType.float8_e4m3fnuz: "float8e4m3fnuz",
    DType.float8_e5m2: "float8e5m2",
    DType.float8_e5m2fnuz: "float8e5m2fnuz",
    DType.float8_e8m0fnu: "float8e8m0",
    DType.float4_e2m1fn: "float4e2m1",
    DType.float6_e2m3fn: "float6e2m3",
    DType.float6_e3m2fn: "float6e3m2",
}


def element_name(dtype: DType | None) -> str:
    return "" if dtype is None else _ELEMENT_NAMES.get(dtype, dtype.name)


def type_name(value_type: Type | None) -> str:
    """``tensor(float)``, ``seq(tensor(int64))``, ``map(string,tensor(float))``, ``optional(…)``.

    >>> type_name(SequenceType(TensorType(DType.int64)))
    'seq(tensor(int64))'
    """
    if isinstance(value_type, TensorType):
        word = "sparse_tensor" if isinstance(value_type, SparseTensorType) else "tensor"
        return f"{word}({element_name(value_type.dtype)})"
    if isinstance(value_type, SequenceType):
        return f"seq({type_name(value_type.elem)})"
    if isinstance(value_type, OptionalType):
        return f"optional({type_name(value_type.elem)})"
    if isinstance(value_type, MapType):
        return f"map({element_name(value_type.key)},{type_name(value_type.value)})"
    return ""


def shape_list(value_type: Type | None) -> list[int | str | None]:
    """Sizes, names of symbolic dims, and None where nothing is known; ``[]`` where there is no rank to tell."""
    if isinstance(value_type, OptionalType):
        return shape_list(value_type.elem)
    if not isinstance(value_type, TensorType) or value_type.shape is None:
        return []
    return [dim.name if isinstance(dim, Symbol) else dim for dim in value_type.shape]


@dataclass(frozen=True, eq=False)
class NodeArg:
    """One input or output of a model."""

    name: str
    type: str
    shape: list[int | str | None]

    @classmethod
    def of(cls, name: str, value_type: Type | None) -> NodeArg:
        return cls(name, type_name(value_type), shape_list(value_type))

    def __str__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape!r})"


@dataclass(frozen=True)
class ModelMetadata:
    """The facts a model file carries beside its graph."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> ModelMetadata:
        facts: dict[str, Any] = graph.metadata
        return cls(
            producer_name=facts.get("producer_name", ""),
            graph_name=facts.get("graph_name", graph.name),
            domain=facts.get("domain", ""),
            description=facts.get("doc_string", ""),
            graph_description=graph.doc,
            version=int(facts.get("model_version", 0)),
            custom_metadata_map=dict(facts.get("custom", {})),
        )


__all__ = ["ModelMetadata", "NodeArg", "element_name", "shape_list", "type_name"]
