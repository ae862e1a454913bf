"""Sums of constant codes, which are made of sums of 16 bits."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.codegen.llvm.integer import column_sums


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (255, 2), (256, 5), (257, 4), (1000, 7), (2, 300, 3)])
def test_no_partial_sum_overflows(kind: type, shape: tuple[int, ...]) -> None:
    for end in (np.iinfo(kind).min, np.iinfo(kind).max):
        codes = np.full(shape, end, kind)
        for lying in (codes, np.asfortranarray(codes)):
            found = column_sums(lying)
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, codes.astype(np.int64).sum(axis=-2))
