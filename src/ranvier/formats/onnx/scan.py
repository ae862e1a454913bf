"""Finds the weights inside a model file without reading them.

A parsed protobuf message owns a copy of every byte. To keep weights in the file until they are needed, the outermost
levels of the wire format are walked over a memory map: large fields of initializers that hold elements as they lie in
memory (``raw_data``, and ``float_data`` of float32) are cut out and remembered by position, and only the small rest
goes through the real parser.
"""

from __future__ import annotations

from collections.abc import Iterator

from ranvier.records import dataclass

CUT_FROM = 4096  # smaller weights stay in the message

# field numbers of the ONNX schema
_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_TENSOR_DATA_TYPE = 2
_TENSOR_FLOAT_DATA = 4
_TENSOR_RAW_DATA = 9

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_DATA_TYPE = _TENSOR_DATA_TYPE << 3 | _VARINT
_FLOAT_DATA_SINGLY = _TENSOR_FLOAT_DATA << 3 | _FIXED32  # old writers: every number a field of its own
_FLOAT32 = 1  # as an element type


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
        taken = body  # everything before this is in ``graph``, or cut
        for field, field_start, field_body, field_end in _fields(data, body, end):
            if field != _GRAPH_INITIALIZER:
                continue
            if field_end - field_body >= CUT_FROM:
                where = _large_data(data, field_body, field_end)
                if where is not None:
                    field_of_data, at, stop = where
                    kept = field_end - field_body - (stop - field_of_data)
                    graph += [data[taken:field_start], _header(_GRAPH_INITIALIZER, kept)]
                    graph += [data[field_body:field_of_data], data[stop:field_end]]
                    taken = field_end
                    weights[count] = (at, stop - at)
            count += 1
        graph.append(data[taken:end])
        parts.append(_header(_MODEL_GRAPH, sum(map(len, graph))))
        parts.extend(graph)
    return Skeleton(b"".join(parts), weights)


def _large_data(data: memoryview, start: int, end: int) -> tuple[int, int, int] | None:
    """The start of the field, of its content, and the end, for the one field that holds the elements as they lie in
    memory; None for a tensor that has no such field, a small one, or several."""
    found: list[tuple[int, int, int]] = []
    floats = float_type = False
    for number, field_start, body, field_end in _fields(data, start, end):
        if number in (_TENSOR_RAW_DATA, _TENSOR_FLOAT_DATA):
            floats = floats or number == _TENSOR_FLOAT_DATA
            found.append((field_start, body, field_end))
        elif data[field_start] == _FLOAT_DATA_SINGLY:
            return None
        elif data[field_start] == _DATA_TYPE:
            float_type = data[body] == _FLOAT32
    if len(found) != 1 or found[0][2] - found[0][1] < CUT_FROM or (floats and not float_type):
        return None
    return found[0]


def _fields(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, start of the field, start of its content, end) for each field of one message."""
    while at < end:
        start = at
        tag = data[at]
        at += 1
        if tag >= 0x80:  # most are a single byte
            tag, at = _varint(data, start, end)
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
