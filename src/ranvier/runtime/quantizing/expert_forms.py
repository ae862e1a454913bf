"""A layer of experts whose weights are codes of any scheme, as com.microsoft QMoE has it.

Integers have a scale and a zero for each group of a row; float4 has scales that are powers of two, float8 one for each
square. Positions in other tables are integers where the table is, once or twice. What none of these holds is refused:
numbers of all experts are what codes are there to save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.errors import ShapeMismatch
from ranvier.ops.contrib.levels import E2M1_LEVELS
from ranvier.ops.contrib.quantized_moe import FLOAT4_BLOCKS
from ranvier.ops.contrib.weight_only import WIDTHS, packed
from ranvier.parts import side_by_side
from ranvier.quantize import Quantized
from ranvier.quantize.blocks import counts
from ranvier.records import dataclass
from ranvier.runtime.quantizing.coded_forms import whole_codes
from ranvier.runtime.quantizing.expert_stacks import Stack, Unfit, in_turns, packed_expert, stack_of
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, MOST_GROUP, in_groups, unfit

Array = np.ndarray[Any, Any]
Experts = Sequence[Quantized]  # of one linear layer, each [outputs, inputs]
_SQUARE = 128  # of float8 whose scale is for more than that


@dataclass(frozen=True)
class ExpertsForm:
    """What QMoE has behind its data: attributes, and of each linear layer codes, scales, zeros and what a whole expert
    is scaled by, as far as it has them."""

    attrs: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, Array]]

    @property
    def arrays(self) -> dict[str, Array]:
        """All of these, by the names of layer and part."""
        return {f"{layer}_{part}": array for layer, parts in self.parts.items() for part, array in parts.items()}


def experts_form(layers: Mapping[str, Experts]) -> ExpertsForm:
    """``layers``: by QMoE's names for them. InvalidConfig where it has no place for such codes."""
    every = [matrix for experts in layers.values() for matrix in experts]
    if "fc3" not in layers and all(_is_float4(matrix) for matrix in every):
        return _float4(layers)
    if all(matrix.codes.dtype == ml_dtypes.float8_e4m3fn for matrix in every):
        return _float8(layers)
    try:
        group = _widest(every)
        return _integers({name: _stacked(experts, group) for name, experts in layers.items()})
    except Unfit as error:
        raise unfit(every[0], str(error)) from None


def of_experts(layer: Quantized | Experts) -> list[Quantized]:
    """Codes [experts, outputs, inputs], or those of each expert, as those of each expert."""
    if not isinstance(layer, Quantized):
        return list(layer)
    if len(layer.shape) != 3 or layer.flat or layer.order is not None or layer.block[0] != 1:
        raise ShapeMismatch(f"a layer of experts has weights [experts, out, in], not {list(layer.shape)}")
    return [
        replace(
            layer,
            codes=codes,
            scales=layer.scales[k],
            zeros=None if layer.zeros is None else layer.zeros[k],
            block=layer.block[1:],
            axis=-1,
            scale_bytes=None,
        )
        for k, codes in enumerate(layer.codes)
    ]


def rows_in_turns(gate: Experts, up: Experts) -> list[Quantized] | None:
    """One linear layer of two: a row of the first, then one of the second; None where their codes differ in kind."""

    def kind(of: Quantized) -> tuple[Any, ...]:
        table = None if of.table is None else of.table.tobytes()
        return of.shape, of.block, of.bits, of.codes.dtype, table, of.zeros is None, of.flat, of.order is None

    def both(one: Array, other: Array) -> Array:
        turned: Array = in_turns([one[None], other[None]])[0]
        return turned

    def joined(pair: tuple[Quantized, Quantized]) -> Quantized:
        one, other = pair
        zeros = None if one.zeros is None or other.zeros is None else both(one.zeros, other.zeros)
        codes, scales = both(one.codes, other.codes), both(one.scales, other.scales)
        return replace(one, codes=codes, scales=scales, zeros=zeros)

    pairs = list(zip(gate, up, strict=True))
    for one, other in pairs:
        if kind(one) != kind(other) or one.flat or one.order is not None or one.block[0] != 1:
            return None
    return list(side_by_side(joined, pairs, _nbytes(gate)))


