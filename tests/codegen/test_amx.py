"""The matrix unit: permission, configuration, and its micro-kernel against exact integers and float64."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.codegen.llvm import isa, permission
from ranvier.codegen.llvm.amx.micro import TileMicro, padded_groups, rest_bytes
from ranvier.codegen.llvm.amx.rows import rows_spec
from ranvier.codegen.llvm.amx.tiles import LINE
from ranvier.codegen.llvm.control import ALPHA, CLAMP, SLOTS, Slot, number_bits
from ranvier.codegen.llvm.library import Kernel, kernels
from ranvier.dtypes import DType
from tests.codegen.harness import aligned

Array = np.ndarray[Any, Any]
HOST = isa.host()
tiles = pytest.mark.skipif(not HOST.extensions >= isa.TILES, reason="this machine has no tiles for all types")
TYPES = [
    (DType.bfloat16, DType.bfloat16),
    (DType.int8, DType.int8),
    (DType.int8, DType.uint8),
    (DType.uint8, DType.int8),
    (DType.uint8, DType.uint8),
]


# -- permission -----------------------------------------------------------------------------------------------------


def with_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has them, whatever this one has."""
    monkeypatch.setattr(isa, "architecture", lambda: "x86_64")
    every = {name for each in isa.TABLE for name in each.needs} | set(isa.OPTIONAL["avx512"])
    monkeypatch.setattr(isa, "host_features", lambda: dict.fromkeys(every, True))


