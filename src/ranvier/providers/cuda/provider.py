"""The provider ``cuda``: parts of a graph on an NVIDIA GPU.

torch gives memory, streams, products, convolutions and attention; what is between them is generated. Nothing of torch
is imported before the provider is used.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from ranvier.codegen.phases import phase
from ranvier.codegen.triton import images
from ranvier.devices import Device, GpuInfo
from ranvier.devices.gpu import VISIBLE, find_gpus
from ranvier.devices.surroundings import Surroundings
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, ProviderUnavailable
from ranvier.providers.base import (
    Array,
    Claim,
    CompileContext,
    CustomKernels,
    Decline,
    GraphView,
    ProviderCapability,
    Subgraph,
)
from ranvier.providers.cuda import ops
from ranvier.providers.cuda.decode import Decoding
from ranvier.providers.cuda.failures import Health
from ranvier.providers.cuda.kernel import CudaKernel
from ranvier.providers.cuda.library import installed, tensor_over, torch
from ranvier.providers.cuda.memory import DeviceMemory, HostSide
from ranvier.providers.cuda.options import CudaOptions
from ranvier.providers.cuda.place import TWIN, Gpu, Twin, make_place
from ranvier.providers.cuda.specialise import specialiser
from ranvier.providers.cuda.table import ANY, COMPLEX, draws_alike, operators, refusal, unknown_types
from ranvier.providers.cuda.transfers import GpuTransfers, TwinTransfers, lies_on, make_transfers, tensor_at
from ranvier.providers.cuda.variant import Specialise
from ranvier.providers.foreign import ForeignProvider
from ranvier.providers.own_memory import DeviceArray
from ranvier.providers.part_model import reason_against_moving
from ranvier.records import dataclass

OLDEST = (7, 0)  # compute capability: what torch and Triton both have code for
_PRECISIONS = {"float32": "f32", "fp16": "f16", "bf16": "bf16"}  # of sessions, by the names used here


class CudaProvider(ForeignProvider):
    name: ClassVar[str] = "cuda"
    aliases: ClassVar[tuple[str, ...]] = ("CUDAExecutionProvider", "gpu", "torch")
    Options: ClassVar[type] = CudaOptions
    number: ClassVar[int | None] = None  # of the GPU that it is tied to

    def __init__(self, options: CudaOptions | None = None) -> None:
        self.options: CudaOptions = options or self.Options()
        self._host_side = HostSide(self.name)
        self._allocator = self._host_side
        twin = self.options.device == TWIN
        self.device: Device = Device("cuda", self.number or 0 if twin else int(self.options.device))
        self._health = Health("the twin" if twin else str(self.device), self.name)
        self._lock = threading.Lock()
        self._opened: tuple[Twin | Gpu, TwinTransfers | GpuTransfers, DeviceMemory] | None = None
        self._kernels: Any = None

    def configure(self, options: CudaOptions) -> CudaProvider:
        made = type(self)(options)
        reason = made.available()
        if reason is not None:
            raise ProviderUnavailable(self.name, reason)
        if options.device != TWIN and options.triton is not False:
            images.prepare()  # while the model is read
        return made

    def available(self) -> str | None:
        if self._health.lost:
            return self._health.lost
        if not installed():
            return "torch is not installed"
        return None if self.options.device == TWIN else _problem(int(self.options.device))

    def available_with(self, options: Mapping[str, Any]) -> str | None:
        """As ``available``, for somebody who gives options: the twin is there where no GPU is."""
        known = {f.name for f in fields(self.Options)}  # whoever makes them tells of others
        return type(self)(self.Options(**{k: v for k, v in options.items() if k in known})).available()

    # -- what it can do -----------------------------------------------------------------------------------------------

    def capability(self) -> ProviderCapability:
        ops.load_all()
        kinds = frozenset({"cuda", "triton"}) if self.options.device != TWIN else frozenset({"triton"})
        return ProviderCapability(
            ops=operators(),
            dtypes=ANY | COMPLEX,
            memory=("device", "pinned"),
            notes=f"torch {_version()}, {'its CPU device' if self.options.device == TWIN else self.device}",
            flash_attention=True,
            cuda_graphs=self.options.device != TWIN,
            custom_kernels=kinds,
        )

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        ops.load_all()
        for node in view:
            # random numbers are drawn by the generator that all share, so they need not stay elsewhere
            reason = None if draws_alike(node) else reason_against_moving(node)
            reason = reason or unknown_types(node) or refusal(node)
            yield Claim((node,)) if reason is None else Decline(node, reason)

    # -- running ------------------------------------------------------------------------------------------------------

    def compile(self, part: Subgraph, ctx: CompileContext) -> CudaKernel:
        ops.load_all()
        place, _, _ = self._open()
        own = self.options
        precision = _PRECISIONS[ctx.config.precision] if own.precision == "auto" else own.precision
        graphs = place.captures if own.cuda_graphs is None else own.cuda_graphs
        how: dict[str, Any] = {"precision": precision, "graphs": graphs, "kept": own.graphs_kept}
        special: Specialise | None = specialiser(place, own.triton)
        if special is not None:
            special = decoding = Decoding(place, special, part.nodes)
            how["lay_out"] = decoding.lay_out
        return CudaKernel(part, ctx, place, self._health, specialise=special, **how)

    def upload(self, arrays: Sequence[Array]) -> list[Any]:
        place, transfers, _ = self._open()
        return self._health.guarded("a transfer in", lambda: transfers.upload(arrays), place.empty_cache)

    def download(self, tensors: Sequence[Any]) -> list[Array]:
        place, transfers, _ = self._open()
        return self._health.guarded("a transfer out", lambda: transfers.download(tensors), place.empty_cache)

    def adopt(self, x: Any) -> DeviceArray | None:
        place, transfers, _ = self._open()
        return transfers.adopt(x, str(self.device), self.download) if lies_on(x, place) else None

    def hand_out(self, tensors: Sequence[Any]) -> list[Any]:
        place, transfers, _ = self._open()
        return self._health.guarded("results", lambda: transfers.hand_out(tensors), place.empty_cache)

    @property
    def space(self) -> str:
        return str(self.device)

    def bring(self, array: Array) -> Any:
        mine = array.copy() if self.options.device == TWIN else array  # a twin's tensors lie over arrays
        return self.hand_out(self.upload([mine]))[0]

    def at(self, address: int, dtype: DType, shape: Sequence[int]) -> Any:
        place, _, _ = self._open()
        return self._health.guarded(
            "memory of the caller's", lambda: tensor_at(address, dtype, shape, place), lambda: None
        )

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def fill(self, target: Any, source: Any) -> None:
        """In the caller's stream, which waits for results by itself."""
        place, _, _ = self._open()
        given = tensor_over(source) if isinstance(source, np.ndarray) else source
        self._health.guarded("a copy", lambda: target.copy_(given), place.empty_cache)

    def launch(self, run: Callable[[], Any]) -> Any:
        place, _, _ = self._open()

        def launched() -> Any:
            with torch.no_grad(), place.in_order():
                return run()

        return self._health.guarded("a tied run", launched, place.empty_cache)

    def refill(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        place, transfers, _ = self._open()
        self._health.guarded("a transfer in", lambda: transfers.refill(targets, sources), place.empty_cache)

    def leave(self, tensors: Sequence[Any]) -> Callable[[], list[Array]]:
        place, transfers, _ = self._open()
        arrived = self._health.guarded("a transfer out", lambda: transfers.leave(tensors), place.empty_cache)
        return lambda: self._health.guarded("a transfer out", arrived, place.empty_cache)

    def wait(self) -> None:
        place, _, _ = self._open()
        self._health.guarded("waiting", place.synchronize, lambda: None)

    @property
    def memory(self) -> DeviceMemory:
        """Buffers on the device."""
        return self._open()[2]

    @property
    def place(self) -> Twin | Gpu:
        return self._open()[0]

    @property
    def health(self) -> Health:
        return self._health

    @property
    def kernels(self) -> CustomKernels:
        """Kernels of the user's own; see docs/gpu.md."""
        with self._lock:
            if self._kernels is None:
                from ranvier.providers.cuda.custom import CudaKernels  # few sessions need it

                self._kernels = CudaKernels(self)
            found: CustomKernels = self._kernels
            return found

    def _open(self) -> tuple[Twin | Gpu, TwinTransfers | GpuTransfers, DeviceMemory]:
        """The device, woken when something is first done there."""
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    with phase("device"):
                        place = self._health.guarded(f"starting {self.device}", self._wake, lambda: None)
                    memory = DeviceMemory(place, self._health, self.options.memory_limit)
                    self._host_side.device = memory
                    self._opened = place, make_transfers(place), memory
        return self._opened

    def _wake(self) -> Twin | Gpu:
        return make_place(self.options.device, self.device.index)

    def close(self) -> None:
        if self._kernels is not None:
            self._kernels.close()
        super().close()


@functools.cache
def numbered(index: int) -> type[CudaProvider]:
    """The provider of one GPU among several, under a name of its own: each is another device to the partitioner."""

    @dataclass(frozen=True)
    class Options(CudaOptions):
        device: int | str = index

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.device not in (index, TWIN):
                raise InvalidConfig(f"CudaOptions: the provider 'cuda:{index}' cannot have device={self.device!r}")

    return type(
        "CudaProvider",
        (CudaProvider,),
        {"name": f"cuda:{index}", "aliases": (), "Options": Options, "number": index, "__module__": __name__},
    )


def _problem(index: int) -> str | None:
    """Why a GPU cannot be used; None where it can."""
    found = _gpus(os.environ.get(VISIBLE))
    here = [gpu for gpu in found if gpu.kind == "cuda"]
    if not here:
        return "this machine has no NVIDIA GPU (the option device='cpu' runs it on torch's CPU device, for tests)"
    chosen = next((gpu for gpu in here if gpu.index == index), None)
    if chosen is None:
        return here[0].problem or f"there is no cuda:{index}: the GPUs here are numbered 0 to {len(here) - 1}"
    if chosen.problem:
        return chosen.problem
    if chosen.capability is not None and chosen.capability < OLDEST:
        have, want = (".".join(map(str, each)) for each in (chosen.capability, OLDEST))
        return f"{chosen.name} has compute capability {have}, and at least {want} is needed"
    return None


@functools.cache
def _gpus(visible: str | None) -> tuple[GpuInfo, ...]:
    """Asked once: the driver takes tens of milliseconds to answer. ``visible`` is what the answer depends on."""
    return find_gpus(Surroundings())


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


__all__ = ["OLDEST", "CudaOptions", "CudaProvider", "numbered"]
