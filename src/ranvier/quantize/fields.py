"""Codes in blocks of bytes, of which every block has the same bits in the same places."""

from __future__ import annotations

import numpy as np

from ranvier.quantize.blocks import Array
from ranvier.records import dataclass


@dataclass(frozen=True)
class Field:
    """Some bits of all codes of a block, from byte ``at`` on. Of a ``run`` of bytes come the lowest bits first, of one
    byte after another, then those above them. In the codes they stand ``above`` as many bits of other fields."""

    at: int
    bits: int
    run: int
    above: int = 0

    def place(self, k: int) -> tuple[int, int]:
        """The byte of a block that code ``k`` has these bits in, and how far up."""
        run, rest = divmod(k, self.run * (8 // self.bits))
        part, byte = divmod(rest, self.run)
        return self.at + run * self.run + byte, part * self.bits


@dataclass(frozen=True)
class Codes:
    """How codes of so many ``weights`` lie in a block of ``size`` bytes. Signed ones are stored ``raised`` by a number,
    so that none is below zero; or by none, where they are bytes with a sign."""

    weights: int
    size: int
    fields: tuple[Field, ...]
    raised: int | None = None

    def read(self, blocks: Array) -> Array:
        """Of blocks [..., size]."""
        found = None
        for field in self.fields:
            part = blocks[..., field.at : field.at + self.weights * field.bits // 8]
            codes = part if field.bits == 8 else spread(part, field.bits, field.run)
            codes = codes << np.uint8(field.above) if field.above else codes
            found = codes if found is None else found | codes
        assert found is not None
        return found if self.raised is None else found.view(np.int8) - np.int8(self.raised)


def spread(data: Array, bits: int, run: int) -> Array:
    """Codes that share bytes, as a field has them."""
    per_byte = 8 // bits
    words = _words(data, run)  # many bytes are shifted and masked at once, and a run is moved as one
    mask = words.dtype.type(int.from_bytes(bytes([(1 << bits) - 1] * words.itemsize), "little"))
    codes = np.empty((words.size * words.itemsize // run, per_byte), f"V{run}")
    for k in range(per_byte):
        shifted = words >> words.dtype.type(k * bits) if k else words
        codes[:, k] = (shifted & mask).view(codes.dtype)
    return codes.view(np.uint8).reshape(*data.shape[:-1], data.shape[-1] * per_byte)


def _words(data: Array, run: int) -> Array:
    """All bytes in words as wide as fit runs."""
    return np.ascontiguousarray(data).reshape(-1).view(f"<u{min(8, run & -run)}")