@pytest.mark.parametrize("allowed", [True, False])
def test_what_the_system_refuses_is_not_used(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    with_tiles(monkeypatch)
    monkeypatch.setattr(isa, "tiles_allowed", lambda: allowed)
    best = isa.available()[0]
    assert best.name == "avx512" and best.has("avx512vnni") and best.has("avx512bf16")
    assert (best.extensions >= isa.TILES) == allowed and bool(isa.TILES & best.extensions) == allowed
    assert ("amx" in best.features) == allowed


def test_nobody_is_asked_who_has_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiles(monkeypatch)
    features = {name: True for name in isa.host_features() if not name.startswith("amx")}
    monkeypatch.setattr(isa, "host_features", lambda: features)
    monkeypatch.setattr(isa, "tiles_allowed", lambda: pytest.fail("asked"))
    assert isa.available()[0].name == "avx512"


def test_the_system_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    class System:
        def __init__(self, name: None) -> None: ...

        def syscall(self, *numbers: Any) -> int:
            asked.append(tuple(n.value for n in numbers))
            return -1

    monkeypatch.setattr(permission.ctypes, "CDLL", System)
    monkeypatch.setattr(permission.sys, "platform", "linux")
    permission.tiles_allowed.cache_clear()
    try:
        assert not permission.tiles_allowed() and not permission.tiles_allowed()
        assert asked == [(158, 0x1023, 18)]
        permission.tiles_allowed.cache_clear()
        monkeypatch.setattr(permission.sys, "platform", "darwin")
        assert not permission.tiles_allowed() and len(asked) == 1
    finally:
        permission.tiles_allowed.cache_clear()


# -- the micro-kernel -----------------------------------------------------------------------------------------------


class Product:
    """One call of the micro-kernel: ``segments`` of rows times a panel."""

    def __init__(self, left: DType, right: DType, rows: int, k: int, columns: int, layout: str, segments: int) -> None:
        rng = np.random.default_rng(rows * 1000 + k)
        self.item, self.layout = left.numpy.itemsize, layout
        self.vectors = -(-columns // 16)
        self.a = self._numbers(rng, left, (segments, rows, k))
        self.b = self._numbers(rng, right, (segments, k, columns))
        per = 4 // self.item
        groups = padded_groups(-(-k // per))
        padded = np.zeros((segments, groups * per, 16 * self.vectors), right.numpy)
        padded[:, :k, :columns] = self.b
        panel = np.ascontiguousarray(padded.reshape(segments, groups, per, -1).swapaxes(2, 3))
        self.panel = aligned(panel.nbytes)
        self.panel[:] = panel.reshape(-1).view(np.uint8)
        # what stands behind the rows would show
        self.rows = np.full((segments, rows, k + 5), np.nan if self.item == 2 else 77).astype(left.numpy)
        self.rows[:, :, :k] = self.a
        self.out = np.full((rows, columns + 2), -7, np.float32 if self.item == 2 else np.int32)
        self.control = np.zeros(SLOTS, np.int64)
        self.set(K=groups, SEGMENTS=segments, ROWS=rows, REST=rest_bytes(k * self.item), COLUMNS=(columns - 1) % 16 + 1)
        self.set(OUT=self.out.ctypes.data, OUT_STEP=self.out.strides[0], FETCH=self.panel.ctypes.data)
        self.set(A_STEP=self.rows.strides[1])
        self.first = self.rows
        if layout == "starts":
            self.first = np.array([each.ctypes.data for each in self.rows], np.int64)
        elif layout == "table":
            self.first = np.array([[r.ctypes.data for r in each] for each in self.rows], np.int64)
            self.set(A_STEP=self.first.strides[0])
        self.micro = TileMicro(left, right, self.vectors, layout)  # type: ignore[arg-type]

    @staticmethod
    def _numbers(rng: Any, dtype: DType, shape: tuple[int, ...]) -> Array:
        if dtype is DType.bfloat16:
            return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        low = 0 if dtype is DType.uint8 else -128
        return rng.integers(low, low + 256, shape).astype(dtype.numpy)

    def set(self, **slots: int) -> None:
        for name, value in slots.items():
            self.control[Slot[name]] = value

    def run(self, kept: dict[Any, Kernel] | None = None) -> Array:
        spec = self.micro.spec()
        found = kernels([spec], HOST)
        if kept is not None:
            kept.update({spec: found[spec]})
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(found[spec].address)
        call(self.first.ctypes.data, self.panel.ctypes.data, self.control.ctypes.data)
        return self.out[:, :-2]

    @property
    def expected(self) -> Array:
        a, b = (x.astype(np.float64 if self.item == 2 else np.int64) for x in (self.a, self.b))
        return np.einsum("srk,skn->rn", a, b)

    def check(self, got: Array, expected: Array | None = None) -> None:
        expected = self.expected if expected is None else expected
        if self.item == 1:
            assert np.array_equal(got, expected)
        else:
            size = np.einsum("srk,skn->rn", np.abs(self.a).astype(np.float64), np.abs(self.b).astype(np.float64))
            assert np.all(np.abs(got - expected) <= (size + np.abs(expected) + 1) * 3e-6)
        assert np.all(self.out[:, -2:] == -7)


@tiles
@pytest.mark.parametrize("layout", ["rows", "starts", "table"])
@pytest.mark.parametrize(("left", "right"), TYPES, ids=lambda d: d.name)
def test_every_remainder(left: DType, right: DType, layout: str) -> None:
    kept: dict[Any, Kernel] = {}
    for rows in (1, 2, 15, 16, 17, 31, 32):
        for k in (1, 2, 3, 31, 32, 33, 63, 64, 65, 130):
            made = Product(left, right, rows, k, 13 + rows % 20, layout, 1 if layout == "rows" else 3)
            made.check(made.run(kept))


@tiles
def test_everything_that_is_added() -> None:
    for rows, columns in ((9, 30), (32, 32), (20, 16)):
        made = Product(DType.bfloat16, DType.bfloat16, rows, 40, columns, "rows", 1)
        partial = aligned(rows * made.vectors * LINE).view(np.float32).reshape(rows, -1)
        partial[:] = np.random.default_rng(1).standard_normal(partial.shape)
        bias, beside = (
            np.random.default_rng(k).standard_normal(s).astype(np.float32)
            for k, s in ((2, columns), (3, made.out.shape))
        )
        bits = {name: number_bits(value, 4) for name, value in (("ALPHA", 0.5), ("LOW", -2.0), ("HIGH", 3.0))}
        made.set(PARTIAL=partial.ctypes.data, BIAS=bias.ctypes.data, **bits)
        made.set(RESIDUAL=beside.ctypes.data, RESIDUAL_STEP=beside.strides[0])
        added = partial[:, :columns] + bias + beside[:, :columns]
        made.check(made.run(), made.expected + added)
        made.set(FLAGS=ALPHA | CLAMP)
        made.check(made.run(), np.clip(made.expected * 0.5 + added, -2.0, 3.0))
        made.set(FLAGS=0, BIAS=0, RESIDUAL=0)
        made.check(made.run(), made.expected + partial[:, :columns])


@tiles
def test_rows_from_a_table_are_copied_together() -> None:
    for rows, k, segments in ((5, 40, 3), (32, 64, 2), (17, 33, 1)):
        made = Product(DType.int8, DType.uint8, rows, k, 20, "table", segments)
        spec = rows_spec()
        found = kernels([spec], HOST)
        room = aligned(rows * segments * int(made.control[Slot.K]) * 4)
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(found[spec].address)
        call(made.first.ctypes.data, room.ctypes.data, made.control.ctypes.data)
        dense = room.view(np.int8).reshape(rows, segments, -1)
        assert np.array_equal(dense[:, :, :k], made.a.swapaxes(0, 1)) and not dense[:, :, k:].any()


@tiles
def test_threads_and_forked_children_may_use_them() -> None:
    """A thread that ran before anybody asked, and a child that never asks itself."""

    kept: dict[Any, Kernel] = {}  # a child compiles nothing

    def works() -> bool:
        made = Product(DType.int8, DType.int8, 32, 100, 32, "rows", 1)
        return np.array_equal(made.run(kept), made.expected)

    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(works()))
    thread.start()
    thread.join()
    assert found == [True]
    child = os.fork()
    if child == 0:
        os._exit(0 if works() else 1)
    assert os.waitpid(child, 0)[1] == 0
