"""Positions along an axis that has none: an error or nothing, but no memory that belongs to others is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import InvalidValue
from tests.providers.cpu.compare import Array, one_node

# so many rows that reading (or writing) where they would be leaves the process's memory
EMPTY = np.zeros((100_000, 0, 90), np.float32)
PLACES = np.zeros((100_000, 1, 90), np.int64)


def outcome(op: str, inputs: list[Array], attrs: dict[str, Any], provider: str, domain: str) -> list[Array]:
    with rv.load(one_node(op, inputs, attrs, domain=domain), providers=[provider, "reference"]) as session:
        return list(session.run({f"x{k}": x for k, x in enumerate(inputs)}).values())


@pytest.mark.parametrize("provider", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "domain"),
    [
        ("Gather", [EMPTY, np.zeros(3, np.int64)], {"axis": 1}, ""),
        ("GatherElements", [EMPTY, PLACES], {"axis": 1}, ""),
        ("GatherND", [EMPTY, PLACES[:, :, :1]], {"batch_dims": 1}, ""),
        ("ScatterElements", [EMPTY, PLACES, PLACES.astype(np.float32)], {"axis": 1}, ""),
        (
            "ScatterND",
            [np.zeros((0, 90), np.float32), np.zeros((3, 1), np.int64), np.zeros((3, 90), np.float32)],
            {},
            "",
        ),
        ("ArrayFeatureExtractor", [np.zeros((100_000, 0), np.float32), np.zeros(3, np.int64)], {}, "ai.onnx.ml"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_can_be_picked(op: str, inputs: list[Array], attrs: dict[str, Any], domain: str, provider: str) -> None:
    with pytest.raises(InvalidValue, match="out of range"):
        outcome(op, inputs, attrs, provider, domain)


@pytest.mark.parametrize("provider", ["reference", "cpu"])
def test_picking_nothing_from_nothing(provider: str) -> None:
    (found,) = outcome("Gather", [EMPTY, np.zeros((0, 2), np.int64)], {"axis": 1}, provider, "")
    assert found.shape == (100_000, 0, 2, 90)


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "ArgMax", "ArgMin"])
def test_nothing_is_found_in_no_images(op: str, caplog: pytest.LogCaptureFixture) -> None:
    """A batch of none is no reason to leave generated code."""
    attrs = {"axis": 1} if op.startswith("Arg") else {}
    (found,) = outcome(op, [np.zeros((0, 3, 4, 5), np.float32)], attrs, "cpu", "")
    assert found.shape == ((0, 1, 4, 5) if attrs else (0, 3, 1, 1))
    assert "reference" not in caplog.text
