"""Answers the messages of ``providers/distant``: holds tensors by number, loads parts, runs them.

One object serves one connection and is called by one thread, in the order in which messages came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ranvier import dtypes
from ranvier.config import Limits, SessionConfig
from ranvier.errors import InvalidValue, OutOfMemory, RanvierError
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.ops.estimate import graph_cost
from ranvier.ops.registry import Cost
from ranvier.providers.distant import wire
from ranvier.providers.distant.client import PROTOCOL
from ranvier.providers.distant.link import error_fields
from ranvier.providers.distant.wire import Array, Buffer, Message
from ranvier.records import dataclass
from ranvier.runtime.control import RunOptions
from ranvier.runtime.session import Session


class Conduct(Protocol):
    """How a device behaves beside computing: what an accelerator's simulation changes."""

    def arrived(self, kind: str, nbytes: int) -> None:
        """A message is here; may take its time."""
        ...

    def ran(self, cost: Cost, seconds: float) -> None:
        """A part ran; may take more time."""
        ...

    def before_run(self) -> None:
        """May raise, or worse."""
        ...

    def answer(self, pieces: list[Buffer]) -> list[Buffer]:
        """What is sent instead."""
        ...


class Honest:
    """A device that just works."""

    def arrived(self, kind: str, nbytes: int) -> None:
        pass

    def ran(self, cost: Cost, seconds: float) -> None:
        pass

    def before_run(self) -> None:
        pass

    def answer(self, pieces: list[Buffer]) -> list[Buffer]:
        return pieces


@dataclass
class _Part:
    session: Session
    cost: Cost
    weights: int


