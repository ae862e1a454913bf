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
from ranvier.quantize import Quantized
from ranvier.quantize.blocks import counts
from ranvier.quantize.rows import Experts, Rows, any_of, rows_of
from ranvier.records import dataclass
from ranvier.runtime.quantizing.filled import filled, one_by_one, room
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, MOST_GROUP, in_groups, unfit
from ranvier.runtime.quantizing.tables import whole_codes

Array = np.ndarray[Any, Any]
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


def experts_form(layers: Mapping[str, Sequence[Experts]]) -> ExpertsForm:
    """``layers``: by QMoE's names for them; of each what stands in it, rows of two in turns. InvalidConfig where it has
    no place for such codes."""
    every = [part for parts in layers.values() for part in parts]
    if "fc3" not in layers and all(_is_float4(part) for part in every):
        form = _float4(layers)
        if form is not None:
            return form
    matrices = [matrix for part in every if not isinstance(part, Rows) for matrix in part]
    if all(not isinstance(part, Rows) for part in every) and all(_is_float8(matrix) for matrix in matrices):
        return _float8({name: parts[0] for name, parts in layers.items()})  # type: ignore[misc]
    return _integers(layers)


def of_experts(layer: Rows | Quantized | Sequence[Quantized]) -> Experts:
    """Codes [experts, outputs, inputs], or those of each expert, as they are handed on here."""
    if isinstance(layer, Quantized):
        if len(layer.shape) != 3 or layer.flat or layer.order is not None or layer.block[0] != 1:
            raise ShapeMismatch(f"a layer of experts has weights [experts, out, in], not {list(layer.shape)}")
        layer = [_expert(layer, k) for k in range(len(layer.codes))]
    if isinstance(layer, Rows):
        if len(layer.shape) != 3:
            raise ShapeMismatch(f"a layer of experts has weights [experts, out, in], not {list(layer.shape)}")
        return layer
    found = list(layer)
    integers = all(matrix.codes.dtype.kind in "iu" for matrix in found)
    return (rows_of(found) if integers else None) or found


def _expert(layer: Quantized, k: int) -> Quantized:
    return replace(
        layer,
        codes=layer.codes[k],
        scales=layer.scales[k],
        zeros=None if layer.zeros is None else layer.zeros[k],
        block=layer.block[1:],
        axis=-1,
        scale_bytes=None,
    )


def take_turns(gate: Experts, up: Experts) -> bool:
    """Whether both can be one linear layer: a row of the first, then one of the second."""
    return isinstance(gate, Rows) and isinstance(up, Rows) and (gate.shape, gate.kind) == (up.shape, up.kind)


# -- integers ---------------------------------------------------------------------------------------------------------


def _integers(layers: Mapping[str, Sequence[Experts]]) -> ExpertsForm:
    sizes = [_inputs(part) for parts in layers.values() for part in parts]
    odd = next((inputs for inputs in sizes if inputs % LEAST_GROUP), None)
    if odd is not None:
        raise unfit(any_of(layers["fc1"][0]), f"{odd} features are no groups of {LEAST_GROUP}")
    group = min(MOST_GROUP, *(inputs & -inputs for inputs in sizes))  # one that divides all rows that share a scale
    attrs: dict[str, Any] = {}
    parts: dict[str, dict[str, Array]] = {}
    for name in sorted(layers):  # the first is what others are told apart from
        sources = [_rows(part, group) for part in layers[name]]
        made, count = filled(sources, group), sources[0].shape[0]

        def apart(array: Array, count: int = count) -> Array:
            return array.reshape(count, -1, array.shape[-1])

        parts[name] = {"codes": apart(made.codes), "scales": apart(made.scales)}
        zeros = made.stored_zeros
        if zeros is not None:
            parts[name]["zeros"] = apart(zeros)
        for what, value in {"block_size": made.group, "expert_weight_bits": made.bits}.items():
            if value != attrs.setdefault(what, value):
                attrs[f"{name}_{what}"] = value
    return ExpertsForm(attrs, {name: parts[name] for name in layers})


def _rows(part: Experts, group: int) -> Rows:
    """Rows of integers."""
    if isinstance(part, Rows):
        return part
    found = rows_of([in_groups(whole_codes(matrix), group, WIDTHS) for matrix in part])
    if found is None:
        raise unfit(part[0], "groups or bits differ between experts")
    return found


def _inputs(part: Experts) -> int:
    return part.shape[-1] if isinstance(part, Rows) else part[0].shape[1]


# -- small floats -----------------------------------------------------------------------------------------------------


def _is_float8(coded: Quantized) -> bool:
    return bool(coded.codes.dtype == ml_dtypes.float8_e4m3fn)


def _is_float4(part: Experts) -> bool:
    """Whether positions are those of float4, and 32 of a row have a scale."""
    if not isinstance(part, Rows):
        return False
    block, like = FLOAT4_BLOCKS["fp4"], part.like
    known = like.table is not None and np.array_equal(like.table, E2M1_LEVELS)
    return known and like.block == (1, block) and part.shape[-1] % block == 0


def _nibbles(sources: Sequence[Rows]) -> tuple[Array, Array]:
    """Codes and scales, as they are, of rows in turns."""
    columns, block = sources[0].shape[-1], sources[0].like.block[-1]
    codes, scales = room(sources, columns // 2, np.uint8), room(sources, columns // block, np.float32)
    for turn, source in enumerate(sources):

        def put(first: int, last: int, source: Rows = source, turn: int = turn) -> None:
            found = source.read(first, last)
            codes[first:last, turn], scales[first:last, turn] = packed(found.codes, 4), found.scales

        source.in_parts(put)
    return one_by_one(codes), one_by_one(scales)


def _float4(layers: Mapping[str, Sequence[Experts]]) -> ExpertsForm | None:
    """None where scales are no powers of two."""
    parts = {}
    for name, sources in layers.items():
        rows = [source for source in sources if isinstance(source, Rows)]
        codes, scales = _nibbles(rows)
        powers = scales.astype(ml_dtypes.float8_e8m0fnu)
        if not np.array_equal(powers.astype(np.float32), scales):
            return None
        count = rows[0].shape[0]
        parts[name] = {
            "codes": codes.reshape(count, -1, codes.shape[-1]),
            "scales": powers.reshape(count, -1, powers.shape[-1]),
            "whole": np.ones(count, np.float32),
        }
    return ExpertsForm({"quant_type": "fp4"}, parts)


def _float8(layers: Mapping[str, Sequence[Quantized]]) -> ExpertsForm:
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
