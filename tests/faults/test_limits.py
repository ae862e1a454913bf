"""Limits: on the file, a tensor, nesting, nodes, time and memory; and cancelling a run from another thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import Cancelled, DeadlineExceeded, InvalidConfig, RanvierError, ResourceLimit
from tests.faults.models import doubling, floats, model, nested_ifs, nested_loops, zeros

FOREVER = "g (float[n] x, bool c) => (float[n] y) { y = Loop (, c, x) <body = b (int64 i, bool going, float[n] a) \
=> (bool more, float[n] r) { more = Identity(going) r = Add(a, x) }> }"
EMPTY_BODY = "g (float[n] x, bool c) => (float[n] y) { y = Loop (, c, x) <body = b (int64 i, bool going, float[n] a) \
=> (bool going, float[n] a) { }> }"
GOING: dict[str, Any] = {"x": floats(1, 2), "c": np.array(True)}


# -- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [FOREVER, EMPTY_BODY], ids=["steps", "empty body"])
def test_an_endless_loop_ends_at_its_limit(text: str) -> None:
    with rv.load(model(text), limits=rv.Limits(run_seconds=0.6)) as session:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"passed its limit of 0\.6 s") as caught:
            session.run(GOING)
        assert time.monotonic() - started < 10
        # the loop, or the step inside it: wherever the run was at that moment
        assert isinstance(caught.value, TimeoutError) and caught.value.node in ("y", "more +1")
        out = session.run({**GOING, "c": np.array(False)})["y"]
        np.testing.assert_array_equal(out, [1, 2])


def test_an_endless_loop_over_constants_does_not_hang_the_load() -> None:
    text = "g () => (float[2] y) <bool c = {1}, float[2] x = {1, 2}> { y = Loop (, c, x) <body = b (int64 i, \
bool going, float[2] a) => (bool more, float[2] r) { more = Identity(going) r = Add(a, x) }> }"
    with rv.load(model(text), limits=rv.Limits(run_seconds=0.1)) as session, pytest.raises(DeadlineExceeded):
        session.run({})


def test_the_timeout_of_one_run() -> None:
    with rv.load(model(FOREVER)) as session:
        with pytest.raises(DeadlineExceeded, match=r"limit of 0\.1 s"):
            session.run(GOING, options=rv.RunOptions(timeout=0.1))
        assert session.run({**GOING, "c": np.array(False)})["y"].shape == (2,)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_timeouts_that_are_none(timeout: float) -> None:
    with pytest.raises(InvalidConfig, match="timeout must be a positive number"):
        rv.RunOptions(timeout=timeout)


def test_cancelling_from_another_thread() -> None:
    options = rv.RunOptions()
    timer = threading.Timer(0.1, lambda: setattr(options, "terminate", True))
    with rv.load(model(FOREVER)) as session:
        timer.start()
        started = time.monotonic()
        with pytest.raises(Cancelled, match="was cancelled at"):
            session.run(GOING, options=options)
        assert time.monotonic() - started < 5
    timer.join()


def test_one_long_node_can_be_cancelled_too() -> None:
    """A recurrent layer over a very long sequence is one node; it looks at the limits at every step."""
    steps = 200_000
    text = "g (float[t, 1, 1] x, float[1, 4, 1] w, float[1, 4, 1] r) => (y) { y = LSTM <hidden_size = 1> (x, w, r) }"
    with rv.load(model(text), limits=rv.Limits(run_seconds=0.2), providers=["reference"]) as session:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            session.run({"x": zeros(steps, 1, 1), "w": zeros(1, 4, 1), "r": zeros(1, 4, 1)})
        assert time.monotonic() - started < 2


PRODUCTS = (
    "g (float[n, n] v0) => (float[n, n] v400) {" + " ".join(f"v{k + 1} = MatMul(v{k}, v0)" for k in range(400)) + " }"
)


def test_generated_code_ends_at_the_limit() -> None:
    """Four hundred products are one call into native code, which takes seconds; it ends between two of them."""
    given = {"v0": np.eye(700, dtype=np.float32)}
    with rv.load(model(PRODUCTS), providers=["cpu"]) as session:
        session.bind(n=700)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"limit of 0\.1 s"):
            session.run(given, options=rv.RunOptions(timeout=0.1))
        assert time.monotonic() - started < 1.5
        options = rv.RunOptions()
        timer = threading.Timer(0.1, lambda: setattr(options, "terminate", True))
        timer.start()
        started = time.monotonic()
        with pytest.raises(Cancelled, match="was cancelled"):
            session.run(given, options=options)
        assert time.monotonic() - started < 1.5
        timer.join()


@pytest.mark.parametrize("threads", [1, 2])
def test_one_long_kernel_ends_at_the_limit(threads: int) -> None:
    given = {"x": np.ones((3000, 3000), np.float32)}
    with rv.load(model("g (float[n, n] x) => (y) { y = MatMul(x, x) }"), providers=["cpu"], threads=threads) as session:
        session.run({"x": np.ones((64, 64), np.float32)})
        session.bind(n=3000)
        started = time.monotonic()
        session.run(given)
        whole = time.monotonic() - started
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            session.run(given, options=rv.RunOptions(timeout=whole / 10))
        assert time.monotonic() - started < whole * 0.7


def test_an_enormous_window_ends_at_the_limit() -> None:
    text = "g (float[1, 1, 4] x) => (y) { y = MaxPool <kernel_shape = [50000000], pads = [25000000, 25000000]> (x) }"
    limits = rv.Limits(run_seconds=0.2)
    with rv.load(model(text), limits=limits, providers=["reference"]) as session, pytest.raises(DeadlineExceeded):
        session.run({"x": zeros(1, 1, 4)})
    with rv.load(model(text)) as session:  # generated code knows where the window meets data
        started = time.monotonic()
        assert session.run({"x": zeros(1, 1, 4)})["y"].tolist() == [[[0.0] * 5]]
        assert time.monotonic() - started < 5


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["none", "aggressive"])
@pytest.mark.parametrize(
    ("op", "kind", "first"), [("Concat <axis = 0>", "float", 1.0), ("StringConcat", "string", "ab")]
)
def test_growth_without_end_meets_the_limit_of_a_tensor(op: str, kind: str, first: Any, level: str) -> None:
    limits = rv.Limits(tensor_bytes=1 << 20)
    given = np.array([first], np.float32 if kind == "float" else object)
    with rv.load(doubling(op, kind), limits=limits, optimization=level) as session:
        with pytest.raises(ResourceLimit, match="tensor_bytes") as caught:
            session.run({"v0": given})
        assert caught.value.limit == "tensor_bytes" and caught.value.actual <= 2 << 20


@pytest.mark.parametrize(
    ("op", "kind", "first"), [("Concat <axis = 0>", "float", 1.0), ("StringConcat", "string", "ab")]
)
def test_growth_without_end_meets_the_limit_of_memory(op: str, kind: str, first: Any) -> None:
    """Twenty doublings fit a tensor's limit, but not all of them at once."""
    limits = rv.Limits(memory_bytes=1 << 22)
    given = np.array([first], np.float32 if kind == "float" else object)
    with rv.load(doubling(op, kind, 25), limits=limits) as session, pytest.raises(ResourceLimit, match="memory_bytes"):
        session.run({"v0": given})


