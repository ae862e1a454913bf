"""Image files as inputs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from ranvier.cli import exit_codes
from ranvier.cli.images import layout_of, load_image
from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.graph.types import Symbol, TensorType

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def red(tmp_path):
    """8 wide, 4 high, all (255, 51, 0)."""
    path = tmp_path / "red.png"
    Image.new("RGB", (8, 4), (255, 51, 0)).save(path)
    return path


def test_channels_first(call_json, picture_model, red):
    found = call_json("run", picture_model([1, 3, 2, 5]), "-i", f"image={red}")["outputs"]["same"]
    pixels = np.array(found["values"]).reshape(1, 3, 2, 5)
    np.testing.assert_allclose(pixels[0, :, 0, 0], [1.0, 0.2, 0.0], atol=1e-6)
    assert found["min"] == 0.0 and found["max"] == 1.0


def test_channels_last_and_own_size(call_json, picture_model, red):
    found = call_json("run", picture_model([1, "h", "w", 3]), "-i", f"image={red}")["outputs"]["same"]
    assert found["shape"] == [1, 4, 8, 3]
    found = call_json("run", picture_model([1, "h", "w", 3]), "-i", f"image={red}", "--set", "h=6")["outputs"]["same"]
    assert found["shape"] == [1, 6, 8, 3]


def test_mean_and_std(call, call_json, picture_model, red):
    options = ("--mean", "0.5,0.2,0", "--std", "0.5,1,2")
    found = call_json("run", picture_model([1, 3, 1, 1]), "-i", f"image={red}", *options)["outputs"]["same"]
    np.testing.assert_allclose(found["values"], [1.0, 0.0, 0.0], atol=1e-6)
    bad = call("run", picture_model([1, 3, 1, 1]), "-i", f"image={red}", "--mean", "1,2")
    assert bad.exit_code == exit_codes.INVALID_INPUT
    assert call("run", picture_model([1, 3, 1, 1]), "-i", f"image={red}", "--mean", "a").exit_code == exit_codes.USAGE


def test_bytes_stay_bytes(call_json, picture_model, red):
    found = call_json("run", picture_model([1, 3, 1, 1], TensorProto.UINT8), "-i", f"image={red}")["outputs"]["same"]
    assert found["values"] == [255, 51, 0]


def test_grey(call_json, picture_model, red):
    assert call_json("run", picture_model([1, 1, 4, 8]), "-i", f"image={red}")["outputs"]["same"]["shape"] == [
        1,
        1,
        4,
        8,
    ]
    assert call_json("run", picture_model([4, 8]), "-i", f"image={red}")["outputs"]["same"]["shape"] == [4, 8]


def test_a_batch_is_not_one_image(call, picture_model, red):
    result = call("run", picture_model([2, 3, 4, 8]), "-i", f"image={red}")
    assert result.exit_code == exit_codes.INVALID_INPUT and "batch of 2" in result.stderr


@pytest.mark.parametrize(
    ("shape", "channels", "height"),
    [
        ((1, 3, 224, 224), 1, 2),
        ((1, 224, 224, 3), 3, 1),
        ((Symbol("n"), Symbol("c"), Symbol("h"), Symbol("w")), 1, 2),
        ((3, 8, 8), 0, 1),
        ((8, 8, 1), 2, 0),
        ((1, 1, 8, 3), 1, 2),  # both could be; channels first is the custom
    ],
)
def test_layouts(shape, channels, height):
    found = layout_of(TensorType(DType.float32, shape), "image")
    assert (found.channels, found.height) == (channels, height)


def test_no_place_for_channels(red):
    with pytest.raises(InvalidInput, match="channels"):
        load_image(red, "image", TensorType(DType.float32, (1, 8, 8, 8)), {})
    with pytest.raises(InvalidInput, match="2 to 4 dimensions"):
        load_image(red, "image", TensorType(DType.float32, (8,)), {})


def test_missing_pillow_says_what_to_install(red, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidInput, match=r"ranvier\[image\]"):
        load_image(red, "image", TensorType(DType.float32, (1, 3, 4, 4)), {})
