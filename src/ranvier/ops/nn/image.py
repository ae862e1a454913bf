"""Decoding of compressed images."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, NotSupported, RanvierError, ShapeMismatch
from ranvier.ops.allocation import checked_shape
from ranvier.ops.registry import Array, op

# what the standard lists, and nothing more: every further codec is attack surface
_FORMATS = ("BMP", "JPEG", "JPEG2000", "TIFF", "PNG", "WEBP", "PPM")
_CHANNELS = {"RGB": 3, "BGR": 3, "Grayscale": 1}


@op("ImageDecoder", since=20)
def image_decoder(encoded_stream: Array, *, pixel_format: str = "RGB") -> Array:
    """Pixels as uint8 [height, width, channels]; an image of size 0×0 where the stream cannot be decoded."""
    if pixel_format not in _CHANNELS:
        raise InvalidValue(f"ImageDecoder: pixel_format must be one of {', '.join(_CHANNELS)}, got {pixel_format!r}")
    if encoded_stream.ndim != 1:
        raise ShapeMismatch(f"ImageDecoder: expected a 1-D stream of bytes, got shape {list(encoded_stream.shape)}")
    pillow = _pillow()
    channels = _CHANNELS[pixel_format]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures; the check below decides
            picture = pillow.open(io.BytesIO(encoded_stream.tobytes()), formats=_FORMATS)
        # only the header has been read: refuse a decompression bomb before its pixels take memory
        checked_shape((picture.height, picture.width, channels), np.uint8, "ImageDecoder")
        pixels = np.array(_as_8_bit(pillow, picture).convert("L" if channels == 1 else "RGB"))
    except (RanvierError, MemoryError):
        raise
    except pillow.DecompressionBombError as error:
        raise InvalidValue(f"ImageDecoder: {error}") from None
    except Exception:
        # the standard wants an empty image for a stream that cannot be decoded "for any reason",
        # and Pillow's decoders answer damaged files with exceptions of every kind
        return np.empty((0, 0, channels), np.uint8)
    if channels == 1:
        return pixels[:, :, np.newaxis]
    return np.ascontiguousarray(pixels[:, :, ::-1]) if pixel_format == "BGR" else pixels


def _as_8_bit(pillow: Any, picture: Any) -> Any:
    """Pillow clips 16-bit gray when it converts to 8 bits, but the picture is in the high byte."""
    if not picture.mode.startswith("I"):
        return picture
    return pillow.fromarray((np.asarray(picture).clip(0, 0xFFFF) >> 8).astype(np.uint8))


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise NotSupported("ImageDecoder needs Pillow: pip install 'ranvier[image]'") from None
    return PIL.Image
