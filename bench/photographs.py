"""Pieces of photographs, for models that read pictures: what a camera saw has the ranges such models were trained on.

scikit-learn brings two photographs. Each is cut into a board of squares; pieces for ranges come from its white squares
and pieces that results are compared on from its black ones, so no pixel serves both. Models that look for text find
words of a real font written over some of them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]

Array = np.ndarray[Any, Any]
_ROWS, _COLUMNS = 2, 3  # squares of a board
_LETTERS = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_LINE = 3  # times as wide as high: a picture of one line of text


@functools.cache
def _squares() -> tuple[list[Image.Image], list[Image.Image]]:
    boards: tuple[list[Image.Image], list[Image.Image]] = [], []
    for whole in load_sample_images().images:
        height, width = whole.shape[0] // _ROWS, whole.shape[1] // _COLUMNS
        for i, j in np.ndindex(_ROWS, _COLUMNS):
            square = whole[i * height : (i + 1) * height, j * width : (j + 1) * width]
            boards[(i + j) % 2].append(Image.fromarray(square))
    return boards


def photograph(shape: tuple[int, ...], rng: np.random.Generator, *, unseen: bool) -> Array:
    """[..., channels, height, width] between 0 and 1; ``unseen`` pieces share no pixel with the others."""
    *_, channels, height, width = shape
    found = np.empty(shape, np.float32)
    for index in np.ndindex(*shape[:-3]):
        picture = _piece(_squares()[unseen], (width, height), rng)
        if width >= _LINE * height:
            _write(picture, rng, height * 2 // 3)
        elif rng.random() < 0.5:
            for _ in range(rng.integers(1, 4)):
                _write(picture, rng, int(max(8, height * rng.uniform(0.04, 0.12))))
        pixels = np.asarray(picture if channels == 3 else picture.convert("L"), np.float32)
        brighter = np.rint(pixels * rng.uniform(0.6, 1.2)).clip(0, 255) / 255  # a camera's pixels have 8 bits
        found[index] = brighter.reshape(height, width, -1).transpose(2, 0, 1)
    return found


def _piece(squares: list[Image.Image], size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Part of a square in the shape that is wanted, as it is or mirrored."""
    square = squares[rng.integers(len(squares))]
    fit = min(square.width / size[0], square.height / size[1]) * rng.uniform(0.5, 1.0)
    width, height = size[0] * fit, size[1] * fit
    left, top = rng.uniform(0, square.width - width), rng.uniform(0, square.height - height)
    piece = square.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
    return piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else piece


def _write(picture: Image.Image, rng: np.random.Generator, size: int) -> None:
    """A line of words somewhere, dark or light, on a plain ground or on the photograph itself."""
    words = " ".join("".join(rng.choice(_LETTERS, rng.integers(2, 9))) for _ in range(rng.integers(1, 4)))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size)
    box = draw.textbbox((0, 0), words, font=font)
    at = [int(rng.integers(0, max(1, room - end))) for room, end in zip(picture.size, box[2:])]
    dark = rng.random() < 0.5
    if rng.random() < 0.5:
        ground = (230, 225, 215) if dark else (40, 50, 70)
        draw.rectangle([at[0], at[1], at[0] + box[2], at[1] + box[3] + size // 4], fill=ground)
    draw.text((at[0], at[1]), words, font=font, fill=(20, 20, 30) if dark else (250, 250, 240))
