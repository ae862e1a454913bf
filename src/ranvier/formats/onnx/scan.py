"""Finds the weights inside a model file without reading them.

A parsed protobuf message owns a copy of every byte. To keep weights in the file until they are needed, the outermost
levels of the wire format are walked over a memory map: large ``raw_data`` fields of initializers are cut out and
remembered by position, and only the small rest goes through the real parser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CUT_FROM = 4096  # smaller weights stay in the message

# field numbers of the ONNX schema
_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_TENSOR_RAW_DATA = 9

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class Malformed(Exception):
    """The bytes are not a message we can walk; the caller lets the real parser say what is wrong."""


@dataclass(frozen=True)
class Skeleton:
    """A model without its large weights: ``message`` parses as a ModelProto, ``weights`` maps the position of an
    initializer in ``graph.initializer`` to the (offset, length) of its data in the file."""

    message: bytes
    weights: dict[int, tuple[int, int]]


def skeleton(data: memoryview) -> Skeleton:
    """Cut the large weights out of a serialised ModelProto. Raises Malformed where the walk fails."""
    parts: list[bytes | memoryview] = []
    weights: dict[int, tuple[int, int]] = {}
    count = 0
    for number, start, body, end in _fields(data, 0, len(data)):
        if number != _MODEL_GRAPH:
            parts.append(data[start:end])
            continue
        graph: list[bytes | memoryview] = []
        for field, field_start, field_body, field_end in _fields(data, body, end):
            if field != _GRAPH_INITIALIZER:
                graph.append(data[field_start:field_end])
                continue
            tensor, where = _without_raw_data(data, field_body, field_end)
            if where is not None:
                weights[count] = where
            graph.append(_header(_GRAPH_INITIALIZER, sum(map(len, tensor))))
            graph.extend(tensor)
            count += 1
        parts.append(_header(_MODEL_GRAPH, sum(map(len, graph))))
        parts.extend(graph)
    return Skeleton(b"".join(parts), weights)


def _without_raw_data(
    data: memoryview, start: int, end: int
) -> tuple[list[bytes | memoryview], tuple[int, int] | None]:
    kept: list[bytes | memoryview] = []
    where: tuple[int, int] | None = None
    for number, field_start, body, field_end in _fields(data, start, end):
        if number == _TENSOR_RAW_DATA and field_end - body >= CUT_FROM:
            where = (body, field_end - body)  # of a repeated field the last one counts, as in protobuf
            continue
        if number == _TENSOR_RAW_DATA:
            where = None
        kept.append(data[field_start:field_end])
    return kept, where


def _fields(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, start of the field, start of its content, end) for each field of one message."""
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == _LENGTH:
            length, at = _varint(data, at, end)
            body, at = at, at + length
        elif kind == _VARINT:
            body = at
            _, at = _varint(data, at, end)
        elif kind in (_FIXED64, _FIXED32):
            body, at = at, at + (8 if kind == _FIXED64 else 4)
        else:
            raise Malformed(f"wire type {kind} at byte {start}")
        if at > end:
            raise Malformed(f"field at byte {start} passes the end of its message")
        # a known number with another wire type is a stranger to the parser too
        yield tag >> 3 if kind == _LENGTH else 0, start, body, at


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Malformed(f"number at byte {at} does not end")


def _header(number: int, length: int) -> bytes:
    return _encode(number << 3 | _LENGTH) + _encode(length)


def _encode(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
