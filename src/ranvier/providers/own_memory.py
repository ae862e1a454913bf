"""What a provider with a memory of its own offers: tensors there, theirs and others', and runs tied to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ranvier.dtypes import DType
from ranvier.providers.base import Array


@runtime_checkable
class OwnMemory(Protocol):
    """A provider whose kernels work on tensors in a memory of its own: they are given such tensors and make such.

    The plan moves arrays in and results out, several at a time. Both ways, and the kernels too, may return before the
    work is done; only an array that ``download`` returned is there.
    """

    def upload(self, arrays: Sequence[Array]) -> list[Any]: ...

    def download(self, tensors: Sequence[Any]) -> list[Array]: ...


class DeviceArray(np.ndarray[Any, Any]):
    """Stands for a tensor in the memory of a device: type and shape are its own, elements are not there.

    Only a provider with that memory may read it; for everybody else ``fetched`` brings the elements."""

    tensor: Any  # the provider's own
    space: str  # which memory, by its device
    fetch: Callable[[], Array]

    @classmethod
    def of(
        cls, tensor: Any, dtype: np.dtype[Any], shape: Sequence[int], space: str, fetch: Callable[[], Array]
    ) -> DeviceArray:
        made = np.ndarray(tuple(shape), dtype, bytes(16), 0, (0,) * len(shape)).view(cls)
        made.tensor, made.space, made.fetch = tensor, space, fetch
        return made

    def fetched(self) -> Array:
        """Its elements as an ordinary array."""
        return self.fetch()


@runtime_checkable
class SharesTensors(OwnMemory, Protocol):
    """A provider with a memory of its own that takes tensors of others from there, and gives its own to them."""

    def adopt(self, x: Any) -> DeviceArray | None:
        """What stands for the tensor of another library, nothing copied; None where it lies elsewhere."""
        ...

    def hand_out(self, tensors: Sequence[Any]) -> list[Any]:
        """Tensors as results: they belong to the caller, and what the caller does next waits for them by itself."""
        ...


@runtime_checkable
class Ties(Protocol):
    """A compiled kernel that can be tied to tensors: they are where it reads, every time it is called."""

    def tied(self, inputs: Sequence[Any], replaced: Mapping[int, int]) -> Callable[[], Sequence[Any]]:
        """What runs it; results lie in the same memory every time. ``replaced``: outputs, by position, that are written
        over these inputs."""
        ...

    def shaped_by(self) -> Sequence[int]:
        """Inputs, by position, whose content is looked at when it is tied, and not again: sizes follow from it."""
        ...


@runtime_checkable
class LendsMemory(SharesTensors, Protocol):
    """A provider in whose memory callers keep tensors of their own: made before a run, written to after it."""

    @property
    def space(self) -> str:
        """Which memory, by its device."""
        ...

    def bring(self, array: Array) -> Any:
        """A tensor with the elements of an array; it belongs to the caller."""
        ...

    def at(self, address: int, dtype: DType, shape: Sequence[int]) -> Any:
        """A tensor over memory of the device that somebody else owns and keeps alive."""
        ...

    def address(self, tensor: Any) -> int: ...

    def fill(self, target: Any, source: Any) -> None:
        """Write the elements of an array, or of a tensor of this memory, into a tensor of the same type and shape."""
        ...

    def wait(self) -> None:
        """Until everything that was launched is done."""
        ...


@runtime_checkable
class KeepsValues(LendsMemory, Protocol):
    """A provider that tied runs are fed by, and their results taken from, without waiting for the device.

    What is done here happens in the order of the calls, whichever thread or provider of the same device they are of."""

    def launch(self, run: Callable[[], Any]) -> Any:
        """Call a tied run."""
        ...

    def refill(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Write the elements of arrays, or of tensors of this memory, into tensors. An array may change once this
        has returned."""
        ...

    def leave(self, tensors: Sequence[Any]) -> Callable[[], list[Array]]:
        """Begin to bring tensors to the host as they are now; what is returned waits for them."""
        ...


@runtime_checkable
class TellsCaptures(Protocol):
    """A compiled kernel whose runs are captured when they repeat, so that all of one is launched at once."""

    def graph_report(self) -> list[str]:
        """For each kind of run that is kept: whether it is captured, and why not."""
        ...
