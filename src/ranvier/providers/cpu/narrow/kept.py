"""Groups of definitions that the user keeps in the precision they have."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from ranvier.codegen.definitions.groups import Group

_WILD = frozenset("*?[")


class Kept:
    """Names of nodes and patterns of them. After a look at a sample there are hundreds of plain names, and every node
    would be held against each, so they are looked up."""

    def __init__(self, keep_f32: Sequence[str]) -> None:
        self._names = {p for p in keep_f32 if not _WILD.intersection(p)}
        self._patterns = [p for p in keep_f32 if p not in self._names]

    def by(self, group: Group) -> str:
        """The name or pattern that keeps a node of the group; nothing if none does."""
        if not (self._names or self._patterns):
            return ""
        found = next((name for d in group.defs if (name := d.label) in self._names), "")
        return found or next((p for d in group.defs for p in self._patterns if fnmatch.fnmatchcase(d.label, p)), "")
