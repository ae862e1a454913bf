"""Functions that are compiled whole do what they did before, once for each signature."""

from __future__ import annotations

import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.errors import InvalidInput, TracingError
from ranvier.tensor.groups import groups
from ranvier.tensor.state import Parameter, Setting, State

X = np.linspace(-1, 1, 12).reshape(3, 4).astype(np.float32)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_it_is_traced_once_for_each_signature() -> None:
    runs = []

    @rv.jit
    def function(x: rv.Tensor, scale: float = 1.0) -> rv.Tensor:
        runs.append(1)
        return rnp.tanh(x * scale) + x

    for scale in (1.0, 2.0, 1.0):
        for factor in (1, 3):
            found = function(rv.Tensor(factor * X), scale)
            np.testing.assert_allclose(found.numpy(), np.tanh(factor * X * scale) + factor * X, rtol=1e-6)
    assert len(runs) == 2 == function.traces
    function(rv.Tensor(X.astype(np.float64)))
    function(rv.Tensor(X[:2]))
    assert len(runs) == 4
    assert function.__name__ == "function"


def test_trees_go_in_and_come_out() -> None:
    @rv.jit
    def function(tree: dict[str, Any], pair: Pair, *, more: list[Any]) -> Any:
        total = tree["a"] + tree["b"][0] * pair.second
        return {
            "total": total,
            "same": tree["a"],
            "fixed": rv.Tensor([7.0]),
            "text": "x",
            "n": [None, Pair(total * 2, 3)],
        }

    a, b = rv.Tensor([1.0, 2.0]), rv.Tensor([3.0, 4.0])
    for _ in range(2):
        found = function({"a": a, "b": (b,)}, Pair("label", 2.0), more=[])
        assert found["total"].tolist() == [7.0, 10.0] and found["same"].tolist() == [1.0, 2.0]
        assert found["fixed"].tolist() == [7.0] and found["text"] == "x"
        assert found["n"][0] is None and found["n"][1].first.tolist() == [14.0, 20.0] and found["n"][1].second == 3
    assert function.traces == 1
    function({"a": a, "b": [b]}, Pair("label", 2.0), more=[])
    assert function.traces == 2


def test_static_arguments() -> None:
    @rv.jit(static_argnames=("how",))
    def function(x: rv.Tensor, how: tuple[str, ...]) -> rv.Tensor:
        for name in how:
            x = getattr(rnp, name)(x)
        return x

    assert function(rv.Tensor([0.0]), ("cos", "exp")).item() == pytest.approx(np.e)
    assert function(rv.Tensor([0.0]), how=("cos",)).item() == 1.0
    with pytest.raises(InvalidInput, match="hashable"):
        function(rv.Tensor([0.0]), how=["cos"])
    with pytest.raises(InvalidInput, match="no argument other"):
        rv.jit(static_argnames="other")(lambda x: x)


def test_arrays_as_arguments_are_not_shared_with_what_comes_out() -> None:
    passing = rv.jit(lambda x: (x, x + 1))
    array = X.copy()
    same, more = passing(array)
    array[:] = 0
    np.testing.assert_array_equal(same.numpy(), X)
    np.testing.assert_array_equal(more.numpy(), X + 1)


