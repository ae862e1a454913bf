"""The wire format of protobuf: the fields of a message in order, each with where its content lies.

Of a field the key and the length are looked at and nothing else, so a message may be walked where it is: mapped, or on
the other side of a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # how a field is written, the low bits of its tag


class Octets(Protocol):
    """Bytes by position, as a memoryview gives them."""

    def __getitem__(self, at: int, /) -> int: ...


class Malformed(Exception):
    """The bytes are not a message that can be walked."""


def fields(data: Octets, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(tag, start of the field, start of its content, end) for each field of one message.

    A known number that is written otherwise has another tag: it is a stranger to the parser too.
    """
    while at < end:
        start = at
        tag = data[at]
        at += 1
        if tag >= 0x80:  # most are a single byte
            tag, at = varint(data, start, end)
        kind = tag & 7
        if kind == LENGTH:
            length, at = varint(data, at, end)
            body, at = at, at + length
        elif kind == VARINT:
            body = at
            _, at = varint(data, at, end)
        elif kind in (FIXED64, FIXED32):
            body, at = at, at + (8 if kind == FIXED64 else 4)
        else:
            raise Malformed(f"wire type {kind} at byte {start}")
        if at > end:
            raise Malformed(f"field at byte {start} passes the end of its message")
        if tag < 8:
            raise Malformed(f"field number 0 at byte {start}")
        yield tag, start, body, at


def varint(data: Octets, at: int, end: int) -> tuple[int, int]:
    """A number without sign, and where it ends."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Malformed(f"number at byte {at} does not end")
