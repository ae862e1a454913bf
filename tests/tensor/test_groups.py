"""How tensors are computed: lazily, in groups that are compiled once, with what the user still holds."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.errors import DeviceMismatch, RanvierError
from ranvier.tensor.expr import line_of
from ranvier.tensor.groups import DEEPEST, Cache, Group, groups


def made_by(work: object) -> int:
    """How many groups are compiled by a call."""
    before = groups.made
    work()  # type: ignore[operator]
    return groups.made - before


def test_nothing_is_computed_before_somebody_looks() -> None:
    x = rv.Tensor(np.ones((3, 4), np.float32))
    y = rnp.exp(x) * 2 + x
    assert y._expr.array is None and y.shape == (3, 4) and y.dtype is rnp.float32
    y.numpy()
    assert y._expr.array is not None and y._expr.inputs == ()


def test_a_loop_over_equal_shapes_compiles_once() -> None:
    def loop(turns: int) -> None:
        x = rv.Tensor(np.ones((7, 5), np.float32))
        for k in range(turns):
            x = rnp.tanh(x * (0.1 * k) + x[k % 7])
            x.numpy()

    loop(3)
    assert made_by(lambda: loop(20)) == 0


def test_other_shapes_types_attributes_and_wirings_are_other_groups() -> None:
    x = rv.Tensor(np.ones((6, 3), np.float32))
    y = rv.Tensor(np.full((6, 3), 2, np.float32))

    def results() -> list[float]:
        work = [x - y, y - x, x - x, x[:2] - y[:2], x.astype("float64") - y.astype("float64")]
        work += [rnp.softmax(x, axis=0), rnp.softmax(x, axis=1)]
        return [float(each.numpy().ravel()[0]) for each in work]

    expected = [-1.0, 1.0, 0.0, -1.0, -1.0, 1 / 6, 1 / 3]
    for _ in range(2):
        np.testing.assert_allclose(results(), expected, rtol=1e-6)


def test_what_the_user_holds_on_the_way_is_computed_with_the_rest() -> None:
    x = rv.Tensor(np.ones((3, 3), np.float32))
    held = x + 1
    total = (held * 2).sum()
    total.numpy()
    assert held._expr.array is not None
    assert held.tolist() == [[2.0] * 3] * 3


def test_what_nobody_holds_is_gone() -> None:
    x = rv.Tensor(np.ones((3, 3), np.float32))
    step = x + 1
    inner = weakref.ref(step._expr)
    total = (step * 2).sum()
    del step
    total.numpy()
    gc.collect()
    assert inner() is None


def test_a_chain_that_nobody_looks_at_does_not_grow_without_end() -> None:
    x = rv.Tensor(np.zeros(4, np.float32))
    for _ in range(2 * DEEPEST + 10):
        x = x + 1
        assert x._expr.depth <= DEEPEST + 1
    assert x.tolist() == [2 * DEEPEST + 10] * 4


def test_values_cannot_be_written_to() -> None:
    source = np.ones(3, np.float32)
    x = rv.Tensor(source)
    source[0] = 5
    assert x.tolist() == [1, 1, 1]
    for array in (x.numpy(), (x + 1).numpy(), rnp.zeros(2).numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_the_cache_keeps_those_used_last() -> None:
    cache = Cache(2)
    a, b, c = (object.__new__(Group) for _ in range(3))
    cache.keep("a", a), cache.keep("b", b)
    cache.find("a")
    cache.keep("c", c)
    assert cache.find("a") is a and cache.find("b") is None and cache.find("c") is c


def test_the_backend_that_is_asked_for_computes() -> None:
    x = rv.Tensor(np.full((2, 9), 0.5, np.float32))
    plain = rnp.sin(x * 3).numpy()
    with rv.backend("reference"):
        found = rnp.sin(x * 3)
        assert made_by(found.numpy) == 1  # the same structure, compiled for another provider
    group = next(reversed(groups._groups.values()))
    assert {entry.provider for entry in group.session.report.nodes} == {"reference"}
    np.testing.assert_allclose(found.numpy(), plain, rtol=1e-6)


def test_threads_compute_at_the_same_time() -> None:
    x = rv.Tensor(np.arange(50, dtype=np.float32))
    shared = [x * 2 for _ in range(20)]
    found: list[float] = []

    def work(k: int) -> None:
        for each in shared:
            found.append(float((each + k).sum()) - 50 * k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {2450.0} and len(found) == 80


def test_an_operation_knows_the_line_it_stands_in() -> None:
    x = rv.Tensor([1.0])
    y = rnp.logaddexp(x, x)  # the line this is about
    number = test_an_operation_knows_the_line_it_stands_in.__code__.co_firstlineno + 2
    assert line_of(y._expr) == f"{__file__}:{number}"


def test_devices() -> None:
    x = rv.Tensor([1.0, 2.0])
    assert str(x.device) == "cpu" and x.to_device("cpu") is x
    with pytest.raises(DeviceMismatch, match="nothing computes on"):
        x.to_device("nowhere:3")
    with pytest.raises(RanvierError):
        x.to_device(7)


def test_what_is_on_a_device_stays_there() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = rv.Tensor(array).to_device("sim:0")
    y = x + 1
    found = {
        "number": (y[1], (array + 1)[1]),
        "indices": (y[[0, 2]], (array + 1)[[0, 2]]),
        "pairs": (y[rv.Tensor([0, 2]), rv.Tensor([1, 3])], (array + 1)[[0, 2], [1, 3]]),
        "running": (rnp.cumulative_sum(y, axis=1, include_initial=True)[:, 1:], np.cumsum(array + 1, 1)),
        "assigned": (y.copy(), array + 1),
        "derived": (rv.grad(lambda p: (p * p).sum())(x), 2 * array),
    }
    found["assigned"][0][1] = 0.0
    found["assigned"][1][1] = 0.0
    for each, expected in found.values():
        assert str(each.device) == "sim:0"
        np.testing.assert_allclose(each.numpy(), expected)
    with pytest.raises(DeviceMismatch, match="sim:0"):
        x + rv.Tensor(array)