def test_a_training_step_is_one_graph_and_states_keep_their_memory() -> None:
    draw = np.random.default_rng(0)
    first = draw.standard_normal((4, 5)).astype(np.float32)
    x, target = draw.standard_normal((6, 4)).astype(np.float32), draw.standard_normal((6, 5)).astype(np.float32)

    def trained(compiled: bool) -> tuple[list[float], Any, Any, list[int]]:
        w, momentum = Parameter(first), State(np.zeros((4, 5), np.float32))

        def step(x: rv.Tensor, t: rv.Tensor) -> rv.Tensor:
            w.grad = None
            loss = ((rnp.tanh(x @ w) - t) ** 2).mean()
            loss.backward()
            assert w.grad is not None
            momentum.assign(0.9 * momentum + w.grad)
            w.assign(w - 0.1 * momentum)
            return loss

        run = rv.jit(step) if compiled else step
        places, losses = [], []
        for _ in range(6):
            losses.append(float(run(rv.Tensor(x), rv.Tensor(target))))
            places.append(w.numpy().ctypes.data)
        assert w.grad is not None
        return losses, w.numpy(), w.grad.numpy(), places

    eager, found = trained(False), trained(True)
    np.testing.assert_allclose(found[0], eager[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], eager[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[2], eager[2], rtol=1e-4, atol=1e-6)
    assert len(set(found[3])) == 1


def test_nothing_is_allocated_from_step_to_step() -> None:
    w, momentum = (kind(np.full((256, 256), 0.01, np.float32)) for kind in (Parameter, State))

    @rv.jit
    def step(x: rv.Tensor) -> rv.Tensor:
        w.grad = None
        loss = (rnp.tanh(x @ w) ** 2).mean()
        loss.backward()
        momentum.assign(0.9 * momentum + w.grad)
        w.assign(w - 0.1 * momentum)
        return loss

    x = rv.Tensor(np.ones((8, 256), np.float32))
    for _ in range(3):
        step(x)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            step(x)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before < w.nbytes // 4


def test_old_values_that_somebody_holds_are_left_alone() -> None:
    state = State(np.zeros(4, np.float32))

    @rv.jit
    def count() -> None:
        state.assign(state + 1)

    held: list[Any] = []
    for k in range(4):
        held += [(k, state.value), (k, state.numpy()), (k, state.numpy()[1:]), (2 * k, state * 2)]
        count()
    assert state.tolist() == [4.0] * 4
    for expected, each in held:
        assert np.asarray(each).tolist()[-1] == expected
    assert count.traces == 1


def test_gradients_that_somebody_holds_are_left_alone() -> None:
    w = Parameter([1.0, 2.0])

    @rv.jit
    def fresh(x: rv.Tensor) -> None:
        w.grad = None
        (w * x).sum().backward()

    @rv.jit
    def more(x: rv.Tensor) -> None:
        (w * x).sum().backward()

    held: list[Any] = []
    for k in range(1, 6):
        fresh(rv.Tensor([1.0 * k, 0.0]))
        held.append((k, w.grad))
        more(rv.Tensor([10.0 * k, 0.0]))
        held.append((11 * k, w.grad))
    assert [grad.tolist()[0] for _, grad in held] == [number for number, _ in held]


def test_gradients_gather_over_calls() -> None:
    w = Parameter([1.0, 2.0])

    @rv.jit
    def add(x: rv.Tensor) -> None:
        (w * x).sum().backward()

    for k in range(4):
        add(rv.Tensor([1.0, 10.0]))
        assert w.grad is not None and w.grad.tolist() == [k + 1.0, 10.0 * (k + 1)]
    assert add.traces == 2  # without a gradient before, and with one


def test_what_python_holds_is_seen_where_it_is_a_setting() -> None:
    training, w = Setting(True), Parameter([1.0])

    @rv.jit
    def function(x: rv.Tensor) -> rv.Tensor:
        return x * 2 if training.value else x * w

    x = rv.Tensor([3.0])
    assert function(x).item() == 6.0
    training.value = False
    assert function(x).item() == 3.0
    training.value = True
    assert function(x).item() == 6.0
    assert function.traces == 2
    w.requires_grad = False
    training.value = False
    assert function(x).item() == 3.0
    assert function.traces == 3


def test_inside_of_each_other_and_with_gradients() -> None:
    inner = rv.jit(lambda x: (rnp.sin(x) * x).sum())
    x = rv.Tensor(X.astype(np.float64))
    slope = np.cos(X.astype(np.float64)) * X + np.sin(X.astype(np.float64))
    for derived in (rv.grad(inner), rv.jit(rv.grad(inner)), rv.jit(rv.grad(rv.jit(lambda y: inner(y))))):
        np.testing.assert_allclose(derived(x).numpy(), slope, rtol=1e-12)
    second = rv.jit(rv.grad(lambda y: rv.grad(inner)(y).sum()))
    plain = rv.grad(lambda y: rv.grad(lambda z: (rnp.sin(z) * z).sum())(y).sum())
    np.testing.assert_allclose(second(x).numpy(), plain(x).numpy(), rtol=1e-12)


def test_what_a_compiled_function_made_of_parameters_can_be_derived_outside() -> None:
    w = Parameter([2.0, 3.0])

    @rv.jit
    def forward(x: rv.Tensor) -> tuple[rv.Tensor, rv.Tensor]:
        return rnp.exp(x * w), x + 1

    x = rv.Tensor([1.0, 0.5])
    for _ in range(2):
        out, _other = forward(x)
        (out * 2).sum().backward()
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.numpy(), 4 * np.exp([2.0, 1.5]) * [1.0, 0.5], rtol=1e-5)
    with rv.no_grad(), pytest.raises(InvalidInput):
        forward(x)[0].sum().backward()


