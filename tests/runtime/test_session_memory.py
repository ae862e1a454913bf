"""The memory of sessions: limits that name the part and the numbers, pools of their own, and what they hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import ranvier as rv
from ranvier.config import MemoryConfig
from ranvier.errors import InvalidConfig, MemoryLimit, OutOfMemory, ResourceLimit
from ranvier.formats import onnx as onnx_format
from ranvier.memory import room
from ranvier.providers.memory import PoolAllocator
from ranvier.providers.memory.sources import HostRegion
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.estimates import estimate_model
from ranvier.runtime.outputs import blocks

DIGITS = Path(rv.__file__).parent / "models" / "digits.onnx"
RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 64)).astype(np.float32)
K = RNG.standard_normal((16, 8, 3, 3)).astype(np.float32)


def model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    parsed.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return parsed


def product() -> onnx.ModelProto:
    return model("g (float[n,64] x) => (float[n,64] y) { a = MatMul(x, w) b = Softmax(a) y = MatMul(b, w) }", w=W)


def convolution() -> onnx.ModelProto:
    return model("g (float[n,8,s,s] x) => (float[n,16,s,s] y) { a = Conv <pads = [1,1,1,1]> (x, k) y = Relu(a) }", k=K)


def looped() -> onnx.ModelProto:
    return model(
        """g (float[k] x, int64 m) => (float[k] y) {
            t = Constant <value = bool {1}> ()
            y = Loop (m, t, x) <body = b (int64 i, bool c, float[k] v) => (bool d, float[k] u) {
                d = Identity(c) s = Softmax(v) w = CumSum(s, z) u = Add(w, v) }>
        }""",
        z=np.array(0, np.int64),
    )


def rows(count: int) -> np.ndarray:
    return RNG.standard_normal((count, 64)).astype(np.float32)


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("providers", [["cpu", "reference"], ["reference"]])
def test_weights_buffers_and_outputs_count(providers: list[str]) -> None:
    with rv.load(product(), providers=providers) as free:
        plan = free.bind(n=100)
        needed = plan.weight_bytes() + plan.memory.arena + plan.output_bytes()
    assert plan.weight_bytes() >= W.nbytes and plan.output_bytes() == 100 * 64 * 4
    x = rows(100)
    with rv.load(product(), providers=providers, limits=rv.Limits(memory_bytes=needed)) as session:
        session.run({"x": x})
        with pytest.raises(MemoryLimit, match="most of it for") as caught:
            session.run({"x": rows(200)})
        error = caught.value
        assert isinstance(error, ResourceLimit) and isinstance(error, OutOfMemory)
        assert (error.limit, error.allowed) == ("memory_bytes", needed)
        assert error.actual == error.in_use + error.requested > needed
        assert error.part
        session.run({"x": x})  # and the session goes on
    tight = rv.Limits(memory_bytes=needed - 1)
    with rv.load(product(), providers=providers, limits=tight) as session, pytest.raises(MemoryLimit):
        session.run({"x": x})


def test_the_part_that_takes_the_most_is_named() -> None:
    limits, what = rv.Limits(memory_bytes=200_000), r"most of it for (value|output) '[aby]'"
    with rv.load(product(), providers=["reference"], limits=limits) as session, pytest.raises(MemoryLimit, match=what):
        session.run({"x": rows(1000)})


@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_a_limit_that_is_met_while_running_leaves_the_session_usable(provider: str) -> None:
    """How many rows there will be only the data tells."""
    text = "g (float[n] x) => (float[a,b] y) { i = NonZero(x) c = Cast <to = 1> (i) t = Transpose(c) y = MatMul(t, c) }"
    with rv.load(model(text), providers=[provider, "reference"], limits=rv.Limits(memory_bytes=1 << 20)) as session:
        few, many = np.zeros(1000, np.float32), np.ones(1000, np.float32)
        few[:10] = 1
        expected = np.outer(np.arange(10), np.arange(10))
        for _ in range(3):
            np.testing.assert_array_equal(session.run({"x": few})["y"], expected)
            with pytest.raises(MemoryLimit, match="memory_bytes") as caught:
                session.run({"x": many})
            assert caught.value.part and caught.value.requested
        assert session.memory().arenas_in_use == 0


# -- the machine has no more ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["outputs of 'g'", "arena of 'g'"])
def test_a_machine_with_little_left(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "g (float[n] x) => (float[n] y) { a = Softmax(x) b = CumSum(a, z) c = Add(a, b) y = Softmax(c) }"
    made = model(text, z=np.array(0, np.int64))
    x = np.ones(3_000_000, np.float32)
    # a pool of its own: in the shared one there may be room that other sessions left
    with rv.load(made, providers=["reference"], memory=rv.MemoryConfig(alignment=128)) as session:
        session.trim()
        blocks.clear()
        arena = session.bind(n=len(x)).memory.arena
        if part.startswith("outputs"):
            arenas = session.bind(n=len(x))._arenas
            arenas.give(arenas.take())  # so that there is an arena, and only the output is to be had
        with monkeypatch.context() as patch:
            patch.setattr(room, "LARGE", 1_000_000)
            patch.setattr(room, "memory_left", lambda around: 0)
            with pytest.raises(OutOfMemory, match=f"{part}: .* are left on this machine") as caught:
                session.run({"x": x})
            assert (caught.value.requested or 0) >= (x.nbytes if part.startswith("outputs") else arena)
        assert session.run({"x": x})["y"].shape == x.shape


@pytest.mark.parametrize("known", [True, False])
def test_results_are_looked_at_together(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is touched before all are made, so each alone would seem to have room."""
    if known:
        made = model("g (float[n] x) => (float[n] y, float[n] z) { y = Neg(x) z = Exp(x) }")
        inputs: dict[str, Any] = {"x": np.ones(2_500_000, np.float32)}
    else:
        made = model("g (float[n] x, int64[2] s) => (float[a,b] y, float[a,b] z) { y = Expand(x, s) z = Neg(y) }")
        inputs = {"x": np.ones(1, np.float32), "s": np.array([2500, 1000])}
    with rv.load(made, providers=["cpu"], fallback="off") as session:
        blocks.clear()
        with monkeypatch.context() as patch:
            patch.setattr(room, "LARGE", 1_000_000)
            patch.setattr(room, "_HEADROOM", 0)
            patch.setattr(room, "promises", room.Promises())  # whatever else of the process is promised
            patch.setattr(room, "memory_left", lambda around: 15_000_000)  # one of them is 10,000,000
            with pytest.raises(OutOfMemory, match=r"2\d,\d+,\d+ bytes asked for, 15,000,000 are left"):
                session.run(inputs)
        assert session.run(inputs)["z"].size == 2_500_000


