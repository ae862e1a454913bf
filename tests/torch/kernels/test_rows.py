"""Kernels of whole rows: norms, gates, codes of 8 bits, and rotary embedding into a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ranvier.ops.own.bitlinear import quantized_tokens
from ranvier.providers.cuda.kernels.codes import Codes, quantize
from ranvier.providers.cuda.kernels.norms import norm
from ranvier.providers.cuda.kernels.rope_append import rope_append
from ranvier.providers.cuda.kernels.swiglu import swiglu
from tests.torch.kernels.checking import DEVICE, close, exact, layer_norm, poisoned, random, rms_norm, rope, silu

EIGHT_BITS = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 1 / 16, torch.float8_e5m2: 1 / 8}


def values(codes: Codes) -> np.ndarray:
    return exact(codes.codes) * exact(codes.scale)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_a_sum(dtype: torch.dtype) -> None:
    x, residual, g = random(1, 3, 50, dtype=dtype), random(2, 3, 50, dtype=dtype), random(3, 50, dtype=dtype)
    out, total = poisoned(3, 50, dtype=dtype), poisoned(3, 50, dtype=dtype)
    norm(x, g, out=out, residual=residual, total=total, eps=1e-3)
    both = exact(x) + exact(residual)
    close(total, both)
    close(out, rms_norm(both, exact(g), 1e-3))


def test_centred() -> None:
    x, g, b = random(1, 3, 50), random(2, 50), random(3, 50)
    out = poisoned(3, 50)
    norm(x + 7.0, g, out=out, bias=b, centred=True)
    close(out, layer_norm(exact(x + 7.0), exact(g), exact(b)))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_norm_and_gate_as_codes(dtype: torch.dtype) -> None:
    x, y, g = random(1, 3, 50), random(2, 3, 50), random(3, 50)
    codes = Codes.empty(3, 50, dtype, DEVICE)
    norm(x, g, codes=codes)
    wanted = rms_norm(exact(x), exact(g))
    assert (np.abs(values(codes) - wanted) <= EIGHT_BITS[dtype] * np.abs(wanted).max(-1, keepdims=True) * 1.01).all()
    swiglu(x, y, codes=codes)
    wanted = silu(exact(x)) * exact(y)
    assert (np.abs(values(codes) - wanted) <= EIGHT_BITS[dtype] * np.abs(wanted).max(-1, keepdims=True) * 1.01).all()


def test_codes_are_those_of_bitlinear() -> None:
    x = random(1, 5, 77)
    x[1] = 0.0
    x[2] = torch.arange(77, device=DEVICE) - 38.5  # codes that lie in the middle of two
    x[2, 0] = 127.0
    codes = quantize(x, Codes.empty(5, 77, torch.int8, DEVICE, inverse=True))
    wanted, by = quantized_tokens(x.cpu().numpy())
    np.testing.assert_array_equal(codes.codes.cpu().numpy(), wanted)
    np.testing.assert_array_equal(codes.scale.cpu().numpy(), by[:, 0])


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("inverse", [False, True])
def test_what_is_not_a_number_stays_none(dtype: torch.dtype, inverse: bool) -> None:
    x = random(1, 4, 40)
    x[1, 3], x[2, 39], x[3, 0] = float("nan"), float("inf"), -float("inf")
    codes = quantize(x, Codes.empty(4, 40, dtype, DEVICE, inverse=inverse))
    assert torch.isnan(codes.scale).tolist() == [False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_largest_stays_finite(dtype: torch.dtype) -> None:
    x = random(1, 4, 40, scale=1e4)
    codes = quantize(x, Codes.empty(4, 40, dtype, DEVICE))
    found = exact(codes.codes)
    assert np.isfinite(found).all()
    assert np.abs(found).max() == codes.largest


def test_gate_of_two_tensors_and_of_halves() -> None:
    packed = random(1, 3, 2 * 2100)
    wanted = silu(exact(packed[:, :2100])) * exact(packed[:, 2100:])
    out = poisoned(3, 2100)
    swiglu(packed, out=out)
    close(out, wanted)
    out = poisoned(3, 2100)
    swiglu(packed[:, :2100], packed[:, 2100:], out=out)
    close(out, wanted)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_rope_append(interleaved: bool, paged: bool) -> None:
    length, positions = 3, [4, 5, -1, 0, 1, 2]  # one token is padding
    q, k, v = random(1, 6, 10, 12), random(2, 6, 3, 12), random(3, 6, 3, 12)
    angles = np.random.default_rng(4).uniform(-3, 3, (16, 5))
    cos, sin = (torch.from_numpy(f(angles).astype(np.float32)).to(DEVICE) for f in (np.cos, np.sin))
    cache_k, cache_v = torch.zeros(2, 16, 3, 12, device=DEVICE), torch.zeros(2, 16, 3, 12, device=DEVICE)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).reshape(2, 4) if paged else None
    shape = (8, 4, 3, 12) if paged else (2, 16, 3, 12)
    at = torch.tensor(positions, device=DEVICE)
    real = np.array([i for i, p in enumerate(positions) if p >= 0])
    wanted_q = rope(exact(q)[real], np.array(positions)[real], exact(cos), exact(sin), interleaved)
    turned_k = rope(exact(k)[real], np.array(positions)[real], exact(cos), exact(sin), interleaved)
    wanted_k, wanted_v = np.zeros((2, 16, 3, 12)), np.zeros((2, 16, 3, 12))
    for i, token in enumerate(real):
        wanted_k[token // length, positions[token]] = turned_k[i]
        wanted_v[token // length, positions[token]] = exact(v)[token]
    found = rope_append(
        q, k, v, at, cos, sin, q, cache_k.view(shape), cache_v.view(shape),
        length=length, table=table, interleaved=interleaved,
    )  # fmt: skip
    close(found[real], wanted_q)
    close(cache_k, wanted_k)
    close(cache_v, wanted_v)
