"""A picture file as the tensor a vision model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.graph.types import Dim, Symbol, TensorType, Type

Array = np.ndarray[Any, Any]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class Layout:
    """Where a tensor keeps height, width and channels; ``channels`` is None for a plain [height, width]."""

    height: int
    width: int
    channels: int | None


def layout_of(declared: TensorType, name: str) -> Layout:
    """Channels before the picture where the size there can be one (1, 3 or 4), else after it."""
    dims = declared.shape
    rank = -1 if dims is None else len(dims)
    if dims is None or rank not in (2, 3, 4):
        raise InvalidInput(f"input {name!r}: an image fills a tensor with 2 to 4 dimensions, not {declared}")
    if rank == 2:
        return Layout(0, 1, None)
    first = rank - 3
    if dims[first] in _MODES:
        return Layout(first + 1, first + 2, first)
    if dims[-1] in _MODES:
        return Layout(first, first + 1, first + 2)
    if not isinstance(dims[first], int):
        return Layout(first + 1, first + 2, first)
    raise InvalidInput(f"input {name!r}: {declared} has no axis of 1, 3 or 4 channels for an image")


def load_image(
    path: Path,
    name: str,
    declared: Type | None,
    sizes: Mapping[str, int],
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Array:
    """The image resized to the input's height and width (its own where those are free), in the input's layout.

    Floating-point inputs get values from 0 to 1, less ``mean``, divided by ``std``; integer inputs get 0 to 255.
    """
    if not isinstance(declared, TensorType):
        raise InvalidInput(f"input {name!r}: an image cannot fill {declared}")
    layout = layout_of(declared, name)
    dims = declared.shape or ()
    dtype = declared.dtype or DType.float32
    channels = 1 if layout.channels is None else _size(dims[layout.channels], sizes) or 3
    if channels not in _MODES:
        raise InvalidInput(f"input {name!r}: an image has 1, 3 or 4 channels, not {channels}")
    if len(dims) == 4 and (batch := _size(dims[0], sizes)) not in (1, None):
        raise InvalidInput(f"input {name!r}: one image cannot fill a batch of {batch}; use an .npy file")
    pixels = _pixels(path, name, _MODES[channels], _size(dims[layout.height], sizes), _size(dims[layout.width], sizes))
    array = pixels.reshape(*pixels.shape[:2], channels).astype(np.float32)
    if dtype.is_float:
        array = array / np.float32(255)
        if mean or std:
            array -= _per_channel(mean or (0.0,), channels)
            array /= _per_channel(std or (1.0,), channels)
    elif mean or std:
        raise InvalidInput(f"input {name!r}: --mean and --std are for floating-point inputs, this is {declared}")
    if layout.channels is None:
        return array[:, :, 0].astype(dtype.numpy)
    if layout.channels < layout.height:
        array = array.transpose(2, 0, 1)
    if len(dims) == 4:
        array = array[np.newaxis]
    return np.ascontiguousarray(array.astype(dtype.numpy))


def _size(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    return dim if isinstance(dim, int) else sizes.get(dim.name) if isinstance(dim, Symbol) else None


def _per_channel(numbers: Sequence[float], channels: int) -> Array:
    if len(numbers) not in (1, channels):
        raise InvalidInput(f"--mean and --std take 1 or {channels} numbers here, got {len(numbers)}")
    return np.asarray(numbers, np.float32)


def _pixels(path: Path, name: str, mode: str, height: int | None, width: int | None) -> Array:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InvalidInput(f"input {name!r}: reading images needs pillow (pip install 'ranvier[image]')") from None
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"input {name!r}: cannot read image {str(path)!r}: {error}") from None
    target = (width or image.width, height or image.height)
    if image.size != target:
        image = image.resize(target, Image.Resampling.BILINEAR)
    return np.asarray(image)
