"""Attributes of nodes as they were given."""

from __future__ import annotations

from typing import Any


def text_of(attribute: Any) -> str:
    """A text, which may have come as bytes."""
    return attribute.decode() if isinstance(attribute, bytes) else str(attribute)
