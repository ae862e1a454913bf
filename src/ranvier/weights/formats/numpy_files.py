"""NumPy's ``.npy`` and ``.npz``. Arrays of Python objects are refused: reading them would run a pickle."""

from __future__ import annotations

import functools
import io
import struct
import zipfile
import zlib
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.errors import ResourceLimit, WeightError
from ranvier.weights.blob import Blob, BlobFile, MemoryBlob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.stored import Decoded, Stored, TensorInfo, Weight, checked_size, row_major

Array = np.ndarray[Any, Any]
_MAGIC = b"\x93NUMPY"
_HEADER = 1 << 16  # bytes within which a header ends
_RATIO = 1200  # deflate cannot do better than about 1030 to 1; more is a lie


class Npy:
    name = "npy"
    suffixes = (".npy",)

    def matches(self, head: bytes, name: str) -> bool:
        return head.startswith(_MAGIC)

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        name = blob.name.removesuffix(".npy")
        weight = npy_weight(blob, name, 0, blob.size, opening)
        return Checkpoint({name: weight}, {}, repr(blob.name))


def npy_weight(blob: Blob, name: str, start: int, stop: int, opening: Opening) -> Stored:
    """The array whose file is these bytes of a blob."""
    head = io.BytesIO(bytes(blob.read(start, min(stop, start + _HEADER))))
    try:
        major, _ = version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        shape, fortran, dtype = read(head)
        element = dtypes.of(dtype)
    except Exception as error:  # it is parsed as Python text, with as many ways to fail as that has
        raise WeightError(f"{blob.name!r}: array {name!r} has a header that cannot be used: {error}") from None
    if dtype.hasobject or dtype.fields or element is dtypes.DType.string:
        raise WeightError(f"{blob.name!r}: array {name!r} holds {dtype}, not numbers")
    nbytes = checked_size(name, shape, dtype.itemsize * 8, opening.tensor_bytes)
    data = start + head.tell()
    if stop - data < nbytes:
        raise WeightError(f"{blob.name!r}: array {name!r} is cut off: {nbytes} bytes needed, {stop - data} there")
    strides = tuple(reversed(row_major(tuple(reversed(shape))))) if fortran else ()
    info = TensorInfo(name, element, tuple(shape), nbytes, source=blob.name)
    return Stored(info, blob, data, strides, big_endian=dtype.byteorder == ">")


class Npz:
    name = "npz"
    suffixes = (".npz",)

    def matches(self, head: bytes, name: str) -> bool:
        return name.endswith(self.suffixes) and head.startswith((b"PK\x03\x04", b"PK\x05\x06"))

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        weights: dict[str, Weight] = {}
        archive = open_zip(blob)
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise WeightError(f"{blob.name!r}: member {member.filename!r} is no array")
            name = member.filename.removesuffix(".npy")
            if name in weights:
                raise WeightError(f"{blob.name!r}: array {name!r} occurs twice")
            if member.compress_type == zipfile.ZIP_STORED:
                start = member_data(blob, member)
                weights[name] = npy_weight(blob, name, start, start + member.file_size, opening)
            else:
                weights[name] = _compressed(blob, archive, member, name, opening)
        return Checkpoint(weights, {}, repr(blob.name))


def _compressed(blob: Blob, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, opening: Opening) -> Decoded:
    if member.file_size > _RATIO * max(1, member.compress_size):
        raise WeightError(f"{blob.name!r}: member {name!r} claims {member.file_size} bytes of {member.compress_size}")
    if opening.tensor_bytes is not None and member.file_size > opening.tensor_bytes + _HEADER:
        raise ResourceLimit("tensor_bytes", opening.tensor_bytes, member.file_size, f"array {name!r}")
    read = functools.partial(_inflated, archive, member, blob.name)
    head = npy_weight(
        _Padded(MemoryBlob(blob.name, read(_HEADER)), member.file_size), name, 0, member.file_size, opening
    )

    def make() -> Array:
        whole = MemoryBlob(blob.name, read(member.file_size))
        return npy_weight(whole, name, 0, whole.size, opening).read()

    return Decoded(head.info, make)


class _Padded(MemoryBlob):
    """The first bytes of a member that is longer: for looking at its header."""

    def __init__(self, first: MemoryBlob, size: int) -> None:
        self.name, self._first, self._whole = first.name, first, size

    @property
    def size(self) -> int:
        return self._whole

    def read(self, start: int, stop: int) -> Any:
        return self._first.read(start, min(stop, self._first.size))


def _inflated(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: str, count: int) -> bytes:
    try:
        with archive.open(member) as stream:
            return stream.read(count)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise WeightError(f"{file!r}: member {member.filename!r} cannot be read: {error}") from None


def open_zip(blob: Blob) -> zipfile.ZipFile:
    """The directory of an archive, checked against the bytes that are there."""
    try:
        archive = zipfile.ZipFile(io.BufferedReader(BlobFile(blob), 1 << 16))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise WeightError(f"{blob.name!r} is no sound zip archive: {error}") from None
    for member in archive.infolist():
        if member.flag_bits & 1:
            raise WeightError(f"{blob.name!r}: member {member.filename!r} is encrypted")
        if member.header_offset + member.compress_size > blob.size:
            raise WeightError(f"{blob.name!r}: member {member.filename!r} lies outside the file")
    return archive


def member_data(blob: Blob, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin: its own header may be longer than the directory says."""
    start = member.header_offset
    head = bytes(blob.read(start, min(start + 30, blob.size)))
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise WeightError(f"{blob.name!r}: member {member.filename!r} has no header")
    name, extra = struct.unpack("<HH", head[26:30])
    begin = start + 30 + int(name) + int(extra)
    if member.compress_size != member.file_size or begin + member.file_size > blob.size:
        raise WeightError(f"{blob.name!r}: member {member.filename!r} lies outside the file")
    return begin
