"""Products with weights of 8, 4 and 2 bits, against what their layouts mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.ops.own.bitlinear import bitlinear, pack_codes, quantized_tokens
from ranvier.providers.cuda.kernels import fp8, int4, ternary, w4a16, w8a8
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile
from tests.torch.kernels.checking import DEVICE, Array, close, exact, integers, poisoned, random, rms_norm, silu

TILE = Tile(rows=16, depth=256, warps=1)
MATRIX = MatrixTile(rows=32, columns=32, depth=128, warps=1, stages=1)
TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def int4_weights(seed: int, n: int, k: int, group: int, zeros: bool) -> tuple[int4.Int4, Array]:
    """Packed weights, and the same in float64, out of the layout's definition: low nibble first, groups along K."""
    rng = np.random.default_rng(seed)
    groups = -(-k // group)
    codes = rng.integers(0, 16, (n, groups * group))
    scales = rng.uniform(0.5, 2.0, (n, groups)).astype(np.float32)
    zero = rng.integers(0, 16, (n, groups)) if zeros else np.full((n, groups), 8)
    at = np.arange(k) // group
    weights = (codes[:, :k] - zero[:, at]) * scales[:, at].astype(np.float64)
    by_byte = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(n, groups, group // 2)
    even = np.concatenate([zero, np.zeros((n, groups % 2), zero.dtype)], axis=1)
    zero_bytes = torch.from_numpy((even[:, 0::2] | even[:, 1::2] << 4).astype(np.uint8)).to(DEVICE)
    packed = int4.pack(
        torch.from_numpy(by_byte).to(DEVICE),
        torch.from_numpy(scales).to(DEVICE),
        k,
        group,
        zero_bytes if zeros else None,
    )
    return packed, weights


@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([32, 96, 300, 512]),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
    st.sampled_from([1, 2, 3, 6]),
)
def test_four_bits(n: int, k: int, group: int, zeros: bool, m: int) -> None:
    packed, weights = int4_weights(n + k, n, k, group, zeros)
    x = random(1, m, k)
    close(w4a16.unpack(packed, poisoned(n, k)), weights, 1e-6)
    close(w4a16.gemv(x, packed, poisoned(m, n), tile=TILE), exact(x) @ weights.T, 2e-4)
    close(w4a16.gemm(x, packed, poisoned(m, n), tile=MATRIX), exact(x) @ weights.T, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_four_bits_with_halves(dtype: torch.dtype) -> None:
    packed, weights = int4_weights(1, 20, 256, 32, True)
    x, bias = random(2, 2, 256, dtype=dtype), random(3, 20, dtype=dtype)
    wanted = exact(x) @ weights.T + exact(bias)
    close(w4a16.gemv(x, packed, poisoned(2, 20, dtype=dtype), bias=bias, tile=TILE), wanted)
    close(w4a16.gemm(x, packed, poisoned(2, 20, dtype=dtype), bias=bias, tile=MATRIX), wanted)


def test_four_bits_with_norm_residual_and_gate() -> None:
    gate, gate_weights = int4_weights(1, 12, 128, 32, False)
    up, up_weights = int4_weights(2, 12, 128, 32, False)
    x, g, residual = random(3, 2, 128), random(4, 128), random(5, 2, 12)
    normed = rms_norm(exact(x), exact(g))
    found = w4a16.gemv(x, gate, poisoned(2, 12), norm=g, residual=residual, activation="silu", tile=TILE)
    close(found, silu(normed @ gate_weights.T) + exact(residual), 2e-4)
    both = int4.interleaved(gate, up)
    found = w4a16.gemv(x, both, poisoned(2, 12), norm=g, gated=True, activation="silu", tile=TILE)
    close(found, silu(normed @ gate_weights.T) * (normed @ up_weights.T), 2e-4)
    found = w4a16.gemv(x, int4.stacked(gate, up), poisoned(2, 24), tile=TILE)
    close(found, exact(x) @ np.concatenate([gate_weights, up_weights]).T, 2e-4)


def test_four_bits_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        int4.pack(torch.zeros(2, 4, 8, dtype=torch.uint8), torch.ones(2, 4), 64, 16)
    fine, _ = int4_weights(1, 4, 64, 32, False)
    coarse, _ = int4_weights(1, 4, 64, 64, False)
    with pytest.raises(ValueError, match="alike"):
        int4.stacked(fine, coarse)
    with pytest.raises(ValueError, match="alike"):
        int4.interleaved(fine, coarse)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 20), st.sampled_from([4, 100, 300]), st.integers(1, 19))
def test_eight_bits(n: int, k: int, m: int) -> None:
    x, w = integers(1, -128, 128, m, k), integers(2, -128, 128, n, k)
    x_scale, w_scale = random(3, m).abs(), random(4, n).abs()
    wanted = (exact(x) * exact(x_scale)[:, None]) @ (exact(w) * exact(w_scale)[:, None]).T
    close(w8a8.gemv(x, x_scale, w, w_scale, poisoned(m, n), tile=TILE), wanted, 1e-6)
    close(w8a8.gemm(x, x_scale, w, w_scale, poisoned(m, n), tile=MATRIX), wanted, 1e-6)


