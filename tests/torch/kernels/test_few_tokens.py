"""Few tokens on the matrix unit: the source compiled for this processor, and on a GPU itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ranvier.providers.cuda.kernels import few_tokens, int4, native
from ranvier.providers.cuda.kernels.few_tokens import Around, Cut
from tests.torch.kernels.checking import DEVICE, Array, close, exact, poisoned, random, rms_norm, silu
from tests.torch.kernels.test_few_bits import int4_weights
from tests.torch.kernels.twins import Twin, twin

__all__ = ["twin"]


def halves(packed: int4.Int4, dtype: torch.dtype) -> tuple[int4.Int4, Array]:
    """With scales that ``dtype`` has, and the weights that these stand for, by definition."""
    rounded = packed.scales.to(dtype)
    codes = np.zeros((packed.n, packed.words.shape[1], 32))
    words = packed.words.cpu().numpy().astype(np.uint32)
    for i in range(4):
        for j in range(4):
            codes[:, :, 8 * i + 2 * j] = words[:, :, j] >> (4 * i) & 15
            codes[:, :, 8 * i + 2 * j + 1] = words[:, :, j] >> (4 * i + 16) & 15
    flat = codes.reshape(packed.n, -1)[:, : packed.k]
    of = np.arange(packed.k) // packed.group
    zero = 8.0 if packed.zeros is None else packed.zeros.cpu().numpy().astype(np.float64)[:, of]
    made = int4.Int4(packed.words, rounded, packed.zeros, packed.k, packed.group)
    return made, (flat - zero) * exact(rounded)[:, of]


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "zeros", "dtype", "cut"),
    [
        (1, 40, 512, 32, False, torch.bfloat16, Cut(2, 2, 1)),
        (1, 40, 512, 32, False, torch.bfloat16, Cut(2, 2, 1, most=0, depth=128)),  # rows in pieces
        (2, 16, 504, 32, True, torch.bfloat16, Cut(2, 1, 1)),  # a chunk that is not whole
        (3, 24, 1024, 64, False, torch.float16, Cut(1, 3, 1, most=0, depth=256)),
        (5, 20, 512, 32, True, torch.bfloat16, Cut(2, 2, 1)),
        (1, 48, 1000, 128, True, torch.float16, Cut(2, 2, 1)),  # a step that is not whole
        (1, 36, 4096, 128, True, torch.float16, Cut(2, 2, 1, most=0, depth=1024)),
        (8, 20, 3072, 128, False, torch.bfloat16, Cut(2, 2, 1, most=0, depth=512)),
        (2, 40, 1024, 128, False, torch.bfloat16, Cut(8, 2, 1)),  # tokens in registers
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


def test_compiles_for_a_gpu() -> None:
    try:
        native._nvrtc()
    except OSError as error:
        pytest.skip(str(error))
    usual = {"HALF": 0, "FLOAT_OUT": 0, "GATED": 0, "ACTIVATION": 0, "WARPS": 8, "RESIDENT": 1, "PDL": 1}
    usual |= {"STAGES": 5, "DEPTH": 1024, "TOGETHER": 1}
    coded = {"FLOAT_SCALES": 0, "HAS_ZEROS": 0, "OF_GROUP": 1, "GROUPS": 64, "TOKENS": 2, "HELD": 1}
    kinds = (
        ("few_tokens_int4", coded),
        (
            "few_tokens_int4",
            {**coded, "HALF": 1, "FLOAT_SCALES": 1, "HAS_ZEROS": 1, "TOKENS": 8, "HELD": 0, "TOGETHER": 0},
        ),
        ("few_tokens_int4", {**coded, "OF_GROUP": 4, "GROUPS": 16, "TOKENS": 1, "GATED": 1, "ACTIVATION": 1}),
    )
    for name, other in kinds:
        defines = native.named({**usual, **other})
        options = ("--gpu-architecture=sm_90", "--std=c++17", *(f"-D{key}={value}" for key, value in defines))
        assert native.compiled(native.source(name), name, options)[1:4] == b"ELF"
