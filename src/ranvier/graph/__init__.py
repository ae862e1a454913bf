"""The IR: graphs of nodes and values, types with symbolic dims, patterns and their rewriting, verification."""

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.patterns import Match, Rule
from ranvier.graph.rewrite import GraphOps, RuleSet, substitute
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.topology import topological_order
from ranvier.graph.types import (
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    Symbol,
    TensorType,
    Type,
)
from ranvier.graph.verify import verify

__all__ = [
    "ConstTensor",
    "Graph",
    "GraphOps",
    "MapType",
    "Match",
    "Node",
    "OptionalType",
    "Rule",
    "RuleSet",
    "SequenceType",
    "SparseTensorType",
    "Symbol",
    "TensorType",
    "Type",
    "Value",
    "substitute",
    "topological_order",
    "verify",
]
