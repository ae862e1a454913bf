"""ONNX in and out. ``read`` makes a Graph of a model, ``write`` makes a model of a Graph; nothing here runs one.

They are imported when first asked for: with them come all operators, and whoever wants only to find weights in a file
(``wire``, ``external``) does not need those.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranvier.formats.onnx.reader import read
    from ranvier.formats.onnx.writer import save, to_proto

_HOME = {"read": "reader", "save": "writer", "to_proto": "writer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


__all__ = ["read", "save", "to_proto"]
