"""Bodies of control flow: planned by shapes, the same results whatever happens to those shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import ranvier as rv
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.body import Body, _BodyPlan

RNG = np.random.default_rng(3)


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


CELL = """
loops (int64 count, float[B, 5] start, float[5, 5] w) => (float[B, 5] last, float[5, 5] kept, float[N, B, 5] all)
{
    yes = Constant <value = bool {1}> ()
    last, kept, all = Loop <body = step (int64 i, bool c, float[B, 5] h, float[5, 5] v) => (c2, h2, v2, out)
    {
        c2 = Identity (c)
        v2 = Identity (v)
        m = MatMul (h, v)
        s = Add (m, start)
        h2 = Tanh (s)
        out = Mul (h2, h2)
    }> (count, yes, start, w)
}
"""

GROWING = """
grows (int64 count, float[K] x) => (float[M] last)
{
    yes = Constant <value = bool {1}> ()
    x_sum = ReduceSum <keepdims = 0> (x)
    last = Loop <body = step (int64 i, bool c, float[N] h) => (c2, h2)
    {
        c2 = Identity (c)
        t = Add (h, x_sum)
        h2 = Concat <axis = 0> (t, x)
    }> (count, yes, x)
}
"""


def run(model: Any, feeds: dict[str, Any], providers: list[str]) -> list[Any]:
    with rv.load(model, providers=providers) as session:
        return list(session.run(feeds).values())


def cell(batch: int, count: int) -> dict[str, Any]:
    start, w = RNG.normal(size=(batch, 5)), RNG.normal(size=(5, 5))
    return {"count": np.array(count), "start": start.astype(np.float32), "w": w.astype(np.float32)}


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_loop_gives_what_its_steps_give(count: int) -> None:
    feeds = cell(3, count)
    last, kept, everything = run(parsed(CELL), feeds, ["cpu", "reference"])
    h = feeds["start"].astype(np.float64)
    for k in range(count):
        h = np.tanh(h @ feeds["w"] + feeds["start"])
        np.testing.assert_allclose(everything[k], h * h, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(last, h, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(kept, feeds["w"])
    assert everything.shape[0] == count


def test_results_that_are_operands_are_the_callers_own() -> None:
    feeds = cell(2, 3)
    with rv.load(parsed(CELL), providers=["cpu", "reference"]) as session:
        first = session.run(feeds)
        first["kept"][:] = 0
        first["last"][:] = 0
        again = session.run(feeds)
    np.testing.assert_array_equal(again["kept"], feeds["w"])
    assert np.any(again["last"])


def test_shapes_may_change_at_every_step() -> None:
    model = parsed(GROWING)
    x = RNG.normal(size=4).astype(np.float32)
    (found,) = run(model, {"count": np.array(40), "x": x}, ["cpu", "reference"])
    expected = x.astype(np.float64)
    for _ in range(40):
        expected = np.concatenate((expected + x.sum(dtype=np.float64), x))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_plans_are_made_once_per_set_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = Body._made

    def counting(self: Body, values: Any) -> Any:
        made.append(1)
        return real(self, values)

    monkeypatch.setattr(Body, "_made", counting)
    with rv.load(parsed(CELL), providers=["cpu", "reference"]) as session:
        for batch in (2, 3, 2, 3, 2):
            session.run(cell(batch, 6))
    assert len(made) == 2


def test_bodies_run_in_several_threads() -> None:
    feeds = [cell(1 + k % 3, 9) for k in range(12)]
    with rv.load(parsed(CELL), providers=["cpu", "reference"], threads=1) as session:
        alone = [session.run(f)["last"] for f in feeds]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda f: session.run(f)["last"], feeds))
    for a, b in zip(alone, together):
        np.testing.assert_array_equal(a, b)


def test_a_run_with_limits_gives_the_same() -> None:
    feeds = cell(3, 5)
    with rv.load(parsed(CELL), providers=["cpu", "reference"]) as session:
        plain = session.run(feeds)["last"]
        limited = session.run(feeds, options=rv.RunOptions(timeout=60.0))["last"]
    np.testing.assert_array_equal(plain, limited)


TWICE = """
twice (int64 count, float[B, 5] start, float[5, 5] w) => (float[B, 5] last, float[B, 5] same, float[5, 5] kept)
{
    yes = Constant <value = bool {1}> ()
    last, same, kept = Loop <body = one (int64 i, bool t, float[B, 5] h, float[B, 5] g, float[5, 5] v) => (t, h2, h2, v)
    {
        m = MatMul (g, v)
        h2 = Add (m, start)
    }> (count, yes, start, start, w)
}
"""


@pytest.mark.parametrize("secure", [False, True])
def test_a_body_of_one_kernel_is_called_at_once(secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With captures among its operands, and operands among its results; not in memory that must be cleared."""
    ways: list[str] = []

    def noting(name: str) -> Any:
        real = getattr(_BodyPlan, name)

        def noted(self: Any, *given: Any) -> Any:
            found = real(self, *given)
            ways.extend([name] if found is not None else [])
            return found

        return noted

    for name in ("run_directly", "run_steps"):
        monkeypatch.setattr(_BodyPlan, name, noting(name))
    feeds = cell(3, 4)
    memory = rv.MemoryConfig(secure=secure)
    with rv.load(parsed(TWICE), providers=["cpu", "reference"], memory=memory) as session:
        found = session.run(feeds)
    assert ways == ["run_steps" if secure else "run_directly"] * 4
    h = feeds["start"].astype(np.float64)
    for _ in range(4):
        h = h @ feeds["w"] + feeds["start"]
    np.testing.assert_allclose(found["last"], h, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["same"], found["last"])
    assert not np.shares_memory(found["same"], found["last"])
    np.testing.assert_array_equal(found["kept"], feeds["w"])


