"""Pictures that no camera took: enough like some that models trained on pictures have something to find.

Noise has nothing to find: a detector of text answers with numbers near 1e-9 everywhere, and comparing those says
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_GLYPH = (7, 5)


def scene(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """[..., channels, height, width] between 0 and 1: clouds, some plain shapes, and lines of small dark marks."""
    *_, channels, height, width = shape
    found = np.empty(shape, np.float32)
    for index in np.ndindex(*shape[:-3]):
        picture = 0.5 + 0.15 * (0.8 * _cloud((1, height, width), rng) + 0.6 * _cloud((channels, height, width), rng))
        for _ in range(rng.integers(2, 6)):
            _shape(picture, rng)
        for _ in range(rng.integers(2, 5)):
            _line(picture, rng)
        found[index] = np.clip(picture, 0.0, 1.0)
    return found


def _cloud(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Neighbours that are alike: amplitudes fall with frequency as they do in photographs."""
    *_, height, width = shape
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal(shape)) / frequency, (height, width))
    return np.asarray(field / max(float(field.std()), 1e-12))


def _shape(picture: Array, rng: np.random.Generator) -> None:
    """An ellipse or a box of one colour."""
    channels, height, width = picture.shape
    y, x = (
        np.arange(n)[tuple(slice(None) if k == a else None for k in range(2))] for a, n in enumerate((height, width))
    )
    dy = (y - rng.uniform(0, height)) / (height * rng.uniform(0.05, 0.3))
    dx = (x - rng.uniform(0, width)) / (width * rng.uniform(0.05, 0.3))
    inside = (dy * dy + dx * dx < 1) if rng.random() < 0.6 else (np.abs(dy) < 1) & (np.abs(dx) < 1)
    colour = rng.uniform(0.0, 1.0, (channels, 1, 1))
    picture[:] = np.where(inside, 0.8 * colour + 0.2 * picture, picture)


def _line(picture: Array, rng: np.random.Generator) -> None:
    """Marks of the size of letters, dark on light."""
    _, height, width = picture.shape
    scale = max(1, int(min(height / 9, rng.uniform(2, 5) * height / 320 + 1)))
    marks = [np.kron(rng.random(_GLYPH) < 0.5, np.ones((scale, scale))) for _ in range(rng.integers(4, 14))]
    gap = np.zeros((marks[0].shape[0], scale))
    line = np.hstack([part for mark in marks for part in (mark, gap)])[:height, :width]
    top, left = (int(rng.integers(0, n - m + 1)) for n, m in zip((height, width), line.shape))
    part = picture[:, top : top + line.shape[0], left : left + line.shape[1]]
    part[:] = np.where(line > 0, 0.1, 0.9)
