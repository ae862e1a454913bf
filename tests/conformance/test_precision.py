"""Cases of several nodes in bfloat16: they run, and what comes out is what the format can give.

Single nodes have nothing but their inputs and outputs, which stay float32; conversions around products, convolutions
and kernels that want float32 are met by those, and by what operators are spelt out to (``…_expanded``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.codegen.llvm import isa
from ranvier.providers.cpu.narrow import assign as assigning
from ranvier.providers.cpu.narrow.effective import effective
from tests.conformance.cases import WAITING, Case, all_cases

OFF = 0.04  # of the largest value: few of these sums have more than a few hundred terms
_PRODUCTS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention", "FusedMatMul"}
pytestmark = pytest.mark.skipif(
    effective("bf16", isa.host())[0] != "bf16", reason="this processor has no bfloat16 products"
)


def _cases() -> list[Case]:
    found = []
    for case in all_cases():
        if case.name in WAITING or case.kind == "light":
            continue
        graph = case.model().graph
        floats = any(i.type.tensor_type.elem_type == 1 for i in graph.input)
        if floats and (len(graph.node) > 3 or any(n.op_type in _PRODUCTS for n in graph.node)):
            found.append(case)
    return found[::3]  # neighbours differ in little


@pytest.fixture(autouse=True)
def _all_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are small here; in 16 bits by their cost they would not be."""
    monkeypatch.setattr(assigning, "LAUNCH", 0.0)
    monkeypatch.setattr(assigning, "touching", lambda nbytes: 1e-9 * nbytes)
    monkeypatch.setattr(assigning, "multiplying", lambda flops, isa: 1.0 + flops)


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_in_bfloat16(case: Case) -> None:
    model = case.model()
    with rv.load(model, precision="bf16") as session:
        for inputs, expected in case.data(model):
            for found, wanted in zip(session.run(inputs).values(), expected, strict=True):
                if isinstance(wanted, np.ndarray):
                    _close(np.asarray(found), wanted)


def _close(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if wanted.dtype == np.float32 and wanted.size:
        a, b = found.astype(np.float64), wanted.astype(np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        gap = np.abs(a[finite] - b[finite]).max(initial=0.0)
        assert gap <= OFF * max(np.abs(b[finite]).max(initial=0.0), 1e-3)