# -- integers ---------------------------------------------------------------------------------------------------------


def _stacked(experts: Experts, group: int) -> Stack:
    """Each in groups that divide its rows."""

    def one(matrix: Quantized) -> Stack:
        made = in_groups(whole_codes(matrix), group, WIDTHS)
        if made.shape[1] % made.block[1]:
            raise Unfit(f"groups of {made.block[1]} do not divide {made.shape[1]} features")
        return packed_expert(made)

    return stack_of(side_by_side(one, experts, _nbytes(experts)), len(experts))


def _nbytes(experts: Experts) -> int:
    return sum(matrix.codes.nbytes for matrix in experts)


def _widest(matrices: Experts) -> int:
    """The group for rows that share a scale: one that divides all rows, so that layers have the same."""
    odd = next((inputs for matrix in matrices if (inputs := matrix.shape[1]) % LEAST_GROUP), None)
    if odd is not None:
        raise Unfit(f"{odd} features are no groups of {LEAST_GROUP}")
    return min(MOST_GROUP, *(matrix.shape[1] & -matrix.shape[1] for matrix in matrices))


def _integers(stacks: Mapping[str, Stack]) -> ExpertsForm:
    parts: dict[str, dict[str, Array]] = {}
    usual = stacks["fc1"]
    attrs: dict[str, Any] = {"block_size": usual.group, "expert_weight_bits": usual.bits}
    for name, stack in stacks.items():
        parts[name] = {"codes": stack.codes, "scales": stack.scales}
        if stack.zeros.dtype.kind == "f":
            parts[name]["zeros"] = stack.zeros
        elif (stack.zeros != 1 << (stack.bits - 1)).any():  # else they are the operator's own
            parts[name]["zeros"] = packed(stack.zeros, stack.bits)
        if stack.bits != usual.bits:
            attrs[f"{name}_expert_weight_bits"] = stack.bits
        if stack.group != usual.group:
            attrs[f"{name}_block_size"] = stack.group
    return ExpertsForm(attrs, parts)


# -- small floats -----------------------------------------------------------------------------------------------------


def _is_float4(coded: Quantized) -> bool:
    """Whether scales are powers of two, each for 32 of a row."""
    block = FLOAT4_BLOCKS["fp4"]
    known = coded.table is not None and np.array_equal(coded.table, E2M1_LEVELS) and not coded.flat
    if not known or coded.block != (1, block) or coded.order is not None or coded.shape[1] % block:
        return False
    return np.array_equal(_powers(coded.scales).astype(np.float32), coded.scales)


def _powers(scales: Array) -> Array:
    return np.asarray(scales, np.float32).astype(ml_dtypes.float8_e8m0fnu)


def _float4(layers: Mapping[str, Experts]) -> ExpertsForm:
    parts = {}
    for name, experts in layers.items():
        parts[name] = {
            "codes": np.stack([packed(matrix.codes, 4) for matrix in experts]),
            "scales": np.stack([_powers(matrix.scales) for matrix in experts]),
            "whole": np.ones(len(experts), np.float32),
        }
    return ExpertsForm({"quant_type": "fp4"}, parts)


def _float8(layers: Mapping[str, Experts]) -> ExpertsForm:
    """In squares, also those that have one scale for a whole matrix."""
    every = [matrix for experts in layers.values() for matrix in experts]
    blocks = {matrix.block for matrix in every if matrix.scales.size > 1} or {(_SQUARE, _SQUARE)}
    side = min(blocks)[0]
    plain = all(matrix.zeros is None and matrix.order is None and not matrix.flat for matrix in every)
    if blocks != {(side, side)} or not plain:
        raise unfit(every[0], "float8 of experts has scales for squares of one size")

    def scales(of: Quantized) -> Array:
        return np.broadcast_to(of.scales.astype(np.float32), counts(of.shape, (side, side)))

    parts = {
        name: {"codes": np.stack([m.codes for m in experts]), "scales": np.stack([scales(m) for m in experts])}
        for name, experts in layers.items()
    }
    return ExpertsForm({"quant_type": "fp8", "block_size": side}, parts)
