"""Bytes of ternary tensors that are no such bytes, and which tensor they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ranvier.errors import WeightError
from ranvier.weights import WeightLoader
from ranvier.weights.ternary import decoded, gguf_ternary, i2s

SCALE = np.float32(0.5).tobytes()


def test_errors_name_the_tensor(tmp_path: Path) -> None:
    data = gguf.quants.quantize(np.ones((2, 256), np.float32), gguf.GGMLQuantizationType.TQ2_0)
    data[1, 3] = 0xFF
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "test")
    writer.add_tensor("blk.0.up.weight", data, raw_dtype=gguf.GGMLQuantizationType.TQ2_0)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(WeightError, match=r"tensor 'blk\.0\.up\.weight': TQ2_0: .*3 was found"):
        gguf_ternary(WeightLoader(offline=True).open(tmp_path / "m.gguf")["blk.0.up.weight"])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_anything_that_holds_bytes(kind: Any) -> None:
    assert i2s(kind(bytes(32) + SCALE), (1, 128)).scales == 0.5
    assert decoded(kind(bytes(66)), "TQ2_0", (1, 256)).shape == (1, 256)


@pytest.mark.parametrize("data", [np.zeros(66, np.float32), np.zeros(66, np.int32), "a" * 66, [0] * 66, None, 3])
def test_numbers_are_no_bytes(data: Any) -> None:
    """They would be cut down to bytes, and read as codes."""
    with pytest.raises(WeightError, match="bytes are expected"):
        i2s(data, (1, 128))
    with pytest.raises(WeightError, match="bytes are expected"):
        decoded(data, "TQ2_0", (1, 256))


@pytest.mark.parametrize("shape", [(-1, 128), (128,), (1, 1, 128)])
def test_shapes_of_no_matrix(shape: Any) -> None:
    with pytest.raises(WeightError, match="a matrix"):
        i2s(bytes(32) + SCALE, shape)
    with pytest.raises(WeightError, match="a matrix"):
        decoded(bytes(66), "TQ2_0", shape)


def test_other_kinds() -> None:
    with pytest.raises(WeightError, match="Q4_0 is no kind of ternary blocks"):
        decoded(bytes(66), "Q4_0", (1, 256))


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_no_number(scale: float) -> None:
    with pytest.raises(WeightError, match=f"a scale of {scale}"):
        i2s(bytes(32) + np.float32(scale).tobytes(), (1, 128))
