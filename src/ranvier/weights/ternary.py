"""Ternary tensors of GGUF files as codes: TQ1_0 (five in a byte, as digits of base 3) and TQ2_0 (four in a byte).

Both have a float16 scale for every 256 weights of a row. A file made from a trained ternary model has the same scale
in every block that is not all zeros: :func:`ranvier.passes.ternary.ternary_linear` sees that, and what is lost then is
only what the scale lost when it became a float16.

I2_S is bitnet.cpp's own kind and has one float32 scale for the whole tensor. Files written on x86 are understood; those
written on ARM have another order that nothing in the file tells, so whoever calls :func:`i2s` has to know.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import numpy as np

from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.weights.stored import Stored, TensorInfo

Array = np.ndarray[Any, Any]
_BLOCK = 256
_SIZES = {"TQ1_0": 54, "TQ2_0": 66}


class _Blocks(Protocol):
    @property
    def info(self) -> TensorInfo: ...
    @property
    def raw(self) -> Stored | None: ...


def gguf_ternary(tensor: _Blocks) -> Quantized:
    """Codes and scales of a tensor [N, K] that a GGUF file has as TQ1_0 or TQ2_0."""
    kind, shape = tensor.info.encoding, tensor.info.shape
    if kind not in _SIZES or tensor.raw is None or len(shape) != 2:
        raise WeightError(f"tensor {tensor.info.name!r} ({kind}, {list(shape)}) is no matrix of TQ1_0 or TQ2_0")
    try:
        return decoded(np.asarray(tensor.raw.read()), kind, (shape[0], shape[1]))
    except WeightError as error:
        raise WeightError(f"tensor {tensor.info.name!r}: {error}") from None


def decoded(data: Array | bytes, kind: str, shape: tuple[int, int]) -> Quantized:
    """What blocks of bytes hold."""
    if kind not in _SIZES:
        raise WeightError(f"{kind} is no kind of ternary blocks (known: {', '.join(_SIZES)})")
    (n, k), flat, size = _matrix(kind, shape), _bytes(kind, data), _SIZES[kind]
    if k % _BLOCK or flat.size != n * (k // _BLOCK) * size:
        raise WeightError(f"{kind}: {n} x {k} weights do not fit in {flat.size} bytes")
    blocks = flat.reshape(n, k // _BLOCK, size)
    scales = np.ascontiguousarray(blocks[..., -2:]).view("<f2")[..., 0].astype(np.float32)
    codes = (_two_bits if kind == "TQ2_0" else _base_three)(blocks[..., :-2])
    if codes.max(initial=0) > 2:
        raise WeightError(f"{kind}: a ternary code is 0, 1 or 2; 3 was found")
    return Quantized("ternary", codes.reshape(n, k).astype(np.int8) - np.int8(1), scales, (1, _BLOCK), 2, axis=1)


def _two_bits(blocks: Array) -> Array:
    """Byte m of each half of 32 has the codes m, 32 + m, 64 + m and 96 + m of its half, from the low bits on."""
    halves = blocks.reshape(*blocks.shape[:2], 2, 1, 32)
    codes: Array = (halves >> (2 * np.arange(4, dtype=np.uint8))[:, None]) & 3
    return codes


def _base_three(blocks: Array) -> Array:
    """32 bytes of five digits, 16 of five, 4 of four; a byte is a fraction of 256, its first digit the highest."""
    parts = []
    for first, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint16)[:, None]
        rest = (blocks[..., None, first:end].astype(np.uint16) * powers) & 0xFF
        parts.append(((rest * 3) >> 8).reshape(*blocks.shape[:2], -1))
    return np.concatenate(parts, axis=-1)


def i2s(data: Array | bytes, shape: tuple[int, int]) -> Quantized:
    """A tensor [N, K] of I2_S in the order of x86: of 128 weights, byte m has m, 32 + m, 64 + m and 96 + m from the
    high bits on; after all codes comes the scale, and padding."""
    (n, k), flat = _matrix("I2_S", shape), _bytes("I2_S", data)
    count = n * k
    if count % 128 or flat.size < count // 4 + 4:
        raise WeightError(f"I2_S: {n} x {k} weights and a scale do not fit in {flat.size} bytes")
    blocks = flat[: count // 4].reshape(-1, 1, 32)
    codes = (blocks >> np.array([6, 4, 2, 0], np.uint8)[:, None]) & 3
    if codes.max(initial=0) > 2:
        raise WeightError("I2_S: a ternary code is 0, 1 or 2; 3 was found")
    scale = flat[count // 4 : count // 4 + 4].view("<f4").astype(np.float32).reshape(1, 1)
    if not np.isfinite(scale).all():
        raise WeightError(f"I2_S: a scale of {scale.item()}; the bytes are in another order, or of other weights")
    return Quantized("ternary", codes.reshape(n, k).astype(np.int8) - np.int8(1), scale, (n, k), 2, axis=1)


def _matrix(kind: str, shape: Any) -> tuple[int, int]:
    try:
        n, k = map(operator.index, shape)
    except (TypeError, ValueError):
        n, k = -1, -1
    if min(n, k) < 0:
        raise WeightError(f"{kind}: ternary weights are a matrix of a shape (N, K), not {shape!r}")
    return n, k


def _bytes(kind: str, data: Any) -> Array:
    """The bytes one after another; numbers of another type are none, and would be read as some."""
    given = data if isinstance(data, np.ndarray) else _buffer(kind, data)
    if given.dtype.kind not in "iu" or given.itemsize != 1:
        raise WeightError(f"{kind}: bytes are expected, not {given.dtype}")
    return np.ascontiguousarray(given).reshape(-1).view(np.uint8)


def _buffer(kind: str, data: Any) -> Array:
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError) as error:
        raise WeightError(f"{kind}: bytes are expected, not {type(data).__name__}") from error
