"""Memory for providers: pools over private, shared, mapped or a device's own memory."""

from __future__ import annotations

from ranvier.providers.memory.pool import ALIGNMENT, PoolAllocator
from ranvier.providers.memory.sources import (
    HostRegion,
    MappedSource,
    MemoryKind,
    Region,
    SharedHandle,
    SharedSource,
    Source,
    SystemSource,
    attach,
)

__all__ = [
    "ALIGNMENT",
    "HostRegion",
    "MappedSource",
    "MemoryKind",
    "PoolAllocator",
    "Region",
    "SharedHandle",
    "SharedSource",
    "Source",
    "SystemSource",
    "attach",
]
