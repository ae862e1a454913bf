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
from ranvier.quantize.rows import Rows, rows_of
from ranvier.records import dataclass
from ranvier.runtime.quantizing.filled import Filled, filled
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, MOST_GROUP, at_most, in_groups, unfit
from ranvier.runtime.quantizing.tables import levels_as_codes, whole_codes

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


def linear_form(coded: Quantized | Rows, *, level: int = 0) -> CodedForm:
    """The form that keeps most of what codes save. ``level`` is MatMulNBits' own word for what activations may be
    rounded to."""
    if len(coded.shape) != 2:
        raise InvalidConfig(f"a linear layer has weights [out, in], not {list(coded.shape)}")
    if isinstance(coded, Rows):
        return _form_of_rows(coded, level) or linear_form(coded.whole(), level=level)
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
        return replace(_integers_form(neighbours, level), order=order)
    except InvalidConfig:  # no operator has such codes
        return CodedForm("MatMul", (np.ascontiguousarray(coded.dequantize().T),))


def _form_of_rows(rows: Rows, level: int) -> CodedForm | None:
    """Of integers, without all of them in memory in any other form; None where MatMulNBits has none for them."""
    like = rows.like
    if dtypes.of(like.codes).is_float or (like.table is not None and levels_as_codes(like) is None):
        return None
    try:
        return _nbits(filled([rows], _widest(rows.shape[1])), rows.shape[1], level)
    except InvalidConfig:
        return None


def _integers_form(coded: Quantized, level: int) -> CodedForm:
    rows = rows_of(coded)
    form = None if rows is None else _form_of_rows(rows, level)
    return form or nbits_form(in_groups(coded, _widest(coded.shape[1]), WIDTHS), level)


def table_form(coded: Quantized | Rows) -> CodedForm:
    """A table [rows, features] of which some rows are looked up: codes, scales, and zeros or, where those lie between
    codes, what is to be added to the numbers of a group."""
    if len(coded.shape) != 2:
        raise ShapeMismatch(f"a table has rows and features, not {list(coded.shape)}")
    features = coded.shape[1]
    try:
        group = min(MOST_GROUP, max(LEAST_GROUP, features & -features))  # groups are full
        found = filled([integer_rows(coded, group)], group)
    except InvalidConfig:
        return CodedForm("Gather", ((coded.whole() if isinstance(coded, Rows) else coded).dequantize(),))
    operands, zeros = [found.codes, found.scales], found.stored_zeros
    if zeros is not None:
        between = zeros.dtype.kind == "f"
        operands.append((np.float32(1 << (found.bits - 1)) - zeros) * found.scales if between else zeros)
    attrs = {"bits": found.bits, "block_size": found.group, "gather_axis": 0, "quantize_axis": 1}
    return CodedForm("GatherBlockQuantized", tuple(operands), attrs, MICROSOFT)


def integer_rows(coded: Quantized | Rows, group: int) -> Rows:
    """Rows of integers, as :func:`filled` takes them with the same ``group``; InvalidConfig where they are none."""
    if isinstance(coded, Rows):
        return coded
    found = rows_of(coded) or rows_of(in_groups(whole_codes(coded), group, WIDTHS))
    assert found is not None
    return found


def _widest(inputs: int) -> int:
    """The group for rows that share a scale: the fewer scales are repeated, the better."""
    return at_most(MOST_GROUP, inputs)


def nbits_form(coded: Quantized, level: int = 0) -> CodedForm:
    """Codes of 0 … 2^bits - 1 with a scale for each group of a row, as MatMulNBits stores them."""
    outputs, inputs = coded.shape
    group = at_most(coded.block[1], inputs)
    groups = -(-inputs // group)
    codes = np.zeros((outputs, groups * group), np.uint8)
    codes[:, :inputs] = coded.codes
    zeros = np.full(coded.scales.shape, 1 << (coded.bits - 1), np.uint8) if coded.zeros is None else coded.zeros
    scales = coded.scales.astype(np.float32)
    return _nbits(Filled(packed(codes, coded.bits), scales, zeros, coded.bits, group), inputs, level)


def _nbits(filled: Filled, inputs: int, level: int) -> CodedForm:
    outputs = len(filled.codes)
    codes = filled.codes.reshape(outputs, -(-inputs // filled.group), filled.group * filled.bits // 8)
    operands, zeros = [codes, filled.scales.reshape(-1)], filled.stored_zeros
    if zeros is not None:
        operands.append(zeros.reshape(-1))
    attrs = {"K": inputs, "N": outputs, "bits": filled.bits, "block_size": filled.group}
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


def _in_order(coded: Quantized) -> tuple[Quantized, Array | None]:
    """Groups as runs of neighbours, and which channel each of them was before; None where they are already."""
    if coded.order is None:
        return coded, None
    size, groups = coded.block[1], coded.scales.shape[1]
    order = np.argsort(coded.order, kind="stable")
    if not np.array_equal(coded.order[order], np.arange(len(order)) // size) or len(order) > groups * size:
        raise unfit(coded, "its groups do not have the same size")
    return replace(coded, codes=coded.codes[:, order], order=None), order.astype(np.int64)
