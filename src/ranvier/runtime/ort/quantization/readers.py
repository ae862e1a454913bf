"""Samples of inputs from a reader that a script wrote."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from ranvier.errors import InvalidConfig, InvalidInput, nearest
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.quantizing.sites import noted_in_errors
from ranvier.runtime.signature import Signature


class CalibrationDataReader(abc.ABC):
    """Gives the inputs of one run after the other; scripts write ``get_next``. It is a reader that has that method."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return True if callable(getattr(other, "get_next", None)) else NotImplemented

    @abc.abstractmethod
    def get_next(self) -> dict[str, Any] | None:
        """An array for each input by its name; None behind the last."""

    def __iter__(self) -> CalibrationDataReader:
        return self

    def __next__(self) -> dict[str, Any]:
        found = self.get_next()
        if found is None:
            raise StopIteration
        return found


def read_feeds(reader: Any, graph: Graph, option: str = "calibration_data_reader") -> list[Feed]:
    """All that a reader has, to its end; InvalidInput where that is nothing, or not what the model reads."""
    if not isinstance(reader, CalibrationDataReader):
        what = "nothing" if reader is None else type(reader).__name__
        raise InvalidConfig(f"{option} must have a method get_next that gives inputs of a run, got {what}")
    feeds: list[Feed] = []
    signature = Signature(graph)
    while given := reader.get_next():  # what is empty ends it too
        feeds.append(_checked(given, graph, signature, len(feeds)))
    if not feeds:
        raise InvalidInput(f"{option} gave no samples: its first get_next() was the end; was it read before?")
    return feeds


def _checked(given: Any, graph: Graph, signature: Signature, number: int) -> Feed:
    if not hasattr(given, "items"):
        raise InvalidInput(f"sample {number} must be a dict of arrays by names of inputs, got {type(given).__name__}")
    names = [value.name for value in graph.inputs]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise InvalidInput(f"sample {number}: the model has no input {unknown!r}{nearest(str(unknown), names)}")
    absent = [name for name in names if name not in given and name not in graph.defaults]
    if absent:
        raise InvalidInput(f"sample {number} lacks the inputs {', '.join(map(repr, absent))}")
    found = {name: np.asarray(value) for name, value in given.items()}
    with noted_in_errors(f"sample {number}"):
        signature.bind(found)
    return found


__all__ = ["CalibrationDataReader", "read_feeds"]
