"""Initializers as lazy constants: inside the message, cut out of the model file, or in external files.

Every size is checked when the model is read; the bytes themselves are touched when somebody asks for them. That may be
as late as the first run, so whether somebody wrote to the file in between is looked at whenever they are asked for.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidModel, ResourceLimit, WeightError
from ranvier.formats.onnx.external import Place, file_beside, place_of
from ranvier.graph.tensors import ConstTensor
from ranvier.memory.mapping import give_back, is_mapped, mapped
from ranvier.memory.opened import Opened
from ranvier.ops.allocation import MAX_RANK
from ranvier.ops.proto import tensor_array
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Piece:
    """Bytes of a model, and the file they are mapped from; None where they are in memory."""

    data: memoryview
    opened: Opened | None = None


class WeightFiles:
    """Maps files into memory, once each, and keeps external data inside the folder of its model."""

    def __init__(self, model: Path | None) -> None:
        self._model = model
        self._maps: dict[Path, Piece] = {}

    @classmethod
    def inside(cls, folder: Path) -> WeightFiles:
        return cls(folder / "model.onnx")

    def map(self, path: Path) -> Piece:
        """The bytes of a file, mapped read-only."""
        found = self._maps.get(path)
        if found is None:
            try:
                data = mapped(path)
                found = Piece(data, Opened(path, len(data)))
            except (OSError, ValueError) as error:
                raise WeightError(f"cannot map {path.name!r}: {error}") from error
            self._maps[path] = found
        return found

    def external(self, location: str, tensor: str) -> Piece:
        """The bytes of an external data file; WeightError where the path leaves the model's folder."""
        if self._model is None:
            raise WeightError(
                f"tensor {tensor!r} is in external file {location!r}, but the model was not loaded from a file; "
                "load it by path, or give base_dir"
            )
        path = file_beside(self._model, location, tensor)
        if path is None:
            raise WeightError(f"tensor {tensor!r}: external file {location!r} does not exist")
        return self.map(path)


def checked_type(tensor: TensorProto, limit: int | None, label: str) -> tuple[DType, tuple[int, ...]]:
    """Element type and shape of a tensor message, or an error that names it."""
    try:
        dtype = dtypes.from_onnx(tensor.data_type)
    except DTypeMismatch:
        raise InvalidModel(f"{label} has unknown element type {tensor.data_type}") from None
    shape = tuple(tensor.dims)
    if len(shape) > MAX_RANK:
        raise InvalidModel(f"{label} has {len(shape)} dimensions; at most {MAX_RANK} are possible")
    if any(d < 0 for d in shape):
        raise InvalidModel(f"{label} has a negative size in shape {list(shape)}")
    nbytes = dtype.nbytes(math.prod(shape))
    if limit is not None and nbytes > limit:
        raise ResourceLimit("tensor_bytes", limit, nbytes, label)
    return dtype, shape


def constant_of(
    tensor: TensorProto,
    cut: Piece | None,
    files: WeightFiles,
    limit: int | None,
    label: str,
) -> ConstTensor:
    """The constant for an initializer; ``cut`` are its bytes where the scanner took them out of the message."""
    dtype, shape = checked_type(tensor, limit, label)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _external(tensor, dtype, shape, files, label)
    if cut is not None:
        _check_length(label, dtype, shape, len(cut.data))
        return _constant(cut, dtype, shape, _reader(cut.data, dtype, shape), "the model file")
    if tensor.HasField("raw_data"):
        raw = tensor.raw_data
        _check_length(label, dtype, shape, len(raw))
        return ConstTensor(dtype, shape, _reader(memoryview(raw), dtype, shape), "the model")
    array = tensor_array(tensor)
    if array.shape != shape:
        raise InvalidModel(f"{label}: data of shape {list(array.shape)}, declared {list(shape)}")
    return ConstTensor.of(array)


def _external(tensor: TensorProto, dtype: DType, shape: tuple[int, ...], files: WeightFiles, label: str) -> ConstTensor:
    place = place_of({e.key: e.value for e in tensor.external_data}, _stored_bytes(dtype, shape), tensor.name)
    file = files.external(place.location, tensor.name)
    place.check_inside(len(file.data), tensor.name)
    _check_length(label, dtype, shape, place.length)
    piece = Piece(file.data[place.offset : place.stop], file.opened)
    load = _reader(piece.data, dtype, shape)
    if place.checksum:
        load = _verified(load, piece.data, place, tensor.name)
    return _constant(piece, dtype, shape, load, f"file {place.location!r}")


def _constant(
    piece: Piece, dtype: DType, shape: tuple[int, ...], load: Callable[[], Array], source: str
) -> ConstTensor:
    drop = _dropper(piece.data)
    if piece.opened is None:
        return ConstTensor(dtype, shape, load, source, drop)
    return _InFile(dtype, shape, load, source, drop, piece.opened)


class _InFile(ConstTensor):
    """A constant whose data is a file's own bytes: FileChanged where it is asked for and they are others by then."""

    __slots__ = ("_opened",)

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        load: Callable[[], Array],
        source: str,
        drop: Callable[[], None] | None,
        opened: Opened,
    ) -> None:
        super().__init__(dtype, shape, load, source, drop)
        self._opened = opened

    def numpy(self) -> Array:
        if self.is_loaded:  # else reading it looks
            self._opened.check()
        return super().numpy()

    def raw(self) -> Array:
        self._opened.check()
        return super().raw()


def _stored_bytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Bytes in a file: elements of 6, 4 and 2 bits are packed there."""
    bits = dtype.bits if dtype.bits < 8 else dtype.numpy.itemsize * 8
    return (math.prod(shape) * bits + 7) // 8


def _check_length(label: str, dtype: DType, shape: tuple[int, ...], length: int) -> None:
    if dtype is DType.string:
        raise InvalidModel(f"{label}: strings cannot be stored as raw data")
    expected = _stored_bytes(dtype, shape)
    if length != expected:
        kind = f"{dtype}{list(shape)}"
        raise InvalidModel(f"{label}: {kind} takes {expected} bytes, its data has {length}")


def _reader(data: memoryview, dtype: DType, shape: tuple[int, ...]) -> Callable[[], Array]:
    def load() -> Array:
        if dtype.bits < 8:
            message = TensorProto(data_type=dtype.onnx, dims=shape, raw_data=bytes(data))
            return tensor_array(message)
        array = np.frombuffer(data, dtype=np.uint8).view(dtype.numpy).reshape(shape)
        return array.byteswap() if sys.byteorder == "big" else array

    return load


_WORTH_DROPPING = 1 << 16


def _dropper(data: memoryview) -> Callable[[], None] | None:
    """Gives back the pages of some bytes of a file, where that is worth it."""
    if len(data) < _WORTH_DROPPING or not is_mapped(data):
        return None
    return functools.partial(give_back, data)


def _verified(load: Callable[[], Array], data: memoryview, place: Place, name: str) -> Callable[[], Array]:
    def load_verified() -> Array:
        place.check_sum(data, name)
        return load()

    return load_verified
