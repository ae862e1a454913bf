"""Which provider runs which node: asking the providers, weighing their answers, and cutting the graph into parts."""

from __future__ import annotations

from ranvier.runtime.partition.partitioner import (
    Beside,
    Blocked,
    Part,
    Partitioner,
    Partitioning,
    Placement,
    missing_ops,
    narrowed,
    subgraph_of,
    unsupported_ops,
)

__all__ = [
    "Beside",
    "Blocked",
    "Part",
    "Partitioner",
    "Partitioning",
    "Placement",
    "missing_ops",
    "narrowed",
    "subgraph_of",
    "unsupported_ops",
]
