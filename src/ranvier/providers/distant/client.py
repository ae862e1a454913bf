"""A provider whose kernels run in another process: parts are shipped once, tensors stay there until somebody here
needs their contents.

Nothing waits before it must: putting tensors, running a part and dropping tensors are sent off, and an error comes
out when the results are fetched. A worker that dies takes its tensors along; the next use starts or reaches another
one and ships the parts again.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np

from ranvier.devices import Device
from ranvier.errors import WorkerLost
from ranvier.providers.base import (
    CompileContext,
    ProviderCapability,
    Subgraph,
)
from ranvier.providers.distant.channel import Channel
from ranvier.providers.distant.link import Link
from ranvier.providers.distant.wire import Array, Message
from ranvier.providers.foreign import ForeignKernel, ForeignProvider
from ranvier.providers.part_model import part_model

PROTOCOL = 1
_START = 60.0  # seconds that a worker may take until it is there: it has a runtime to import


class DistantTensor:
    """A tensor at the other end of a link; it is dropped there when nobody here refers to it any more."""

    __slots__ = ("__weakref__", "_made", "_position", "link", "number")

    def __init__(self, link: Link, number: int, made: Future[Message], position: int) -> None:
        self.link = link
        self.number = number
        self._made = made  # the answer that says its type, or why there is none
        self._position = position
        weakref.finalize(self, link.forget, number).atexit = False

    def described(self) -> tuple[str, list[int]]:
        """Element type and shape; waits until the tensor has been made."""
        dtype, shape = self.link.wait(self._made, "run").fields["tensors"][self._position]
        return dtype, shape

    def check(self) -> None:
        """Wait until it has been made; raise what went wrong."""
        self.link.wait(self._made, "run")


class DistantProvider(ForeignProvider, ABC):
    """Common to all providers of this kind; a subclass says how the other end is reached."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type]

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        self.device: Device = self._device()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False

    @abstractmethod
    def _device(self) -> Device: ...

    @abstractmethod
    def _open(self) -> Channel:
        """Reach the other end; ProviderUnavailable or ProviderFailed where it cannot be reached."""

    @abstractmethod
    def _timeout(self) -> float | None:
        """Seconds that an answer may take."""

    def available(self) -> str | None:
        return None

    def capability(self) -> ProviderCapability:
        return ProviderCapability(memory=("device",), notes=f"runs in another process, {self.device}")

    def compile(self, part: Subgraph, ctx: CompileContext) -> DistantKernel:
        kernel = DistantKernel(self, part, ctx)
        kernel.ship(self.link())
        return kernel

    def link(self) -> Link:
        """The connection, made when it is first needed and again after it broke."""
        with self._lock:
            if self._closed:
                raise WorkerLost(self.name, "the provider was shut down")
            link = self._link
            if link is None or not link.usable:
                link = self._link = Link(self._open(), self.name, self._timeout())
                link.ask("hello", {"protocol": PROTOCOL}, at_least=_START)
            return link

    def upload(self, arrays: Sequence[Array]) -> list[DistantTensor]:
        link = self.link()
        numbers = [link.next_number() for _ in arrays]
        made = link.post("put", {"tensors": numbers}, arrays)
        return [DistantTensor(link, number, made, k) for k, number in enumerate(numbers)]

    def download(self, tensors: Sequence[DistantTensor]) -> list[Array]:
        if not tensors:
            return []
        link = tensors[0].link
        for tensor in tensors:
            tensor.check()
        return link.ask("get", {"tensors": [t.number for t in tensors]}).tensors

    def statistics(self) -> dict[str, Any]:
        """What the other end says about its memory and its work."""
        return self.link().ask("statistics", {}).fields

    def close(self) -> None:
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close()
        super().close()


class DistantKernel(ForeignKernel):
    """A part that was shipped as a small model of its own."""

    def __init__(self, provider: DistantProvider, part: Subgraph, ctx: CompileContext) -> None:
        self._model = part_model(part)
        super().__init__(self._model.constant_bytes)
        self._provider = provider
        self.source = self._model.text
        self._lock = threading.Lock()
        self._shipped: tuple[Link, int] | None = None

    def ship(self, link: Link) -> int:
        """Make the other end load the part; its number there."""
        with self._lock:
            if self._shipped is not None and self._shipped[0] is link:
                return self._shipped[1]
            number = link.next_number()
            link.ask("load", {"part": number}, [np.frombuffer(self._model.data, np.uint8)])
            self._shipped = (link, number)
            weakref.finalize(self, link.forget, number).atexit = False
            return number

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        link = self._provider.link()
        part = self.ship(link)
        given = [inputs[k] for k in self._model.positions]
        before = next((tensor.link for tensor in given if tensor.link is not link), None)
        if before is not None:
            why = f": {before.ended_by}" if before.ended_by else ""
            raise WorkerLost(self._provider.name, f"what it held went with the worker before{why}", transient=True)
        numbers = [link.next_number() for _ in self._model.outputs]
        fields = {"part": part, "inputs": [t.number for t in given], "outputs": numbers, "seconds": link.timeout}
        made = link.post("run", fields)
        outputs[:] = [DistantTensor(link, number, made, k) for k, number in enumerate(numbers)]
        self._count(started)
