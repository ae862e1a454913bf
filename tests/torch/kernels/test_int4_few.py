"""Few tokens with 4-bit weights on the matrix unit: the source compiled for this processor, and on a GPU itself."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranvier.providers.cuda.kernels import int4, int4_few, native
from tests.torch.kernels.checking import DEVICE, Array, close, exact, poisoned, random, rms_norm, silu
from tests.torch.kernels.test_few_bits import int4_weights

COMPILER = shutil.which("g++") or shutil.which("c++")
FOLDER = Path(__file__).parent
ENTRY = """
#include "twin.h"
{source}
extern "C" void twin(int grid, const u16* x, const uint4* words, const Scale* scales, const unsigned char* zeros,
                     const u16* bias, const u16* residual, const u16* norm, Result* out, int m, int n, int k,
                     int chunks, int groups, long long x_step, long long residual_step, long long out_step,
                     float eps) {{
    run_blocks(grid, THREADS, [&] {{
        few_tokens_int4(x, words, scales, zeros, bias, residual, norm, out, m, n, k, chunks, groups, x_step,
                        residual_step, out_step, eps);
    }});
}}
"""


class Twin:
    """Stands for a loaded kernel; a launch runs it here."""

    def __init__(self, folder: Path, name: str, defines: tuple[tuple[str, int], ...]) -> None:
        source = resources.files(native.__package__).joinpath(f"{name}.cu").read_text("utf-8")
        text = ENTRY.format(source=source)
        digest = hashlib.sha256((text + str(defines)).encode()).hexdigest()[:16]
        written, library = folder / f"{digest}.cpp", folder / f"{digest}.so"
        written.write_text(text)
        constants = [f"-D{key}={value}" for key, value in defines]
        how = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{FOLDER}"]
        subprocess.run([str(COMPILER), *how, *constants, str(written), "-o", str(library)], check=True, timeout=120)
        self._call = ctypes.CDLL(str(library)).twin
        self._call.restype = None
        self.launches: list[tuple[int, int, int]] = []

    def launch(self, grid: int, threads: int, shared: int, args: Any, *, pdl: bool = False) -> None:
        self.launches.append((grid, threads, shared))
        given = [
            ctypes.c_void_p(x if x is None else x.data_ptr()) if x is None or isinstance(x, torch.Tensor) else x
            for x in args
        ]
        self._call(ctypes.c_int(grid), *given)


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Twin]:
    """Kernels that were asked for. On a GPU they are the real ones, and nothing is listed."""
    made: list[Twin] = []
    if DEVICE == "cuda":
        return made
    if COMPILER is None:
        pytest.skip("no C++ compiler")

    def function(name: str, defines: tuple[tuple[str, int], ...], device: int) -> Twin:
        made.append(Twin(tmp_path, name, defines))
        return made[-1]

    monkeypatch.setattr(native, "function", function)
    monkeypatch.setattr(int4_few, "_facts", lambda _device: ((9, 0), 1))
    return made


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
    ("m", "n", "k", "group", "zeros", "dtype"),
    [
        (1, 40, 512, 32, False, torch.bfloat16),
        (2, 16, 256, 32, True, torch.bfloat16),
        (3, 24, 320, 64, False, torch.float16),  # two and a half steps
        (8, 20, 1152, 128, True, torch.bfloat16),  # more steps than a warp has at once
        (1, 7, 96, 32, True, torch.float16),
    ],
)
def test_is_the_product(m: int, n: int, k: int, group: int, zeros: bool, dtype: torch.dtype, twin: list[Twin]) -> None:
    packed, weights = halves(int4_weights(n + k, n, k, group, zeros)[0], dtype)
    x = random(m, m, k, dtype=dtype)
    cut = int4_few.Cut(warps=2, ahead=2, resident=1)
    kind = torch.float32 if zeros else dtype  # of the results
    found = int4_few.gemv(x, packed, poisoned(m, n, dtype=kind), cut=cut)
    close(found, exact(x) @ weights.T, 1e-2 if dtype is torch.bfloat16 else 2e-3)
    assert all(grid < -(-n // 16) or n <= 16 for each in twin for grid, _, _ in each.launches)  # tiles in turn


def test_what_rides_along(twin: list[Twin]) -> None:
    dtype = torch.bfloat16
    packed, weights = halves(int4_weights(1, 24, 256, 32, False)[0], dtype)
    x, norm = random(1, 2, 256, dtype=dtype), random(2, 256, dtype=dtype)
    bias, residual = random(3, 24, dtype=dtype), random(4, 2, 24, dtype=dtype)
    cut = int4_few.Cut(warps=2, ahead=1, resident=4)
    how: dict[str, Any] = {"norm": norm, "bias": bias, "residual": residual, "activation": "silu", "cut": cut}
    found = int4_few.gemv(x, packed, poisoned(2, 24, dtype=dtype), **how)
    inner = rms_norm(exact(x), exact(norm)) @ weights.T + exact(bias)
    close(found, silu(inner) + exact(residual), 2e-2)


def test_gate_and_up_in_turn(twin: list[Twin]) -> None:
    dtype = torch.bfloat16
    gate, up = (int4_weights(seed, 20, 128, 32, False)[0] for seed in (1, 2))
    (gate, gate_weights), (up, up_weights) = halves(gate, dtype), halves(up, dtype)
    x = random(1, 1, 128, dtype=dtype)
    both = int4.interleaved(gate, up)
    cut = int4_few.Cut(warps=1, ahead=2, resident=1)
    found = int4_few.gemv(x, both, poisoned(1, 20, dtype=dtype), gated=True, activation="silu", cut=cut)
    close(found, silu(exact(x) @ gate_weights.T) * (exact(x) @ up_weights.T), 2e-2)


def test_what_it_declines() -> None:
    packed, _ = halves(int4_weights(1, 16, 128, 32, False)[0], torch.bfloat16)
    x = random(1, 1, 128, dtype=torch.bfloat16)
    if DEVICE == "cpu":
        assert not int4_few.suits(x, packed)
        return
    assert int4_few.suits(x, packed)
    assert not int4_few.suits(x.to(torch.float32), packed)
    assert not int4_few.suits(random(1, 9, 128, dtype=torch.bfloat16), packed)
    assert not int4_few.suits(x, packed, random(1, 16))  # a bias of another type


def test_compiles_for_a_gpu() -> None:
    try:
        native._nvrtc()
    except OSError as error:
        pytest.skip(str(error))
    source = resources.files(native.__package__).joinpath("few_tokens_int4.cu").read_text("utf-8")
    usual = {"HALF": 0, "FLOAT_SCALES": 0, "FLOAT_OUT": 0, "OF_GROUP": 1, "PAIRS": 1, "GATED": 0, "ACTIVATION": 0}
    for other in ({}, {"HALF": 1, "FLOAT_SCALES": 1, "PAIRS": 4}, {"OF_GROUP": 4, "GATED": 1, "ACTIVATION": 1}):
        defines = native.named({**usual, **other, "WARPS": 8, "AHEAD": 2, "PDL": 1})
        options = ("--gpu-architecture=sm_90", "--std=c++17", *(f"-D{key}={value}" for key, value in defines))
        assert native.compiled(source, "few_tokens_int4", options)[1:4] == b"ELF"
