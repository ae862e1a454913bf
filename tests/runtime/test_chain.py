"""Calls of models with an If go from one piece of native code to the next: as they do the long way, or that way."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import ranvier as rv
from ranvier.errors import RanvierError
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.chain import Chain

RNG = np.random.default_rng(11)
OFTEN = 20  # calls, more than it takes


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


# the branches differ in shape, one reads what an earlier step made, and one input is not read at all
BRANCHES = parsed("""
g (float[2,3] x, int64[3] unused, float limit) => (float[A,B] y, float s)
{
  s = ReduceSum <keepdims: int = 0> (x)
  c = Greater (s, limit)
  y = If (c) <
    then_branch = large () => (float[2,3] a) { t = Mul (x, s) a = Exp (t) },
    else_branch = small () => (float[4,3] b) { d = Concat <axis: int = 0> (x, x) b = Neg (d) }
  >
}
""")

# what follows an If goes on from either of its bodies; one of these asks again
NESTED = parsed("""
g (float[5] x, float[5] z) => (float[5] y)
{
  zero = Constant <value: tensor = float {0}> ()
  s = ReduceSum <keepdims: int = 0> (x)
  c = Greater (s, zero)
  m = If (c) <
    then_branch = outer () => (float[5] a) {
      w = ReduceSum <keepdims: int = 0> (z)
      also = Greater (w, s)
      a = If (also) <
        then_branch = both () => (float[5] p) { p = Add (x, z) },
        else_branch = one () => (float[5] q) { q = Mul (x, w) }
      >
    },
    else_branch = none () => (float[5] b) { b = Neg (z) }
  >
  k = Mul (m, x)
  y = Tanh (k)
}
""")


def feed(large: bool) -> dict[str, Any]:
    x = RNG.uniform(0.1, 1, (2, 3)).astype(np.float32)
    return {"x": x, "unused": np.arange(3), "limit": np.array(0 if large else 100, np.float32)}


def nested_feed(first: bool, second: bool) -> dict[str, Any]:
    x = RNG.uniform(0.1, 1, 5).astype(np.float32) * (1 if first else -1)
    return {"x": x, "z": RNG.uniform(0.1, 1, 5).astype(np.float32) * (20 if second else -1)}


def called(source: onnx.ModelProto, *feeds: dict[str, Any], **options: Any) -> rv.Session:
    """A session that knows such calls."""
    session = rv.load(source, threads=1, **options)
    for _ in range(OFTEN):
        for each in feeds:
            session.run(each)
    return session


def chain_of(session: rv.Session) -> Chain | None:
    found = [plan.opened for plan in session._compiled.plans()]
    return next((each for each in found if isinstance(each, Chain)), None)


def same(found: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert found is not None and list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_either_branch_gives_what_the_reference_gives() -> None:
    with called(BRANCHES, feed(True)) as session, rv.load(BRANCHES, providers=["reference"]) as reference:
        for k in range(40):
            given = feed(k % 3 == 0)
            expected = reference.run(given)
            found = session.run_again(given)
            same(found, expected)
            assert found is not None
            for each in found.values():
                each[...] = 0  # what callers get is theirs
            same(session.run(dict(reversed(given.items()))), expected)


def test_it_is_the_long_way_bit_by_bit() -> None:
    with called(BRANCHES, feed(True)) as session:
        for large in (True, False):
            given = feed(large)
            short = session.run_again(given)
            long = session.run(given, options=rv.RunOptions())
            assert short is not None
            for name, value in long.items():
                np.testing.assert_array_equal(short[name], value)


def test_branches_in_branches_and_what_follows() -> None:
    with called(NESTED, nested_feed(True, True)) as session, rv.load(NESTED, providers=["reference"]) as reference:
        for first in (True, False):
            for second in (True, False):
                for _ in range(5):
                    given = nested_feed(first, second)
                    same(session.run_again(given), reference.run(given))


@pytest.mark.parametrize(
    "change",
    [{"x": np.zeros((3, 3), np.float32)}, {"unused": np.zeros(3)}, {"limit": None}, {"other": np.zeros(1)}],
    ids=["a size", "an element type of what nobody reads", "None", "a name"],
)
def test_wrong_inputs_are_told_as_ever(change: dict[str, Any]) -> None:
    given = feed(True)
    with called(BRANCHES, given) as session, rv.load(BRANCHES, threads=1) as new:
        for wrong in ({**given, **change}, {"x": given["x"]}, None, {}):
            assert session.run_again(wrong) is None
            with pytest.raises(RanvierError) as expected:
                new.run(wrong)  # type: ignore[arg-type]
            with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
                session.run(wrong)  # type: ignore[arg-type]
        same(session.run_again(given), session.run(given))


def test_several_threads_and_trims() -> None:
    feeds = [feed(k % 2 == 0) for k in range(8)]
    with called(BRANCHES, *feeds[:2]) as session:
        expected = [session.run(each) for each in feeds]
        start = threading.Barrier(4)

        def work(k: int) -> bool:
            start.wait()
            for _ in range(150):
                for j in (k, k + 4):
                    same(session.run(feeds[j]), expected[j])
            return True

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, k) for k in range(4)]
            for _ in range(20):
                session.trim()
            assert all(future.result() for future in futures)
        assert session.memory().arenas_in_use == 0


def test_memory_is_given_back_and_taken_again() -> None:
    given = feed(True)
    with called(BRANCHES, given) as session:
        expected = session.run(given)
        session.trim()
        assert session.memory().arenas_in_use == 0 and session.run_again(given) is None
        for _ in range(OFTEN):
            same(session.run(given), expected)
        same(session.run_again(given), expected)


def test_the_way_into_a_body_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may be asked back when that of the rest is not."""
    given = feed(True)
    with called(BRANCHES, given) as session:
        expected = session.run_again(given)
        assert expected is not None
        for item in session._parts:
            for body in item.kernel.bodies() if hasattr(item.kernel, "bodies") else ():
                body.release_arenas()
        same(session.run_again(given), expected)


