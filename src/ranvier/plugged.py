"""What installed packages bring, by the names of their entry points; looked up once, loaded when used."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint


@functools.cache
def plugged(group: str) -> Mapping[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}
