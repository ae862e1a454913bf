"""What the tests of kernels share: random tensors, results nobody could take for right, definitions in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Array = np.ndarray[Any, Any]
HALF = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return torch.from_numpy(values.astype(np.float32)).to(dtype).to(DEVICE)


def integers(seed: int, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(low, high, shape)
    return torch.from_numpy(values).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def exact(tensor: torch.Tensor) -> Array:
    """The same numbers in float64."""
    return tensor.detach().to("cpu").to(torch.float32).numpy().astype(np.float64)


def close(found: torch.Tensor, wanted: Array, tolerance: float | None = None) -> None:
    """Within the precision of the result, measured by the largest magnitude that was wanted."""
    allowed = HALF[found.dtype] if tolerance is None else tolerance
    reach = max(1e-6, float(np.abs(wanted).max()))
    off = np.abs(exact(found) - wanted)
    assert np.isfinite(exact(found)).all()
    assert off.max() <= allowed * reach, f"off by {off.max() / reach:.2e} of the largest"


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def rms_norm(x: Array, weight: Array, eps: float = 1e-5) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return normed


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed: Array = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias
    return normed


def rope(x: Array, positions: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """x [tokens, heads, D]; the first 2 * angles elements of each head are turned."""
    half = cos.shape[1]
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    turned = x.copy()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        turned[..., 0 : 2 * half : 2], turned[..., 1 : 2 * half : 2] = a * c - b * s, b * c + a * s
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        turned[..., :half], turned[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return turned


def attention(q: Array, k: Array, v: Array, scale: float, softcap: float | None = None) -> Array:
    """One token: q [heads, D], k and v [positions, kv heads, D]."""
    group = q.shape[0] // k.shape[1]
    result = np.zeros_like(q)
    for head in range(q.shape[0]):
        scores = k[:, head // group] @ q[head] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        result[head] = weights @ v[:, head // group] / weights.sum()
    return result