def test_captured_variables_are_no_constants() -> None:
    def outer(w: rv.Tensor) -> rv.Tensor:
        return rv.jit(lambda x: x * w)(rv.Tensor(3.0))

    assert rv.grad(outer)(rv.Tensor(2.0)).item() == 3.0


def line_in_message(error: pytest.ExceptionInfo[BaseException], text: str) -> None:
    """The message names the line of this file that has this text."""
    found = re.search(rf"{re.escape(__file__)}:(\d+)", str(error.value))
    assert found, str(error.value)
    with open(__file__) as source:
        assert text in source.read().splitlines()[int(found.group(1)) - 1]


def test_looking_at_a_value_is_an_error_at_the_users_line() -> None:
    @rv.jit
    def branching(x: rv.Tensor) -> rv.Tensor:
        if x.sum() > 0:  # here
            return x
        return -x

    @rv.jit
    def looking(x: rv.Tensor) -> rv.Tensor:
        return x * float(x[0])  # there

    for function, mark in ((branching, "# here"), (looking, "# there")):
        with pytest.raises(TracingError) as caught:
            function(rv.Tensor([1.0, 2.0]))
        line_in_message(caught, mark)
    assert rv.jit(lambda x: (x, repr(x)))(rv.Tensor([1.0]))[1] == "Tensor(traced, shape=[1], dtype=float32)"


def test_leaked_tensors_are_an_error_at_the_line_that_uses_them() -> None:
    leaked: list[rv.Tensor] = []

    @rv.jit
    def leaking(x: rv.Tensor) -> rv.Tensor:
        leaked.append(x * 2)
        return x

    leaking(rv.Tensor([1.0]))
    with pytest.raises(TracingError, match="State") as caught:
        leaked[0].numpy()  # outside
    line_in_message(caught, "# outside")
    with pytest.raises(TracingError, match="another"):
        rv.jit(lambda x: x + leaked[0])(rv.Tensor([1.0]))


def test_a_failing_function_leaves_states_as_they_were() -> None:
    state = State([1.0])

    @rv.jit
    def failing(x: rv.Tensor) -> rv.Tensor:
        state.assign(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing(rv.Tensor([5.0]))
    assert state.tolist() == [1.0] and (state + 1).tolist() == [2.0]


def test_methods_states_as_arguments_and_results() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = State([0.0])

        @rv.jit
        def add(self, x: rv.Tensor) -> State:
            self.total.assign(self.total + x)
            return self.total

    one, other = Counter(), Counter()
    for _ in range(3):
        assert one.add(rv.Tensor([2.0])) is one.total
    other.add(rv.Tensor([1.0]))
    assert one.total.tolist() == [6.0] and other.total.tolist() == [1.0]
    double = rv.jit(lambda state: state * 2)
    assert double(one.total).tolist() == [12.0] and double(other.total).tolist() == [2.0]


def test_calls_from_several_threads() -> None:
    total = State(np.zeros(3))

    @rv.jit
    def add(x: rv.Tensor) -> None:
        total.assign(total + x)

    double = rv.jit(lambda x: rnp.exp(x) * 2)

    def work(k: int) -> None:
        for _ in range(25):
            add(rv.Tensor([1.0, 10.0, float(k)], "float64"))
            np.testing.assert_allclose(double(np.full(4, float(k))).numpy(), 2 * np.exp(k))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert total.tolist() == [100.0, 1000.0, 25.0 * 6]
    assert (add.traces, double.traces) == (1, 1)


def test_several_tensors_are_computed_together() -> None:
    x = rv.Tensor(np.full((5, 7), 0.3))
    shared = rnp.exp(x)
    before = groups.made
    a, b = shared + 1, {"b": [shared * 2]}
    rv.realise(a, b)
    assert groups.made == before + 1
    assert a._expr.array is not None and b["b"][0]._expr.array is not None
    np.testing.assert_allclose(b["b"][0].numpy(), 2 * np.exp(0.3), rtol=1e-12)
