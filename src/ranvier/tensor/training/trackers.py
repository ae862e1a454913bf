"""Where the numbers of a run go beside the screen: a file here, or an experiment tracker that a package brings.

A package registers its tracker under the entry points ``ranvier.trackers``: a function or class that makes one, called
with what stands behind the colon of ``tracker="name:rest"``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from ranvier.errors import CannotWrite, InvalidConfig, nearest
from ranvier.plugged import plugged

GROUP = "ranvier.trackers"


class Tracker(Protocol):
    """Told what a run is, its numbers as they come, and how it ended."""

    def begin(self, run: Mapping[str, Any]) -> None:
        """The record of the run; ``resumed_at`` is in it where it goes on from a checkpoint."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def end(self, outcome: str) -> None:
        """``finished``, ``stopped early``, ``interrupted`` or the name of an error."""
        ...


class JsonLines:
    """A line of JSON for each report, appended to a file. What a killed run wrote beyond its last checkpoint is cut off
    when it goes on, so that no step is in the file twice."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def begin(self, run: Mapping[str, Any]) -> None:
        kept: list[str] = []
        resumed = run.get("resumed_at")
        try:
            if resumed is not None and self._path.exists():
                kept = [line for line in self._path.read_text().splitlines() if _step(line) <= resumed]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        except OSError as error:
            raise CannotWrite(f"cannot write {str(self._path)!r}: {error.strerror or error}") from error
        self._file.writelines(f"{line}\n" for line in kept)
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def end(self, outcome: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that was cut off


def trackers_of(given: Any) -> list[Tracker]:
    """Trackers from objects, from names of installed ones (``"name"``, ``"name:rest"``), or from a list of both."""
    if given is None:
        return []
    if isinstance(given, str):
        name, _, rest = given.partition(":")
        if name == "jsonl":
            return [JsonLines(rest or "metrics.jsonl")]
        known = plugged(GROUP)
        if name not in known:
            raise InvalidConfig(f"no tracker is called {name!r}{nearest(name, ['jsonl', *known])}")
        return [known[name].load()(*([rest] if rest else []))]
    if isinstance(given, Sequence):
        return [each for one in given for each in trackers_of(one)]
    return [given]
