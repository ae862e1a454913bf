"""Whatever goes wrong between reading a model and running it comes out as a typed error that names the model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ranvier.config import Limits
from ranvier.errors import InvalidModel, OutOfMemory, RanvierError
from ranvier.formats.onnx import read
from ranvier.graph.ir import Graph
from ranvier.memory.collector import collector_paused
from ranvier.ops.allocation import tensor_limit
from ranvier.ops.nn.training import DOMAIN


@contextmanager
def preparing(model: str, step: str, tensor_bytes: int | None) -> Iterator[None]:
    """Inside, no tensor may pass the limit (constants are folded here), and untyped errors become typed ones."""
    try:
        with tensor_limit(tensor_bytes), collector_paused():
            yield
    except RanvierError:
        raise
    except MemoryError as error:
        raise OutOfMemory(f"model {model!r}: out of memory while {step}") from error
    except Exception as error:
        # a model that keeps the rules does not get here; the cause and its place are in __cause__
        raise InvalidModel(f"model {model!r}: {step} raised {type(error).__name__}: {error}") from error


def read_model(model: Any, limits: Limits, base_dir: str | os.PathLike[str] | None = None) -> Graph:
    """The graph of a model, with what it asks to be derived written out while values still have the model's names."""
    graph = read(model, limits=limits, base_dir=base_dir)
    # many quantizers list this domain without using it
    if DOMAIN in graph.opsets and any(node.op == "Gradient" and node.domain == DOMAIN for node in graph.all_nodes()):
        from ranvier.passes.gradient_operator import expand_gradients  # and with it the gradients of all operators

        expand_gradients(graph)
    return graph


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self._now = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._now
        self._now = now
