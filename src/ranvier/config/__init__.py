"""Options: frozen dataclasses, validated when they are made, and the sources they come from.

An unknown name raises with the nearest known one; a value out of range raises with the range.
"""

from __future__ import annotations

from ranvier.config.memory import GROWTHS, Growth, MemoryConfig
from ranvier.config.provider import PRESETS, ProviderConfig
from ranvier.config.resolve import Resolved, Setting, resolve
from ranvier.config.session import FALLBACKS, LEVELS, POLICIES, PRECISIONS, Level, Limits, SessionConfig

__all__ = [
    "FALLBACKS",
    "GROWTHS",
    "LEVELS",
    "POLICIES",
    "PRECISIONS",
    "PRESETS",
    "Growth",
    "Level",
    "Limits",
    "MemoryConfig",
    "ProviderConfig",
    "Resolved",
    "SessionConfig",
    "Setting",
    "resolve",
]
