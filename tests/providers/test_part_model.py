"""What other runtimes return is held against what the graph says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.errors import KernelError
from ranvier.graph.types import Symbol, TensorType
from ranvier.providers.part_model import check_results

ROWS = TensorType(DType.float32, (Symbol("rows"), 3, None))


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 9)])
def test_what_fits_passes(shape: tuple[int, ...]) -> None:
    check_results([ROWS], [np.zeros(shape, np.float32)], {"rows": 2}, "other")
    check_results([ROWS], [np.zeros(shape, np.float32)], {}, "other")  # nobody knows how many rows there are
    check_results([None, TensorType(DType.float32)], [np.zeros(1), np.zeros(shape, np.float32)], {}, "other")


@pytest.mark.parametrize(
    "result",
    [
        np.zeros((2, 3, 1), np.float64),
        np.zeros((2, 4, 1), np.float32),
        np.zeros((5, 3, 1), np.float32),
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3, 1, 1), np.float32),
    ],
    ids=["type", "size", "symbol", "fewer axes", "more axes"],
)
def test_what_does_not_is_the_runtimes_fault(result: Any) -> None:
    with pytest.raises(KernelError, match="other returned") as caught:
        check_results([ROWS], [result], {"rows": 2}, "other")
    assert caught.value.provider == "other"


def test_results_are_counted() -> None:
    with pytest.raises(KernelError, match="returned 0 results, not 1"):
        check_results([ROWS], [], {}, "other")
