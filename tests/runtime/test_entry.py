"""Calls that come again go by native code alone: what they give, what they leave behind, and when they go elsewhere."""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import ranvier as rv
from ranvier.codegen.llvm import objects
from ranvier.errors import RanvierError, SessionClosed
from ranvier.ops import seed
from ranvier.providers.registry import REGISTRY

RNG = np.random.default_rng(7)
W = RNG.standard_normal((4, 3)).astype(np.float32)
OFTEN = 20  # calls, more than it takes


def model(text: str, **initializers: np.ndarray) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    parsed.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in initializers.items())
    return parsed


def several() -> onnx.ModelProto:
    """Inputs that are not read in their order, one that is not read at all, a constant among the outputs."""
    text = """g (float[2,4] x, int64[3] unused, float[2,3] b) => (float[2] s, float[2] fixed, float[2,3] y) {
        h = MatMul(x, w) y = Add(b, h) t = ReduceSum <keepdims: int = 0> (y, one) s = Neg(t) }"""
    return model(text, w=W, one=np.array([1]), fixed=np.array([5, 6], np.float32))


def feed() -> dict[str, Any]:
    x, b = RNG.standard_normal((2, 4)).astype(np.float32), RNG.standard_normal((2, 3)).astype(np.float32)
    return {"x": x, "unused": np.arange(3), "b": b}


def opened(source: onnx.ModelProto, given: dict[str, Any], **options: Any) -> rv.Session:
    """A session whose calls like this one go by native code."""
    session = rv.load(source, threads=1, **options)
    for _ in range(OFTEN):
        session.run(given)
    assert session.run_again(given) is not None
    return session


def same(found: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert found is not None and list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is np.ndarray and found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_the_interpreter_is_known_here() -> None:
    assert objects.interpreter() is not None  # on the interpreters that the tests run on


def test_results_are_those_of_the_reference() -> None:
    with opened(several(), feed()) as session, rv.load(several(), providers=["reference"]) as reference:
        for _ in range(50):
            given = feed()
            expected = reference.run(given)
            found = session.run_again(given)
            same(found, expected)
            assert found is not None
            for each in found.values():
                each[...] = 0  # what callers get is theirs
            same(session.run(dict(reversed(given.items()))), expected)
            same(dict(zip(expected, rv_list(session, given))), expected)


def rv_list(session: rv.Session, given: dict[str, Any]) -> list[Any]:
    return list(session.run(list(given.values())).values())


def test_other_calls_go_the_long_way() -> None:
    given = feed()
    with opened(several(), given) as session:
        expected = session.run(given)
        moved = np.zeros(given["x"].nbytes + 1, np.uint8)[1:].view(np.float32).reshape(2, 4)
        moved[:] = given["x"]
        others: list[Any] = [
            {**given, "x": np.asfortranarray(given["x"])},
            {**given, "x": moved},
            {**given, "x": given["x"].view(np.recarray)},
            {**given, "x": given["x"].tolist()},
            OrderedDict(given),
            list(given.values()),
        ]
        for other in others:
            assert session.run_again(other) is None
            same(session.run(other), expected)
            same(session.run_again(given), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"x": np.zeros((2, 5), np.float32)},
        {"x": np.zeros((2, 4, 1), np.float32)},
        {"x": np.zeros((2, 4), np.float64)},
        {"x": None},
        {"x": object()},
        {"other": np.zeros(1)},
    ],
    ids=["a size", "a rank", "an element type", "None", "an object", "a name"],
)
def test_wrong_inputs_are_told_as_ever(change: dict[str, Any]) -> None:
    given = feed()
    with opened(several(), given) as session, rv.load(several(), threads=1) as new:
        without = {name: x for name, x in given.items() if name != "b"}
        for wrong in ({**given, **change}, without, None, 5, {}, {1: 2, 3: 4, 5: 6}):
            assert session.run_again(wrong) is None
            with pytest.raises(RanvierError) as expected:
                new.run(wrong)  # type: ignore[arg-type]
            with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
                session.run(wrong)  # type: ignore[arg-type]
        same(session.run_again(given), session.run(given))