def test_growth_of_constants_does_not_fill_the_memory_while_loading() -> None:
    made = doubling("Concat <axis = 0>", "float")
    made.graph.input.pop()
    made.graph.node.add(op_type="Constant", output=["v0"]).attribute.add(name="value_floats", type=6).floats.append(1)
    with rv.load(made) as session, pytest.raises(ResourceLimit, match="tensor_bytes"):
        session.run({})
    assert max(v.const.nbytes for v in session.graph.constants.values()) <= session.config.fold_limit


COLLECTING = "g (float[n] x, bool c) => (float[n] y, float[k, n] all) { y, all = Loop (, c, x) <body = b (int64 i, \
bool going, float[n] a) => (bool more, float[n] r, float[n] s) { more = Identity(going) r = Add(a, x) s = Neg(a) }> }"
APPENDING = "g (float[n] x, bool c) => (seq(float[n]) y) { e = SequenceConstruct(x) y = Loop (, c, e) <body = b \
(int64 i, bool going, seq(float[n]) a) => (bool more, seq(float[n]) r) \
{ more = Identity(going) q = Neg(x) r = SequenceInsert(a, q) }> }"
SQUARING = "g (float[n] x, bool c) => (y) { y = Loop (, c, x) <body = b (int64 i, bool going, a) => (more, r) \
{ more = Identity(going) tall = Constant <value_ints = [-1, 1]> () flat = Constant <value_ints = [-1]> () \
t = Reshape(a, tall) u = Mul(t, a) r = Reshape(u, flat) }> }"


