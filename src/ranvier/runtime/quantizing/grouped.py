"""Codes of any scheme in the forms that operators of other tools have.

Integers go into MatMulNBits: unsigned, a scale and a zero for each group of a row. Float8 goes behind a
DequantizeLinear with a scale for each row, positions in the table of NF4 into MatMulBnb4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig
from ranvier.ops.contrib.levels import NF4_LEVELS
from ranvier.quantize import Quantized
from ranvier.quantize.blocks import expand

Array = np.ndarray[Any, Any]
LEAST_GROUP, MOST_GROUP = 16, 256  # powers of two: ONNX Runtime reads no others
_BITS = (2, 4, 8)  # that ONNX Runtime reads
_FLOAT8 = (DType.float8_e4m3fn, DType.float8_e5m2)


def storable(coded: Quantized, group: int) -> Quantized:
    """The same numbers in a form that an operator has; InvalidConfig where there is none."""
    if coded.table is not None:
        (side, *others) = coded.block
        known = np.array_equal(coded.table, NF4_LEVELS) and coded.codes.dtype.kind in "iu"
        if not known or not coded.flat or others or coded.bits != 4:
            raise unfit(coded, "its codes are positions in a table that is not NF4's, or not in blocks as that has")
        if side < LEAST_GROUP or side & (side - 1):
            raise unfit(coded, f"{side} weights share a scale, that must be a power of two of at least {LEAST_GROUP}")
        size = min(side, MOST_GROUP)
        scales = np.repeat(coded.scales, side // size)[: -(-coded.codes.size // size)]
        return replace(coded, scales=scales, block=(size,))
    if coded.codes.ndim == 2 and dtypes.of(coded.codes) in _FLOAT8:
        if coded.zeros is not None or coded.order is not None or coded.flat or coded.block[1] < coded.shape[1]:
            raise unfit(coded, "float8 needs one scale for a row, and no zeros")
        return replace(coded, scales=np.ascontiguousarray(coded.each(coded.scales)[:, :1], np.float32))
    return in_groups(coded, group)


def in_groups(coded: Quantized, group: int, widths: Sequence[int] = _BITS) -> Quantized:
    """The same numbers, in groups of a power of two of weights: as many as share a scale, or ``group`` where whole rows
    do; in the fewest bits of ``widths``. InvalidConfig where that operator has no such numbers."""
    if coded.codes.ndim != 2 or coded.codes.dtype.kind not in "iu" or coded.table is not None:
        raise unfit(coded, "its codes are no integers with a scale and a zero each")
    bits = next((b for b in widths if b >= coded.bits), None)
    if bits is None:
        raise unfit(coded, f"its codes have {coded.bits} bits, at most {widths[-1]} can be stored")
    size = _size(coded, group)
    middle = 1 << (coded.bits - 1) if coded.codes.dtype.kind == "i" else 0  # signed ones are counted from the least
    if coded.codes.size and coded.bits < 8 * coded.codes.itemsize:  # else all there are fit
        least, most = int(coded.codes.min()), int(coded.codes.max())
        if not 0 <= least + middle <= most + middle < 1 << bits:
            raise unfit(coded, f"its codes go from {least} to {most}, which is no {bits} bits")
    codes = coded.codes.view(np.uint8) if coded.codes.itemsize == 1 else coded.codes.astype(np.uint8)
    codes = codes + np.uint8(middle) if middle else codes  # wraps as it should
    scales = _of_groups(coded, coded.scales, size).astype(np.float32)
    zeros = np.zeros(scales.shape, np.float32) if coded.zeros is None else _of_groups(coded, coded.zeros, size)
    zeros = zeros.astype(np.float32) + np.float32(middle)
    check_finite(coded, scales, zeros)
    return replace(
        coded,
        codes=codes,
        scales=scales,
        zeros=whole_zeros(zeros, bits),
        block=(1, size),
        bits=bits,
        axis=1,
        flat=False,
        scale_bytes=None,
    )


def check_finite(coded: Quantized, scales: Array, zeros: Array | None) -> None:
    if not (np.isfinite(scales).all() and (zeros is None or np.isfinite(zeros).all())):
        raise unfit(coded, "it has scales or zeros that are no finite numbers")


def whole_zeros(zeros: Array, bits: int) -> Array:
    """Zeros as codes, if all are some; else as they are."""
    whole = 0 <= zeros.min(initial=0) <= zeros.max(initial=0) < 1 << bits and (zeros == np.rint(zeros)).all()
    return zeros.astype(np.uint8) if whole else zeros


def _size(coded: Quantized, group: int) -> int:
    """Weights of a group."""
    if coded.order is not None:
        raise unfit(coded, "its groups are no runs of neighbours")
    columns = coded.shape[1]
    if coded.flat:
        (side,) = coded.block
        shared = columns if columns and side % columns == 0 else side
        if columns % shared:
            raise unfit(coded, f"its blocks of {side} weights end inside of rows of {columns}")
    else:
        shared = coded.block[1]
    if shared >= columns:
        return group
    size = shared & -shared
    if size < LEAST_GROUP:
        raise unfit(coded, f"{shared} weights share a scale, that must be a multiple of {LEAST_GROUP}")
    return min(size, MOST_GROUP)


def _of_groups(coded: Quantized, numbers: Array, size: int) -> Array:
    """The number of each group of a row; of a tensor's own blocks without one for each element between."""
    if coded.flat:
        return coded.each(numbers)[:, ::size]
    (rows, side), columns = coded.block, coded.shape[1]
    at = np.arange(0, columns, size) // side if numbers.shape[1] > 1 else np.zeros(-(-columns // size), np.int64)
    return expand(numbers[:, at], (rows, 1), (coded.shape[0], len(at)))


def at_most(group: int, weights: int) -> int:
    """A group that holds no more than there is, as a power of two."""
    return min(group, max(LEAST_GROUP, 1 << (weights - 1).bit_length()))


def unfit(coded: Quantized, why: str) -> InvalidConfig:
    """What is to be said of codes that an operator has no place for."""
    return InvalidConfig(f"what scheme {coded.scheme!r} makes has no form that other tools read: {why}")