def test_nothing_is_held_and_nothing_is_lost() -> None:
    given = feed()
    with opened(several(), given) as session:
        watched = [*given.values(), np.dtype(np.float32), *given]
        out = session.run_again(given)
        assert out is not None
        counts = [sys.getrefcount(x) for x in watched]
        for _ in range(1000):
            out = session.run_again(given)
            assert session.run_again({**given, "b": None}) is None
        assert out is not None and [sys.getrefcount(x) for x in watched] == counts
        assert sys.getrefcount(out) == 2 and all(sys.getrefcount(out[name]) == 2 for name in out)


def test_runs_are_counted() -> None:
    given = feed()
    before = REGISTRY.ledger.operations().get("cpu", 0)
    with opened(several(), given) as session:
        first = REGISTRY.ledger.operations()["cpu"] - before
        nodes = first // (OFTEN + 1)
        assert first == nodes * (OFTEN + 1)
        for _ in range(7):
            session.run_again(given)
        session.trim()
        for _ in range(3):
            session.run(given)
        assert REGISTRY.ledger.operations()["cpu"] - before == nodes * (OFTEN + 11)
    del session
    assert REGISTRY.ledger.operations()["cpu"] - before == nodes * (OFTEN + 11)


def test_memory_is_given_back_and_taken_again() -> None:
    text = "g (float[64,4] x) => (float[64,1] y) { h = MatMul(x, w) s = Softmax(h) y = ReduceMax(s) }"
    given = {"x": RNG.standard_normal((64, 4)).astype(np.float32)}
    with opened(model(text, w=W), given) as session:
        expected = session.run(given)
        held = session.memory()
        assert held.arenas_waiting and not held.arenas_in_use
        session.trim()
        assert session.memory().arenas_waiting == session.memory().arenas_in_use == 0
        assert session.run_again(given) is None
        for _ in range(OFTEN):
            same(session.run(given), expected)
        same(session.run_again(given), expected)


def test_many_threads() -> None:
    """One at a time is let in, and the others go beside it."""
    text = "g (float[64,4] x) => (float[64,3] y) { h = MatMul(x, w) s = Softmax(h) y = Exp(s) }"
    feeds = [{"x": RNG.standard_normal((64, 4)).astype(np.float32)} for _ in range(8)]
    source = model(text, w=W)
    with opened(source, feeds[0]) as session:
        expected = [session.run(each)["y"] for each in feeds]
        start = threading.Barrier(8)

        def work(k: int) -> bool:
            start.wait()
            return all(np.array_equal(session.run(feeds[k])["y"], expected[k]) for _ in range(500))

        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(work, k) for k in range(8)]
            for _ in range(50):
                session.trim()
            assert all(future.result() for future in futures)
        assert session.memory().arenas_in_use == 0


def test_inputs_may_go_while_they_are_read() -> None:
    """The dictionary belongs to whoever gave it."""
    text = "g (float[512,4] x) => (float[512,3] y) { h = MatMul(x, w) s = Softmax(h) y = Exp(s) }"
    given = {"x": RNG.standard_normal((512, 4)).astype(np.float32)}
    with opened(model(text, w=W), given) as session:
        expected = session.run(given)["y"]
        kept, done = given["x"].copy(), threading.Event()

        def change() -> None:
            while not done.is_set():
                given["x"] = kept.copy()

        other = threading.Thread(target=change)
        other.start()
        try:
            assert all(np.array_equal(session.run(given)["y"], expected) for _ in range(2000))
        finally:
            done.set()
            other.join()


