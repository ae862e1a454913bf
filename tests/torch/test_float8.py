"""8-bit floats against PyTorch's own: rounding, what codes stand for, and files it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ranvier.quantize.floats import Float8  # noqa: E402
from ranvier.weights import WeightLoader  # noqa: E402

RNG = np.random.default_rng(5)
KINDS = {"e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn), "e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2)}


def bits(tensor: Any) -> Any:
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_codes_are_those_that_pytorch_rounds_to(kind: str, granularity: Any) -> None:
    array = (RNG.standard_normal((48, 64)) * np.logspace(-3, 3, 64)).astype(np.float32)
    coded = Float8(kind, granularity, 16, axis=0).quantize(array)
    rows, columns = coded.block
    scales = np.kron(coded.scales, np.ones((rows, columns), np.float32))[:48, :64]
    most = torch.finfo(KINDS[kind][0]).max
    theirs = torch.from_numpy(array / scales).clamp(-most, most).to(KINDS[kind][0])
    np.testing.assert_array_equal(coded.codes.view(np.uint8), bits(theirs))
    np.testing.assert_array_equal(coded.dequantize(), theirs.float().numpy() * scales)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_stands_for_the_same_number(kind: str, tmp_path: Path) -> None:
    """All 256 of them, through a file that PyTorch wrote."""
    codes = torch.arange(256, dtype=torch.uint8).view(KINDS[kind][0])
    torch.save({"w": codes}, tmp_path / "codes.pt")
    found = WeightLoader().load(tmp_path / "codes.pt", "w")
    assert found.dtype == KINDS[kind][1]
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.arange(256))
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), codes.float().numpy())