def test_weights_are_looked_at_before_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    with rv.load(product(), providers=["cpu", "reference"]) as session:
        with monkeypatch.context() as patch:
            patch.setattr(room, "LARGE", 1000)
            patch.setattr(room, "memory_left", lambda around: 0)
            with pytest.raises(OutOfMemory, match=r"weights of 'a .*' on cpu: 16,384 bytes asked for"):
                session.run({"x": rows(2)})
            assert session.memory().packed == 0
        session.run({"x": rows(2)})
        assert session.memory().packed >= W.nbytes


class _Failing:
    kind = "system"
    forks = True
    failing = False

    def reserve(self, nbytes: int, alignment: int) -> HostRegion:
        if self.failing:
            raise MemoryError
        return HostRegion(np.empty(nbytes + alignment, np.uint8), nbytes, alignment)


@pytest.mark.parametrize("build", [product, looped])
def test_an_allocation_that_fails_is_typed_and_passes(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _Failing()
    pool = PoolAllocator(MemoryConfig(pooling=False), source)
    for provider in (REGISTRY.get("reference"), REGISTRY.get("cpu")):
        monkeypatch.setattr(provider, "_allocator", pool)
    inputs = {"x": rows(50)} if build is product else {"x": np.ones(5000, np.float32), "m": np.array(3)}
    with rv.load(build()) as session:
        expected = session.run(inputs)["y"]
        for _ in range(3):
            session.trim()
            source.failing = True
            try:
                again = session.run(inputs)["y"]
            except OutOfMemory as error:
                assert "the system gives none" in str(error)
            else:
                np.testing.assert_array_equal(again, expected)  # a loop's arena waits in its body
            source.failing = False
            np.testing.assert_array_equal(session.run(inputs)["y"], expected)
    assert pool.stats().failures >= (3 if build is product else 0)


# -- a pool of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PoolAllocator]]:
    """The pools that sessions make for themselves."""
    made: list[PoolAllocator] = []
    plain = PoolAllocator.configured

    def configured(self: PoolAllocator, *given: Any, **named: Any) -> PoolAllocator:
        made.append(plain(self, *given, **named))
        return made[-1]

    monkeypatch.setattr(PoolAllocator, "configured", configured)
    yield made


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("build", [product, convolution, looped])
@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(growth="static", pool_size=1 << 20),
        MemoryConfig(growth="incremental", secure=True),
        MemoryConfig(pooling=False),
        MemoryConfig(alignment=4096),
    ],
    ids=["static", "secure", "unpooled", "aligned"],
)
def test_results_are_the_same_whatever_the_pool(
    build: Any, provider: str, memory: MemoryConfig, pools: list[PoolAllocator]
) -> None:
    inputs = {
        product: {"x": rows(7)},
        convolution: {"x": RNG.standard_normal((2, 8, 12, 12)).astype(np.float32)},
        looped: {"x": RNG.standard_normal(100).astype(np.float32), "m": np.array(5)},
    }[build]
    with rv.load(build(), providers=[provider, "reference"]) as plain:
        expected = plain.run(inputs)["y"]
    with rv.load(build(), providers=[provider, "reference"], memory=memory) as session:
        for _ in range(3):
            np.testing.assert_array_equal(session.run(inputs)["y"], expected)
        (pool,) = pools
        assert pool.config == memory
        assert session.memory().pools["session"] == pool.stats()
        for region in pool._chunks.values():
            assert isinstance(region, HostRegion) and region.address % memory.alignment == 0
        if memory.secure:
            assert pool.stats().active == 0  # nothing waits with data in it
            assert all(not region.view(0, region.nbytes).any() for region in pool._chunks.values())
    assert (pool.stats().active, pool.stats().reserved) == (0, 0)