def test_keys_may_do_what_they_like() -> None:
    """A key that is asked whether it is the name of an input may change the dictionary, or call the session."""
    given = feed()
    with opened(several(), given) as session:
        expected = session.run(given)
        found: list[Any] = []

        class Key(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                found.append(session.run(given))
                tricky["x"] = given["x"].copy()
                return str(self) == other

            def __hash__(self) -> int:
                return hash(str(self))

        for _ in range(50):
            tricky: dict[Any, Any] = {"x": given["x"].copy(), "unused": given["unused"].copy(), Key("b"): given["b"]}
            same(session.run(tricky), expected)
        assert found
        for each in found:
            same(each, expected)


def test_random_numbers_are_drawn_for_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    source = model("g (float[1,5] x) => (int32[1,9] y) { y = Multinomial <sample_size: int = 9> (x) }")
    given = {"x": np.zeros((1, 5), np.float32)}
    with opened(source, given) as session:
        found = [session.run_again(given) for _ in range(50)]
        drawn = np.concatenate([each["y"] for each in found if each is not None])
        assert drawn.shape == (50, 9) and len(np.unique(drawn, axis=0)) > 40
        seed.set_seed(3)
        try:
            first = [session.run(given)["y"] for _ in range(5)]
            seed.set_seed(3)
            again = [session.run(given)["y"] for _ in range(5)]
        finally:
            seed.set_seed(None)
        np.testing.assert_array_equal(first, again)

        def fails(_: seed.Ahead) -> np.ndarray:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(seed.Ahead, "__call__", fails)
            with pytest.raises(KeyboardInterrupt):
                session.run(given)
        assert session.run_again(given) is not None


def test_data_that_are_refused() -> None:
    source = model("g (float[5,2] x, int64[2] i) => (float[2,2] y) { y = Gather(x, i) }")
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    good, bad = {"x": x, "i": np.array([1, 4])}, {"x": x, "i": np.array([1, 5])}
    with opened(source, good) as session, rv.load(source, providers=["reference"]) as reference:
        with pytest.raises(RanvierError) as expected:
            reference.run(bad)
        assert session.run_again(bad) is None
        with pytest.raises(type(expected.value)):
            session.run(bad)
        np.testing.assert_array_equal(session.run(good)["y"], x[[1, 4]])


def test_empty_and_single_values() -> None:
    source = model("g (float x, float[0,3] e) => (float y) { y = Exp(x) }")
    given = {"x": np.array(1.0, np.float32), "e": np.zeros((0, 3), np.float32)}
    with opened(source, given) as session:
        found = session.run_again(given)
        assert found is not None and found["y"].shape == ()
        np.testing.assert_allclose(found["y"], np.e, rtol=1e-6)
        assert session.run_again({**given, "e": np.zeros((3, 0), np.float32)}) is None


def test_profiles_and_the_end() -> None:
    given = feed()
    session = opened(several(), given)
    with session.profile() as profile:
        assert session.run_again(given) is None
        session.run(given)
    assert profile.events
    session.close()
    assert session.run_again(given) is None
    with pytest.raises(SessionClosed):
        session.run(given)


def test_what_has_no_entry() -> None:
    """Long runs gain nothing, and what NumPy computes goes through Python."""
    text = "g (float[512,512] x) => (float[512,512] y) { a = MatMul(x, x) b = MatMul(a, x) y = MatMul(b, x) }"
    given = {"x": np.eye(512, dtype=np.float32)}
    with rv.load(model(text), threads=1) as session:
        for _ in range(OFTEN):
            session.run(given)
        assert session.run_again(given) is None
    with rv.load(several(), providers=["reference"]) as session:
        for _ in range(OFTEN):
            session.run(feed())
        assert session.run_again(feed()) is None


def test_as_an_inference_session() -> None:
    given = feed()
    session = rv.InferenceSession(several())
    expected = session.run(None, given)
    for names in (None, [], ["s", "fixed", "y"], ["y", "s"], ["y"], ["y", "y"]):
        for _ in range(OFTEN):
            found = session.run(names, given)
        wanted = names or ["s", "fixed", "y"]
        assert len(found) == len(wanted)
        for name, value in zip(wanted, found):
            np.testing.assert_allclose(value, expected[["s", "fixed", "y"].index(name)], rtol=1e-6)
    with pytest.raises(RanvierError):
        session.run(None, {"x": given["x"]})