@pytest.mark.parametrize("secure", [False, True])
def test_nodes_of_bodies_count_as_run(secure: bool) -> None:
    def counted(steps: int) -> int:
        before = REGISTRY.ledger.operations().get("cpu", 0)
        session.run(cell(3, steps))
        return REGISTRY.ledger.operations()["cpu"] - before

    with rv.load(parsed(TWICE), providers=["cpu", "reference"], memory=rv.MemoryConfig(secure=secure)) as session:
        assert counted(6) - counted(4) == counted(4) - counted(2) >= 2 * 2  # MatMul and Add, of two steps


EITHER = """
either (bool c, int64[A] x, int64[B] z) => (int64[N] y)
{
  y = If (c) <
    then_branch = t () => (int64[N] a) { a = Concat <axis = 0> (x, z) },
    else_branch = e () => (int64[N] b) { b = Neg (z) }
  >
}
"""


def either(kind: str, condition: bool = True) -> dict[str, Any]:
    return {"c": np.array(condition), "x": np.arange(3).astype(kind), "z": np.arange(2).astype(kind)}


def test_element_types_that_are_equal_and_not_the_same_object_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.dtype("longlong") == np.dtype("int64") and np.dtype("longlong") is not np.dtype("int64")
    made: list[int] = []
    real = Body._made
    monkeypatch.setattr(Body, "_made", lambda self, values: made.append(1) or real(self, values))
    with rv.load(parsed(EITHER), providers=["cpu", "reference"]) as session:
        for kind in ("int64", "longlong") * 4:
            np.testing.assert_array_equal(session.run(either(kind))["y"], [0, 1, 2, 0, 1])
    assert len(made) == 1


@pytest.mark.parametrize("condition", [True, False])
def test_a_branch_gives_the_same_whatever_way_it_takes(condition: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, by its steps, without a plan, and while somebody watches or counts."""
    feeds = either("int64", condition)
    expected = [0, 1, 2, 0, 1] if condition else [0, -1]
    with rv.load(parsed(EITHER), providers=["cpu", "reference"]) as session:
        for _ in range(3):
            np.testing.assert_array_equal(session.run(feeds)["y"], expected)
        np.testing.assert_array_equal(session.run(feeds, options=rv.RunOptions(timeout=60.0))["y"], expected)
        with session.profile() as profile:
            np.testing.assert_array_equal(session.run(feeds)["y"], expected)
        assert {event.op for event in profile.events} == {"run", "If", "Concat" if condition else "Neg"}
        with monkeypatch.context() as patch:
            patch.setattr(_BodyPlan, "run_directly", lambda *given: None)
            np.testing.assert_array_equal(session.run(feeds)["y"], expected)
            patch.setattr(Body, "_plan", lambda *given: None)
            np.testing.assert_array_equal(session.run(feeds)["y"], expected)


@pytest.mark.parametrize("condition", [np.array([True, False]), np.zeros(0, bool)])
def test_a_condition_is_one_element(condition: np.ndarray) -> None:
    text = EITHER.replace("bool c", "bool[K] c")
    with (
        rv.load(parsed(text), providers=["cpu", "reference"]) as session,
        pytest.raises(rv.errors.ShapeMismatch, match="must hold one element"),
    ):
        session.run({**either("int64"), "c": condition})
