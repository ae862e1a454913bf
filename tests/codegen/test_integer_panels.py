"""Constant codes in panels: each group and column where the micro-kernels look for it, zeros elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.gemm.blocks import Panels
from ranvier.codegen.llvm.integer import pack_codes, pack_filters
from ranvier.codegen.llvm.integer import panels as filling
from ranvier.codegen.llvm.integer.dots import BYTES, SIGNED, TILES, WORDS, Dot
from ranvier.codegen.llvm.integer.pack import panels_for, signed
from tests.codegen.test_integer import PATHS, codes

Array = np.ndarray[Any, Any]
DOTS = [BYTES, SIGNED, WORDS, TILES]
ISA = PATHS[0]


def one_by_one(b: Array, panels: Panels, dot: Dot) -> Array:
    """What the panels of one matrix hold, as elements of groups."""
    k, n = b.shape
    deep, lanes = dot.groups(k), panels.lanes
    made = np.zeros((panels.packed_elements(deep), dot.group), dot.right.numpy)
    at = 0
    for panel in range(panels.cut.count):
        first, end = (panels.cut.start(x) * lanes for x in (panel, panel + 1))
        for group in range(deep):
            for column in range(first, end):
                here = b[group * dot.group : (group + 1) * dot.group, column] if column < n else b[:0, 0]
                made[at, : len(here)] = here
                at += 1
    return made.view(dot.packed.numpy)[:, 0]


@pytest.mark.parametrize("dot", DOTS, ids=["bytes", "signed", "words", "tiles"])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (3, 17), (4, 16), (27, 33), (64, 40), (70, 129)])
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_every_code_has_its_place(monkeypatch: pytest.MonkeyPatch, dot: Dot, k: int, n: int, kind: type) -> None:
    monkeypatch.setattr(filling, "_NEAR", 2048)  # several rounds even for small ones
    b = codes(kind, k, n)
    want = one_by_one(signed(b), panels_for(256, n, dot.groups(k), ISA, dot), dot)
    for lying in (b, np.asfortranarray(b)):  # N side by side, or K
        packed = pack_codes(lying, ISA, rows_hint=256, dot=dot).storage.array
        assert packed is not None
        np.testing.assert_array_equal(packed, want)


@pytest.mark.parametrize("dot", DOTS, ids=["bytes", "signed", "words", "tiles"])
def test_matrices_of_a_stack_are_packed_apart(dot: Dot) -> None:
    b = codes(np.uint8, 3, 10, 21)
    packed = pack_codes(b, ISA, rows_hint=8, dot=dot).storage.array
    assert packed is not None
    for each, matrix in zip(packed, b):
        alone = pack_codes(matrix, ISA, rows_hint=8, dot=dot).storage.array
        assert alone is not None
        np.testing.assert_array_equal(each, alone)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 2)])
@pytest.mark.parametrize("group", [1, 2])
def test_filters_are_a_matrix_of_taps_and_channels_by_outputs(kernel: tuple[int, int], group: int) -> None:
    w = codes(np.int8, 10, 8, *kernel)
    shape = ConvShape.conv((1, 8 * group, 9, 9), w.shape, group=group)
    matrices = w.reshape(group, 10 // group, 8, -1).transpose(0, 3, 2, 1).reshape(group, -1, 10 // group)
    packed = pack_filters(w, ISA, shape)
    want = pack_codes(np.ascontiguousarray(matrices), ISA, rows_hint=256, dot=packed.dot)
    assert packed.storage.array is not None and want.storage.array is not None
    np.testing.assert_array_equal(packed.storage.array, want.storage.array)
