"""Few tokens on the matrix unit: the source compiled for this processor, and on a GPU itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ranvier.providers.cuda.kernels import few_tokens, int4, native
from ranvier.providers.cuda.kernels.few_tokens import Around, Cut
from tests.torch.kernels.checking import DEVICE, Array, close, exact, poisoned, random, rms_norm, silu
from tests.torch.kernels.test_few_bits import int4_weights
from tests.torch.kernels.twins import Twin, late_twin, twin

__all__ = ["late_twin", "twin"]


def halves(packed: int4.Int4, dtype: torch.dtype) -> tuple[int4.Int4, Array]:
    """With scales that ``dtype`` has, and the weights that these stand for, by definition."""
    rounded = dataclasses.replace(packed, scales=packed.scales.to(dtype))
    row, at = np.arange(packed.n)[:, None], np.arange(packed.k)[None, :]
    chunk, inside = at // 32, at % 32
    words = packed.words.cpu().numpy().astype(np.uint32)
    nibble = 4 * (inside // 8) + 16 * (inside % 2)
    codes = words[row // 16, chunk // 4, row % 16, chunk % 4, inside % 8 // 2] >> nibble.astype(np.uint32) & 15
    beside = (row // 16, at // packed.group, row % 16)
    zero = 8.0 if packed.zeros is None else packed.zeros.cpu().numpy().astype(np.float64)[beside]
    return rounded, (codes.astype(np.float64) - zero) * exact(rounded.scales)[beside]


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "zeros", "dtype", "cut"),
    [
        (1, 40, 512, 32, False, torch.bfloat16, Cut(2, 2, 1)),
        (1, 40, 512, 32, False, torch.bfloat16, Cut(2, 2, 1, steps=2)),  # a tile in pieces
        (2, 16, 504, 32, True, torch.bfloat16, Cut(2, 1, 1)),  # a chunk that is not whole
        (3, 24, 1152, 64, False, torch.float16, Cut(1, 3, 1, steps=2)),  # a piece that is not whole
        (5, 20, 512, 32, True, torch.bfloat16, Cut(2, 2, 1)),
        (1, 48, 1000, 128, True, torch.float16, Cut(2, 2, 1)),  # a step that is not whole
        (1, 36, 4096, 128, True, torch.float16, Cut(2, 2, 1, steps=8)),
        (8, 20, 1024, 512, False, torch.bfloat16, Cut(2, 2, 1, steps=2)),  # a group that goes on
        (2, 40, 1024, 128, False, torch.bfloat16, Cut(8, 2, 1)),  # tokens in registers
        (5, 24, 512, 128, True, torch.float16, Cut(2, 2, 1)),  # more than one operand for tokens
        (1, 16, 384, 96, False, torch.bfloat16, Cut(2, 2, 1)),  # groups and steps end at different places
    ],
)
def test_is_the_product(
    m: int, n: int, k: int, group: int, zeros: bool, dtype: torch.dtype, cut: Cut, twin: list[Twin]
) -> None:
    packed, weights = halves(int4_weights(n + k, n, k, group, zeros)[0], dtype)
    x = random(m, m, k, dtype=dtype)
    kind = torch.float32 if zeros else dtype  # of the results
    found = few_tokens.coded(x, packed, poisoned(m, n, dtype=kind), Around(), cut)
    close(found, exact(x) @ weights.T, 1e-2 if dtype is torch.bfloat16 else 2e-3)
    assert all(grid == 1 for each in twin for grid, _, _ in each.launches)  # tiles in turn


def test_lanes_that_are_late_miss_nothing(late_twin: list[Twin]) -> None:
    """The ring turns several times; who waits for a phase must not find the one after it over as well. There are two
    warps that multiply, one that brings and one that finishes."""
    dtype = torch.bfloat16
    packed, weights = halves(int4_weights(5, 96, 512, 32, False)[0], dtype)
    x = random(1, 1, 512, dtype=dtype)
    found = few_tokens.coded(x, packed, poisoned(1, 96, dtype=dtype), Around(), Cut(2, 1, 1, steps=2))
    close(found, exact(x) @ weights.T, 1e-2)


def test_what_rides_along(twin: list[Twin]) -> None:
    dtype = torch.bfloat16
    packed, weights = halves(int4_weights(1, 24, 256, 32, False)[0], dtype)
    cut = Cut(warps=2, stages=2, resident=4)
    x, norm = random(1, 2, 256, dtype=dtype), random(2, 256, dtype=dtype)
    bias, residual = random(3, 24, dtype=dtype), random(4, 2, 24, dtype=dtype)
    around = Around(bias, residual, norm, activation="silu")
    inner = rms_norm(exact(x), exact(norm)) @ weights.T + exact(bias)
    found = few_tokens.coded(x, packed, poisoned(2, 24, dtype=dtype), around, cut)
    close(found, silu(inner) + exact(residual), 2e-2)


def test_gate_and_up_in_turn(twin: list[Twin]) -> None:
    dtype = torch.bfloat16
    gate, up = (int4_weights(seed, 20, 256, 32, False)[0] for seed in (1, 2))
    (gate, gate_weights), (up, up_weights) = halves(gate, dtype), halves(up, dtype)
    x = random(1, 1, 256, dtype=dtype)
    both = int4.interleaved(gate, up)
    around, cut = Around(gated=True, activation="silu"), Cut(warps=1, stages=2, resident=1)
    found = few_tokens.coded(x, both, poisoned(1, 20, dtype=dtype), around, cut)
    close(found, silu(exact(x) @ gate_weights.T) * (exact(x) @ up_weights.T), 2e-2)


def test_what_it_declines() -> None:
    packed, _ = halves(int4_weights(1, 16, 256, 32, False)[0], torch.bfloat16)
    x = random(1, 1, 256, dtype=torch.bfloat16)
    assert few_tokens.suits(x, packed, Around()) is (DEVICE == "cuda")
    assert not few_tokens.suits(x.to(torch.float32), packed, Around())
    assert not few_tokens.suits(random(1, 9, 256, dtype=torch.bfloat16), packed, Around())
    assert not few_tokens.suits(x, packed, Around(bias=random(1, 16)))  # of another type


def test_tokens_of_all_sizes(twin: list[Twin]) -> None:
    """Chunks of very small and of very large elements, beside each other and beside zeros, lose nothing."""
    dtype = torch.bfloat16
    packed, weights = halves(int4_weights(5, 16, 512, 32, False)[0], dtype)
    x = random(7, 16, 512, dtype=dtype)
    sizes = torch.logspace(-30, 30, 16, dtype=torch.float32).to(DEVICE)
    for token in range(16):  # each has one chunk
        x[token] = torch.where(torch.arange(512, device=DEVICE) // 32 == token, x[token] * sizes[token], 0.0).to(dtype)
    x[3, 100] = 0.0
    for eight in (x[:8], x[8:]):
        wanted = exact(eight) @ weights.T
        found = few_tokens.coded(eight, packed, poisoned(8, 16), Around(), Cut(2, 2, 1))
        assert (np.abs(exact(found) - wanted).max(1) < 2e-4 * np.abs(wanted).max(1)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_vanish(bad: float, twin: list[Twin]) -> None:
    packed, _ = halves(int4_weights(1, 16, 256, 32, False)[0], torch.bfloat16)
    x = random(1, 1, 256, dtype=torch.bfloat16)
    x[0, 70] = bad
    found = few_tokens.coded(x, packed, poisoned(1, 16), Around(), Cut(2, 2, 1))
    assert not np.isfinite(exact(found)).any()


def test_compiles_for_a_gpu() -> None:
    try:
        native._nvrtc()
    except OSError as error:
        pytest.skip(str(error))
    usual = {"HALF": 0, "FLOAT_OUT": 0, "GATED": 0, "ACTIVATION": 0, "WARPS": 8, "RESIDENT": 1, "PDL": 1}
    usual |= {"STAGES": 5, "STEPS": 16, "ROW_STEPS": 16, "PIECES": 1, "FLOAT_SCALES": 0, "HAS_ZEROS": 0}
    usual |= {"OF_GROUP": 1, "GROUPS": 64, "TOKENS": 1, "HELD": 1}
    kinds = (
        {},
        {"HALF": 1, "FLOAT_SCALES": 1, "HAS_ZEROS": 1, "TOKENS": 8, "HELD": 0, "ROW_STEPS": 40, "PIECES": 3},
        {"OF_GROUP": 4, "GROUPS": 16, "GATED": 1, "ACTIVATION": 1},
    )
    for other in kinds:
        defines = native.named({**usual, **other})
        options = ("--gpu-architecture=sm_90", "--std=c++17", *(f"-D{key}={value}" for key, value in defines))
        name = "few_tokens_int4"
        assert native.compiled(native.source(name), name, options)[1:4] == b"ELF"
