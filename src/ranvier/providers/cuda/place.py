"""Where the tensors of a provider are: a GPU with its streams, or its twin on the host.

The twin does the same with torch's CPU device, at once instead of in streams. It is for tests and for machines without
a GPU, and nobody gets it who did not ask for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ranvier.providers.cuda.library import torch

TWIN = "cpu"


class Replay(Protocol):
    """A run that was captured: the same kernels on the same memory, as often as it is called."""

    def __call__(self) -> None: ...


class Place(Protocol):
    """What kernels and transfers ask of a device."""

    device: Any  # torch's
    captures: bool  # can it replay runs by itself

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """While kernels are launched."""
        ...

    def in_order(self) -> contextlib.AbstractContextManager[Any]:
        """While tied runs are fed and launched: in one stream, whoever does it."""
        ...

    def capture(self, run: Callable[[], Any], *, apart: bool = False) -> Replay:
        """``apart``: in memory that no other captured run uses, so that it may be replayed in any stream."""
        ...

    def synchronize(self) -> None: ...

    def settle(self) -> None:
        """Until what was launched while computing is done."""
        ...

    def uses(self, tensor: Any) -> None:
        """A tensor that other places of the device may have made and may let go of: its memory is not used for anything
        else before what is launched here until then is done."""
        ...

    def empty_cache(self) -> None: ...

    def memory(self) -> tuple[int, int, int, int]:
        """Bytes in tensors now, at most, taken from the driver, and how many requests failed."""
        ...


class Twin:
    """torch's CPU device."""

    captures = False

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device(TWIN)
        self.index = index  # of the GPU that it stands for

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def in_order(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def capture(self, run: Callable[[], Any], *, apart: bool = False) -> Replay:
        """Runs it again: what a captured run reads and writes stays where it was, so the way through static memory is
        the same as on a GPU."""
        run()

        def replay() -> None:
            run()

        return replay

    def synchronize(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def uses(self, tensor: Any) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def memory(self) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0


class Gpu:
    """One GPU: a stream for kernels, one for what comes in and one for what goes out, so that all three overlap."""

    captures = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.index = index
        with torch.cuda.device(index):
            self.compute = torch.cuda.Stream(index)
            self.incoming = torch.cuda.Stream(index)
            self.outgoing = torch.cuda.Stream(index)
        self._pool: Any = None
        self._launching = threading.RLock()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """One thread at a time: what others launched on the stream meanwhile would become part of a captured run."""
        with self._launching, torch.cuda.stream(self.compute):  # which makes its device the current one as well
            yield

    def in_order(self) -> contextlib.AbstractContextManager[Any]:
        """The stream that every library begins with: providers of one device with different options share it."""
        found: contextlib.AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.default_stream(self.index))
        return found

    def capture(self, run: Callable[[], Any], *, apart: bool = False) -> Replay:
        """All captured runs share one pool of memory: they run one after the other, on one stream."""
        if self._pool is None and not apart:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self.compute.synchronize()
        pool = None if apart else self._pool
        # errors of other threads' calls are theirs: only what this thread does counts
        with (
            _own_workspaces(),
            torch.cuda.graph(graph, pool=pool, stream=self.compute, capture_error_mode="thread_local"),
        ):
            run()
        replay: Replay = graph.replay
        return replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def settle(self) -> None:
        self.compute.synchronize()

    def uses(self, tensor: Any) -> None:
        tensor.record_stream(self.compute)
        tensor.record_stream(torch.cuda.default_stream(self.index))  # where tied runs are

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int, int, int]:
        told = torch.cuda.memory_stats(self.index)
        return (
            int(told.get("allocated_bytes.all.current", 0)),
            int(told.get("allocated_bytes.all.peak", 0)),
            int(told.get("reserved_bytes.all.current", 0)),
            int(told.get("num_ooms", 0)),
        )


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS works in memory that torch keeps for each stream, and gives back whenever somebody asks it to: a captured
    run would go on using it. So it makes its own, which lies in the memory of the run."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    try:
        yield
    finally:
        if clear is not None:
            clear()


def make_place(device: int | str, index: int = 0) -> Twin | Gpu:
    """``index``: the number of the GPU that a twin stands for."""
    return Twin(index) if device == TWIN else Gpu(int(device))


__all__ = ["TWIN", "Gpu", "Place", "Replay", "Twin", "make_place"]
