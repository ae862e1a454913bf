"""Codes of a few bits in words, as checkpoints store them. Each function has its inverse; all are plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.errors import WeightError
from ranvier.ops.contrib.weight_only import unpacked
from ranvier.quantize.blocks import Array

_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the column that nibble i of a word holds


def pack_bits(codes: Array, bits: int, word: Any = np.uint32, axis: int = -1) -> Array:
    """Codes along an axis, one after another from the low bits on, also across words where bits do not divide them."""
    width = np.dtype(word).itemsize * 8
    moved = np.moveaxis(np.asarray(codes), axis, -1).astype(np.uint64) & np.uint64((1 << bits) - 1)
    count = moved.shape[-1]
    words = -(-count * bits // width)
    streams = ((moved[..., None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)).astype(np.uint8)
    flat = streams.reshape(*moved.shape[:-1], count * bits)
    padded = np.zeros((*moved.shape[:-1], words * width), np.uint8)
    padded[..., : count * bits] = flat
    packed = np.packbits(padded, axis=-1, bitorder="little")
    little = np.ascontiguousarray(packed).view(np.dtype(word).newbyteorder("<"))
    words_along: Array = np.moveaxis(little, -1, axis).astype(word)
    return words_along


def unpack_bits(words: Array, bits: int, count: int, axis: int = -1) -> Array:
    """The first ``count`` codes along an axis."""
    moved = np.ascontiguousarray(np.moveaxis(np.asarray(words), axis, -1))
    if moved.shape[-1] * moved.itemsize * 8 < count * bits:
        raise WeightError(f"{count} codes of {bits} bits do not fit in {moved.shape[-1]} words")
    little = moved.astype(moved.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    used = little[..., : -(-count * bits // 8)]
    codes = unpacked(used, bits) if 8 % bits else _spread(used, bits)
    return np.moveaxis(np.ascontiguousarray(codes[..., :count]), -1, axis)


def _spread(data: Array, bits: int) -> Array:
    """Codes of 1, 2, 4 or 8 bits as a byte each: all that a word will hold are moved to their places at once."""
    per_byte = 8 // bits
    words = data.astype(f"<u{per_byte}")
    lane, part = 8 * per_byte, 8
    while part > bits:  # halves of each part become parts of their own
        lane, part = lane // 2, part // 2
        mask = sum(((1 << part) - 1) << at for at in range(0, 8 * per_byte, lane))
        words |= words << words.dtype.type(lane - part)
        words &= words.dtype.type(mask)
    return words.view(np.uint8)


def pack_awq(codes: Array) -> Array:
    """[rows, columns] of 4 bits as int32 [rows, columns / 8]."""
    rows, columns = codes.shape
    if columns % 8:
        raise WeightError(f"AWQ packs 8 columns in a word; {columns} are not whole words")
    ordered = codes.reshape(rows, columns // 8, 8)[:, :, _AWQ_COLUMNS].reshape(rows, columns)
    return pack_bits(ordered, 4).view(np.int32)


def unpack_awq(words: Array) -> Array:
    rows, count = words.shape
    nibbles = unpack_bits(words.view(np.uint32), 4, count * 8).reshape(rows, count, 2, 4)
    # columns 0, 2, 4, 6 in the low half of a word and 1, 3, 5, 7 in the high one
    return np.ascontiguousarray(np.swapaxes(nibbles, 2, 3)).reshape(rows, count * 8)


def pack_nibbles(codes: Array) -> Array:
    """4-bit codes two in a byte, the even one in the high half, as bitsandbytes has it."""
    flat = np.asarray(codes, np.uint8).reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return (flat[::2] << 4) | (flat[1::2] & 0xF)


def unpack_nibbles(data: Array, count: int) -> Array:
    flat = np.asarray(data, np.uint8).reshape(-1)
    if flat.size * 2 < count:
        raise WeightError(f"{count} codes of 4 bits do not fit in {flat.size} bytes")
    return np.stack([flat >> 4, flat & 0xF], axis=-1).reshape(-1)[:count]


def pack_ternary(codes: Array) -> Array:
    """[rows, columns] of -1, 0, 1 as bytes [rows / 4, columns]: row r is in byte row r mod rows/4, at bit 2·(r div
    rows/4), as Hugging Face's BitNet checkpoints have it."""
    rows, columns = codes.shape
    if rows % 4:
        raise WeightError(f"four rows share a byte; {rows} are not whole bytes")
    raised = (np.asarray(codes, np.int8) + 1).astype(np.uint8).reshape(4, rows // 4, columns)
    packed: Array = (raised << (2 * np.arange(4, dtype=np.uint8))[:, None, None]).sum(axis=0, dtype=np.uint8)
    return packed


def unpack_ternary(data: Array) -> Array:
    shifts = (2 * np.arange(4, dtype=np.uint8))[:, None, None]
    raised = (np.asarray(data, np.uint8)[None] >> shifts) & 3
    if (raised == 3).any():
        raise WeightError("a ternary code is 0, 1 or 2; 3 was found")
    return (raised.astype(np.int8) - 1).reshape(data.shape[0] * 4, data.shape[1])
