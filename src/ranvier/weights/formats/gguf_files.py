"""GGUF: a header of keys and tensors, then data in plain types or blocks of codes with scales.

The header is read here, because it comes from anywhere and is read by ranges; what the codes of a block mean is left
to the package ``gguf``. A tensor of blocks reads as float32; its bytes are had by ``raw``. One file is read here; where
a checkpoint has several, ``gguf_parts`` finds the others.

In files of machines that write the highest byte first, tensors of plain types are read. Of blocks and of bfloat16,
which are bytes to the package's writer, nobody knows the order there: it leaves that of the machine it runs on, and its
converter turns them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported, WeightError
from ranvier.records import dataclass
from ranvier.weights.blob import HEAD, Blob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.gguf_parts import ALIGNMENT, Part, files_of, whole
from ranvier.weights.stored import Selection, Stored, TensorInfo, Weight, checked_size, extent, full

_MAGIC = b"GGUF"
_ALIGNMENT = 32  # bytes, where a file tells no other
_PLAIN = {
    0: DType.float32,
    1: DType.float16,
    24: DType.int8,
    25: DType.int16,
    26: DType.int32,
    27: DType.int64,
    28: DType.float64,
    30: DType.bfloat16,
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_LENGTH = 8  # bytes of the length of a text
_DIMENSIONS = 8
_CHUNK = 1 << 20
_DEEPEST = 4  # lists in lists
# What takes a few bytes in a file takes many more and a while here, and headers may be long. Real files have about a
# hundred keys, half a million texts in a list, no lists in lists, and a hundred thousand tensors at most.
_MOST_ENTRIES = 1 << 22  # of all lists
_MOST_LISTS = 1 << 16  # in lists
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 18


class _Header:
    """The bytes of the header in order, fetched a piece at a time."""

    def __init__(self, blob: Blob, limit: int) -> None:
        self.blob, self.limit = blob, min(limit, blob.size)
        self.at = 0
        self.order = "<"  # of bytes, as ``struct`` writes it
        self._entries = self._lists = 0  # of all lists, and those of them that are lists
        self._start, self._data = 0, b""

    def take(self, count: int) -> bytes:
        if self.at + count > self.limit:
            raise WeightError(f"{self.blob.name!r} is cut off, or its header is too long: {self.at + count} bytes")
        if self.at + count > self._start + len(self._data):
            self._start = self.at
            piece = max(count, _CHUNK if self.at else HEAD)  # of most parts it is all
            self._data = bytes(self.blob.read(self.at, min(self.limit, self.at + piece)))
        begin = self.at - self._start
        self.at += count
        return self._data[begin : begin + count]

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        form = _form(self.order + kinds)
        return form.unpack(self.take(form.size))

    def number(self, kind: str) -> Any:
        return self.numbers(kind)[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: those in the piece at hand are taken without a call for each."""
        found: list[str] = []
        length = _form(self.order + "Q").unpack_from
        while len(found) < count:
            data, at = self._data, self.at - self._start
            last = len(data) - _LENGTH
            while at <= last and len(found) < count:
                end = at + _LENGTH + length(data, at)[0]
                if end > len(data):
                    break
                found.append(data[at + _LENGTH : end].decode("utf-8", "replace"))
                at = end
            self.at = self._start + at
            if len(found) < count:
                found.append(self.text())  # fetches the next piece
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise WeightError(f"{self.blob.name!r}: a value of the unknown kind {kind}")
        if depth > _DEEPEST:
            raise WeightError(f"{self.blob.name!r}: lists in lists, more than {_DEEPEST} deep")
        inner, count = self.numbers("IQ")
        self._entries += count
        _check_count(self.blob, "entries of lists", self._entries, _MOST_ENTRIES)
        if inner in _SCALARS:
            form = _SCALARS[inner]
            data = self.take(count * struct.calcsize("<" + form))
            return list(struct.unpack(f"{self.order}{count}{form}", data))
        if inner == _TEXT:
            return self.texts(count)
        self._lists += count
        _check_count(self.blob, "lists in lists", self._lists, _MOST_LISTS)
        return [self.value(inner, depth + 1) for _ in range(count)]


