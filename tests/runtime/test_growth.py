"""Calls that grow: one plan for a span of them gives what a plan for each would."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import ranvier as rv
from ranvier.config import Limits
from ranvier.errors import ResourceLimit
from tests.runtime.small_models import model_of, tensor

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
HEADS, SIZE = 2, 16
WIDTH = HEADS * SIZE
Arrays = dict[str, np.ndarray[Any, Any]]


def _weights() -> Arrays:
    rng = np.random.default_rng(0)
    return {n: (rng.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float32) for n in ("wq", "wk", "wv", "wo")}


def _projections() -> list[Any]:
    return [helper.make_node("MatMul", ["x", f"w{n}"], [n]) for n in "qkv"]


def standard_attention() -> ModelProto:
    """The standard's operator with a cache beside it."""
    nodes = [
        *_projections(),
        helper.make_node(
            "Attention",
            ["q", "k", "v", "", "past_k", "past_v"],
            ["y", "new_k", "new_v"],
            q_num_heads=HEADS,
            kv_num_heads=HEADS,
            is_causal=1,
        ),
        helper.make_node("MatMul", ["y", "wo"], ["out"]),
    ]
    return _model(nodes, opset=23)


def exported_attention() -> ModelProto:
    """As exporters write it: shapes are asked for and computed with, a triangle is cut to the size of the scores."""
    nodes = [*_projections()]
    weights = _weights() | {
        "zero": np.array(0), "one": np.array(1), "axis0": np.array([0]), "axis2": np.array([2]), "axis3": np.array([3]),
        "heads": np.array([HEADS]), "size": np.array([SIZE]), "scale": np.float32(SIZE**-0.5),
        "low": np.float32(-1e9), "triangle": np.tril(np.ones((1, 1, 64, 64), bool)), "two": np.array(2),
    }  # fmt: skip
    for name in "qkv":
        nodes += [
            helper.make_node("Shape", [name], [f"{name}_shape"]),
            helper.make_node("Gather", [f"{name}_shape", "zero"], [f"{name}_b"]),
            helper.make_node("Gather", [f"{name}_shape", "one"], [f"{name}_t"]),
            helper.make_node("Unsqueeze", [f"{name}_b", "axis0"], [f"{name}_b1"]),
            helper.make_node("Unsqueeze", [f"{name}_t", "axis0"], [f"{name}_t1"]),
            helper.make_node("Concat", [f"{name}_b1", f"{name}_t1", "heads", "size"], [f"{name}_to"], axis=0),
            helper.make_node("Reshape", [name, f"{name}_to"], [f"{name}_4"]),
            helper.make_node("Transpose", [f"{name}_4"], [f"{name}_h"], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        helper.make_node("Concat", ["past_k", "k_h"], ["new_k"], axis=2),
        helper.make_node("Concat", ["past_v", "v_h"], ["new_v"], axis=2),
        helper.make_node("Transpose", ["new_k"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q_h", "turned"], ["raw"]),
        helper.make_node("Mul", ["raw", "scale"], ["scores"]),
        helper.make_node("Shape", ["new_k"], ["k_all"]),
        helper.make_node("Gather", ["k_all", "two"], ["keys"]),
        helper.make_node("Sub", ["keys", "q_t"], ["first"]),
        helper.make_node("Unsqueeze", ["keys", "axis0"], ["keys1"]),
        helper.make_node("Unsqueeze", ["first", "axis0"], ["first1"]),
        helper.make_node("Slice", ["triangle", "first1", "keys1", "axis2"], ["rows"]),
        helper.make_node("Slice", ["rows", "axis0", "keys1", "axis3"], ["seen"]),
        helper.make_node("Where", ["seen", "scores", "low"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "new_v"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
        helper.make_node("Concat", ["q_b1", "q_t1", "wide"], ["flat"], axis=0),
        helper.make_node("Reshape", ["back", "flat"], ["y"]),
        helper.make_node("MatMul", ["y", "wo"], ["out"]),
    ]
    return _model(nodes, weights | {"wide": np.array([WIDTH])})


def _model(nodes: list[Any], weights: Arrays | None = None, opset: int = 20) -> ModelProto:
    cache = ["b", HEADS, "past", SIZE]
    grown = ["b", HEADS, "all", SIZE]
    return model_of(
        nodes,
        [tensor("x", FLOAT, ["b", "t", WIDTH]), tensor("past_k", FLOAT, cache), tensor("past_v", FLOAT, cache)],
        [tensor("out", FLOAT, ["b", "t", WIDTH]), tensor("new_k", FLOAT, grown), tensor("new_v", FLOAT, grown)],
        weights or _weights(),
        opsets={"": opset},
        ir_version=10,
    )


def _feed(past: int, step: int = 1, batch: int = 1, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed + past)
    cache = (batch, HEADS, past, SIZE)
    return {
        "x": rng.standard_normal((batch, step, WIDTH)).astype(np.float32),
        "past_k": rng.standard_normal(cache).astype(np.float32),
        "past_v": rng.standard_normal(cache).astype(np.float32),
    }


def _spans(session: rv.Session) -> list[int]:
    return [plan.kernel.calls for plan in session._compiled._growth.plans()]  # type: ignore[attr-defined]


def _same(session: rv.Session, reference: rv.Session, feed: Arrays) -> None:
    wanted = reference.run(feed)
    for name, found in session.run(feed).items():
        np.testing.assert_allclose(found, wanted[name], rtol=2e-5, atol=2e-6, err_msg=name)


MODELS = [standard_attention, exported_attention]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(("step", "batch"), [(1, 1), (2, 1), (1, 3)])
def test_every_step_is_right(make: Any, step: int, batch: int) -> None:
    model = make()
    reference = rv.load(model, providers=["reference"])
    with rv.load(model, providers=["cpu"]) as session:
        for past in range(0, 40, step):
            _same(session, reference, _feed(past, step, batch))
        assert max(_spans(session)) > 4, session._compiled._growth.reason


@pytest.mark.parametrize("make", MODELS)
def test_a_call_gets_the_launches_that_planning_it_alone_makes(make: Any) -> None:
    model = make()
    with rv.load(model, providers=["cpu"]) as session:
        for past in range(20, 26):
            session.run(_feed(past))
        (span,) = [plan for plan in session._compiled._growth.plans() if plan.kernel.calls > 3]  # type: ignore[attr-defined]
        growing = span.kernel._made  # type: ignore[attr-defined]
        assert growing.calls > 3
        for call in range(growing.calls):
            with rv.load(model, providers=["cpu"]) as fresh:
                fresh.run(_feed(22 + call))
                (plan,) = fresh._compiled.plans()
                alone = plan._bound[0].made  # type: ignore[union-attr]
                made = growing.at(call)
                assert [r.shape for r in made.results] == [r.shape for r in alone.results]
                for a, b in zip(made.launches, alone.launches, strict=True):
                    assert a.spec.key == b.spec.key
                    assert (a.dims, a.tiles, a.grain, a.flops) == (b.dims, b.tiles, b.grain, b.flops), a.label


def _grouped() -> ModelProto:
    """GroupQueryAttention: the number of keys is an input's content, and the cache may have room for more."""
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "last", "total"],
        ["out", "new_k", "new_v"],
        domain="com.microsoft",
        num_heads=2 * HEADS,
        kv_num_heads=HEADS,
    )
    cache, narrow, wide = ["b", HEADS, "past", SIZE], ["b", "t", WIDTH], ["b", "t", 2 * WIDTH]
    inputs = [("q", wide), ("k", narrow), ("v", narrow), ("past_k", cache), ("past_v", cache)]
    return model_of(
        [node],
        [
            *(tensor(name, FLOAT, shape) for name, shape in inputs),
            tensor("last", TensorProto.INT32, ["b"]),
            tensor("total", TensorProto.INT32, [1]),
        ],
        [tensor("out", FLOAT, wide), tensor("new_k", FLOAT, None), tensor("new_v", FLOAT, None)],
        opsets={"com.microsoft": 1},
    )


def _grouped_feed(past: int, rows: int, batch: int = 1) -> Arrays:
    rng = np.random.default_rng(past)
    shapes = {"q": (batch, 1, 2 * WIDTH), "k": (batch, 1, WIDTH), "v": (batch, 1, WIDTH)}
    shapes |= dict.fromkeys(("past_k", "past_v"), (batch, HEADS, rows, SIZE))
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return feed | {"last": np.full(batch, past, np.int32), "total": np.array([past + 1], np.int32)}


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_length_that_is_given_as_a_tensor(capacity: int | None, batch: int) -> None:
    model = _grouped()
    reference = rv.load(model, providers=["reference"])
    with rv.load(model, providers=["cpu"]) as session:
        for past in range(3, 36):
            _same(session, reference, _grouped_feed(past, past if capacity is None else capacity, batch))
        growing = session._parts[0].kernel._growing  # type: ignore[attr-defined]
        assert max((made.calls for *_, made in growing._spans), default=0) > 8, growing.reason


def test_a_cache_that_is_its_own_result_is_written_in_place() -> None:
    model = _grouped()
    reference = rv.load(model, providers=["reference"])
    with rv.load(model, providers=["cpu"]) as session:
        cache = {name: np.zeros((1, HEADS, 24, SIZE), np.float32) for name in ("past_k", "past_v")}
        theirs = {name: x.copy() for name, x in cache.items()}
        for past in range(1, 23):
            new = {n: x for n, x in _grouped_feed(past, 1).items() if not n.startswith("past")}
            wanted = reference.run(new | theirs)
            theirs = {"past_k": wanted["new_k"], "past_v": wanted["new_v"]}
            found = session.run(new | cache, into={"new_k": cache["past_k"], "new_v": cache["past_v"]})
            assert found["new_k"] is cache["past_k"] and found["new_v"] is cache["past_v"]
            for name in ("out", "new_k", "new_v"):
                np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, atol=2e-6, err_msg=name)


def test_caches_that_are_fed_back() -> None:
    model = exported_attention()
    reference = rv.load(model, providers=["reference"])
    with rv.load(model, providers=["cpu"]) as session:
        ours, theirs = _feed(0), _feed(0)
        for past in range(30):
            found, wanted = session.run(ours), reference.run(theirs)
            np.testing.assert_allclose(found["out"], wanted["out"], rtol=1e-4, atol=1e-5)
            x = _feed(past + 1)["x"]
            ours = {"x": x, "past_k": found["new_k"], "past_v": found["new_v"]}
            theirs = {"x": x, "past_k": wanted["new_k"], "past_v": wanted["new_v"]}
        assert _spans(session)


def test_sizes_that_jump_and_come_back() -> None:
    model = standard_attention()
    reference = rv.load(model, providers=["reference"])
    with rv.load(model, providers=["cpu"]) as session:
        for past in [3, 4, 5, 6, 7, 50, 51, 8, 9, 52, 53, 54, 10, 5, 6, 3]:
            _same(session, reference, _feed(past))
        _same(session, reference, _feed(7, batch=2))
        _same(session, reference, _feed(8, step=3))


def test_several_threads_at_different_places() -> None:
    model = standard_attention()
    reference = rv.load(model, providers=["reference"])
    with rv.load(model, providers=["cpu"]) as session:
        for past in range(10, 15):
            session.run(_feed(past))
        assert _spans(session)
        failures: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for past in range(first, first + 12):
                    _same(session, reference, _feed(past, seed=first))
            except BaseException as error:  # an assertion must reach the test
                failures.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in (12, 13, 15, 18)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not failures


def test_outputs_into_given_memory_and_profiles() -> None:
    with rv.load(standard_attention(), providers=["cpu"]) as session:
        for past in range(5, 12):
            session.run(_feed(past))
        feed = _feed(12)
        wanted = session.run(feed)
        target = np.empty((1, HEADS, 13, SIZE), np.float32)
        found = session.run(feed, into={"new_k": target})
        assert found["new_k"] is target
        np.testing.assert_array_equal(target, wanted["new_k"])
        with session.profile() as profile:
            session.run(feed)
        assert profile is not None
        assert _spans(session)


def test_what_cannot_be_followed_is_planned_call_by_call() -> None:
    """Which elements a mask keeps only the data tells."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Transpose", ["places"], ["turned"]),
        helper.make_node("GatherND", ["x", "turned"], ["y"]),
    ]
    model = model_of(nodes, [tensor("x", FLOAT, ["n"])], [tensor("y", FLOAT, ["m"])])
    with rv.load(model) as session:
        for n in range(1, 9):
            x = np.arange(n, dtype=np.float32) % 3
            np.testing.assert_array_equal(session.run({"x": x})["y"], x[x != 0])
        assert not _spans(session)


def test_an_operator_without_a_rule_says_so() -> None:
    nodes = [helper.make_node("Upsample", ["x", "s"], ["y"], mode="nearest")]
    model = model_of(
        nodes,
        [tensor("x", FLOAT, [1, 1, "n", 2])],
        [tensor("y", FLOAT, [1, 1, "m", 4])],
        {"s": np.array([1, 1, 2, 2], np.float32)},
        opsets={"": 9},
    )
    with rv.load(model, providers=["cpu"], optimization="none") as session:
        for n in range(1, 7):
            x = np.arange(2.0 * n, dtype=np.float32).reshape(1, 1, n, 2)
            np.testing.assert_array_equal(session.run({"x": x})["y"], x.repeat(2, 2).repeat(2, 3))
        assert not _spans(session)
        assert session._compiled._growth.reason


def test_limits_hold_for_calls_of_a_span() -> None:
    model = standard_attention()
    limits = Limits(tensor_bytes=4 * HEADS * SIZE * 64)
    with rv.load(model, providers=["cpu"], limits=limits) as session:
        for past in range(50, 64):
            session.run(_feed(past))
        assert _spans(session)
        with pytest.raises(ResourceLimit):
            session.run(_feed(64))


def test_memory_is_given_back() -> None:
    with rv.load(standard_attention(), providers=["cpu"]) as session:
        for past in range(4, 30):
            session.run(_feed(past))
        assert _spans(session)
        session.trim()
        assert session.memory().arenas_waiting == 0
        session.run(_feed(30))
