"""Operators that installed packages bring, through entry points of the group ``ranvier.ops``.

An entry is named after the domain of its operators and points to a function that registers them, or to a module that
does when it is imported. It is looked for when a model uses an operator of a domain that nobody declared, so a
package costs nothing until then, and an absent one never does.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ranvier.logs import warn_once
from ranvier.ops.registry import OpDef, add_fallback, own_declaration

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ranvier.ops"

_lock = threading.RLock()  # a package that is being loaded may itself ask for operators
_asked: set[str] = set()
_STANDARD = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "ai.onnx.training", "com.microsoft")


def find_plugged(domain: str, name: str, version: int | None) -> OpDef | None:
    """The declaration by a package for this domain, which is loaded now; None where there is none."""
    if domain in _STANDARD:
        return None
    with _lock:
        if domain not in _asked:
            from importlib.metadata import entry_points

            _asked.add(domain)
            for entry in entry_points(group=ENTRY_POINTS, name=domain):
                _load(entry)
        return own_declaration(domain, name, version)


def _load(entry: EntryPoint) -> None:
    """One that is broken must not keep models from others' operators; what it lacks is missing, and told as such."""
    try:
        found = entry.load()
        if callable(found):
            found()
    except Exception as error:
        reason = f"{entry.value} failed ({type(error).__name__}: {error})"
        warn_once(f"operators {entry.name}", f"operators of domain {entry.name!r}: {reason}")


add_fallback(find_plugged)
