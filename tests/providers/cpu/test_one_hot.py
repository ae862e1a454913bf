"""OneHot by every version of it: what an index below zero means is not the same in all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.providers.cpu.compare import check


@pytest.mark.parametrize("opset", [9, 10, 11, 21])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_indices_below_zero(opset: int, axis: int) -> None:
    indices = np.array([[-5, -4, -1], [0, 3, 4]], np.int64)
    operands = [indices, np.array(4, np.int64), np.array([2, 5], np.float32)]
    (found,) = check("OneHot", operands, {"axis": axis}, constant=[1], opset=opset)
    marked = (np.asarray(found) == 5).sum(axis=axis)
    np.testing.assert_array_equal(marked, [[0, opset >= 11, opset >= 11], [1, 1, 0]])
