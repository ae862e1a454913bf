"""Memory of large results: lent once, back when the last array over it has gone, and never without bounds."""

from __future__ import annotations

import gc
import threading

import numpy as np
from onnx import TensorProto, helper

import ranvier as rv
from ranvier.runtime.outputs import FROM_BYTES, Blocks
from tests.runtime.small_models import model_of, tensor

FLOAT = np.dtype(np.float32)
LARGE = FROM_BYTES // 4


def test_a_block_comes_back_when_the_last_view_has_gone() -> None:
    blocks = Blocks()
    first = blocks.empty((2, LARGE), FLOAT)
    assert first.shape == (2, LARGE) and first.dtype == FLOAT and type(first) is np.ndarray
    assert first.flags.c_contiguous and first.flags.writeable and first.flags.aligned
    at = first.ctypes.data
    first[:] = 7
    part = first[1, 5:9].view(np.int32)
    del first
    gc.collect()
    assert blocks.nbytes == 0 and blocks.empty((2, LARGE), FLOAT).ctypes.data != at
    np.testing.assert_array_equal(part.view(FLOAT), [7] * 4)
    del part
    again = [blocks.empty((LARGE, 2), FLOAT) for _ in range(2)]  # another shape, the same size
    assert at in [x.ctypes.data for x in again] and blocks.nbytes == 0


def test_a_result_that_grows_finds_the_memory_of_those_before_it() -> None:
    blocks = Blocks()
    cache = blocks.empty((LARGE,), FLOAT)
    places = set()
    for step in range(1, 65):
        grown = blocks.empty((LARGE + 64 * step,), FLOAT)
        grown[: cache.size] = cache
        grown[cache.size :] = step
        cache = grown
        places.add(cache.ctypes.data)
    assert len(places) <= 6
    np.testing.assert_array_equal(cache[LARGE:], np.repeat(np.arange(1.0, 65.0), 64))


def test_two_results_never_share_memory() -> None:
    blocks = Blocks()
    for _ in range(3):
        held = [blocks.empty((LARGE + 16 * k,), FLOAT) for k in (0, 0, 1, 1, 2)]
        for k, each in enumerate(held):
            each[:] = k
        for k, each in enumerate(held):
            assert (each == k).all()


def test_small_and_empty_results_are_numpys_own() -> None:
    blocks = Blocks()
    for shape in ((), (0,), (3, 0, 1 << 30), (LARGE - 1,)):
        made = blocks.empty(shape, FLOAT)
        assert made.shape == shape and made.base is None
    assert blocks.empty((LARGE,), np.dtype(object)).base is None


def test_what_waits_is_bounded() -> None:
    blocks = Blocks(limit=3 * FROM_BYTES)
    held = [blocks.empty((LARGE + 64 * k,), FLOAT) for k in range(6)]
    newest = held[-1].ctypes.data
    while held:
        held.pop(0)
    assert 0 < blocks.nbytes <= 3 * FROM_BYTES
    assert blocks.empty((LARGE + 64 * 5,), FLOAT).ctypes.data == newest  # the oldest went first
    del_me = blocks.empty((4 * LARGE,), FLOAT)
    waiting = blocks.nbytes
    del del_me
    assert blocks.nbytes == waiting  # too large to wait at all
    blocks.clear()
    assert blocks.nbytes == 0 and blocks.empty((LARGE,), FLOAT).shape == (LARGE,)


def test_results_of_many_threads() -> None:
    blocks = Blocks(limit=8 * FROM_BYTES)
    wrong: list[int] = []

    def work(number: int) -> None:
        for k in range(200):
            made = [blocks.empty((LARGE + 64 * (k % 3),), FLOAT) for _ in range(2)]
            made[0][:], made[1][:] = number, -number
            if not ((made[0] == number).all() and (made[1] == -number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and blocks.nbytes <= 8 * FROM_BYTES


def test_a_session_uses_the_memory_of_dropped_results_again() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"])
    shape = [3, LARGE]
    model = model_of([node], [tensor("x", TensorProto.FLOAT, shape)], [tensor("y", TensorProto.FLOAT, shape)])
    x = np.arange(3 * LARGE, dtype=np.float32).reshape(shape)
    with rv.load(model.SerializeToString()) as session:
        first = session.run({"x": x})["y"]
        second = session.run({"x": x + 1})["y"]
        at = first.ctypes.data
        np.testing.assert_array_equal(first, 2 * x)
        assert second.ctypes.data != at
        del first
        third = session.run({"x": x + 2})["y"]
        assert third.ctypes.data == at
        np.testing.assert_array_equal(second, 2 * (x + 1))
        np.testing.assert_array_equal(third, 2 * (x + 2))
