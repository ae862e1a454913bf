"""Products with weights of a few bits. Constant weights are turned into numbers once, where they fit; the kernels that
read the codes themselves take these products over where they are faster."""

from __future__ import annotations

from typing import Any

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.ir import Node
from ranvier.graph.types import TensorType
from ranvier.ops.contrib.levels import E2M1_LEVELS, FP4_LEVELS, NF4_LEVELS
from ranvier.ops.contrib.weight_only import WIDTHS
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers

_TYPES = FLOATS | {DType.uint8, DType.int32, DType.int8, DType.float8_e4m3fn}
_TABLES = FLOATS - {DType.float64} | {DType.uint8, DType.int4, DType.uint4, DType.int32, DType.int64}


def unpacked(packed: Any, bits: int) -> Any:
    """Codes from bytes, the low bits first; the last axis grows."""
    if bits == 8:
        return packed
    if 8 % bits:  # codes go on in the next byte
        at = torch.arange(packed.shape[-1] * 8 // bits, device=packed.device) * bits
        wide = torch.nn.functional.pad(packed, (0, 1)).to(torch.int16)
        both = wide.index_select(-1, at // 8) | (wide.index_select(-1, at // 8 + 1) << 8)
        return ((both >> (at % 8).to(torch.int16)) & ((1 << bits) - 1)).to(torch.uint8)
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).reshape(*packed.shape[:-1], packed.shape[-1] * len(parts))


def packed(codes: Any, bits: int) -> Any:
    """The inverse of :func:`unpacked` for bits of which a byte has whole codes, of rows that are whole bytes."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return sum((parts[..., k] << (k * bits) for k in range(1, 8 // bits)), parts[..., 0])


def _times(call: Call, a: Any, weight: Any, bias: Any) -> Any:
    """``a @ weight.T`` in the type of ``a``, summed as float32."""
    if a.device.type == "cpu" or a.dtype == torch.float32:
        y = torch.matmul(a.float(), weight.float().mT)
    else:
        y = torch.matmul(a, weight.to(a.dtype).mT)
    return y if bias is None else y + bias


def _layout(node: Node) -> str | None:
    if node.attrs.get("weight_prepacked", 0):
        return "weight_prepacked is a layout of one kind of GPU"
    return None if node.attrs.get("bits", 4) in WIDTHS else f"{node.attrs.get('bits')} bits are not lowered to torch"


def numbers_of(node: Node, b: Any, scales: Any, zeros: Any = None, groups: Any = None) -> Any:
    """Weights ``[N, K]`` of a MatMulNBits as float32; ``groups`` are in their range."""
    inner, outer, bits, block = (node.attrs.get(name, 4) for name in ("K", "N", "bits", "block_size"))
    blocks = -(-inner // block)
    codes = unpacked(b.reshape(outer, blocks, -1), bits).float()
    factor = scales.float().reshape(outer, blocks)
    if zeros is None:
        zero = torch.full_like(factor, 1 << (bits - 1))
    elif zeros.dtype == torch.uint8:
        zero = unpacked(zeros.reshape(outer, -1), bits)[:, :blocks].float()
    else:
        zero = zeros.float().reshape(outer, blocks)
    if groups is None:
        return ((codes - zero[..., None]) * factor[..., None]).reshape(outer, -1)[:, :inner]
    return (codes.reshape(outer, -1)[:, :inner] - zero[:, groups]) * factor[:, groups]


@lowers("MatMulNBits", domain=CONTRIB, types=_TYPES, refuses=_layout)
def matmul_nbits(
    call: Call, a: Any, b: Any, scales: Any, zeros: Any = None, groups: Any = None, bias: Any = None
) -> Any:
    times = getattr(b, "times", None)
    if times is not None:  # it stands for weights in the order of kernels of ours
        y = times(a)
        return y if bias is None else y + bias
    if groups is not None:
        blocks = -(-call.attr("K") // call.attr("block_size"))
        groups = groups.reshape(-1)[: call.attr("K")].to(torch.int64)
        call.require(((groups >= 0) & (groups < blocks)).all(), f"g_idx must be in [0, {blocks})")
        groups = groups.clamp(0, blocks - 1)
    return _times(call, a, numbers_of(call.node, b, scales, zeros, groups), bias)


@lowers("MatMulBnb4", domain=CONTRIB, types=_TYPES)
def matmul_bnb4(call: Call, a: Any, b: Any, largest: Any) -> Any:
    inner, outer, block = call.attr("K"), call.attr("N"), call.attr("block_size")
    flat = b.reshape(-1)
    codes = torch.stack((flat >> 4, flat & 15), dim=-1).reshape(-1)[: outer * inner].to(torch.int64)
    levels = call.constant(lambda: NF4_LEVELS if call.attr("quant_type") else FP4_LEVELS)[codes]
    weight = levels * largest.float().reshape(-1).repeat_interleave(block)[: outer * inner]
    weight = weight.reshape(outer, inner)
    return _times(call, a, weight if call.flag("transB", 1) else weight.mT, None)


@lowers("MatMulBlockQuantizedFp8Weight", domain=CONTRIB, types=_TYPES)
def matmul_fp8(call: Call, a: Any, b: Any, b_scale: Any, a_scale: Any = None, bias: Any = None) -> Any:
    block = call.attr("block_size", 128)
    weight = b.float() * b_scale.float().repeat_interleave(block, dim=1)[:, : b.shape[1]]
    left = a.float()
    if a_scale is not None:
        step = a_scale.float().reshape(())
        left = (left / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    y = torch.matmul(left, weight.mT)
    return y if bias is None else y + bias


@lowers("MatMulBlockQuantizedFp4Weight", domain=CONTRIB, types=_TYPES)
def matmul_fp4(call: Call, a: Any, b: Any, scale: Any, whole: Any, given: Any = None, bias: Any = None) -> Any:
    block = call.attr("block_size", 16)
    levels = call.constant(lambda: E2M1_LEVELS)
    numbers = levels[unpacked(b, 4).to(torch.int64)]
    steps = scale.view(torch.float8_e4m3fn).float().repeat_interleave(block, dim=1)[:, : numbers.shape[1]]
    return _times(call, a, numbers * steps * whole.float().reshape(()), bias)


def _packing(node: Node) -> str | None:
    """Codes that share bytes lie along the last axis, whole rows of them."""
    value = node.inputs[0]
    kind = value.type if value is not None else None
    if not isinstance(kind, TensorType) or kind.dtype is not DType.uint8:
        return None
    bits = node.attrs.get("bits", 4)
    if bits not in WIDTHS:
        return f"{bits} bits are not lowered to torch"
    if not kind.shape:
        return "its table has no axes that are known"
    rank = len(kind.shape)
    at, along = (node.attrs.get(name, k) % rank for k, name in enumerate(("gather_axis", "quantize_axis")))
    return None if at != along == rank - 1 else f"bytes of codes along axis {along}, gathered along axis {at}"


@lowers("GatherBlockQuantized", domain=CONTRIB, types=_TABLES, refuses=_packing)
def gather_block_quantized(call: Call, data: Any, indices: Any, scales: Any, zeros: Any = None) -> Any:
    """Rows of a table of codes; an index outside of it gives zeros."""
    at, along = call.attr("gather_axis", 0) % data.ndim, call.attr("quantize_axis", 1) % data.ndim
    bits = call.attr("bits", 4) if call.operand_dtype(0) is DType.uint8 else 0  # 0: a code has an element of its own
    size, width = data.shape[at], data.shape[along] * 8 // (bits or 8)
    block = call.attr("block_size", 128) or width
    wanted = [(-(-width // block),) if k == along else (1, n) for k, n in enumerate(data.shape)]
    if scales.ndim != data.ndim or any(n not in some for n, some in zip(scales.shape, wanted)):
        raise ShapeMismatch(f"{call.node.op}: {list(data.shape)} does not take scales of {list(scales.shape)}")
    if not size and indices.numel():
        raise InvalidValue(f"{call.node.op}: nothing can be taken from an empty axis", op=call.node.op)
    rows = indices.to(torch.int64)
    outside = (rows < -size) | (rows >= size)
    rows = torch.where(outside, 0, torch.where(rows < 0, rows + size, rows))
    behind = along if along < at else along + rows.ndim - 1  # where the axis of blocks is in the result

    def picked(table: Any, packed: int = 0) -> Any:
        shared = table.shape[at] != size  # one row is all rows'
        taken = table.index_select(at, (torch.zeros_like(rows) if shared else rows).reshape(-1))
        taken = taken.reshape(*table.shape[:at], *rows.shape, *table.shape[at + 1 :])
        return (unpacked(taken, packed) if packed else taken).float()

    def stretched(table: Any, axis: int) -> Any:
        return table.repeat_interleave(block, dim=axis).narrow(axis, 0, width)

    def of_each(table: Any, packed: int = 0) -> Any:
        """What blocks have, for each of their codes; rows that lie across blocks are told before they are picked."""
        return picked(stretched(table, at)) if at == along else stretched(picked(table, packed), behind)

    y = picked(data, bits)
    if zeros is not None:
        y = y - of_each(zeros, bits)
    elif bits:
        y = y - (1 << (bits - 1))
    y = y * of_each(scales)
    return torch.where(outside.reshape(*outside.shape, *[1] * (data.ndim - at - 1)), 0.0, y)


@lowers("BitLinear", domain="ranvier", types=_TYPES)
def bitlinear(call: Call, x: Any, codes: Any, scale: Any, bias: Any = None) -> Any:
    """Tokens of eight bits times weights of {-1, 0, 1}: sums are whole numbers that float64 holds."""
    inner = call.attr("K")
    weights = unpacked(codes, 2)[:, :inner].to(torch.int8) - 1
    wide = x.float()
    factor = 127 / wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    tokens = torch.round(wide * factor).clamp(-128, 127)
    total = torch.matmul(tokens.to(torch.float64), weights.to(torch.float64).mT).float()
    y = total * (scale.float().reshape(-1) / factor)
    return y if bias is None else y + bias.float()
