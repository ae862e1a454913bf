"""Names for values of which no two may be the same."""

from __future__ import annotations


class Names:
    """Hands out each name once; a name that is taken gets a number behind it."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def unique(self, wanted: str) -> str:
        stem = wanted or "v"
        found, k = stem, 0
        while found in self._used:
            k += 1
            found = f"{stem}.{k}"
        self._used.add(found)
        return found
