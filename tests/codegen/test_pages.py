"""Memory for packed weights."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from ranvier.codegen import pages

F32 = np.dtype(np.float32)


def _place(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return array.ctypes.data, array.ctypes.data + array.nbytes


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_chunk", None)


@pytest.mark.parametrize("shape", [(3,), (0, 4), (1, 20_001), (300, 401), (3, 100_001), (1100, 1000), (9, 1_000_003)])
@pytest.mark.parametrize("dtype", [F32, np.dtype(np.int8), np.dtype(np.uint16)])
def test_arrays_are_as_asked_for(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    found = pages.packed_empty(shape, dtype)
    assert found.shape == shape and found.dtype == dtype and found.flags.c_contiguous and found.flags.writeable
    assert found.ctypes.data % 64 == 0 or not found.size
    found[...] = 3
    assert (found == 3).all()


def test_arrays_do_not_overlap_and_begin_in_a_page() -> None:
    made = [pages.packed_empty((size,), F32) for size in (20_000, 900_001, 400_003, 17_001, 1_000_000) * 4]
    for number, array in enumerate(made):
        array.fill(number)
    places = sorted(map(_place, made))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert all((array == number).all() for number, array in enumerate(made))
    if pages._ADVICE is not None:
        assert made[0].ctypes.data % pages._PAGE == 0
        assert 0 <= made[1].ctypes.data - _place(made[0])[1] < 64  # side by side


def test_large_arrays_begin_at_a_page() -> None:
    made = [pages.packed_empty((pages._MOST + extra,), np.dtype(np.uint8)) for extra in (0, 1, 3 << 20)]
    for number, array in enumerate(made):
        array.fill(number)
    assert all((array == number).all() for number, array in enumerate(made))
    if pages._ADVICE is not None:
        assert all(array.ctypes.data % pages._PAGE == 0 for array in made)


def test_memory_lives_as_long_as_its_arrays() -> None:
    first = pages.packed_empty((500_000,), F32)
    first.fill(7)
    others = [pages.packed_empty((1_000_000,), F32) for _ in range(8)]  # other chunks
    del others
    gc.collect()
    assert (first == 7).all()


def test_threads_get_memory_of_their_own() -> None:
    made: list[np.ndarray[Any, Any]] = []

    def work() -> None:
        for _ in range(20):
            made.append(pages.packed_empty((30_000,), F32))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = sorted(map(_place, made))
    assert len(places) == 80 and all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_no_memory_is_an_error_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    if pages._ADVICE is None:
        pytest.skip("no large pages here")

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pages.mmap, "mmap", refused)
    with pytest.raises(MemoryError, match="for weights"):
        pages.packed_empty((100_000,), F32)


def test_systems_without_large_pages_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ADVICE", None)
    assert pages.packed_empty((100_000,), F32).shape == (100_000,)
    assert pages._chunk is None


def test_places_of_arrays_that_are_gone_serve_again() -> None:
    if pages._ADVICE is None:
        pytest.skip("no large pages here")
    first, second, third = (pages.packed_empty((100_000,), F32).reshape(10, -1) for _ in range(3))
    places = [array.ctypes.data for array in (first, second, third)]
    kept = second[1:]  # whatever was made of an array keeps its place
    del second
    gc.collect()
    assert pages.packed_empty((100_000,), F32).ctypes.data > places[2]
    del kept
    gc.collect()
    again = pages.packed_empty((100_000,), F32)
    assert again.ctypes.data == places[1]
    del first, again, third
    gc.collect()
    assert pages._chunk is not None and pages._chunk._free == [(0, pages._CHUNK)]  # and is one piece again
