"""Facts about memory that every layer may need: what is left, what something will take, and who holds how much."""

from __future__ import annotations

from ranvier.memory.budget import Budget
from ranvier.memory.estimates import AttentionEstimate, estimate_attention, estimate_tensor
from ranvier.memory.numa import place, topology
from ranvier.memory.room import LARGE, NOTED_FROM, NOTHING, Promise, check_room, promised, promises
from ranvier.memory.tracker import MemoryHolding, MemorySnapshot, MemoryTracker

__all__ = [
    "LARGE",
    "NOTED_FROM",
    "NOTHING",
    "AttentionEstimate",
    "Budget",
    "MemoryHolding",
    "MemorySnapshot",
    "MemoryTracker",
    "Promise",
    "check_room",
    "estimate_attention",
    "estimate_tensor",
    "place",
    "promised",
    "promises",
    "topology",
]
