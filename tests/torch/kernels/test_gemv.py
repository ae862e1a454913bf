"""Products of few tokens with float weights, and what rides along with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ranvier.providers.cuda.kernels.gemv import gated_gemv, gemv
from ranvier.providers.cuda.kernels.jit import Tile
from tests.torch.kernels.checking import close, exact, poisoned, random, rms_norm, silu

TILE = Tile(rows=4, depth=32, warps=1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_product(m: int, dtype: torch.dtype) -> None:
    x, w = random(1, m, 72, dtype=dtype), random(2, 13, 72, dtype=dtype)
    found = gemv(x, (w,), poisoned(m, 13, dtype=dtype), tile=TILE)
    close(found, exact(x) @ exact(w).T)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("tile", [Tile(4, 32, 1, ahead=2), Tile(4, 128, 1), Tile(4, 128, 1, ahead=2)])
def test_how_far_ahead_weights_are_read(m: int, tile: Tile) -> None:
    x, w, up = random(1, m, 100), random(2, 13, 100), random(3, 13, 100)
    close(gemv(x, (w,), poisoned(m, 13), tile=tile), exact(x) @ exact(w).T)
    wanted = np.maximum(exact(x) @ exact(w).T, 0) * (exact(x) @ exact(up).T)
    close(gated_gemv(x, w, up, poisoned(m, 13), activation="relu", tile=tile), wanted)


def test_epilogue_and_norm() -> None:
    x, w, g = random(1, 2, 64), random(2, 12, 64), random(3, 64)
    bias, residual = random(4, 12), random(5, 2, 12)
    found = gemv(x, (w,), poisoned(2, 12), bias=bias, residual=residual, norm=g, eps=1e-3, activation="silu", tile=TILE)
    wanted = silu(rms_norm(exact(x), exact(g), 1e-3) @ exact(w).T + exact(bias)) + exact(residual)
    close(found, wanted)


@pytest.mark.parametrize("sizes", [(8, 4), (7, 5, 3), (1, 9, 4)])
def test_matrices_side_by_side(sizes: tuple[int, ...]) -> None:
    x = random(1, 1, 40)
    weights = tuple(random(2 + i, n, 40) for i, n in enumerate(sizes))
    bias = random(9, sum(sizes))
    found = gemv(x, weights, poisoned(1, sum(sizes)), bias=bias, tile=TILE)
    close(found, exact(x) @ np.concatenate([exact(w) for w in weights]).T + exact(bias))


@pytest.mark.parametrize("m", [1, 3])
def test_gate_and_up(m: int) -> None:
    x, gate, up, g = random(1, m, 96), random(2, 10, 96), random(3, 10, 96), random(4, 96)
    found = gated_gemv(x, gate, up, poisoned(m, 10), norm=g, tile=TILE)
    normed = rms_norm(exact(x), exact(g))
    close(found, silu(normed @ exact(gate).T) * (normed @ exact(up).T))
    found = gated_gemv(x, gate, up, poisoned(m, 10), activation="relu", tile=TILE)
    close(found, np.maximum(exact(x) @ exact(gate).T, 0) * (exact(x) @ exact(up).T))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_activations(activation: str) -> None:
    x, w = random(1, 1, 32), random(2, 16, 32, scale=0.3)
    found = gemv(x, (w,), poisoned(1, 16), activation=activation, tile=TILE)
    plain = torch.from_numpy(exact(x) @ exact(w).T)
    wanted = {
        "gelu": torch.nn.functional.gelu(plain),
        "gelu_tanh": torch.nn.functional.gelu(plain, approximate="tanh"),
        "relu": torch.relu(plain),
    }
    close(found, wanted[activation].numpy())


def test_rows_may_lie_apart() -> None:
    x, w = random(1, 2, 96)[:, :64], random(2, 8, 80)[:, :64]
    out = poisoned(2, 24)
    gemv(x, (w,), out[:, 4:12], tile=TILE)
    close(out[:, 4:12], exact(x) @ exact(w).T)
    assert torch.isnan(out[:, :4]).all() and torch.isnan(out[:, 12:]).all()


def test_what_is_refused() -> None:
    x, w = random(1, 5, 32), random(2, 8, 32)
    with pytest.raises(ValueError, match="tokens"):
        gemv(x, (w,), poisoned(5, 8))
    with pytest.raises(ValueError, match="one shape"):
        gated_gemv(x[:1], w, w[:4], poisoned(1, 8))
