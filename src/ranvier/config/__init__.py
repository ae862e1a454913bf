"""Options: frozen dataclasses, validated when they are made.

An unknown name raises with the nearest known one; a value out of range raises with the range.
"""

from __future__ import annotations

from ranvier.config.memory import GROWTHS, Growth, MemoryConfig
from ranvier.config.session import FALLBACKS, LEVELS, PRECISIONS, Level, Limits, SessionConfig, environment

__all__ = [
    "FALLBACKS",
    "GROWTHS",
    "LEVELS",
    "PRECISIONS",
    "Growth",
    "Level",
    "Limits",
    "MemoryConfig",
    "SessionConfig",
    "environment",
]
