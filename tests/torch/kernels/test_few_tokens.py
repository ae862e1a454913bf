"""Few tokens on the matrix unit: the source compiled for this processor, and on a GPU itself."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranvier.providers.cuda.kernels import few_tokens, int4, native
from ranvier.providers.cuda.kernels.few_tokens import Around, Cut
from tests.torch.kernels.checking import DEVICE, Array, close, exact, poisoned, random, rms_norm, silu
from tests.torch.kernels.test_few_bits import int4_weights

COMPILER = shutil.which("g++") or shutil.which("c++")
FOLDER = Path(__file__).parent
ENTRY = """
#include "twin.h"
{source}
extern "C" void twin(int grid{declared}) {{ run_blocks(grid, THREADS, [&] {{ {name}({given}); }}); }}
"""


class Twin:
    """Stands for a loaded kernel; a launch runs it here."""

    def __init__(self, folder: Path, name: str, defines: tuple[tuple[str, int], ...]) -> None:
        source = native.source(name)
        signature = re.search(rf"{name}\(([^)]*)\)", source)
        assert signature is not None
        arguments = [" ".join(each.split()) for each in signature[1].split(",")]
        given = ", ".join(each.split()[-1] for each in arguments)
        declared = "".join(f", {each}" for each in arguments).replace("__restrict__", "")
        text = ENTRY.format(source=source, name=name, declared=declared, given=given)
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
    monkeypatch.setattr(few_tokens, "_facts", lambda _device: ((9, 0), 1))
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
    kind = torch.float32 if zeros else dtype  # of the results
    found = few_tokens.coded(x, packed, poisoned(m, n, dtype=kind), Around(), Cut(warps=2, ahead=2, resident=1))
    close(found, exact(x) @ weights.T, 1e-2 if dtype is torch.bfloat16 else 2e-3)
    assert all(grid < -(-n // 16) or n <= 16 for each in twin for grid, _, _ in each.launches)  # tiles in turn


def test_what_rides_along(twin: list[Twin]) -> None:
    dtype = torch.bfloat16
    packed, weights = halves(int4_weights(1, 24, 256, 32, False)[0], dtype)
    x, norm = random(1, 2, 256, dtype=dtype), random(2, 256, dtype=dtype)
    bias, residual = random(3, 24, dtype=dtype), random(4, 2, 24, dtype=dtype)
    around = Around(bias, residual, norm, activation="silu")
    inner = rms_norm(exact(x), exact(norm)) @ weights.T + exact(bias)
    found = few_tokens.coded(x, packed, poisoned(2, 24, dtype=dtype), around, Cut(warps=2, ahead=1, resident=4))
    close(found, silu(inner) + exact(residual), 2e-2)
    matrix = torch.from_numpy(weights.astype(np.float32)).to(dtype).to(DEVICE)
    found = few_tokens.floats(x, [matrix], poisoned(2, 24, dtype=dtype), around, Cut(warps=2, ahead=1, resident=4))
    close(found, silu(inner) + exact(residual), 3e-2)


def test_gate_and_up_in_turn(twin: list[Twin]) -> None:
    dtype = torch.bfloat16
    gate, up = (int4_weights(seed, 20, 128, 32, False)[0] for seed in (1, 2))
    (gate, gate_weights), (up, up_weights) = halves(gate, dtype), halves(up, dtype)
    x = random(1, 1, 128, dtype=dtype)
    both = int4.interleaved(gate, up)
    around, cut = Around(gated=True, activation="silu"), Cut(warps=1, ahead=2, resident=1)
    found = few_tokens.coded(x, both, poisoned(1, 20, dtype=dtype), around, cut)
    close(found, silu(exact(x) @ gate_weights.T) * (exact(x) @ up_weights.T), 2e-2)
    gate, up = random(3, 20, 128, dtype=dtype), random(4, 20, 128, dtype=dtype)
    found = few_tokens.floats(x, [gate, up], poisoned(1, 20, dtype=dtype), around, cut)
    close(found, silu(exact(x) @ exact(gate).T) * (exact(x) @ exact(up).T), 2e-2)


@pytest.mark.parametrize(
    ("m", "sizes", "k", "dtype"),
    [
        (1, (40,), 512, torch.bfloat16),
        (2, (16, 5, 11), 200, torch.float16),  # a step that is not whole; matrices that end inside a tile
        (8, (9, 8), 1088, torch.bfloat16),
        (5, (3,), 8, torch.float16),
    ],
)
def test_is_the_product_with_floats(
    m: int, sizes: tuple[int, ...], k: int, dtype: torch.dtype, twin: list[Twin]
) -> None:
    x = random(m, m, k, dtype=dtype)
    matrices = [random(n + 50, n, k, dtype=dtype, scale=k**-0.5) for n in sizes]
    out = poisoned(m, sum(sizes), dtype=dtype)
    few_tokens.floats(x, matrices, out, Around(), Cut(warps=2, ahead=2, resident=1))
    wanted = np.concatenate([exact(x) @ exact(matrix).T for matrix in matrices], axis=1)
    close(out, wanted, 1e-2 if dtype is torch.bfloat16 else 2e-3)


def test_what_it_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_tokens, "USED", True)
    packed, _ = halves(int4_weights(1, 16, 128, 32, False)[0], torch.bfloat16)
    x = random(1, 1, 128, dtype=torch.bfloat16)
    matrix = random(2, 16, 128, dtype=torch.bfloat16)
    if DEVICE == "cpu":
        assert not few_tokens.suits_codes(x, packed, Around()) and not few_tokens.suits(x, [matrix], Around())
        return
    assert few_tokens.suits_codes(x, packed, Around()) and few_tokens.suits(x, [matrix], Around())
    assert not few_tokens.suits_codes(x.to(torch.float32), packed, Around())
    assert not few_tokens.suits_codes(random(1, 9, 128, dtype=torch.bfloat16), packed, Around())
    assert not few_tokens.suits(x, [matrix], Around(bias=random(1, 16)))  # of another type
    assert not few_tokens.suits(x[:, 1:121], [matrix[:, 1:121]], Around())  # rows that begin at odd places


def test_compiles_for_a_gpu() -> None:
    try:
        native._nvrtc()
    except OSError as error:
        pytest.skip(str(error))
    usual = {"HALF": 0, "FLOAT_OUT": 0, "GATED": 0, "ACTIVATION": 0, "WARPS": 8, "AHEAD": 2, "RESIDENT": 2, "PDL": 1}
    coded = {"FLOAT_SCALES": 0, "OF_GROUP": 1, "PAIRS": 1}
    kinds = (
        ("few_tokens_int4", coded),
        ("few_tokens_int4", {**coded, "HALF": 1, "FLOAT_SCALES": 1, "PAIRS": 4}),
        ("few_tokens_int4", {**coded, "OF_GROUP": 4, "GATED": 1, "ACTIVATION": 1}),
        ("few_tokens_float", {"TOKENS": 8, "HALF": 1, "FLOAT_OUT": 1}),
    )
    for name, other in kinds:
        defines = native.named({**usual, **other})
        options = ("--gpu-architecture=sm_90", "--std=c++17", *(f"-D{key}={value}" for key, value in defines))
        assert native.compiled(native.source(name), name, options)[1:4] == b"ELF"
