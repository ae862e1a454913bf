"""Generated code that fills bytes with codes, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.llvm.coded.filling import Filling
from ranvier.ops.contrib.weight_only import WIDTHS, packed
from ranvier.quantize.fields import Codes, Field

Array = np.ndarray[Any, Any]


def check(filling: Filling, rows: int, count: int, seed: int = 0) -> None:
    codes = filling.codes
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, count, codes.size), np.uint8)
    found = codes.read(blocks).view(np.uint8).reshape(rows, count * codes.weights)
    if filling.levels:
        expected = np.array(filling.levels, np.uint8)[found]
    else:
        expected = (found + np.uint8(filling.added)) & np.uint8((1 << filling.bits) - 1)
    room = np.full((rows, 2, expected.shape[1] * filling.bits // 8), 0xA5, np.uint8)
    filling.function()(blocks, room[:, 1])
    np.testing.assert_array_equal(room[:, 1], packed(expected, filling.bits))
    assert (room[:, 0] == 0xA5).all()  # rows of others in between


# of each width of codes: fields side by side, as files have them
FIELDS = {
    2: ((2, 32, 0),),
    3: ((2, 32, 0), (1, 32, 2)),
    4: ((4, 16, 0),),
    5: ((4, 16, 0), (1, 1, 4)),
    6: ((4, 64, 0), (2, 32, 4)),
    8: ((8, 32, 0),),
}


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("weights", [32, 256])
def test_codes_of_every_width(bits: int, weights: int) -> None:
    if bits in (3, 6) and weights == 32:
        return  # runs are longer
    fields, at = [], 3
    for width, run, above in FIELDS[bits]:
        run = min(run, weights * width // 8)
        fields.append(Field(at, width, run, above))
        at += weights * width // 8 + 1
    for rows, count in ((0, 2), (1, 1), (3, 2)):
        check(Filling(Codes(weights, at, tuple(fields)), bits), rows, count)


def test_bytes_with_a_sign() -> None:
    check(Filling(Codes(32, 34, (Field(2, 8, 32),)), 8, added=128), 3, 5)


def test_levels_of_positions() -> None:
    levels = tuple(int(level) for level in np.random.default_rng(0).integers(0, 256, 16))
    check(Filling(Codes(32, 18, (Field(2, 4, 16),)), 8, levels=levels), 3, 5)
    check(Filling(Codes(32, 18, (Field(2, 4, 16),)), 6, levels=tuple(level >> 2 for level in levels)), 3, 5)


@settings(max_examples=12)
@given(st.data())
def test_any_fields(data: st.DataObject) -> None:
    weights = data.draw(st.sampled_from([32, 64]))
    fields, at, above = [], data.draw(st.integers(0, 4)), 0
    for width in data.draw(st.sampled_from([(1, 2), (2, 1), (4, 1), (2, 2), (2, 4), (4, 2, 2)])):
        runs = [run for run in (1, 2, 4, 8, 16, 32) if weights * width // 8 % run == 0]
        fields.append(Field(at, width, data.draw(st.sampled_from(runs)), above))
        at, above = at + weights * width // 8 + data.draw(st.integers(0, 3)), above + width
    check(Filling(Codes(weights, at, tuple(fields)), above), 2, 3, at)
