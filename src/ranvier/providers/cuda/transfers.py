"""Arrays into tensors of a device and back, all of one call together.

Incoming arrays go through one block of pinned memory and one copy, on a stream of their own: kernels of the call before
still run meanwhile. torch keeps pinned blocks for reuse until the copies that use them are done.

A tensor may carry more than its elements. ``HOST``: a small one's content as an array, so that sizes are known without
asking the device. ``CHECKS``: conditions on which it is right; they are looked at when it leaves the device. ``KIND``:
the element type in NumPy, where torch's is only a carrier of it. ``SHARED``: its memory is also that of a weight or of
an operand, so nobody gets it to keep. ``OURS``: it was handed out before, by the twin of this number.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.storage import row_major
from ranvier.dtypes import DType
from ranvier.errors import InvalidValue
from ranvier.providers.base import Array
from ranvier.providers.cuda.library import array_over, numpy_type, tensor_over, torch, torch_type
from ranvier.providers.cuda.place import Gpu, Twin
from ranvier.providers.own_memory import DeviceArray

HOST, CHECKS, KIND = "_ranvier_host", "_ranvier_checks", "_ranvier_kind"
OURS, SHARED = "_ranvier_ours", "_ranvier_shared"
_REMEMBERED = 4096  # bytes of an array whose content is also kept on the host
_ALIGNED = 256  # bytes: where torch's own tensors start at the least
_ALONE = 1 << 20  # bytes from which an array is not packed with others


class Checks:
    """Booleans on the device, all of which must be true, and what each of them means when it is not."""

    __slots__ = ("flags", "messages")

    def __init__(self, flags: Any, messages: tuple[str, ...]) -> None:
        self.flags = flags
        self.messages = messages

    def look(self, flags: Array) -> None:
        for fine, message in zip(flags.reshape(-1).tolist(), self.messages):
            if not fine:
                raise InvalidValue(message)


def remember(tensor: Any, array: Array) -> Any:
    if array.dtype != numpy_type(tensor):
        setattr(tensor, KIND, array.dtype)
    if array.nbytes <= _REMEMBERED:
        setattr(tensor, HOST, array)
    return tensor


def host_of(tensor: Any) -> Array:
    """The content of a tensor as an array: remembered, or asked of the device, which is waited for."""
    known: Array | None = getattr(tensor, HOST, None)
    return array_over(tensor.detach().cpu(), getattr(tensor, KIND, None)) if known is None else known


def checks_of(tensors: Iterable[Any]) -> list[Checks]:
    return list(dict.fromkeys(each for tensor in tensors for each in getattr(tensor, CHECKS, ())))


def look_at(tensors: Sequence[Any]) -> None:
    """Raise where a condition on which these tensors are right does not hold; waits for the device."""
    for each in checks_of(tensors):
        each.look(array_over(each.flags.cpu()))


_DLPACK_CUDA = 2  # kDLCUDA


def lies_on(x: Any, place: Twin | Gpu) -> bool:
    """Is this a tensor of the device's own memory? What lies on the host is an array to everybody: also for the twin,
    which takes only what was handed out before."""
    if isinstance(place, Twin):
        return getattr(x, OURS, None) == place.index
    kind, index = x.__dlpack_device__()
    return int(kind) == _DLPACK_CUDA and int(index) == place.index


def _standing_for(x: Any, space: str, download: Any) -> DeviceArray:
    tensor = x.detach() if type(x).__module__.partition(".")[0] == "torch" else torch.from_dlpack(x)
    for name in (CHECKS, KIND, OURS):
        if hasattr(x, name):
            setattr(tensor, name, getattr(x, name))
    dtype = getattr(x, KIND, None) or numpy_type(tensor)
    return DeviceArray.of(tensor, dtype, tensor.shape, space, lambda: download([tensor])[0])


def _own(tensor: Any, index: int) -> Any:
    """A result that nobody else writes to or reads. What was remembered of its content is forgotten: its new owner may
    write to it."""
    found = tensor.clone() if getattr(tensor, SHARED, False) else tensor
    if hasattr(tensor, KIND):
        setattr(found, KIND, getattr(tensor, KIND))
    if hasattr(found, HOST):
        delattr(found, HOST)
    setattr(found, OURS, index)
    return found


class _Foreign:
    """Bytes of a GPU's memory by their address, in words that torch understands."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, dtype: DType, shape: Sequence[int], place: Twin | Gpu) -> Any:
    """A tensor over memory that somebody else owns and keeps alive; elements of few bits take a byte each."""
    kind = torch_type(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes == 0:
        found = torch.empty(tuple(shape), dtype=kind, device=place.device)
    else:
        if isinstance(place, Twin):
            memory = (ctypes.c_uint8 * nbytes).from_address(address)
            flat = torch.frombuffer(memoryview(memory), dtype=torch.uint8)
        else:
            flat = torch.as_tensor(_Foreign(address, nbytes), device=place.device)
        found = flat.view(kind).reshape(tuple(shape))
    if dtype.numpy != numpy_type(found):
        setattr(found, KIND, dtype.numpy)
    setattr(found, OURS, place.index)
    return found


class TwinTransfers:
    """On the host nothing has to move, but results get memory of their own: the caller may write to it."""

    def __init__(self, place: Twin) -> None:
        self._place = place

    def upload(self, arrays: Sequence[Array]) -> list[Any]:
        return [a.tensor if isinstance(a, DeviceArray) else remember(tensor_over(a), a) for a in arrays]

    def adopt(self, x: Any, space: str, download: Any) -> DeviceArray:
        return _standing_for(x, space, download)

    def hand_out(self, tensors: Sequence[Any]) -> list[Any]:
        look_at(tensors)
        return [_own(tensor, self._place.index) for tensor in tensors]

    def refill(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        for target, source in zip(targets, sources):
            target.copy_(tensor_over(source) if isinstance(source, np.ndarray) else source)

    def leave(self, tensors: Sequence[Any]) -> Callable[[], list[Array]]:
        kept = [tensor.clone() for tensor in tensors]
        flags = [(each, each.flags.clone()) for each in checks_of(tensors)]

        def arrived() -> list[Array]:
            for each, found in flags:
                each.look(array_over(found))
            return [array_over(own, getattr(tensor, KIND, None)) for own, tensor in zip(kept, tensors)]

        return arrived

    def download(self, tensors: Sequence[Any]) -> list[Array]:
        look_at(tensors)
        return [array_over(tensor, getattr(tensor, KIND, None)).copy() for tensor in tensors]


class GpuTransfers:
    def __init__(self, place: Gpu) -> None:
        self._place = place

    def upload(self, arrays: Sequence[Array]) -> list[Any]:
        place = self._place
        found: list[Any] = [None] * len(arrays)
        packed: list[tuple[int, Any, int]] = []
        size = 0
        with torch.cuda.stream(place.incoming):
            for k, array in enumerate(arrays):
                if isinstance(array, DeviceArray):
                    found[k] = array.tensor
                    continue
                source = tensor_over(row_major(array))
                if array.nbytes >= _ALONE or array.nbytes == 0:
                    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                    pinned.copy_(source)
                    found[k] = pinned.to(place.device, non_blocking=True)
                else:
                    packed.append((k, source, size))
                    size += -(-array.nbytes // _ALIGNED) * _ALIGNED
            if packed:
                block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                for _, source, start in packed:
                    _part(block, source, start).copy_(source)
                there = block.to(place.device, non_blocking=True)
                for k, source, start in packed:
                    found[k] = _part(there, source, start)
            arrived = place.incoming.record_event()
        with place.computing():
            place.compute.wait_event(arrived)
        for tensor, array in zip(found, arrays):
            if isinstance(array, DeviceArray):
                continue
            tensor.record_stream(place.compute)  # its memory is not used again before the kernels are done with it
            remember(tensor, array.copy() if array.nbytes <= _REMEMBERED else array)
        return found

    def adopt(self, x: Any, space: str, download: Any) -> DeviceArray:
        """Kernels wait for what its maker has launched so far; its memory lives until they are done."""

        def fetched(tensors: Sequence[Any]) -> list[Array]:
            self._follow_the_caller()
            found: list[Array] = download(tensors)
            return found

        found = _standing_for(x, space, fetched)
        self._follow_the_caller()
        found.tensor.record_stream(self._place.compute)
        return found

    def _follow_the_caller(self) -> None:
        """What is launched next comes after what the caller's stream does now."""
        theirs = torch.cuda.current_stream(self._place.index)
        with self._place.computing():
            self._place.compute.wait_stream(theirs)

    def hand_out(self, tensors: Sequence[Any]) -> list[Any]:
        place = self._place
        theirs = torch.cuda.current_stream(place.index)
        with place.computing():
            found = [_own(tensor, place.index) for tensor in tensors]
            done = place.compute.record_event()
        theirs.wait_event(done)
        look_at(tensors)  # flags are read by the caller's stream: not before they are computed
        for tensor in found:
            tensor.record_stream(theirs)
        return found

    def refill(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        with self._place.in_order():
            for target, source in zip(targets, sources):
                if not isinstance(source, np.ndarray):
                    target.copy_(source)
                    continue
                given = tensor_over(row_major(source))
                pinned = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
                target.copy_(pinned.copy_(given), non_blocking=True)

    def leave(self, tensors: Sequence[Any]) -> Callable[[], list[Array]]:
        checks = checks_of(tensors)
        with self._place.in_order():
            kept = [_pinned(tensor) for tensor in tensors]
            flags = [_pinned(each.flags) for each in checks]
            left = torch.cuda.current_stream(self._place.index).record_event()
        kinds = [getattr(tensor, KIND, None) for tensor in tensors]

        def arrived() -> list[Array]:
            left.synchronize()
            for each, found in zip(checks, flags):
                each.look(array_over(found))
            return [array_over(own, kind) for own, kind in zip(kept, kinds)]

        return arrived

    def download(self, tensors: Sequence[Any]) -> list[Array]:
        place = self._place
        checks = checks_of(tensors)
        with place.computing():
            computed = place.compute.record_event()
        place.outgoing.wait_event(computed)
        with torch.cuda.stream(place.outgoing):
            results = [self._leaving(tensor) for tensor in tensors]
            flags = [self._leaving(each.flags) for each in checks]
            left = place.outgoing.record_event()
        left.synchronize()
        for each, found in zip(checks, flags):
            each.look(array_over(found))
        return [array_over(result, getattr(tensor, KIND, None)) for tensor, result in zip(tensors, results)]

    def _leaving(self, tensor: Any) -> Any:
        source = tensor.detach().contiguous()
        source.record_stream(self._place.outgoing)
        return _pinned(source)


def _pinned(tensor: Any) -> Any:
    """Its elements on the host, once the stream has come so far."""
    source = tensor.detach().contiguous()
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


def _part(block: Any, like: Any, start: int) -> Any:
    """A tensor like another one in a block of bytes."""
    nbytes = like.numel() * like.element_size()
    return block[start : start + nbytes].view(like.dtype).reshape(like.shape)


def make_transfers(place: Twin | Gpu) -> TwinTransfers | GpuTransfers:
    return TwinTransfers(place) if isinstance(place, Twin) else GpuTransfers(place)


__all__ = [
    "CHECKS",
    "HOST",
    "KIND",
    "Checks",
    "GpuTransfers",
    "TwinTransfers",
    "OURS",
    "SHARED",
    "checks_of",
    "host_of",
    "lies_on",
    "look_at",
    "make_transfers",
    "remember",
    "tensor_at",
]