@lru_cache(maxsize=256)
def _form(text: str) -> struct.Struct:
    return struct.Struct(text)


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class Gguf:
    name = "gguf"
    suffixes = (".gguf",)
    options = ()

    def matches(self, head: bytes, name: str) -> bool:
        return head.startswith(_MAGIC)

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        return whole(_part(blob, opening), opening, lambda other: _part(other, opening), _ALIGNMENT)


def parts_of(blob: Blob, limit: int) -> list[str]:
    """The files of the checkpoint that a GGUF file is a part of, itself among them; of any other file itself."""
    if bytes(blob.read(0, min(len(_MAGIC), blob.size))) != _MAGIC:
        return [blob.name]
    return files_of(blob.name, _notes(_Header(blob, limit))[1])


def _part(blob: Blob, opening: Opening) -> Part:
    header = _Header(blob, opening.header_bytes)
    tensors, notes = _notes(header)
    _check_count(blob, "tensors", tensors, _MOST_TENSORS)
    entries = [_entry(header) for _ in range(tensors)]
    end = header.at

    def placed(usual: Any) -> dict[str, Weight]:
        start = _start(blob, end, entries, notes.get(ALIGNMENT), usual)
        weights: dict[str, Weight] = {}
        for entry in entries:
            if entry.name in weights:
                raise WeightError(f"{blob.name!r}: tensor {entry.name!r} occurs twice")
            weights[entry.name] = _weight(blob, entry, start, opening, header.order == ">")
        return weights

    return Part(blob.name, notes, placed)


def _start(blob: Blob, end: int, entries: Sequence[_Entry], own: Any, usual: Any) -> int:
    """Where the data begins: at the next place behind the header that its alignment allows.

    A part that tells none has that of every file that tells none, as llama.cpp reads and writes it, or the ``usual``
    one of the first part, as the package ``gguf`` writes them all: the one by which the data ends where the file does.
    """
    told = [own] if own is not None else [_ALIGNMENT, usual]
    for alignment in told:
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise WeightError(f"{blob.name!r}: tensors aligned to {alignment!r}")
    starts = {_up(end, alignment): alignment for alignment in reversed(told)}
    if len(starts) > 1 and entries:
        reach = max(entry.offset + _stored(entry) for entry in entries)
        fitting = [start for start, by in starts.items() if blob.size in (start + reach, start + _up(reach, by))]
        if len(fitting) != 1:
            raise WeightError(
                f"{blob.name!r} tells no alignment of its tensors, and ends where they do neither by {_ALIGNMENT} "
                f"bytes nor by {usual}, which the first part tells"
            )
        return fitting[0]
    return max(starts)


def _up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _notes(header: _Header) -> tuple[int, dict[str, Any]]:
    """How many tensors there are, and the keys with their values."""
    name = header.blob.name
    magic = header.take(len(_MAGIC))
    if magic != _MAGIC:
        raise WeightError(f"{name!r} is no GGUF file: it begins {magic!r}")
    version = header.number("I")
    if version >= 1 << 16:  # the highest byte comes first
        header.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise WeightError(f"{name!r} is a GGUF file of version {version}, not of 2 or 3")
    tensors, keys = header.numbers("QQ")
    _check_count(header.blob, "keys", keys, _MOST_KEYS)
    notes = {}
    for _ in range(keys):
        key = header.text()
        if key in notes:  # of which readers keep either
            raise WeightError(f"{name!r}: the key {key[:100]!r} occurs twice")
        notes[key] = header.value(header.number("I"))
    return tensors, notes


def _entry(header: _Header) -> _Entry:
    name, rank = header.text(), header.number("I")
    if rank > _DIMENSIONS:
        raise WeightError(f"{header.blob.name!r}: tensor {name!r} has {rank} dimensions")
    *sizes, kind, offset = header.numbers(f"{rank}QIQ")
    return _Entry(name, tuple(reversed(sizes)), kind, offset)


def _stored(entry: _Entry) -> int:
    """Bytes of a tensor in the file; whether they make sense is found out when it is placed."""
    dtype = _PLAIN.get(entry.kind)
    if dtype is not None:
        return math.prod(entry.shape) * dtype.bits // 8
    _, block, size = _blocks(entry.kind, entry.name)
    return math.prod(entry.shape) // block * size


