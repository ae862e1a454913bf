"""Finds the weights inside a model file without reading them.

A parsed protobuf message owns a copy of every byte. To keep weights in the file until they are needed, the outermost
levels of the wire format are walked over a memory map: large fields of initializers that hold elements as they lie in
memory (``raw_data``, and ``float_data`` of float32) are cut out and remembered by position, and only the small rest
goes through the real parser.
"""

from __future__ import annotations

from ranvier.formats.onnx.wire import FIXED32, LENGTH, VARINT, Malformed, fields
from ranvier.records import dataclass

__all__ = ["CUT_FROM", "Malformed", "Skeleton", "skeleton"]

CUT_FROM = 4096  # smaller weights stay in the message

# tags of the ONNX schema: the number of a field with how it is written
_MODEL_GRAPH = 7 << 3 | LENGTH
_GRAPH_INITIALIZER = 5 << 3 | LENGTH
_TENSOR_DATA_TYPE = 2 << 3 | VARINT
_TENSOR_FLOAT_DATA = 4 << 3 | LENGTH
_TENSOR_FLOAT_DATA_SINGLY = 4 << 3 | FIXED32  # old writers: every number a field of its own
_TENSOR_RAW_DATA = 9 << 3 | LENGTH

_FLOAT32 = 1  # as an element type


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
    for tag, start, body, end in fields(data, 0, len(data)):
        if tag != _MODEL_GRAPH:
            parts.append(data[start:end])
            continue
        graph: list[bytes | memoryview] = []
        taken = body  # everything before this is in ``graph``, or cut
        for field, field_start, field_body, field_end in fields(data, body, end):
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
    for tag, field_start, body, field_end in fields(data, start, end):
        if tag in (_TENSOR_RAW_DATA, _TENSOR_FLOAT_DATA):
            floats = floats or tag == _TENSOR_FLOAT_DATA
            found.append((field_start, body, field_end))
        elif tag == _TENSOR_FLOAT_DATA_SINGLY:
            return None
        elif tag == _TENSOR_DATA_TYPE:
            float_type = data[body] == _FLOAT32
    if len(found) != 1 or found[0][2] - found[0][1] < CUT_FROM or (floats and not float_type):
        return None
    return found[0]


def _header(tag: int, length: int) -> bytes:
    return _encode(tag) + _encode(length)


def _encode(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
