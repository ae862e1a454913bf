"""Machine code from other processes, and launches of it; the driver is a stand-in that notes what it is told."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from ranvier.codegen.llvm import compiler
from ranvier.codegen.loops.ir import Op
from ranvier.codegen.storage import View
from ranvier.codegen.triton import driver as cuda_driver
from ranvier.codegen.triton import images, launching
from ranvier.codegen.triton.library import kernel
from ranvier.codegen.triton.printer import HEADER, Pointer, Source
from ranvier.dtypes import DType
from ranvier.errors import KernelError
from tests.codegen.nest_makers import elementwise

F32 = DType.float32
_REFUSED = "@triton.jit\ndef wrong(p0, n, X: tl.constexpr):\n    tl.store(p0, tl.arange(0, 3))\n"


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Caches of this test alone, in memory and on disk."""
    monkeypatch.setenv("RANVIER_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("RANVIER_CACHE", raising=False)
    monkeypatch.delenv(compiler.VARIABLE, raising=False)
    monkeypatch.setattr(images, "_found", {})
    monkeypatch.setattr(images, "_given_up", False)
    yield


def _source(size: int = 4096) -> Source:
    operands = View.temporary(F32, (size,)), [View.temporary(F32, (size,))]
    (call,) = kernel(elementwise(*operands, lambda x: Op("add", (x, x), F32))).calls
    return call.source


def _plain(numbers: tuple[int, ...], pointers: int = 2) -> Source:
    there = View.temporary(F32, (16,)).storage
    return Source(
        "", "k", tuple(Pointer(there, 0, "float32") for _ in range(pointers)), numbers, (("X", 64),), (3, 2, 1), 4
    )


def test_orders_tell_what_triton_tells_apart() -> None:
    found = images.order(_plain((1, 32, 7, 1 << 33)), [True, False], 90)
    assert found.kinds == ("*fp32", "*fp32", "constexpr", "i32", "i32", "i64", "constexpr")
    assert found.fixed == ((2, 1), (6, 64))
    assert found.multiples == (0, 3, 5)
    assert found.parameters() == 5 + 2


def test_compiled_elsewhere_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = images.order(_source(), [True, True], 90)
    assert not images.is_kept(wanted)
    made = images.image(wanted)
    assert made is not None and made.code[:4] == b"\x7fELF" and made.warps == _source().warps
    assert images.is_kept(wanted) and images.image(wanted) is made
    monkeypatch.setattr(images, "_found", {})
    monkeypatch.setattr(images, "_compiled", lambda message: pytest.fail("it is on disk"))
    assert images.image(wanted) == made


def test_what_triton_refuses_is_an_error_every_time() -> None:
    there = Pointer(View.temporary(F32, (16,)).storage, 0, "float32")
    wrong = Source(HEADER + _REFUSED, "wrong", (there,), (5,), (("X", 64),), (1, 1, 1), 4)
    wanted = images.order(wrong, [True], 90)
    for _ in range(2):
        with pytest.raises(KernelError, match="power of 2"):
            images.image(wanted)


def test_other_parameters_than_expected_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = b'{"name": "k", "warps": 4, "shared": 0, "parameters": 5}\ncode'
    monkeypatch.setattr(images, "_compiled", lambda message: facts)
    assert images.image(images.order(_plain((7,)), [True, True], 90)) is not None  # 3 of its own and 2 of Triton's
    assert images.image(images.order(_plain((7, 8)), [True, True], 90)) is None


def test_inside_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.VARIABLE, compiler.INSIDE)
    assert not images.elsewhere()
    assert images.image(images.order(_source(), [True, True], 90)) is None


class _Driver:
    """Answers as the driver does where all goes well; reads the parameters of a launch as a kernel would."""

    def __init__(self, kinds: list[type], codes: list[int] | None = None) -> None:
        self.kinds, self.codes = kinds, codes or []
        self.launches: list[Any] = []
        self.asked: list[str] = []

    def cuLaunchKernel(self, entry: Any, *rest: Any) -> int:
        *sizes, stream, where, extra = rest
        values = [kind.from_address(where[k]).value for k, kind in enumerate(self.kinds)]
        self.launches.append((tuple(sizes), stream, values, extra))
        return self.codes.pop(0) if self.codes else 0

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> int:
            self.asked.append(name)
            return 0

        return ask


def _launcher(monkeypatch: pytest.MonkeyPatch, driver: Any, numbers: tuple[int, ...], **how: Any) -> Any:
    monkeypatch.setattr(cuda_driver, "cuda", lambda: driver)
    monkeypatch.setattr(launching, "_loaded", {})
    source = _plain(numbers)
    image = images.Image("key", b"code", "k", 4, how.get("shared", 0))
    order = images.order(source, [True, True], 90)
    return launching.launcher(image, order, source.numbers, how.get("grid", source.grid), 0, lambda: 77)


def test_parameters_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    pointer, wide = ctypes.c_uint64, ctypes.c_int64
    driver = _Driver([pointer, pointer, ctypes.c_int32, ctypes.c_int32, wide, pointer, pointer])
    launch = _launcher(monkeypatch, driver, (-5, 1, 48, 1 << 33), shared=1000)
    launch([4096, 1 << 40])
    ((sizes, stream, values, extra),) = driver.launches
    assert sizes == (3, 2, 1, 4 * 32, 1, 1, 1000)
    assert (stream, extra) == (77, None)
    assert values == [4096, 1 << 40, -5, 48, 1 << 33, 0, 0]
    assert "cuFuncSetAttribute" not in driver.asked


def test_much_shared_memory_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver([])
    launch = _launcher(monkeypatch, driver, (7,), shared=100_000)
    launch([0, 0])
    launch([0, 0])
    assert driver.asked.count("cuFuncSetAttribute") == driver.asked.count("cuModuleLoadData") == 1


def test_a_thread_without_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver([], [201])
    launch = _launcher(monkeypatch, driver, (7,))
    before = driver.asked.count("cuCtxSetCurrent")
    launch([0, 0])
    assert len(driver.launches) == 2 and driver.asked.count("cuCtxSetCurrent") == before + 1


def test_failures_are_told_and_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver([], [700])
    with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA error 700"):
        _launcher(monkeypatch, driver, (7,))([0, 0])
    empty = SimpleNamespace()
    _launcher(monkeypatch, empty, (7,), grid=(0, 1, 1))([0, 0])
