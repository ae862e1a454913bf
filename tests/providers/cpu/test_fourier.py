"""DFT and STFT nodes: generated code agrees with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.providers.cpu.compare import agree, one_node

Array = np.ndarray[Any, Any]


def signal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis", "length", "attrs"),
    [
        ((3, 48, 1), 1, None, {"onesided": 1}),
        ((3, 48, 1), 1, None, {}),
        ((64, 5, 2), 0, None, {}),
        ((2, 30, 3, 2), -3, 40, {}),
        ((2, 33, 2), 1, None, {"inverse": 1, "onesided": 1}),
        ((2, 50, 2), 1, 17 * 17, {}),
    ],
)
def test_dft(shape: tuple[int, ...], axis: int, length: int | None, attrs: dict[str, int]) -> None:
    x = signal(*shape)
    size = None if length is None else np.array(length, np.int64)
    model = one_node("DFT", [x, size, np.array(axis, np.int64)], attrs, constant=[1, 2])
    agree(model, {"x0": x}, rtol=1e-4, atol=2e-5)
    if length is None and axis >= 0:
        old = one_node("DFT", [x], {**attrs, "axis": axis}, opset=17)
        agree(old, {"x0": x}, rtol=1e-4, atol=2e-5)


def test_stft() -> None:
    x, window = signal(2, 700), signal(100)
    model = one_node("STFT", [x, np.array(40, np.int64), window], constant=[1, 2])
    agree(model, {"x0": x}, rtol=1e-4, atol=2e-4)
