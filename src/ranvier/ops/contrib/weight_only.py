"""com.microsoft operators whose weights are stored in a few bits and whose arithmetic is floating point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from ranvier.graph.types import Dim, TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.levels import E2M1_LEVELS, FP4_LEVELS, NF4_LEVELS
from ranvier.ops.contrib.rules import MICROSOFT, divided, rounded, tensor, times
from ranvier.ops.costs import dims, traffic
from ranvier.ops.operands import index_array, normal_axis, scalar
from ranvier.ops.registry import Array, Cost, TypeCall, op

WIDTHS = (2, 3, 4, 5, 6, 8)  # bits that codes may have
WIDER = {3: 4, 5: 8, 6: 8}  # bits that hold them where none but 2, 4 and 8 are read
_ROWS = 1 << 14  # of words that are taken apart at a time


def raised_by(bits: int) -> int:
    """What is added to codes and to their zeros in ``WIDER`` bits: their middle is so far below that of more bits."""
    return (1 << (WIDER.get(bits, bits) - 1)) - (1 << (bits - 1))


def unpacked(packed: Array, bits: int) -> Array:
    """Codes from bytes, the low bits first; the last axis grows. Of 3, 5 and 6 bits they go on in the next byte."""
    if bits == 8:
        return packed
    if 8 % bits:
        return _unpacked_across(packed, bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * len(shifts))


def packed(codes: Array, bits: int) -> Array:
    """The inverse of :func:`unpacked`; the last axis is filled up with zeros to whole bytes."""
    if bits == 8:
        return codes.astype(np.uint8, copy=False)
    if 8 % bits:
        return _packed_across(codes, bits)
    per_byte = 8 // bits
    words = _in_runs(codes, per_byte).view(f"<u{per_byte}")[..., 0]  # what becomes one byte
    made = words.copy()
    for k in range(1, per_byte):
        made |= words >> words.dtype.type(k * (8 - bits))
    return made.astype(np.uint8)  # the lowest byte of each


def _unpacked_across(packed: Array, bits: int) -> Array:
    """Four codes at a time, which are a part of one 32-bit word or of two; as many of them as are whole."""
    fours = _fours(bits)
    given = _in_runs(packed, 4 * len(fours) * bits // 8).view("<u4")
    found = np.empty((*given.shape[:-1], len(fours)), "<u4")
    for words, codes in _at_a_time(given, found):
        for k, (word, shift) in enumerate(fours):
            four = words[:, word] >> np.uint32(shift)
            if shift + 4 * bits > 32:
                four |= words[:, word + 1] << np.uint32(32 - shift)
            codes[:, k] = _moved(_moved(four, 2 * bits, 16, 1), bits, 8, 0x00010001)
    return _in_one(found.view(np.uint8))[..., : packed.shape[-1] * 8 // bits]


def _packed_across(codes: Array, bits: int) -> Array:
    fours = _fours(bits)
    given = _in_runs(codes, 4 * len(fours)).view("<u4")
    made = np.zeros((*given.shape[:-1], len(fours) * bits // 8), "<u4")
    for runs, words in _at_a_time(given, made):
        for k, (word, shift) in enumerate(fours):
            four = _moved_back(_moved_back(runs[:, k], bits, 8, 0x00010001), 2 * bits, 16, 1)
            words[:, word] |= four << np.uint32(shift)
            if shift + 4 * bits > 32:
                words[:, word + 1] |= four >> np.uint32(32 - shift)
    return _in_one(made.view(np.uint8))[..., : -(-codes.shape[-1] * bits // 8)]


def _fours(bits: int) -> list[tuple[int, int]]:
    """Word and bit at which each four codes begin, of the fewest that fill words."""
    return [divmod(4 * bits * k, 32) for k in range(8 // math.gcd(8, bits))]


def _moved(words: Array, bits: int, to: int, each: int) -> Array:
    """The second of two neighbours of so many bits, which begin where ``each`` has ones, moved up to bit ``to``."""
    first = np.uint32(((1 << bits) - 1) * each)
    moved: Array = (words & first) | (words & first << np.uint32(bits)) << np.uint32(to - bits)
    return moved


def _moved_back(words: Array, bits: int, to: int, each: int) -> Array:
    first = np.uint32(((1 << bits) - 1) * each)
    moved: Array = (words & first) | words >> np.uint32(to - bits) & first << np.uint32(bits)
    return moved


def _in_runs(array: Array, length: int) -> Array:
    """The last axis in runs of so many bytes, zeros behind the last."""
    rest = -array.shape[-1] % length
    filled = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, rest)]) if rest else array
    return np.ascontiguousarray(filled, np.uint8).reshape(*array.shape[:-1], filled.shape[-1] // length, length)


def _in_one(runs: Array) -> Array:
    return runs.reshape(*runs.shape[:-2], runs.shape[-2] * runs.shape[-1])


def _at_a_time(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Some rows of all of them: so few that what is made in between stays near the processor."""
    flat = [array.reshape(-1, array.shape[-1]) for array in arrays]
    for at in range(0, len(flat[0]), _ROWS):
        yield tuple(array[at : at + _ROWS] for array in flat)


