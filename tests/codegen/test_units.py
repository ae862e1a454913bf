"""What multiplies in a launch, and the peak it is held against."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.codegen.llvm import compiler, isa, library, peaks
from ranvier.codegen.llvm.gemm import matmul, pack_b
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.peaks import Peaks
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_PLAIN = isa.named("avx512", "x86_64")
_MATRIX = isa.with_extensions(_PLAIN, isa.TILES | {"avx512bf16"})


@pytest.mark.parametrize(
    "kind, target, units",
    [
        (DType.bfloat16, _MATRIX, "bfloat16 tiles"),
        (DType.float32, _MATRIX, ""),
        (DType.bfloat16, _PLAIN, ""),
    ],
)
def test_products_tell_what_multiplies(kind: DType, target: Isa, units: str) -> None:
    a, out = View.temporary(kind, (64, 96)), View.temporary(DType.float32, (64, 80))
    packed = pack_b(np.zeros((96, 80), np.float32), target, rows_hint=256, dtype=kind)
    launches = matmul(a, packed, out, target)
    assert launches[-1].units == units


def test_units_have_peaks_of_their_own() -> None:
    top = Peaks(100.0, 10.0, 12.0, 50.0, bf16_tile_gflops=1500.0, int8_tile_gops=3000.0)
    found = {units: top.arithmetic(units) for units in ("", "bytes", "bfloat16 tiles", "int8 tiles")}
    assert found == {"": 100.0, "bytes": 400.0, "bfloat16 tiles": 1500.0, "int8 tiles": 3000.0}
    assert Peaks(100.0, 10.0, 12.0, 50.0).arithmetic("int8 tiles") == 100.0


def test_the_peak_of_multiply_adds_is_nothing_but_multiply_adds() -> None:
    """On an instruction set whose multiply-adds overwrite the addend, too: no register is copied in the loop."""
    neon = isa.named("neon", "aarch64")
    text = compiler.assembly(library.source(peaks._SPECS["fma"], neon), neon)
    loop = next(part for part in text.split(".LBB0_") if part.count("fmla") == peaks._chains(neon))
    others = {line.split()[0] for line in loop.splitlines()[1:]} - {"fmla"}
    assert others <= {"add", "cmp", "b.lt", "b", "ldp", "ldr"}
