"""Products with weights of few bits: exact in their activations and, where they are no constants, in their scales.

Codes stay what they are. Where activations are rounded too, gradients pass straight through, as by QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.contrib.levels import E2M1_LEVELS, FP4_LEVELS, NF4_LEVELS
from ranvier.ops.contrib.weight_only import unpacked as unpacked_array
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_array, first, gradient, operand
from ranvier.ops.gradients.parts import made_of
from ranvier.ops.own.bitlinear import DOMAIN

MICROSOFT = "com.microsoft"
_SCALES = {"MatMulNBits": (2, 3), "MatMulBnb4": (2,), "MatMulBlockQuantizedFp8Weight": (2, 3),
           "MatMulBlockQuantizedFp4Weight": (3,)}  # fmt: skip
_BIASES = {"MatMulNBits": 5, "MatMulBlockQuantizedFp8Weight": 4, "MatMulBlockQuantizedFp4Weight": 5}


def _learns(node: Node) -> bool:
    """Whether scales may be derived by, or activations are rounded: then a node is written out."""
    operands = [operand(node, k) for k in _SCALES[node.op]]
    rounds = node.op == "MatMulBlockQuantizedFp8Weight" and operand(node, 3) is not None
    return rounds or any(v is not None and v.const is None and _is_float(v) for v in operands)


def _is_float(value: Value) -> bool:
    kind = getattr(value.type, "dtype", None)
    return kind is not None and kind.is_float


@gradient(*_SCALES, domain=MICROSOFT)
def _product(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """The forward product keeps its kernel; only the way back reads the weight as numbers."""
    grad = grads[0]
    assert grad is not None
    found: list[Value | None] = [None] * len(node.inputs)
    weight = b.cast(_weight(b, node), b.dtype(grad))  # [results, features]
    found[0] = b.MatMul(grad, weight)
    bias = operand(node, _BIASES.get(node.op, len(node.inputs)))
    if bias is not None:
        found[_BIASES[node.op]] = b.sum_to(grad, bias)
    return found


@made_of(*_SCALES, domain=MICROSOFT, when=_learns)
def _plain_product(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    if node.op == "MatMulBlockQuantizedFp8Weight" and operand(node, 3) is not None:
        step = b.Reshape(operand(node, 3), b.constant(np.zeros(0, np.int64)))
        zero = b.constant(np.zeros((), ml_dtypes.float8_e4m3fn))
        x = b.cast(b.DequantizeLinear(b.QuantizeLinear(x, b.cast(step, b.dtype(x)), zero), step, zero), b.dtype(x))
    weight = b.cast(_weight(b, node), b.dtype(x))
    y = b.MatMul(x, b.Transpose(weight, perm=[1, 0]))
    bias = operand(node, _BIASES.get(node.op, len(node.inputs)))
    return [y if bias is None else b.Add(y, bias)]


def _weight(b: Backward, node: Node) -> Value:
    """``[results, features]``, as the operator reads its codes."""
    if node.op == "MatMulNBits":
        return _of_blocks(b, node)
    if node.op == "MatMulBnb4":
        return _of_levels(b, node)
    codes = node.inputs[1]
    assert codes is not None
    if node.op == "MatMulBlockQuantizedFp8Weight":
        block = int(attribute(node, "block_size", 128))
        scales = stretched(b, node.inputs[2], b.sizes(codes)[1], block)
        return b.Mul(b.cast(codes, b.dtype(scales)), scales)
    block = int(attribute(node, "block_size", 16))
    halves = unpacked(b, codes, 4)
    steps = constant_array(node.inputs[2], "the scales of MatMulBlockQuantizedFp4Weight")
    blocks = b.constant(steps.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    weight = b.Mul(looked_up(b, E2M1_LEVELS, halves), stretched(b, blocks, b.sizes(halves)[1], block))
    return b.Mul(weight, b.Reshape(node.inputs[3], b.whole(1)))


def looked_up(b: Backward, levels: np.ndarray, codes: Value) -> Value:
    """Numbers that codes stand for; the codes stay bytes until they are read."""
    return b.Gather(b.constant(levels), b.Cast(codes, to=DType.int32.onnx), axis=0)


def unpacked(b: Backward, codes: Value, bits: int, high_first: bool = False) -> Value:
    """A byte for each code; the last axis grows. They may be an input: a layer whose codes a function is handed."""
    if 8 % bits:
        return _unpacked_across(b, codes, bits)
    order = -1 if high_first else 1
    shifts = list(range(0, 8, bits))[::order]
    if codes.const is not None:
        known = unpacked_array(codes.const.numpy(), bits)
        return b.constant(known.reshape(-1, len(shifts))[:, ::order].reshape(known.shape))
    mask, sizes = b.constant(np.uint8((1 << bits) - 1)), b.sizes(codes)
    each = [b.BitwiseAnd(b.BitShift(codes, b.constant(np.uint8(s)), direction="RIGHT"), mask) for s in shifts]
    apart = b.Concat(*(b.Unsqueeze(one, b.whole(len(sizes))) for one in each), axis=len(sizes))
    return b.Reshape(apart, b.whole(*sizes[:-1], sizes[-1] * len(shifts)))


def _unpacked_across(b: Backward, codes: Value, bits: int) -> Value:
    """Of codes that go on in the next byte, what is in each of both."""
    if codes.const is not None:
        return b.constant(unpacked_array(codes.const.numpy(), bits))
    size, axis = b.sizes(codes)[-1], b.rank(codes) - 1
    byte, shift = np.divmod(np.arange(size * 8 // bits) * bits, 8)
    mask = (1 << bits) - 1
    left = mask >> (8 - shift)  # bits of the next byte, none where all are in the first

    def part(at: np.ndarray, direction: str, shifts: np.ndarray) -> Value:
        bytes_ = b.Gather(codes, b.constant(at), axis=axis)
        return b.BitShift(bytes_, b.constant(shifts.astype(np.uint8)), direction=direction)

    low = b.BitwiseAnd(part(byte, "RIGHT", shift), b.constant(np.uint8(mask)))
    ahead = part(np.minimum(byte + 1, size - 1), "LEFT", (8 - shift) % 8)
    return b.BitwiseOr(low, b.BitwiseAnd(ahead, b.constant((left << (8 - shift)).astype(np.uint8))))


def stretched(b: Backward, scales: Value | None, width: int, block: int, axis: int = 1) -> Value:
    """One scale for each element along an axis."""
    return b.Gather(scales, b.constant(np.arange(width, dtype=np.int64) // block), axis=axis)


def _of_blocks(b: Backward, node: Node) -> Value:
    codes, scales, zero = node.inputs[1], node.inputs[2], operand(node, 3)
    assert codes is not None and scales is not None
    inner, outer, block = (int(node.attrs[k]) for k in ("K", "N", "block_size"))
    bits = int(attribute(node, "bits", 4))
    if operand(node, 4) is not None:
        raise NotSupported("the gradient of MatMulNBits with g_idx is not known")
    rows = b.Reshape(scales, b.whole(outer, -1))
    operands: list[Value | None] = [b.Reshape(codes, b.whole(outer, -1)), b.constant(np.arange(outer)), rows]
    packed = zero is not None and not _is_float(zero)
    if packed:
        operands.append(b.Reshape(zero, b.whole(outer, -1)))
    attrs = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    weight = b.node("GatherBlockQuantized", operands, attrs, domain=MICROSOFT, version=1).output
    if zero is not None and not packed:  # codes were read as differences to the middle
        middle = b.number(float(1 << (bits - 1)), rows)
        shift = b.Mul(b.Sub(middle, b.cast(b.Reshape(zero, b.whole(outer, -1)), b.dtype(rows))), rows)
        weight = b.Add(weight, stretched(b, shift, b.sizes(weight)[1], block))
    return b.Slice(weight, b.whole(0), b.whole(inner), b.whole(1))


def _of_levels(b: Backward, node: Node) -> Value:
    inner, outer, block = (int(node.attrs[k]) for k in ("K", "N", "block_size"))
    pairs = node.inputs[1]
    assert pairs is not None
    codes = b.Reshape(unpacked(b, pairs, 4, high_first=True), b.whole(-1))
    if outer * inner % 2:  # the last half is none
        codes = b.Slice(codes, b.whole(0), b.whole(outer * inner), b.whole(0))
    levels = NF4_LEVELS if int(node.attrs["quant_type"]) else FP4_LEVELS
    owner = b.constant(np.arange(outer * inner, dtype=np.int64) // block)
    largest = b.Gather(b.Reshape(node.inputs[2], b.whole(-1)), owner, axis=0)
    weight = b.Reshape(b.Mul(b.cast(looked_up(b, levels, codes), b.dtype(largest)), largest), b.whole(outer, inner))
    return weight if attribute(node, "transB", 1) else b.Transpose(weight, perm=[1, 0])


@gradient("GatherBlockQuantized", domain=MICROSOFT)
def _rows(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Scales get what their codes count, summed over blocks and added to the rows that were asked for."""
    grad, scales, indices = grads[0], node.inputs[2], node.inputs[1]
    assert grad is not None and scales is not None and indices is not None
    none: list[Value | None] = [None] * len(node.inputs)
    if scales.const is not None:
        return none
    rank = b.rank(scales)
    at, along = (int(attribute(node, k, d)) % rank for k, d in (("gather_axis", 0), ("quantize_axis", 1)))
    if at != 0 or along != rank - 1 or b.sizes(scales)[:-1] != b.sizes(first(node))[:-1]:
        raise NotSupported("the gradient of GatherBlockQuantized is known for rows with blocks along the last axis")
    counted = b.node(
        node.op, [*node.inputs[:2], b.filled(1.0, scales), *node.inputs[3:]], dict(node.attrs),
        domain=MICROSOFT, version=node.version,
    ).output  # fmt: skip
    each = b.Mul(grad, counted)
    width, blocks = b.sizes(each)[-1], b.sizes(scales)[-1]
    block = int(attribute(node, "block_size", 128)) or width
    owned = (np.arange(width)[:, None] // block == np.arange(blocks)).astype(b.dtype(grad).numpy)
    summed = b.MatMul(each, b.constant(owned))
    places = b.Unsqueeze(b.cast(indices, DType.int64), b.whole(b.rank(indices)))
    none[2] = b.ScatterND(b.zeros(scales), places, summed, reduction="add")
    return none


@gradient("BitLinear", domain=DOMAIN)
def _bitlinear(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """As if tokens had not been rounded, which is how such models are trained."""
    grad, scale, bias = grads[0], node.inputs[2], operand(node, 3)
    assert grad is not None and scale is not None
    given = node.inputs[1]
    assert given is not None
    kind = b.dtype(grad)
    raised = b.Slice(unpacked(b, given, 2), b.whole(0), b.whole(int(node.attrs["K"])), b.whole(1))
    weight = b.Sub(b.cast(raised, kind), b.number(1.0, grad))  # [results, features]
    step = b.cast(b.Reshape(scale, b.whole(-1)), kind)
    unscaled = b.Div(node.output if bias is None else b.Sub(node.output, b.cast(bias, kind)), step)
    of_scale = b.cast(b.like(b.sum_to(b.Mul(grad, unscaled), step), scale), b.dtype(scale))
    found: list[Value | None] = [b.MatMul(b.Mul(grad, step), weight), None, of_scale]
    return [*found, b.cast(b.sum_to(grad, bias), b.dtype(bias))] if bias is not None else found