def _product(name: str, a: Array, weight: Array, bias: Array | None, weight_transposed: bool = True) -> Array:
    """``a`` times a dequantized weight, plus a bias, in the type of ``a``."""
    right = weight.T if weight_transposed else weight
    if not a.ndim or a.shape[-1] != right.shape[0]:
        raise ShapeMismatch(f"{name}: A {list(a.shape)} does not multiply a weight of {right.shape[0]} rows")
    if bias is not None and bias.size != right.shape[1]:
        raise ShapeMismatch(f"{name}: a bias of {list(bias.shape)} for {right.shape[1]} columns")
    y = np.matmul(widened(a), right)
    return rounded(y if bias is None else y + widened(bias).reshape(-1), a.dtype)


# -- MatMulNBits ------------------------------------------------------------------------------------------------------


@op("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(
    a: Array,
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    bias: Array | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Array:
    if weight_prepacked:
        raise NotSupported("MatMulNBits: weight_prepacked is a layout of one GPU; store the weight as it is specified")
    weight = dequantized_nbits("MatMulNBits", b, scales, zero_points, g_idx, K, N, bits, block_size)
    return _product("MatMulNBits", a, weight, bias)


def dequantized_nbits(
    name: str,
    b: Array,
    scales: Array,
    zero_points: Array | None,
    g_idx: Array | None,
    inner: int,
    outer: int,
    bits: int,
    block_size: int,
) -> Array:
    """The weight ``[outer, inner]`` that blocks of codes along the inner axis stand for."""
    if bits not in WIDTHS or block_size < 1 or (block_size * bits) % 8:
        raise InvalidValue(f"{name}: {bits} bits in blocks of {block_size} are not defined", op=name)
    if inner < 1 or outer < 1:
        raise InvalidValue(f"{name}: a weight of {outer} x {inner} codes has none", op=name)
    blocks = -(-inner // block_size)
    if b.size != outer * blocks * (block_size * bits // 8) or scales.size != outer * blocks:
        raise ShapeMismatch(
            f"{name}: {outer} x {inner} codes in blocks of {block_size} need {outer} x {blocks} blocks, got B "
            f"{list(b.shape)} and scales {list(scales.shape)}"
        )
    codes = unpacked(b.reshape(outer, blocks, -1), bits).astype(np.float32)
    zero = zeros_of(name, zero_points, outer, blocks, bits)
    factor = widened(scales).reshape(outer, blocks)
    if g_idx is None:
        return ((codes - zero[..., None]) * factor[..., None]).reshape(outer, -1)[:, :inner]
    group = g_idx.reshape(-1)[:inner]
    if len(group) < inner or (inner and not (group.min() >= 0 and group.max() < blocks)):
        raise InvalidValue(f"{name}: g_idx must give each of {inner} rows a group in [0, {blocks})", op=name)
    return np.asarray((codes.reshape(outer, -1)[:, :inner] - zero[:, group]) * factor[:, group])


def zeros_of(name: str, zero_points: Array | None, outer: int, blocks: int, bits: int) -> Array:
    """Zero points ``[outer, blocks]``: the middle of the range, packed like the codes, or plain numbers."""
    if zero_points is None:
        return np.full((outer, blocks), 1 << (bits - 1), np.float32)
    expected = outer * (-(-blocks * bits // 8) if zero_points.dtype == np.uint8 else blocks)
    if zero_points.size != expected:
        raise ShapeMismatch(f"{name}: expected {expected} zero points, got {list(zero_points.shape)}")
    if zero_points.dtype != np.uint8:
        return widened(zero_points).reshape(outer, blocks)
    return unpacked(zero_points.reshape(outer, -1), bits)[:, :blocks].astype(np.float32)


# -- other formats ----------------------------------------------------------------------------------------------------


@op("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(
    a: Array,
    b: Array,
    absmax: Array,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Array:
    """Blocks run over the flattened weight ``[N, K]``; of two codes in a byte the first stands high."""
    name = "MatMulBnb4"
    if quant_type not in (0, 1):
        raise InvalidValue(f"{name}: quant_type must be 0 (FP4) or 1 (NF4), got {quant_type}", op=name)
    if min(block_size, K, N) < 1:
        raise InvalidValue(f"{name}: {N} x {K} codes in blocks of {block_size} are not defined", op=name)
    blocks = -(-N * K // block_size)
    if b.size != -(-N * K // 2) or absmax.size != blocks:
        raise ShapeMismatch(
            f"{name}: {N} x {K} codes need {-(-N * K // 2)} bytes and {blocks} scales, got {b.size} and {absmax.size}"
        )
    codes = np.stack((b.reshape(-1) >> 4, b.reshape(-1) & 15), axis=-1).reshape(-1)[: N * K]
    levels = (NF4_LEVELS if quant_type else FP4_LEVELS)[codes]
    weight = levels * np.repeat(widened(absmax).reshape(-1), block_size)[: N * K]
    return _product(name, a, weight.reshape(N, K), None, bool(transB))


@op("MatMulBlockQuantizedFp8Weight", domain=MICROSOFT)
def matmul_fp8_weight(
    a: Array,
    b: Array,
    b_scale: Array,
    a_scale: Array | None = None,
    bias: Array | None = None,
    *,
    block_size: int = 128,
) -> Array:
    name = "MatMulBlockQuantizedFp8Weight"
    weight = widened(b) * _per_block(name, widened(b_scale), b.shape, block_size)
    left = widened(a)
    if a_scale is not None:  # the activation goes through float8 as well
        step = float(scalar(name, "a_scale", a_scale))
        largest = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
        left = np.clip(left / step, -largest, largest).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * step
    return rounded(_product(name, left, weight, bias), a.dtype)


@op("MatMulBlockQuantizedFp4Weight", domain=MICROSOFT)
def matmul_fp4_weight(
    a: Array,
    b: Array,
    weight_scale: Array,
    weight_scale_2: Array,
    input_scale: Array | None = None,
    bias: Array | None = None,
    *,
    block_size: int = 16,
) -> Array:
    """NVFP4: pairs of E2M1 codes, E4M3 scales per block (as raw bytes) and one scale for the whole weight."""
    name = "MatMulBlockQuantizedFp4Weight"
    levels = E2M1_LEVELS[unpacked(b, 4)]
    steps = weight_scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    weight = levels * _per_block(name, steps, levels.shape, block_size)
    return _product(name, a, weight * float(scalar(name, "weight_scale_2", weight_scale_2)), bias)


def _per_block(name: str, scales: Array, shape: tuple[int, ...], block_size: int) -> Array:
    """Scales of blocks along the last axis, one per element."""
    if len(shape) != 2 or block_size < 1 or scales.shape != (shape[0], -(-shape[1] // block_size)):
        raise ShapeMismatch(f"{name}: scales {list(scales.shape)} do not fit {list(shape)} in blocks of {block_size}")
    return np.repeat(scales, block_size, axis=1)[:, : shape[1]]


@op("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(
    data: Array,
    indices: Array,
    scales: Array,
    zero_points: Array | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Array:
    """Gather from a table stored in blocks of codes; an index outside the table gives zeros."""
    name = "GatherBlockQuantized"
    at_axis = normal_axis(name, gather_axis, data.ndim)
    block_axis = normal_axis(name, quantize_axis, data.ndim)
    packed_bytes = data.dtype == np.uint8
    if packed_bytes and (bits not in WIDTHS or block_axis != data.ndim - 1 or at_axis == block_axis):
        raise InvalidValue(f"{name}: bytes hold codes of 2 to 6 or 8 bits along the last axis, gathered along another")
    width = data.shape[block_axis] * 8 // bits if packed_bytes else data.shape[block_axis]
    step = block_size or width
    blocks = -(-width // step)
    fits = scales.ndim == data.ndim and scales.shape[block_axis] == blocks
    if not fits or any(n not in (1, d) for k, (n, d) in enumerate(zip(scales.shape, data.shape)) if k != block_axis):
        raise ShapeMismatch(
            f"{name}: data {list(data.shape)} in {blocks} blocks along axis {block_axis} does not take scales of "
            f"shape {list(scales.shape)}"
        )
    size = data.shape[at_axis]
    rows = index_array(name, indices).astype(np.int64)
    outside = (rows < -size) | (rows >= size)
    rows = np.where(outside, 0, np.where(rows < 0, rows + size, rows))

    def picked(table: Array) -> Array:
        """The rows asked for; a table with a single row has it for all."""
        return np.take(table, rows if table.shape[at_axis] == size else np.zeros_like(rows), axis=at_axis)

    factor, zero = scales, zero_points
    if at_axis == block_axis:  # blocks straddle the rows to pick, so give every row its own scale first
        factor = _stretched(factor, at_axis, step, size)
        zero = None if zero is None else _stretched(zero, at_axis, step, size)
    codes, factor = picked(data), picked(factor)
    zero = None if zero is None else picked(zero)
    if packed_bytes:
        codes = unpacked(codes, bits)
        zero = None if zero is None else unpacked(zero, bits)[..., : factor.shape[-1]]
    if at_axis != block_axis:
        moved = block_axis if block_axis < at_axis else block_axis + indices.ndim - 1
        factor = _stretched(factor, moved, step, width)
        zero = None if zero is None else _stretched(zero, moved, step, width)
    y: Array = codes.astype(np.float32)
    if zero is not None:
        y = y - zero.astype(np.float32)
    elif packed_bytes:
        y = y - np.float32(1 << (bits - 1))
    y = y * widened(factor)
    if outside.any():
        y[(slice(None),) * at_axis + (outside,)] = 0
    return rounded(y, scales.dtype)


def _stretched(table: Array, axis: int, step: int, width: int) -> Array:
    """Every entry along ``axis`` repeated for the elements of its block."""
    return np.repeat(table, step, axis=axis)[(slice(None),) * axis + (slice(width),)]


# -- types and costs --------------------------------------------------------------------------------------------------


def _matmul_type(call: TypeCall, columns: Dim) -> Sequence[Type | None]:
    a = tensor(call, 0)
    return [TensorType(a.dtype, None if a.shape is None else (*a.shape[:-1], columns))]


@matmul_nbits.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _matmul_type(call, int(call.attr("N")))


@matmul_bnb4.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _matmul_type(call, int(call.attr("N" if call.attr("transB", 1) else "K")))


@matmul_fp8_weight.infer
@matmul_fp4_weight.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    b = tensor(call, 1).shape
    return _matmul_type(call, b[0] if b else None)


@matmul_nbits.cost
@matmul_bnb4.cost
@matmul_fp8_weight.cost
@matmul_fp4_weight.cost
def _(call: TypeCall) -> Cost:
    a = dims(call.type(0))
    columns = dims(call.result_types[0])[-1:] if call.result_types else (1,)
    return Cost(2.0 * math.prod(a) * math.prod(columns), traffic(call))


def _codes_in(size: Dim, bits: int) -> Dim:
    """Codes that so many bytes hold."""
    return divided(times(size, 8), bits) if 8 % bits else times(size, 8 // bits)


@gather_block_quantized.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    data, indices, scales = tensor(call, 0), tensor(call, 1).shape, tensor(call, 2)
    if data.shape is None or indices is None:
        return [TensorType(scales.dtype, None)]
    axis = call.attr("gather_axis", 0) % len(data.shape)
    shape = [*data.shape]
    if data.dtype is DType.uint8:
        shape[-1] = _codes_in(shape[-1], int(call.attr("bits", 4)))
    return [TensorType(scales.dtype, (*shape[:axis], *indices, *shape[axis + 1 :]))]
