"""Codes that fill bytes: what generated code makes of blocks is what NumPy makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.coded.filling import Filling
from ranvier.errors import InvalidConfig, KernelError
from ranvier.ops.contrib.weight_only import packed, unpacked
from ranvier.quantize.base import Quantized
from ranvier.quantize.rows import rows_of
from ranvier.runtime.quantizing import filled as module
from ranvier.runtime.quantizing.filled import Filled, filled
from ranvier.runtime.quantizing.grouped import in_groups
from ranvier.runtime.quantizing.tables import whole_codes
from ranvier.weights.quantized.gguf_blocks import gguf_rows
from tests.weights.test_gguf_layers import GRIDS, HALVES, SCALES, random_blocks, tensor

Array = np.ndarray[Any, Any]
KINDS = [kind for kind in HALVES if kind not in GRIDS]


def same(one: Filled, other: Filled) -> None:
    assert (one.bits, one.group, one.zeros.dtype) == (other.bits, other.group, other.zeros.dtype)
    for a, b in ((one.codes, other.codes), (one.scales, other.scales), (one.zeros, other.zeros)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_code_reads_what_numpy_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [random_blocks(kind, 6, 2, seed) for seed in range(2)]
    if kind in SCALES:  # groups without a scale, whose weights are all the same
        for each in data:
            each.reshape(6, 2, -1)[1::2, :, SCALES[kind]] = 0
    sources = [gguf_rows(tensor(each, kind)) for each in data]
    slow = filled(sources, 256), filled(sources[:1], 256)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_MANY", 0)
    monkeypatch.setattr(module._Numbered, "read", None)
    quick = filled(sources, 256), filled(sources[:1], 256)  # type: ignore[arg-type]
    for one, other in zip(quick, slow):
        same(one, other)
    np.testing.assert_array_equal(quick[0].codes[0::2], quick[1].codes)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_all_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY", 0)
    rows: Any = gguf_rows(tensor(random_blocks(kind, 6, 2, 3), kind))
    found, whole = filled([rows], 256), in_groups(whole_codes(rows.whole()), 256, (2, 3, 4, 5, 6, 8))
    assert found.bits == whole.bits and found.group == whole.block[1]
    np.testing.assert_array_equal(found.codes, packed(whole.codes, whole.bits))
    np.testing.assert_array_equal(found.scales, whole.scales)
    np.testing.assert_array_equal(found.zeros, whole.zeros)


def test_systems_that_allow_no_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise KernelError("this system allows no generated code")

    rows: Any = gguf_rows(tensor(random_blocks("Q4_K", 6, 2, 0), "Q4_K"))
    expected = filled([rows], 256)
    monkeypatch.setattr(module, "_MANY", 0)
    monkeypatch.setattr(Filling, "function", refuse)
    same(filled([rows], 256), expected)


@pytest.mark.parametrize("many", [0, 1 << 30])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "IQ4_XS"])
def test_scales_that_are_no_numbers(kind: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY", many)
    data = random_blocks(kind, 4, 8, 0)
    data[2, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(InvalidConfig, match="no finite numbers"):
        filled([gguf_rows(tensor(data, kind))], 256)  # type: ignore[list-item]


def test_groups_divide_rows() -> None:
    rng = np.random.default_rng(0)
    coded = Quantized("any", rng.integers(0, 16, (3, 40), np.uint8), np.ones((3, 1), np.float32), (1, 40), 4)
    rows = rows_of(coded)
    assert rows is not None
    with pytest.raises(InvalidConfig, match="groups of 16 do not divide 40 features"):
        filled([rows], 16)
    np.testing.assert_array_equal(unpacked(filled([rows], 8).codes, 4), coded.codes)


def test_zeros_of_all_rows_are_of_one_kind() -> None:
    """Those of some rows may be codes, and those of others lie between."""
    rng = np.random.default_rng(0)
    zeros = np.array([[1.0], [2.5], [3.0]], np.float32)
    coded = Quantized("any", rng.integers(0, 16, (3, 32), np.uint8), np.ones((3, 1), np.float32), (1, 32), 4, zeros)
    for given, kind in ((coded.zeros, "f"), (np.rint(zeros), "u")):
        rows = rows_of(Quantized("any", coded.codes, coded.scales, (1, 32), 4, given))
        assert rows is not None
        found = filled([rows], 32).zeros
        assert found.dtype.kind == kind
        np.testing.assert_array_equal(found, given)
