"""safetensors: a JSON header, then the data of all tensors, one after another.

Everything the header says is checked before a tensor can be asked for: lengths, types, shapes against bytes, and that
tensors cover the data without gap or overlap, as the format demands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.formats.files import write_files
from ranvier.weights.blob import Blob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.formats.documents import read_json
from ranvier.weights.stored import Stored, TensorInfo, Weight, checked_size

TYPES: dict[str, DType] = {
    "F64": DType.float64,
    "F32": DType.float32,
    "F16": DType.float16,
    "BF16": DType.bfloat16,
    "F8_E4M3": DType.float8_e4m3fn,
    "F8_E5M2": DType.float8_e5m2,
    "F8_E8M0": DType.float8_e8m0fnu,
    "F8_E4M3FNUZ": DType.float8_e4m3fnuz,
    "F8_E5M2FNUZ": DType.float8_e5m2fnuz,
    "F6_E2M3": DType.float6_e2m3fn,
    "F6_E3M2": DType.float6_e3m2fn,
    "F4": DType.float4_e2m1fn,
    "I64": DType.int64,
    "I32": DType.int32,
    "I16": DType.int16,
    "I8": DType.int8,
    "U64": DType.uint64,
    "U32": DType.uint32,
    "U16": DType.uint16,
    "U8": DType.uint8,
    "BOOL": DType.bool,
    "C64": DType.complex64,
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_NOTES = "__metadata__"
_LENGTH = 8  # bytes of the number that says how long the header is


class SafeTensors:
    name = "safetensors"
    suffixes = (".safetensors",)
    options = ()

    def matches(self, head: bytes, name: str) -> bool:
        return name.endswith(self.suffixes) or head[_LENGTH : _LENGTH + 2] in (b'{"', b"{}")  # with tensors or none

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        header, start = _header(blob, opening.header_bytes)
        notes = header.pop(_NOTES, None)
        notes = {} if notes is None else notes  # some write null where there are none
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise WeightError(f"{blob.name!r}: {_NOTES} must map text to text")
        weights: dict[str, Weight] = {}
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            info, first, last = _entry(blob.name, name, entry, opening.tensor_bytes)
            weights[name] = Stored(info, blob, start + first)
            spans.append((first, last, name))
        _check_cover(blob.name, sorted(spans), blob.size - start)
        return Checkpoint(weights, notes, repr(blob.name))


def _header(blob: Blob, limit: int) -> tuple[dict[str, Any], int]:
    if blob.size < _LENGTH:
        raise WeightError(f"{blob.name!r} is no safetensors file: it has {blob.size} bytes")
    length = int.from_bytes(bytes(blob.read(0, _LENGTH)), "little")
    if length > limit or length > blob.size - _LENGTH:
        what = "more than allowed" if length > limit else f"but the file has {blob.size}"
        raise WeightError(f"{blob.name!r} is no safetensors file, or cut off: a header of {length} bytes, {what}")
    try:
        header = read_json(bytes(blob.read(_LENGTH, _LENGTH + length)))
    except ValueError as error:
        raise WeightError(f"{blob.name!r}: the header is not sound JSON: {error}") from None
    if not isinstance(header, dict):
        raise WeightError(f"{blob.name!r}: the header must be a mapping")
    return header, _LENGTH + length


def _entry(file: str, name: str, entry: Any, limit: int | None) -> tuple[TensorInfo, int, int]:
    label = f"{file!r}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise WeightError(f"{label} lacks dtype, shape or data_offsets")
    dtype = TYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise WeightError(f"{label} has the unknown element type {entry['dtype']!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list):
        raise WeightError(f"{label} has an impossible shape {shape!r}")
    nbytes = checked_size(name, shape, dtype.bits, limit)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(x) is int for x in offsets):
        raise WeightError(f"{label}: data_offsets must be two numbers")
    first, last = offsets
    if not 0 <= first <= last or last - first != nbytes:
        raise WeightError(f"{label}: {dtype}{shape} takes {nbytes} bytes, its offsets are {first} to {last}")
    return TensorInfo(name, dtype, tuple(shape), nbytes, source=file), first, last


def _check_cover(file: str, spans: list[tuple[int, int, str]], available: int) -> None:
    at = 0
    for first, last, name in spans:
        if first != at:
            raise WeightError(
                f"{file!r}: tensor {name!r} begins at {first}, {'inside another' if first < at else 'after a gap'} "
                f"(the data before it ends at {at})"
            )
        at = last
    if at != available:
        what = "cut off" if at > available else "longer than its tensors"
        raise WeightError(f"{file!r} is {what}: tensors take {at} bytes, the file has {available}")


def save(path: str | os.PathLike[str], tensors: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, wholly or not at all. Larger elements come first, so all are aligned."""
    _check_texts(tensors, notes or {})
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    order = sorted(arrays, key=lambda n: (-arrays[n].dtype.itemsize, n))
    header: dict[str, Any] = {_NOTES: dict(notes)} if notes else {}
    at = 0
    for name in order:
        dtype = dtypes.of(arrays[name])
        if dtype not in _NAMES or dtype.is_packed:
            raise WeightError(f"tensor {name!r}: safetensors has no element type for {dtype}")
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(arrays[name].shape),
            "data_offsets": [at, at + arrays[name].nbytes],
        }
        at += arrays[name].nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_files({Path(path): _pieces(text, (arrays[name] for name in order))})


def _check_texts(tensors: Mapping[str, Any], notes: Mapping[str, str]) -> None:
    """WeightError where a file would come of it that nobody can read."""
    if _NOTES in tensors:
        raise WeightError(f"no tensor can have the name {_NOTES!r} in a safetensors file")
    for text in (*tensors, *notes, *notes.values()):
        try:
            str.encode(text)
        except (TypeError, UnicodeEncodeError):
            raise WeightError(f"names and notes in a safetensors file are texts, not {text!r}") from None


def _pieces(header: bytes, arrays: Iterable[np.ndarray[Any, Any]]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(_LENGTH, "little") + header
    for array in arrays:
        native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        yield np.ascontiguousarray(native).reshape(-1).view(np.uint8).data  # not copied where it lies in order
