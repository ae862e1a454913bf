"""Facts about memory that every layer may need: what is left, what something will take, and who holds how much."""

from __future__ import annotations

from ranvier.memory.estimates import AttentionEstimate, estimate_attention, estimate_tensor
from ranvier.memory.numa import NumaNode, Topology, place, topology
from ranvier.memory.room import LARGE, check_room, memory_left, resident_bytes
from ranvier.memory.tracker import MemoryHolding, MemorySnapshot, MemoryTracker

__all__ = [
    "LARGE",
    "AttentionEstimate",
    "MemoryHolding",
    "MemorySnapshot",
    "MemoryTracker",
    "NumaNode",
    "Topology",
    "check_room",
    "estimate_attention",
    "estimate_tensor",
    "memory_left",
    "place",
    "resident_bytes",
    "topology",
]