def test_runs_are_counted() -> None:
    given = feed(True)
    before = REGISTRY.ledger.operations()
    with called(BRANCHES, given) as session:
        first = REGISTRY.ledger.operations()
        nodes = {name: (count - before.get(name, 0)) // OFTEN for name, count in first.items()}
        for _ in range(7):
            assert session.run_again(given) is not None
        after = REGISTRY.ledger.operations()
    assert {name: after[name] - first[name] for name in nodes} == {name: 7 * each for name, each in nodes.items()}
    assert nodes["cpu"] == 4 and nodes["reference"] == 1


def test_profiles_go_the_long_way() -> None:
    given = feed(True)
    with called(BRANCHES, given) as session:
        expected = session.run_again(given)
        assert expected is not None
        with session.profile() as profile:
            assert session.run_again(given) is None
            same(session.run(given), expected)
        assert any(event.op == "If" for event in profile.events)


REFUSED = parsed("""
g (bool[1] flag, float[5] x, int64[2] i) => (float[2] y)
{
  c = Not (flag)
  y = If (c) <
    then_branch = picks () => (float[2] a) { a = Gather (x, i) },
    else_branch = other () => (float[2] b) { b = Cast <to: int = 1> (i) }
  >
}
""")


def test_data_that_a_branch_refuses() -> None:
    x = RNG.standard_normal(5).astype(np.float32)
    good = {"flag": np.array([False]), "x": x, "i": np.array([1, 4])}
    bad = {**good, "i": np.array([1, 5])}
    with called(REFUSED, good) as session, rv.load(REFUSED, providers=["reference"]) as reference:
        with pytest.raises(RanvierError) as expected:
            reference.run(bad)
        assert session.run_again(bad) is None
        with pytest.raises(type(expected.value)):
            session.run(bad)
        same(session.run_again(good), {"y": x[[1, 4]]})
        same(session.run_again({**bad, "flag": np.array([True])}), {"y": np.array([1, 5], np.float32)})


def test_a_chain_that_often_breaks_off_is_given_up() -> None:
    good = {"flag": np.array([False]), "x": np.arange(5, dtype=np.float32), "i": np.array([1, 4])}
    bad = {**good, "i": np.array([1, 5])}
    with called(REFUSED, good) as session:
        chain = chain_of(session)
        assert chain is not None and chain.run(good) is not None
        while chain.run(good) is not None:
            assert chain.run(bad) is None
            assert chain.runs < 1000
        same(session.run(good), {"y": np.array([1, 4], np.float32)})


# the results of one branch are a value from around it, and the same twice
PASSING = parsed("""
g (float[4] x, float[4] z) => (float[4] y, float[4] v)
{
  zero = Constant <value: tensor = float {0}> ()
  s = ReduceSum <keepdims: int = 0> (x)
  c = Greater (s, zero)
  y, v = If (c) <
    then_branch = passes () => (float[4] x, float[4] x) { },
    else_branch = makes () => (float[4] b, float[4] b) { b = Add (x, z) }
  >
}
""")


@pytest.mark.parametrize("providers", [["cpu", "reference"], ["reference"]])
def test_values_that_are_passed_through_are_the_callers_own(providers: list[str]) -> None:
    z = np.arange(4, dtype=np.float32)
    for x in (np.ones(4, np.float32), -np.ones(4, np.float32)):
        given = {"x": x, "z": z}
        with called(PASSING, given, providers=providers) as session:
            found = session.run(given)
            expected = x if x[0] > 0 else x + z
            same(found, {"y": expected, "v": expected})
            arrays = [found["y"], found["v"], x, z]
            for k, a in enumerate(arrays):
                assert not any(np.shares_memory(a, b) for b in arrays[k + 1 :])


def test_what_has_no_chain() -> None:
    """Steps without native code, and memory that is to be cleared."""
    given = feed(True)
    for options in ({"providers": ["reference"]}, {"memory": rv.MemoryConfig(secure=True)}):
        with called(BRANCHES, given, **options) as session:
            assert chain_of(session) is None and session.run_again(given) is None
