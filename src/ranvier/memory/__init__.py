"""Facts about memory that every layer may need: what is left, what something will take, and who holds how much."""

from __future__ import annotations

from ranvier.memory.estimates import AttentionEstimate, estimate_attention, estimate_tensor
from ranvier.memory.numa import place, topology
from ranvier.memory.room import LARGE, check_room
from ranvier.memory.tracker import MemoryHolding, MemorySnapshot, MemoryTracker

__all__ = [
    "LARGE",
    "AttentionEstimate",
    "MemoryHolding",
    "MemorySnapshot",
    "MemoryTracker",
    "check_room",
    "estimate_attention",
    "estimate_tensor",
    "place",
    "topology",
]