def test_arenas_come_from_the_sessions_pool_and_go_with_it(pools: list[PoolAllocator]) -> None:
    session = rv.load(product(), memory=MemoryConfig(growth="incremental"))
    session.run({"x": rows(100)})
    (pool,) = pools
    waiting = session.memory().arenas_waiting
    assert pool.stats().active == waiting > 0
    assert [part for _, part in pool.in_use()] == ["arena of 'g'"]
    session.close()
    assert (pool.stats().active, pool.stats().reserved) == (0, 0)


def test_a_static_pool_serves_one_size_after_another() -> None:
    """Arenas that wait for other sizes go before a request fails."""
    with rv.load(product(), providers=["reference"]) as free:
        arena = free.bind(n=100).memory.arena
    memory = MemoryConfig(growth="static", pool_size=arena * 2)
    with rv.load(product(), providers=["reference"], memory=memory) as session:
        for count in (100, 99, 98, 97, 100):
            session.run({"x": rows(count)})
        with pytest.raises(MemoryLimit, match=r"'pool_size' reached \(pool of a session, arena of 'g'\)") as caught:
            session.run({"x": rows(1000)})
        assert caught.value.allowed == arena * 2
        session.run({"x": rows(100)})


def test_threads_share_a_small_pool() -> None:
    with rv.load(product(), providers=["reference"]) as free:
        arena = free.bind(n=50).memory.arena
        expected = free.run({"x": (x := rows(50))})["y"]
    memory = MemoryConfig(growth="static", pool_size=arena * 3)
    wrong: list[Any] = []
    with rv.load(product(), providers=["reference"], memory=memory, fallback="off") as session:

        def work() -> None:
            for _ in range(50):
                try:
                    if not np.array_equal(session.run({"x": x})["y"], expected):
                        wrong.append("another result")
                except MemoryLimit:
                    pass
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert session.memory().arenas_in_use == 0
        np.testing.assert_array_equal(session.run({"x": x})["y"], expected)


# -- what a session says it holds -------------------------------------------------------------------------------------


def test_packed_weights_are_told_by_part() -> None:
    with rv.load(convolution(), providers=["cpu", "reference"]) as session:
        assert session.memory().packed == 0
        session.run({"x": np.ones((1, 8, 20, 20), np.float32)})
        held = session.memory()
        assert held.packed >= K.nbytes
        assert sum(held.parts.values()) == held.packed and all(name.endswith(" on cpu") for name in held.parts)
        assert held.weights == session.graph.constant_bytes() + held.packed
        assert held.total == held.weights + held.arenas_waiting + held.arenas_in_use
        assert set(held.pools) == {"cpu", "reference"}


# -- estimates --------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
    "digits": (str(DIGITS), {"batch": 16}, {}),
    "product": (product, {"n": 200}, {"x": rows(200)}),
    "convolution": (convolution, {"n": 2, "s": 32}, {"x": np.ones((2, 8, 32, 32), np.float32)}),
}


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_an_estimate_against_what_a_run_took(case: str, provider: str) -> None:
    """From types alone within a factor of two of what was measured; from a plan exactly."""
    source, dims, inputs = CASES[case]
    given = source if isinstance(source, str) else source()
    guess = estimate_model(onnx_format.read(given), dims)
    with rv.load(given, providers=[provider, "reference"], memory=MemoryConfig(growth="incremental")) as session:
        if not inputs:
            (name, found), *_ = session.inputs.items()
            shape = tuple(dims.get(str(d), d) for d in found.shape)  # type: ignore[union-attr]
            inputs = {name: np.ones(shape, np.float32)}
        results = session.run(inputs)
        held = session.memory()
        exact = estimate_model(session, dims)
    measured = (held.packed or held.weights) + held.pools["session"].peak + sum(y.nbytes for y in results.values())
    assert exact.exact and not exact.unknown
    assert exact.outputs == guess.outputs == sum(y.nbytes for y in results.values())
    assert exact.arena == held.pools["session"].peak
    assert measured <= exact.run <= measured * 1.05 + 1024  # small constants that are read as they are count too
    assert measured / 2 <= guess.run <= measured * 2
    assert guess.weights == pytest.approx(exact.weights, rel=0.1)


def test_estimates_say_what_they_do_not_know() -> None:
    graph = onnx_format.read(model("g (float[n] x) => (int64[1,k] y) { i = NonZero(x) y = Neg(i) }"))
    assert estimate_model(graph, {"n": 5}).unknown == ("i", "y")
    with pytest.raises(InvalidConfig, match="the model has no dimension 'm'"):
        estimate_model(graph, {"m": 5})
