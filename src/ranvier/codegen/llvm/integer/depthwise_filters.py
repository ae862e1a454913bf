"""Filters of depthwise convolutions of 8-bit codes, in the order their kernels read them.

They are stored less their zero points, as lines of 32-bit lanes, one for each channel: one 16-bit number in a lane, or,
where all are bytes and the processor multiplies four bytes of a lane at once, four rows of a window. Nothing depends on
the size of images, which may be another one at every call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, aligned_empty

Array = np.ndarray[Any, Any]
ROWS = 4  # of a window that are multiplied at once, as bytes
CHANNELS = 16  # whose bytes are brought together at a time
_UNROLLED = 49  # taps of a kernel at most for which code is unrolled; of more than 9 some filters are read again


def is_unrolled(shape: ConvShape) -> bool:
    """Whether code is unrolled for such windows."""
    return shape.kernel[0] == 1 and shape.taps <= _UNROLLED and shape.dilations[1:] == (1, 1) and shape.strides[2] <= 2


def lengthwise(shape: ConvShape, isa: Isa) -> ConvShape:
    """The same convolution, along the width where its image is a single column: what is read is shared by neighbours
    then. Not where rows are multiplied four at a time by instructions that do no other."""
    return shape.as_row() if shape.is_column and dot_of(isa) is not SIGNED else shape


def permutes(isa: Isa) -> bool:
    """Whether one instruction or two bring the bytes of rows together."""
    return isa.vector_bytes == 64 and isa.has("avx512vnni")


def room_of(isa: Isa, shape: ConvShape) -> int:
    """Channels that filters and sums have room for."""
    lanes = max(isa.lanes(4), CHANNELS) if dot_of(isa) is SIGNED else isa.lanes(4)
    return -(-shape.cout // lanes) * lanes


def pack_depthwise(w: Array, zero: Array, isa: Isa, shape: ConvShape) -> Storage:
    """Filters [channels, 1, *kernel] less their zero points.

    Words stand as [tap][channel]. Of windows that code is unrolled for a row of zeros follows, and then for each row
    the sum of those above it. Bytes stand as [first row][column][channel][row]: rows that follow each other, beginning
    with any from three above the first to the last one, with zeros where there are none, and then nothing but zeros;
    behind them the same sums, what whole windows begin with where codes are moved to the sign that is multiplied, and
    the order that brings rows together.
    """
    shape = lengthwise(shape, isa)
    room = room_of(isa, shape)
    centred = w.astype(np.int32).reshape(shape.cout, shape.taps) - zero.astype(np.int32).reshape(-1, 1)
    words = np.zeros((shape.taps, room), np.int32)
    words[:, : shape.cout] = centred.T
    if not is_unrolled(shape):
        return _stored([words & 0xFFFF])
    _, height, width = shape.kernel
    rows = words.reshape(height, width, room)
    above = np.zeros((height + 1, room), np.int32)
    np.cumsum(rows.sum(axis=1), axis=0, out=above[1:])
    if not _fits_bytes(centred, isa, shape):
        return _stored([words & 0xFFFF, np.zeros((width, room), np.int32), above])
    beyond = ROWS - 1
    padded = np.zeros((height + 1 + 3 * beyond, width, room), np.int8)
    padded[beyond : beyond + height] = rows
    count = height + ROWS
    fours = np.stack([padded[k : k + count] for k in range(ROWS)], axis=-1).reshape(count * width, -1)
    order = np.zeros((1, room), np.int32)
    lanes = isa.lanes(4)
    order.view(np.int8)[0, : ROWS * lanes] = np.arange(ROWS * lanes).reshape(ROWS, lanes).T.reshape(-1)
    return _stored([fours.view(np.int32), above, above[-1:] * -dot_of(isa).moves, order], np.int8)


def _fits_bytes(centred: Array, isa: Isa, shape: ConvShape) -> bool:
    """Whether filters are bytes, windows have rows to bring together, and there is a whole vector of channels."""
    if not permutes(isa) and dot_of(isa) is not SIGNED:
        return False
    if shape.cout < CHANNELS or shape.kernel[1] < 2:
        return False
    return bool(centred.min(initial=0) >= -128 and centred.max(initial=0) <= 127)


def _stored(parts: list[Array], filters: type = np.int32) -> Storage:
    """The type of the whole says what filters are."""
    packed = aligned_empty((sum(map(len, parts)), parts[0].shape[1]), np.dtype(np.int32))
    np.concatenate(parts, out=packed)
    return Storage.constant(packed.view(filters))


def in_bytes(filters: Storage) -> bool:
    assert filters.array is not None
    return bool(filters.array.dtype == np.int8)
