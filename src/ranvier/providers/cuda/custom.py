"""Kernels of the user's own on a GPU: CUDA C source, and functions of Triton.

``load`` takes CUDA C as a string, which CuPy's or torch's own copy of NVRTC compiles, or a function of Triton. What a
launch is given are tensors of the device (or anything that speaks DLPack and lies there) and numbers. A launch waits
for the kernel to end, so its errors belong to it.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.errors import DeviceMismatch, InvalidConfig, InvalidInput, KernelError
from ranvier.providers.base import KernelHandle, KernelInfo
from ranvier.providers.cuda.failures import PROVIDER, typed
from ranvier.providers.cuda.library import installed, torch
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.providers.cuda.provider import CudaProvider

_AXES = 3


@dataclass(frozen=True)
class CudaKernelInfo(KernelInfo):
    """What a kernel takes of the processor, where that is known: -1 where it is not."""

    registers: int = -1  # of a thread
    shared_bytes: int = -1  # of a block
    local_bytes: int = -1  # of a thread, where registers did not suffice
    max_threads: int = -1  # of a block


class _Loaded:
    kind = ""

    def __init__(self, name: str, signature: Any, source: str) -> None:
        self.name = name
        self.signature = signature
        self.source = source
        self.launches, self.seconds = 0, 0.0

    def run(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        raise NotImplementedError

    def used(self) -> Mapping[str, int]:
        return {}


class _Source(_Loaded):
    """CUDA C through CuPy."""

    kind = "cuda"

    def __init__(self, source: str, name: str, signature: Any) -> None:
        super().__init__(name, signature, source)
        self._cupy: Any = importlib.import_module("cupy")
        self._module: Any = self._cupy.RawModule(code=source, options=("--std=c++17",))
        self._function = self._module.get_function(name)

    def run(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        given = tuple(self._cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else _scalar(x) for x in args)
        stream = self._cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            self._function(grid, block, given)

    def used(self) -> Mapping[str, int]:
        found = self._function.attributes
        return {
            "registers": found["num_regs"],
            "shared_bytes": found["shared_size_bytes"],
            "local_bytes": found["local_size_bytes"],
            "max_threads": found["max_threads_per_block"],
        }


class _TorchSource(_Loaded):
    """CUDA C through torch's own compiler, where CuPy is not installed."""

    kind = "cuda"

    def __init__(self, source: str, name: str, signature: Any) -> None:
        super().__init__(name, signature, source)
        self._function: Any = torch.cuda._compile_kernel(source, name)

    def run(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        self._function(grid=(*grid, 1, 1)[:_AXES], block=(*block, 1, 1)[:_AXES], args=list(args))


class _Function(_Loaded):
    """A function of Triton. ``signature``: constants that the function takes by name, ``block`` the number of warps."""

    kind = "triton"

    def __init__(self, function: Any, name: str, signature: Any) -> None:
        inner = getattr(function, "fn", function)
        super().__init__(name, signature, str(getattr(function, "src", "") or getattr(inner, "__doc__", "") or name))
        self._function = function
        self._constants = dict(signature or {})
        self._compiled: Any = None

    def run(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        warps = {"num_warps": block[0]} if block and block[0] else {}
        self._compiled = self._function[grid](*args, **self._constants, **warps)

    def used(self) -> Mapping[str, int]:
        compiled = self._compiled
        if not hasattr(compiled, "n_regs"):
            return {}
        return {
            "registers": int(compiled.n_regs),
            "shared_bytes": int(compiled.metadata.shared),
            "local_bytes": int(compiled.n_spills) * 4,
            "max_threads": int(compiled.metadata.num_warps) * 32,
        }


def _scalar(x: Any) -> Any:
    """Whole numbers as C's int where they fit, others as float: what a kernel declares most often."""
    if isinstance(x, bool):
        return np.bool_(x)
    if isinstance(x, int):
        return np.int32(x) if -(1 << 31) <= x < 1 << 31 else np.int64(x)
    return np.float32(x) if isinstance(x, float) else x


class CudaKernels:
    """Those of one provider. Thread-safe."""

    def __init__(self, provider: CudaProvider) -> None:
        self._provider = provider
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._loaded: dict[int, _Loaded] = {}

    def load(self, source: Any, name: str, signature: Any = None) -> KernelHandle:
        """``source``: text of CUDA C with a function ``extern "C" __global__`` of this name, or a function of Triton;
        for that one ``signature`` gives the values of its constants by name."""
        if isinstance(source, str):
            made = self._compiled(source, name, signature)
        elif hasattr(source, "__getitem__") and hasattr(source, "run"):
            made = _Function(source, name, signature)
        else:
            raise InvalidConfig(f"kernel {name!r}: source must be text of CUDA C or a function of Triton")
        handle = KernelHandle(PROVIDER, name, next(self._numbers))
        with self._lock:
            self._loaded[handle.number] = made
        return handle

    def _compiled(self, source: str, name: str, signature: Any) -> _Loaded:
        if not self._provider.place.captures:
            raise KernelError(f"kernel {name!r}: CUDA C needs a GPU, and this is {self._provider.place.device}")
        try:
            with self._provider.place.computing():
                return (_Source if installed("cupy") else _TorchSource)(source, name, signature)
        except Exception as error:
            raise KernelError(f"kernel {name!r} does not compile: {error}", provider=PROVIDER) from error

    def launch(self, handle: KernelHandle, grid: Any, block: Any, args: Sequence[Any]) -> None:
        found = self._find(handle)
        sizes = _extent(handle.name, "grid", grid)
        threads = _extent(handle.name, "block", block, least=0)
        given = [self._argument(handle.name, k, x) for k, x in enumerate(args)]
        health, place = self._provider.health, self._provider.place
        health.check()
        started = time.perf_counter()
        try:
            with place.computing():
                found.run(sizes, threads, given)
            place.synchronize()
        except Exception as error:
            health.note(error)
            raise typed(error, f"kernel {handle.name!r} failed") from error
        with self._lock:
            found.launches += 1
            found.seconds += time.perf_counter() - started

    def info(self, handle: KernelHandle) -> CudaKernelInfo:
        found = self._find(handle)
        told = "" if found.signature is None else str(found.signature)
        counts = (found.launches, found.seconds)
        return CudaKernelInfo(found.name, found.kind, told, found.source, *counts, **found.used())

    def unload(self, handle: KernelHandle) -> None:
        self._find(handle)
        with self._lock:
            self._loaded.pop(handle.number, None)

    def close(self) -> None:
        with self._lock:
            self._loaded.clear()

    def _find(self, handle: KernelHandle) -> _Loaded:
        with self._lock:
            found = self._loaded.get(handle.number) if handle.provider == PROVIDER else None
        if found is None:
            raise InvalidInput(f"kernel {handle.name!r} is not loaded on {PROVIDER}")
        return found

    def _argument(self, name: str, position: int, x: Any) -> Any:
        if isinstance(x, bool | int | float):
            return x
        if not hasattr(x, "__dlpack__"):
            raise InvalidInput(f"kernel {name!r}: argument {position} is a {type(x).__name__}, no tensor and no number")
        tensor = x if type(x).__module__.startswith("torch") else torch.from_dlpack(x)
        if tensor.device != self._provider.place.device:
            where = self._provider.place.device
            raise DeviceMismatch(f"kernel {name!r}: argument {position} is on {tensor.device}, the kernel on {where}")
        return tensor


def _extent(name: str, what: str, given: Any, least: int = 1) -> tuple[int, ...]:
    sizes = (given,) if isinstance(given, int) else tuple(given or ())
    if len(sizes) > _AXES or any(not isinstance(n, int) or isinstance(n, bool) or n < least for n in sizes):
        raise InvalidInput(f"kernel {name!r}: {what} must be up to {_AXES} whole numbers from {least}, got {given!r}")
    return sizes


__all__ = ["CudaKernelInfo", "CudaKernels"]