def test_eight_bits_epilogue() -> None:
    x, w, one = integers(1, -128, 128, 2, 64), integers(2, -128, 128, 8, 64), torch.full((8,), 0.01, device=DEVICE)
    bias, residual = random(3, 8), random(4, 2, 8)
    plain = exact(x) @ exact(w).T * np.float64(np.float32(0.01)) ** 2 + exact(bias)
    found = w8a8.gemv(x, one[:2], w, one, poisoned(2, 8), bias=bias, residual=residual, activation="relu", tile=TILE)
    close(found, np.maximum(plain, 0) + exact(residual))
    found = w8a8.gemm(x, one[:2], w, one, poisoned(2, 8), bias=bias, activation="relu", tile=MATRIX)
    close(found, np.maximum(plain, 0))
    with pytest.raises(ValueError, match="four at a time"):
        w8a8.gemv(x[:, :63], one[:2], w[:, :63], one, poisoned(2, 8))


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 20), st.sampled_from([4, 64, 100, 324]), st.integers(1, 18), st.booleans())
def test_ternary_is_the_operator_bit_for_bit(n: int, k: int, m: int, one_scale: bool) -> None:
    rng = np.random.default_rng(n * k + m)
    weights = rng.integers(-1, 2, (n, k)).astype(np.int8)
    tokens = rng.standard_normal((m, k)).astype(np.float32)
    scale = rng.uniform(0.5, 2.0, 1 if one_scale else n).astype(np.float32)
    stored = pack_codes(weights)
    wanted = bitlinear(tokens, stored, scale, K=k, N=n)
    packed = ternary.pack(torch.from_numpy(stored).to(DEVICE), torch.from_numpy(scale).to(DEVICE), k)
    codes, by = (torch.from_numpy(part).to(DEVICE) for part in quantized_tokens(tokens))
    found = ternary.gemv(codes, by[:, 0], packed, poisoned(m, n), tile=TILE)
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)
    found = ternary.gemm(codes, by[:, 0], packed, poisoned(m, n), tile=MATRIX)
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)


def test_ternary_epilogue() -> None:
    weights = np.random.default_rng(1).integers(-1, 2, (8, 64)).astype(np.int8)
    packed = ternary.pack(torch.from_numpy(pack_codes(weights)).to(DEVICE), torch.ones(1, device=DEVICE), 64)
    x, by = integers(2, -128, 128, 2, 64), torch.tensor([2.0, 4.0], device=DEVICE)
    bias, residual = random(3, 8), random(4, 2, 8)
    plain = exact(x) @ weights.T.astype(np.float64) / exact(by)[:, None] + exact(bias)
    found = ternary.gemv(x, by, packed, poisoned(2, 8), bias=bias, residual=residual, activation="relu", tile=TILE)
    close(found, np.maximum(plain, 0) + exact(residual))
    found = ternary.gemm(x, by, packed, poisoned(2, 8), bias=bias, activation="relu", tile=MATRIX)
    close(found, np.maximum(plain, 0))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("scales", ["one", "rows", "blocks"])
@pytest.mark.parametrize("tokens", ["wide", "tokens", "blocks"])
def test_floats_of_eight_bits(kind: torch.dtype, scales: str, tokens: str) -> None:
    m, n, k = 2, 140, 272
    w = random(1, n, k).to(kind)
    w_scale = {"one": random(2, 1), "rows": random(2, n), "blocks": random(2, 2, 3)}[scales].abs()
    x = random(3, m, k, dtype=torch.bfloat16) if tokens == "wide" else random(3, m, k).to(kind)
    x_scale = {"wide": None, "tokens": random(4, m).abs(), "blocks": random(4, m, 3).abs()}[tokens]
    rows, columns = np.arange(n) // 128, np.arange(k) // 128
    by_weight = exact(w_scale)[rows[:, None], columns[None]] if scales == "blocks" else exact(w_scale)[:, None]
    by_token = np.ones((m, 1))
    if x_scale is not None:
        by_token = exact(x_scale)[:, columns] if tokens == "blocks" else exact(x_scale)[:, None]
    wanted = (exact(x) * by_token) @ (exact(w) * by_weight).T
    close(fp8.gemv(x, w, w_scale, poisoned(m, n), x_scale=x_scale, tile=TILE), wanted)
    close(fp8.gemm(x, w, w_scale, poisoned(m, n), x_scale=x_scale, tile=MATRIX), wanted)


def test_floats_of_eight_bits_epilogue() -> None:
    x, w = random(1, 2, 64), random(2, 8, 64).to(torch.float8_e4m3fn)
    one, bias, residual = torch.ones(1, device=DEVICE), random(3, 8), random(4, 2, 8)
    plain = exact(x) @ exact(w).T + exact(bias)
    found = fp8.gemv(x, w, one, poisoned(2, 8), bias=bias, residual=residual, activation="relu", tile=TILE)
    close(found, np.maximum(plain, 0) + exact(residual))
    found = fp8.gemm(x, w, one, poisoned(2, 8), bias=bias, activation="relu", tile=MATRIX)
    close(found, np.maximum(plain, 0))
    with pytest.raises(ValueError, match="scales of shape"):
        fp8.gemv(x, w, torch.ones(3, device=DEVICE), poisoned(2, 8))
