"""NumPy's ``.npy`` and ``.npz``. Arrays of Python objects are refused: reading them would run a pickle.

NumPy writes bfloat16, float8 and the like as bytes without a meaning; the option ``dtype`` gives them one.
"""

from __future__ import annotations

import functools
import io
import zipfile
import zlib
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, ResourceLimit, WeightError
from ranvier.weights.blob import Blob, Bytes, MemoryBlob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.zips import Member, open_zip
from ranvier.weights.stored import Decoded, Stored, TensorInfo, Weight, checked_size, row_major
from ranvier.weights.together import AT_ONCE, Stop, together

Array = np.ndarray[Any, Any]
_MAGIC = b"\x93NUMPY"
_HEADER = 1 << 16  # bytes within which a header ends
_FLOAT8, _BYTE = b"'descr': '<f1'", b"'descr': '|V1'"  # what NumPy makes of float8_e5m2, and does not read again
_USUAL = 1 << 10  # bytes within which most do
_RATIO = 200  # deflate makes at most about 1030 bytes of one, of weights a few; zeros may be more …
_HARMLESS = 1 << 30  # … where they are no more than this


class Npy:
    name = "npy"
    suffixes = (".npy",)
    options = ("dtype",)

    def matches(self, head: bytes, name: str) -> bool:
        return head.startswith(_MAGIC)

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        name = blob.name.removesuffix(".npy")
        return Checkpoint({name: npy_weight(blob, name, opening)}, {}, repr(blob.name))


def npy_weight(blob: Blob, name: str, opening: Opening) -> Stored:
    """The array whose file a blob is."""
    label = f"{blob.name!r}: array {name!r}"
    head = io.BytesIO(_header(blob).replace(_FLOAT8, _BYTE, 1))
    try:
        major, _ = version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        shape, fortran, dtype = read(head)
    except Exception as error:  # it is parsed as Python text, with as many ways to fail as that has
        raise WeightError(f"{label} has a header that cannot be used: {error}") from None
    element = _element(dtype, label, opening)
    nbytes = checked_size(name, shape, dtype.itemsize * 8, opening.tensor_bytes)
    data = head.tell()
    if blob.size - data < nbytes:
        raise WeightError(f"{label} is cut off: {nbytes} bytes needed, {blob.size - data} there")
    strides = tuple(reversed(row_major(tuple(reversed(shape))))) if fortran else ()
    info = TensorInfo(name, element, tuple(shape), nbytes, source=blob.name)
    return Stored(info, blob, data, strides, big_endian=dtype.byteorder == ">", packed=False)


def _header(blob: Blob) -> bytes:
    """The first bytes with all of the header: its length stands behind the version."""
    head = bytes(blob.read(0, min(blob.size, _USUAL)))
    length = int.from_bytes(head[8:10] if head[6:7] == b"\x01" else head[8:12], "little") + 12
    return head if length <= _USUAL else bytes(blob.read(0, min(blob.size, length, _HEADER)))


def _element(dtype: np.dtype[Any], label: str, opening: Opening) -> DType:
    if dtype.kind in "biufc":
        try:
            return dtypes.of(dtype)
        except DTypeMismatch:  # longer than of 64 bits: each machine has others
            raise WeightError(f"{label} holds {dtype}, which only the machine that wrote it may know") from None
    if dtype.kind != "V" or dtype.fields or dtype.subdtype:
        raise WeightError(f"{label} holds {dtype}, not numbers")
    given = opening.options.get("dtype")
    if given is None:
        raise WeightError(
            f"{label} holds {dtype.itemsize} bytes for each element and not of which type, as NumPy writes bfloat16 "
            "and float8; the option dtype says it, for example dtype='bfloat16'"
        )
    element = dtypes.of(given)
    if element.numpy.itemsize != dtype.itemsize or element is DType.string:
        raise WeightError(f"{label} holds {dtype.itemsize} bytes for each element; {element} has others")
    return element


class Npz:
    name = "npz"
    suffixes = (".npz",)
    options = ("dtype",)

    def matches(self, head: bytes, name: str) -> bool:
        if head.startswith(b"PK\x05\x06"):  # an archive of nothing
            return name.endswith(self.suffixes)
        length = int.from_bytes(head[26:28], "little")
        first = head[30 : 30 + length]
        return head.startswith(b"PK\x03\x04") and (name.endswith(self.suffixes) or first.endswith(b".npy"))

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        archive = open_zip(blob, opening.header_bytes)
        members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise WeightError(f"{blob.name!r}: member {member.filename!r} is no array")
            name = member.filename.removesuffix(".npy")
            if name in members:
                raise WeightError(f"{blob.name!r}: array {name!r} occurs twice")
            members[name] = member

        def weight(name: str) -> Weight:
            if members[name].compress_type == zipfile.ZIP_STORED:
                return npy_weight(Member(blob, members[name]), name, opening)
            return _compressed(blob, archive, members[name], name, opening)

        # far away, every header is a request
        found = list(map(weight, members)) if blob.near else together(weight, members, AT_ONCE, Stop())
        return Checkpoint(dict(zip(members, found)), {}, repr(blob.name))


def _compressed(blob: Blob, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, opening: Opening) -> Decoded:
    if member.compress_type != zipfile.ZIP_DEFLATED:  # how much memory another one takes, or what it makes, is unknown
        raise WeightError(
            f"{blob.name!r}: member {name!r} is compressed in a way that NumPy does not write "
            f"({member.compress_type}); numpy.savez_compressed writes it as it should be"
        )
    if member.file_size > max(_HARMLESS, _RATIO * member.compress_size):
        raise WeightError(
            f"{blob.name!r}: member {name!r} claims {member.file_size} bytes of {member.compress_size}, which weights "
            "do not; numpy.savez stores what does"
        )
    if opening.tensor_bytes is not None and member.file_size > opening.tensor_bytes + _HEADER:
        raise ResourceLimit("tensor_bytes", opening.tensor_bytes, member.file_size, f"array {name!r}")
    read = functools.partial(_inflated, archive, member, blob.name)
    head = npy_weight(_Beginning(blob.name, read(_HEADER), member.file_size), name, opening)

    def make() -> Array:
        return npy_weight(MemoryBlob(blob.name, read(member.file_size)), name, opening).read()

    return Decoded(head.info, make)


class _Beginning(MemoryBlob):
    """The first bytes of a member that is longer: for looking at its header."""

    def __init__(self, name: str, first: bytes, size: int) -> None:
        super().__init__(name, first)
        self._whole = size

    @property
    def size(self) -> int:
        return self._whole

    def read(self, start: int, stop: int) -> Bytes:
        return self._data[start:stop]


def _inflated(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: str, count: int) -> bytes:
    try:
        with archive.open(member) as stream:
            return stream.read(count)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise WeightError(f"{file!r}: member {member.filename!r} cannot be read: {error}") from None
