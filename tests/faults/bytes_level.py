"""Damage that knows nothing of models, or only where protobuf keeps its lengths."""

from __future__ import annotations

import random

from ranvier.formats.onnx.wire import Malformed, fields


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(data: bytes, rng: random.Random) -> bytes:
    start, end = _chunk(data, rng)
    return data[:start] + rng.randbytes(end - start) + data[end:]


def insert_random(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 2, 5, 17, 200))) + data[at:]


def delete_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = _chunk(data, rng)
    return data[:start] + data[end:]


def duplicate_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = _chunk(data, rng)
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[start:end] + data[at:]


def swap_chunks(data: bytes, rng: random.Random) -> bytes:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(4))
    a, b, c, d = cuts
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def repeat_message(data: bytes, rng: random.Random) -> bytes:
    """Two models in one file: protobuf merges them."""
    return data + data[: rng.choice((len(data), len(data) // 2))]


def edit_length(data: bytes, rng: random.Random) -> bytes:
    """Change the length that a nested message, a string or a block of weights declares; 100 MB among others."""
    places = _lengths(data)
    if not places:
        return flip_bits(data, rng)
    at, end, length = rng.choice(places)
    wrong = rng.choice((0, 1, length - 1, length + 1, 2 * length, 127, 128, 100 << 20, (1 << 31) - 1, (1 << 63) - 1))
    return data[:at] + _varint(max(wrong, 0)) + data[end:]


def edit_tag(data: bytes, rng: random.Random) -> bytes:
    """Change the number or the wire type of a field."""
    places = _lengths(data)
    if not places:
        return flip_bits(data, rng)
    out = bytearray(data)
    at = rng.choice(places)[0] - 1
    out[at] = rng.choice((out[at] ^ 1 << rng.randrange(3), rng.randrange(256)))
    return bytes(out)


def noise(data: bytes, rng: random.Random) -> bytes:
    """Nothing of the model is left."""
    return rng.randbytes(rng.choice((0, 1, 16, 300, len(data))))


def deep_message(data: bytes, rng: random.Random) -> bytes:
    """A graph in an attribute of a node of a graph …, hundreds of levels deep: made by hand, no writer would."""
    inner = b""
    for _ in range(rng.choice((30, 40, 100, 500))):
        graph = inner
        attribute = b"\x0a\x01b" + b"\x32" + _varint(len(graph)) + graph + b"\xa0\x01\x05"  # name, g, type = GRAPH
        node = b"\x12\x01y" + b"\x22\x04Loop" + b"\x2a" + _varint(len(attribute)) + attribute
        inner = b"\x0a" + _varint(len(node)) + node
    return data + b"\x3a" + _varint(len(inner)) + inner


def _chunk(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 4, 16, 64, 512)))


def _lengths(data: bytes) -> list[tuple[int, int, int]]:
    """(start, end, value) of the length of every length-delimited field, as deep as the bytes read as messages."""
    view = memoryview(data)
    found: list[tuple[int, int, int]] = []
    waiting = [(0, len(data))]
    while waiting and len(found) < 2000:
        begin, end = waiting.pop()
        inside: list[tuple[int, int, int]] = []
        try:
            for _, start, body, after in fields(view, begin, end):
                if data[start] & 7 == 2:
                    inside.append((_after_tag(data, start), body, after - body))
        except Malformed:
            continue
        found.extend(inside)
        waiting.extend((body, body + length) for _, body, length in inside if length)
    return found


def _after_tag(data: bytes, at: int) -> int:
    while data[at] >= 0x80:
        at += 1
    return at + 1


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


BYTE_MUTATORS = (
    truncate,
    flip_bits,
    overwrite,
    insert_random,
    delete_chunk,
    duplicate_chunk,
    swap_chunks,
    repeat_message,
    edit_length,
    edit_length,
    edit_tag,
    noise,
    deep_message,
)
