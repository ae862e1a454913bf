"""Positions in tables of whole numbers, as llama.cpp's levels are, as those numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ranvier.quantize import Quantized


def levels_as_codes(coded: Quantized) -> Quantized | None:
    """Positions as levels; None where those are no integers of 8 bits."""
    table = coded.table
    if table is None or coded.flat or (table != np.rint(table)).any() or table.min() < -128 or table.max() > 127:
        return None
    return replace(coded, codes=table.astype(np.int8).take(coded.codes), bits=8, table=None)


def whole_codes(coded: Quantized) -> Quantized:
    """Positions in a table of whole numbers, or of halves, as those; all others as they are."""
    found = levels_as_codes(coded)
    if found is None and coded.table is not None and not coded.flat:
        twice = replace(coded, table=coded.table * 2, scales=coded.scales.astype(np.float32) / 2)
        found = levels_as_codes(twice)
    return coded if found is None else found
