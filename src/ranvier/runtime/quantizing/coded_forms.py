"""Which operator stands for a layer whose weights are codes, or for a table of them, and what it has behind its data.

Integers go into MatMulNBits, ternary ones into BitLinear, which rounds tokens as such models are trained with,
positions in the tables of bitsandbytes into MatMulBnb4, and float8 and float4 behind a DequantizeLinear. What none of
them holds becomes numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import ml_dtypes
import numpy as np

from ranvier import dtypes
from ranvier.errors import InvalidConfig, ShapeMismatch
from ranvier.ops.contrib.levels import E2M1_LEVELS, FP4_LEVELS, NF4_LEVELS
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.contrib.weight_only import WIDTHS, packed
from ranvier.ops.own.bitlinear import DOMAIN
from ranvier.passes.ternary import ternary_weights
from ranvier.quantize import Quantized
from ranvier.quantize.packing import pack_nibbles
from ranvier.records import dataclass
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, MOST_GROUP, at_most, in_groups, unfit

Array = np.ndarray[Any, Any]
_BNB4 = {0: FP4_LEVELS, 1: NF4_LEVELS}  # by quant_type


@dataclass(frozen=True)
class CodedForm:
    """An operator in place of a product with weights [out, in].

    ``operands`` are codes, scales and zeros as it takes them behind its data; with a DequantizeLinear they are its own,
    and a MatMul follows. ``order``: channels of data as the codes have them, where they were moved.
    """

    op: str
    operands: tuple[Array, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    order: Array | None = None

    @property
    def nbytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return int(sum(array.nbytes for array in self.operands)) + order


def linear_form(coded: Quantized, *, level: int = 0) -> CodedForm:
    """The form that keeps most of what codes save. ``level`` is MatMulNBits' own word for what activations may be
    rounded to."""
    if len(coded.shape) != 2:
        raise InvalidConfig(f"a linear layer has weights [out, in], not {list(coded.shape)}")
    if coded.scheme == "ternary" and (ternary := ternary_weights(coded)) is not None:
        attrs = {"K": coded.shape[1], "N": coded.shape[0]}
        return CodedForm("BitLinear", (ternary.codes, ternary.scale), attrs, DOMAIN)
    coded = levels_as_codes(coded) or coded
    try:
        if coded.table is not None and coded.flat:
            return bnb4_form(coded)
        if coded.table is not None or dtypes.of(coded.codes).is_float:
            return _float_form(coded)
        neighbours, order = _in_order(coded)
        return replace(nbits_form(in_groups(neighbours, _widest(coded), WIDTHS), level), order=order)
    except InvalidConfig:  # no operator has such codes
        return CodedForm("MatMul", (np.ascontiguousarray(coded.dequantize().T),))


def table_form(coded: Quantized) -> CodedForm:
    """A table [rows, features] of which some rows are looked up: codes, scales, and zeros or, where those lie between
    codes, what is to be added to the numbers of a group."""
    if len(coded.shape) != 2:
        raise ShapeMismatch(f"a table has rows and features, not {list(coded.shape)}")
    rows, features = coded.shape
    coded = whole_codes(coded)
    try:
        group = min(MOST_GROUP, max(LEAST_GROUP, features & -features))  # groups are full
        found = in_groups(coded, group, WIDTHS)
    except InvalidConfig:
        return CodedForm("Gather", (coded.dequantize(),))
    size, bits = found.block[1], found.bits
    if features % size:
        return CodedForm("Gather", (coded.dequantize(),))
    scales, zeros, middle = found.scales.astype(np.float32), found.zeros, 1 << (found.bits - 1)
    operands = [packed(found.codes.reshape(rows, features), bits), scales]
    if zeros is not None and zeros.dtype.kind == "f":
        operands.append((np.float32(middle) - zeros) * scales)
    elif zeros is not None and not (zeros == middle).all():
        operands.append(packed(zeros, bits))
    attrs = {"bits": bits, "block_size": size, "gather_axis": 0, "quantize_axis": 1}
    return CodedForm("GatherBlockQuantized", tuple(operands), attrs, MICROSOFT)


def _widest(coded: Quantized) -> int:
    """The group for rows that share a scale: the fewer scales are repeated, the better."""
    return at_most(MOST_GROUP, coded.shape[1])


def nbits_form(coded: Quantized, level: int = 0) -> CodedForm:
    """Codes of 0 … 2^bits - 1 with a scale for each group of a row, as MatMulNBits stores them."""
    outputs, inputs = coded.shape
    group = at_most(coded.block[1], inputs)
    groups = -(-inputs // group)
    filled = np.zeros((outputs, groups * group), np.uint8)
    filled[:, :inputs] = coded.codes
    operands = [
        packed(filled.reshape(outputs, groups, group), coded.bits),
        coded.scales.reshape(-1).astype(np.float32),
    ]
    zeros = coded.zeros
    if zeros is not None and not (zeros == 1 << (coded.bits - 1)).all():  # else they are the operator's own
        operands.append((packed(zeros, coded.bits) if zeros.dtype.kind != "f" else zeros).reshape(-1))
    attrs = {"K": inputs, "N": outputs, "bits": coded.bits, "block_size": group}
    attrs |= {"accuracy_level": level} if level else {}
    return CodedForm("MatMulNBits", tuple(operands), attrs, MICROSOFT)


def bnb4_form(coded: Quantized) -> CodedForm:
    """Positions in a table with a scale for each run of neighbours, from row to row, as MatMulBnb4 stores them."""
    outputs, inputs = coded.shape
    assert coded.table is not None
    table = coded.table
    kind = next((k for k, own in _BNB4.items() if np.array_equal(table, own)), None)
    if kind is None:
        raise unfit(coded, "its codes are positions in a table of its own")
    (group,) = coded.block
    attrs = {"K": inputs, "N": outputs, "block_size": group, "quant_type": kind}
    return CodedForm("MatMulBnb4", (pack_nibbles(coded.codes), coded.scales.astype(np.float32)), attrs, MICROSOFT)


def _float_form(coded: Quantized) -> CodedForm:
    """Small floats [in, out] with a scale for each output, or for each block of inputs of one."""
    if coded.zeros is not None or coded.order is not None or coded.flat:
        raise unfit(coded, "small floats have scales for runs of neighbours, and no zeros")
    codes = coded.codes
    if coded.table is not None:
        if not np.array_equal(coded.table, E2M1_LEVELS):
            raise unfit(coded, "its codes are positions in a table of its own")
        codes = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    size = coded.block[1]
    scales = coded.each(coded.scales).astype(np.float32)
    turned = np.ascontiguousarray(codes.T)
    if size >= coded.shape[1]:
        return CodedForm("DequantizeLinear", (turned, np.ascontiguousarray(scales[:, 0])), {"axis": 1})
    attrs = {"axis": 0, "block_size": size}
    return CodedForm("DequantizeLinear", (turned, np.ascontiguousarray(scales[:, ::size].T)), attrs)


def levels_as_codes(coded: Quantized) -> Quantized | None:
    """Positions in a table of whole numbers, as llama.cpp's levels are, as those numbers; None where they are not."""
    table = coded.table
    if table is None or coded.flat or (table != np.rint(table)).any() or table.min() < -128 or table.max() > 127:
        return None
    return replace(coded, codes=table.astype(np.int8).take(coded.codes), bits=8, table=None)


def whole_codes(coded: Quantized) -> Quantized:
    """Positions in a table of whole numbers, or of halves, as those."""
    found = levels_as_codes(coded)
    if found is None and coded.table is not None and not coded.flat:
        twice = replace(coded, table=coded.table * 2, scales=coded.scales.astype(np.float32) / 2)
        found = levels_as_codes(twice)
    return coded if found is None else found


def _in_order(coded: Quantized) -> tuple[Quantized, Array | None]:
    """Groups as runs of neighbours, and which channel each of them was before; None where they are already."""
    if coded.order is None:
        return coded, None
    size, groups = coded.block[1], coded.scales.shape[1]
    order = np.argsort(coded.order, kind="stable")
    if not np.array_equal(coded.order[order], np.arange(len(order)) // size) or len(order) > groups * size:
        raise unfit(coded, "its groups do not have the same size")
    return replace(coded, codes=coded.codes[:, order], order=None), order.astype(np.int64)