def _weight(blob: Blob, entry: _Entry, start: int, opening: Opening, big_endian: bool) -> Weight:
    dtype = _PLAIN.get(entry.kind)
    if dtype is not None:
        nbytes = checked_size(entry.name, entry.shape, dtype.bits, opening.tensor_bytes)
        _check(blob, entry, start, nbytes)
        info = TensorInfo(entry.name, dtype, entry.shape, nbytes, source=blob.name)
        if big_endian and dtype is DType.bfloat16:
            return _Unordered(info)
        return Stored(info, blob, start + entry.offset, big_endian=big_endian)
    name, block, size = _blocks(entry.kind, entry.name)
    checked_size(entry.name, entry.shape, 32, opening.tensor_bytes)
    if not entry.shape or entry.shape[-1] % block:
        raise WeightError(f"{blob.name!r}: tensor {entry.name!r} {list(entry.shape)} has no whole blocks of {block}")
    nbytes = math.prod(entry.shape) // block * size
    _check(blob, entry, start, nbytes)
    info = TensorInfo(entry.name, DType.float32, entry.shape, nbytes, name, blob.name)
    if big_endian:
        return _Unordered(info)
    packed = (*entry.shape[:-1], entry.shape[-1] // block * size)
    raw = Stored(TensorInfo(entry.name, DType.uint8, packed, nbytes, name, blob.name), blob, start + entry.offset)
    return Blocks(info, raw, block, size)


@dataclass(frozen=True)
class Blocks:
    """A tensor whose rows are blocks of codes with scales. Of a part those blocks are read and decoded that hold it."""

    info: TensorInfo
    raw: Stored  # the bytes, for whoever wants those
    block: int  # elements
    size: int  # bytes

    def read(self, part: Selection | None = None) -> np.ndarray[Any, Any]:
        chosen = full(self.info.shape) if part is None else part
        target = tuple(map(extent, chosen))
        if 0 in target:
            return np.empty(target, np.float32)
        *outer, inner = chosen
        first = inner.start // self.block
        last = (inner.start + (target[-1] - 1) * inner.step) // self.block + 1
        data = self.raw.read((*outer, slice(first * self.size, last * self.size, 1)))
        numbers = _decoded(np.ascontiguousarray(data), self.raw.info)
        begin = inner.start - first * self.block
        return numbers.reshape(*target[:-1], -1)[..., begin :: inner.step][..., : target[-1]]


@dataclass(frozen=True)
class _Unordered:
    """A tensor in a file whose numbers have the highest byte first, where it is not told which order its own have."""

    info: TensorInfo

    @property
    def raw(self) -> _Unordered:
        return self

    def read(self, part: Selection | None = None) -> np.ndarray[Any, Any]:
        raise NotSupported(
            f"tensor {self.info.name!r}: {self.info.source!r} is a GGUF file of machines that write the highest byte "
            f"first, of which {self.info.encoding or self.info.dtype} is not read; make one with the lowest byte first "
            "of it ('gguf-convert-endian FILE little' does that)"
        )


def _check_count(blob: Blob, what: str, count: int, most: int) -> None:
    if count > most:
        raise WeightError(f"{blob.name!r} has {count} {what}, more than {most}")


def _check(blob: Blob, entry: _Entry, start: int, nbytes: int) -> None:
    if start + entry.offset + nbytes > blob.size:
        raise WeightError(
            f"{blob.name!r}: tensor {entry.name!r} needs bytes up to {start + entry.offset + nbytes}, "
            f"the file has {blob.size}"
        )


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise NotSupported("blocks of a GGUF file are decoded by the package 'gguf': pip install gguf") from None
    return gguf


def _blocks(kind: int, tensor: str) -> tuple[str, int, int]:
    gguf = _package()
    try:
        found = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[found]
    except (ValueError, KeyError):
        raise WeightError(f"tensor {tensor!r} is of the unknown kind {kind}") from None
    return found.name, int(block), int(size)


def _decoded(data: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    gguf = _package()
    try:
        found = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[info.encoding])
    except NotImplementedError:
        raise NotSupported(f"tensor {info.name!r}: the package 'gguf' does not decode {info.encoding}") from None
    return np.asarray(found, np.float32)