@pytest.mark.parametrize("text", [COLLECTING, APPENDING], ids=["scan outputs", "a sequence"])
def test_what_a_loop_collects_counts(text: str) -> None:
    limits = rv.Limits(memory_bytes=20 << 20, run_seconds=30)
    with rv.load(model(text), limits=limits) as session, pytest.raises(ResourceLimit, match="memory_bytes"):
        session.run({"x": zeros(100_000), "c": np.array(True)})


def test_what_a_loop_carries_counts_once() -> None:
    """A thousand steps over a small state stay within a limit of a few states."""
    text = FOREVER.replace("Loop (, c, x)", "Loop (steps, c, x)").replace("bool c)", "bool c, int64 steps)", 1)
    with rv.load(model(text), limits=rv.Limits(memory_bytes=4 << 20)) as session:
        out = session.run({"x": np.ones(50_000, np.float32), "c": np.array(True), "steps": np.array(1000)})["y"]
    assert out[0] == 1001


def test_broadcasting_in_a_loop_meets_the_limit_of_a_tensor() -> None:
    limits = rv.Limits(tensor_bytes=1 << 24)
    with rv.load(model(SQUARING), limits=limits) as session, pytest.raises(ResourceLimit, match="tensor_bytes"):
        session.run(GOING)


def test_a_plan_that_needs_too_much_is_refused_before_it_runs() -> None:
    text = "g (float[n] x) => (float[m] y) { a = Concat <axis = 0> (x, x) b = Concat <axis = 0> (a, a) y = Neg(b) }"
    with rv.load(model(text), limits=rv.Limits(memory_bytes=1 << 20)) as session:
        with pytest.raises(ResourceLimit, match="planned buffers and outputs"):
            session.run({"x": zeros(100_000)})
        assert session.run({"x": zeros(100)})["y"].shape == (400,)


# -- loading --------------------------------------------------------------------------------------------------------


def test_limits_on_loading() -> None:
    data = model(FOREVER).SerializeToString()
    for limits, name in (
        (rv.Limits(model_bytes=len(data) - 1), "model_bytes"),
        (rv.Limits(graph_nodes=2), "graph_nodes"),
    ):
        with pytest.raises(ResourceLimit, match=name) as caught:
            rv.load(data, limits=limits)
        assert caught.value.limit == name
    with pytest.raises(ResourceLimit, match="graph_depth"):
        rv.load(nested_ifs(3), limits=rv.Limits(graph_depth=2))


def test_a_file_object_is_not_read_beyond_the_limit() -> None:
    class Endless:
        def read(self, count: int = -1) -> bytes:
            assert count > 0, "asked for everything"
            return b"\0" * count

    with pytest.raises(ResourceLimit, match="model_bytes"):
        rv.load(Endless(), limits=rv.Limits(model_bytes=1000))


def test_loops_in_loops_load_in_reasonable_time() -> None:
    """Inference walks a body until its types settle; nested, that must not multiply."""
    started = time.monotonic()
    with rv.load(nested_loops(25)) as session:
        out = session.run({"x": floats(1), "c": np.array(True), "steps": np.array(1)})["y0"]
    assert out.shape == (2,) and time.monotonic() - started < 10


@pytest.mark.parametrize("value", [0, -1, "many", True, float("nan")])
@pytest.mark.parametrize("name", ["model_bytes", "tensor_bytes", "graph_depth", "run_seconds", "memory_bytes"])
def test_limits_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} must be a positive number or None"):
        rv.Limits(**{name: value})


def test_an_unknown_limit_is_named() -> None:
    with pytest.raises(RanvierError, match=r"unknown option 'run_second' \(did you mean 'run_seconds'\?\)"):
        rv.Limits.make(run_second=1)
