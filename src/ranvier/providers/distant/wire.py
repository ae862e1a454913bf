"""Messages between processes: a small JSON header and tensors as raw bytes. Nothing in them is ever executed.

::

    8 bytes   magic
    u32       bytes of the header
    u64       bytes of the body
    u32       checksum of header and body
    header    {"kind": …, "fields": {…}, "tensors": [[dtype, shape, offset], …]}
    body      tensors, each at a multiple of 64

A message comes from outside, so all of it is checked before anything is made of it: sizes against limits before
memory is taken, shapes against the bytes that came, the checksum before a number is believed.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
Buffer = bytes | bytearray | memoryview

MAGIC = b"RVWIRE01"
PREFIX = struct.Struct("<8sIQI")
MAX_HEADER = 1 << 24
MAX_MESSAGE = 1 << 34
_ALIGN = 64
_MAX_RANK = 64


class BadMessage(RanvierError):
    """What came is no message of this protocol, or was damaged on its way."""


@dataclass
class Message:
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: list[Array] = field(default_factory=list)


def encode(kind: str, fields: Mapping[str, Any] | None = None, tensors: Sequence[Array] = ()) -> list[Buffer]:
    """The message in pieces to be written one after the other; the tensors' own memory is among them, not copied."""
    described: list[list[Any]] = []
    body: list[Buffer] = []
    at = 0
    for tensor in tensors:
        dtype = dtypes.of(tensor)
        if dtype is DType.string:
            raise BadMessage("tensors of strings do not travel")
        row_major = np.ascontiguousarray(tensor)
        gap = -at % _ALIGN
        if gap:
            body.append(bytes(gap))
        at += gap
        described.append([dtype.name, list(tensor.shape), at])
        if row_major.nbytes:
            body.append(row_major.reshape(-1).view(np.uint8).data)
        at += row_major.nbytes
    header = json.dumps({"kind": kind, "fields": dict(fields or {}), "tensors": described}).encode()
    check = zlib.crc32(header)
    for piece in body:
        check = zlib.crc32(piece, check)
    return [PREFIX.pack(MAGIC, len(header), at, check), header, *body]


def measure(prefix: Buffer, limit: int = MAX_MESSAGE) -> int:
    """How many bytes follow the prefix of a message; BadMessage where it is none, or longer than allowed."""
    magic, header, body, _ = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadMessage("what came does not begin like a message")
    if header > MAX_HEADER or header + body > limit:
        raise BadMessage(f"a message of {header + body:,} bytes is longer than the {limit:,} allowed")
    return int(header + body)


def decode(prefix: Buffer, rest: Buffer) -> Message:
    """The message; its tensors are views of ``rest``."""
    _, length, size, check = PREFIX.unpack(prefix)
    view = memoryview(rest)
    if len(view) != length + size:
        raise BadMessage(f"a message of {length + size:,} bytes came with {len(view):,}")
    if zlib.crc32(view) != check:
        raise BadMessage("a message was damaged on its way: its checksum differs")
    try:
        header = json.loads(bytes(view[:length]))
        kind, fields, described = header["kind"], header["fields"], header["tensors"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadMessage(f"the header of a message cannot be read: {error}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict) or not isinstance(described, list):
        raise BadMessage("the header of a message has the wrong form")
    body = view[length:]
    return Message(kind, fields, [_tensor(each, body) for each in described])


def join(pieces: Sequence[Buffer]) -> bytes:
    """The message as one piece, for channels that need it so."""
    return b"".join(pieces)


def split(data: Buffer, limit: int = MAX_MESSAGE) -> Message:
    """A message that came as one piece."""
    view = memoryview(data)
    if len(view) < PREFIX.size:
        raise BadMessage(f"a message of {len(view)} bytes is too short")
    if measure(view[: PREFIX.size], limit) != len(view) - PREFIX.size:
        raise BadMessage("a message is not as long as it says")
    return decode(view[: PREFIX.size], view[PREFIX.size :])


def _tensor(described: Any, body: memoryview) -> Array:
    try:
        name, shape, offset = described
        dtype = DType[name]
    except (KeyError, TypeError, ValueError):
        raise BadMessage(f"a tensor cannot be described by {str(described)[:80]!r}") from None
    numbers = [*shape, offset] if isinstance(shape, list) else []
    if dtype is DType.string or not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        raise BadMessage(f"a tensor cannot be {name} of shape {str(shape)[:80]}")
    nbytes = math.prod(shape) * dtype.numpy.itemsize
    if len(shape) > _MAX_RANK or offset % _ALIGN or offset + nbytes > len(body):
        raise BadMessage(f"a tensor of {nbytes:,} bytes at {offset:,} does not lie in a body of {len(body):,}")
    raw = np.frombuffer(body, np.uint8, nbytes, offset) if nbytes else np.empty(0, np.uint8)
    return raw.view(dtype.numpy).reshape(shape)