class DeviceServer:
    """``memory_limit`` counts tensors and weights together; ``providers`` run the parts."""

    def __init__(
        self,
        providers: Sequence[str],
        *,
        threads: int | None = None,
        memory_limit: int | None = None,
        limits: Limits | None = None,
        conduct: Conduct | None = None,
    ) -> None:
        # what arrives was optimized before it was cut into parts
        self._config = SessionConfig(
            providers=tuple(providers), threads=threads, optimization="none", limits=limits or Limits()
        )
        self._memory_limit = memory_limit
        self._conduct = conduct or Honest()
        self._tensors: dict[int, Array] = {}
        self._parts: dict[int, _Part] = {}
        self._held = self._peak = 0
        self._runs = 0
        self._handlers: dict[str, Callable[[Message], tuple[dict[str, Any], list[Array]]]] = {
            "hello": self._hello,
            "put": self._put,
            "get": self._get,
            "load": self._load,
            "run": self._run,
            "statistics": self._statistics,
        }

    def handle(self, message: Message) -> list[Buffer]:
        """The answer to one message, whatever was in it."""
        number = message.fields.get("number")
        try:
            self._conduct.arrived(message.kind, sum(t.nbytes for t in message.tensors))
            for unused in _numbers(message, "unused"):
                self._drop(unused)
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise InvalidValue(f"no message is called {message.kind!r}")
            fields, tensors = handler(message)
            return self._conduct.answer(wire.encode("done", {**fields, "number": number}, tensors))
        except Exception as error:  # whatever it is, the other side must hear of it
            return wire.encode("error", {**error_fields(error), "number": number})

    def close(self) -> None:
        for part in self._parts.values():
            part.session.close()
        self._parts.clear()
        self._tensors.clear()

    def _hello(self, message: Message) -> tuple[dict[str, Any], list[Array]]:
        if message.fields.get("protocol") != PROTOCOL:
            raise InvalidValue(
                f"this worker speaks protocol {PROTOCOL}, not {message.fields.get('protocol')!r}: "
                "use the same version of ranvier on both sides"
            )
        return {"protocol": PROTOCOL}, []

    def _put(self, message: Message) -> tuple[dict[str, Any], list[Array]]:
        numbers = _numbers(message, "tensors")
        if len(numbers) != len(message.tensors):
            raise InvalidValue(f"{len(numbers)} numbers came for {len(message.tensors)} tensors")
        for number, tensor in zip(numbers, message.tensors):
            self._keep(number, tensor)
        return {"tensors": [_described(t) for t in message.tensors]}, []

    def _get(self, message: Message) -> tuple[dict[str, Any], list[Array]]:
        return {}, [self._tensor(number) for number in _numbers(message, "tensors")]

    def _load(self, message: Message) -> tuple[dict[str, Any], list[Array]]:
        number = message.fields.get("part")
        if type(number) is not int or len(message.tensors) != 1:
            raise InvalidValue("a part comes with a number and a model")
        graph = onnx_format.read(message.tensors[0].tobytes(), limits=self._config.limits)
        weights = graph.constant_bytes()
        self._reserve(weights, f"weights of {graph.name!r}")
        cost = _cost(graph)
        try:
            session = Session(graph, self._config)
        except BaseException:
            self._held -= weights
            raise
        self._drop(number)
        self._parts[number] = _Part(session, cost, weights)
        return {"nodes": len(graph)}, []

    def _run(self, message: Message) -> tuple[dict[str, Any], list[Array]]:
        part = self._parts.get(message.fields.get("part", 0))
        if part is None:
            raise InvalidValue(f"no part has the number {message.fields.get('part')!r}")
        inputs = [self._tensor(number) for number in _numbers(message, "inputs")]
        numbers = _numbers(message, "outputs")
        self._conduct.before_run()
        started = time.perf_counter()
        results = list(part.session.run(inputs, options=_allowed(message)).values())
        seconds = time.perf_counter() - started
        if len(results) != len(numbers):
            raise InvalidValue(f"the part has {len(results)} results, {len(numbers)} were expected")
        for number, result in zip(numbers, results):
            self._keep(number, result)
        self._conduct.ran(part.cost, seconds)
        self._runs += 1
        return {"tensors": [_described(r) for r in results], "seconds": seconds}, []

    def _statistics(self, message: Message) -> tuple[dict[str, Any], list[Array]]:
        return {
            "held": self._held,
            "peak": self._peak,
            "limit": self._memory_limit,
            "runs": self._runs,
            "parts": len(self._parts),
            "tensors": len(self._tensors),
        }, []

    def _tensor(self, number: int) -> Array:
        found = self._tensors.get(number)
        if found is None:
            raise InvalidValue(f"there is no tensor with the number {number}")
        return found

    def _keep(self, number: int, tensor: Array) -> None:
        self._drop(number)
        self._reserve(tensor.nbytes, f"a tensor of {tensor.nbytes:,} bytes")
        self._tensors[number] = tensor

    def _reserve(self, nbytes: int, what: str) -> None:
        if self._memory_limit is not None and self._held + nbytes > self._memory_limit:
            raise OutOfMemory(
                f"no memory for {what}: {self._held:,} of {self._memory_limit:,} bytes are in use", requested=nbytes
            )
        self._held += nbytes
        self._peak = max(self._peak, self._held)

    def _drop(self, number: int) -> None:
        tensor = self._tensors.pop(number, None)
        if tensor is not None:
            self._held -= tensor.nbytes
        part = self._parts.pop(number, None)
        if part is not None:
            self._held -= part.weights
            part.session.close()


def _numbers(message: Message, name: str) -> list[int]:
    found = message.fields.get(name, [])
    if not isinstance(found, list) or not all(type(n) is int for n in found):
        raise InvalidValue(f"{message.kind}: {name} must be numbers")
    return found


def _allowed(message: Message) -> RunOptions | None:
    """The time after which nobody waits for the result any more."""
    seconds = message.fields.get("seconds")
    return RunOptions(timeout=seconds) if isinstance(seconds, int | float) and seconds > 0 else None


def _described(tensor: Array) -> list[Any]:
    return [dtypes.of(tensor).name, list(np.shape(tensor))]


def _cost(graph: Graph) -> Cost:
    try:
        return graph_cost(graph)
    except RanvierError:
        return Cost(0.0, 0.0)  # only a simulation asks; the run itself says what is wrong
