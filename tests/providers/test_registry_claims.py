"""What providers said about a graph is remembered for as long as it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ranvier as rv
from ranvier.config import Limits
from ranvier.errors import InvalidConfig, OutOfMemory, UnsupportedOp
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.ops.custom import register_op, unregister_op
from ranvier.providers.base import Claim, Decline, GraphView, ProviderCapability
from ranvier.providers.claims import ClaimCache, digest
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import REGISTRY


def graph(ops: tuple[str, ...] = ("Relu", "Add"), scale: float = 2.0, size: int = 1, name: str = "y") -> Graph:
    constant = numpy_helper.from_array(np.full(size, scale, np.float32), "c")
    nodes = [helper.make_node(ops[0], ["x"], ["h"]), helper.make_node(ops[1], ["h", "c"], [name])]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, size])
    y = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, size])
    made = helper.make_graph(nodes, "g", [x], [y], [constant])
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])
    return onnx_format.read(proto.SerializeToString(), limits=Limits())


class Slow(ReferenceProvider):
    """Counts how often it is asked; takes everything but Add."""

    name = "slow"
    together = False

    def __init__(self, options: Any = None) -> None:
        super().__init__()
        self.options = options
        self.asked = 0

    def capability(self) -> ProviderCapability:
        return ProviderCapability(whole_parts=False, dear_claims=True)

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        self.asked += 1
        if self.together:
            yield Claim(tuple(view), "all of them")
            return
        for node in view:
            yield Decline(node, "no Add") if node.op == "Add" else Claim((node,), "gladly")


def answers(cache: ClaimCache, provider: Slow, about: Graph, open_nodes: Any = None) -> list[tuple[str, str]]:
    found = []
    for each in cache.claims(provider, about, open_nodes):
        if isinstance(each, Decline):
            assert each.node.graph is about
            found.append((each.node.op, each.reason))
        else:
            assert all(node.graph is about for node in each.nodes)
            found += [(node.op, each.note) for node in each.nodes]
    return found


EXPECTED = [("Relu", "gladly"), ("Add", "no Add")]


def test_the_same_model_is_asked_about_once() -> None:
    cache, slow = ClaimCache(), Slow()
    for _ in range(3):
        assert answers(cache, slow, graph()) == EXPECTED
    assert (slow.asked, cache.hits, cache.misses) == (1, 2, 1)


def test_some_of_the_nodes() -> None:
    cache, slow, about = ClaimCache(), Slow(), graph()
    relu, add = about
    assert answers(cache, slow, about, [add]) == EXPECTED[1:]
    assert answers(cache, slow, about, [relu]) == EXPECTED[:1]
    assert slow.asked == 1


def test_nodes_that_are_taken_together_are_asked_about_again() -> None:
    cache, slow, about = ClaimCache(), Slow(), graph()
    slow.together = True
    _, add = about
    assert answers(cache, slow, about) == [("Relu", "all of them"), ("Add", "all of them")]
    assert answers(cache, slow, about, [add]) == [("Add", "all of them")]
    assert slow.asked == 2


@pytest.mark.parametrize(
    "other",
    [
        graph(("Neg", "Add")),
        graph(("Relu", "Mul")),
        graph(scale=3.0),  # the content of a small constant counts
        graph(size=2),
        graph(name="z"),
    ],
)
def test_other_models_are_other_questions(other: Graph) -> None:
    assert digest(other) != digest(graph())
    cache, slow = ClaimCache(), Slow()
    answers(cache, slow, graph())
    answers(cache, slow, other)
    assert slow.asked == 2


def test_the_content_of_large_constants_does_not_count() -> None:
    assert digest(graph(size=1000)) == digest(graph(size=1000, scale=3.0))


def test_a_graph_that_was_changed_is_asked_about_again() -> None:
    cache, slow, about = ClaimCache(), Slow(), graph()
    assert answers(cache, slow, about) == EXPECTED
    about.add("Neg", [about.inputs[0]])
    assert len(answers(cache, slow, about)) == 3
    relu = next(iter(about))
    relu.op = "Sigmoid"
    assert ("Sigmoid", "gladly") in answers(cache, slow, about)
    assert slow.asked == 3


def test_options_operators_and_registrations_are_part_of_the_question() -> None:
    cache = ClaimCache()
    first, second = Slow("a"), Slow("b")
    for provider in (first, second, first, second):
        answers(cache, provider, graph())
    assert (first.asked, second.asked) == (1, 1)
    register_op("test.claims", "Own", lambda x: x)
    try:
        answers(cache, first, graph())
        assert first.asked == 2
    finally:
        unregister_op("test.claims", "Own")
    cache.forget("slow")
    assert len(cache) == 0


def test_few_answers_are_kept() -> None:
    cache, slow = ClaimCache(kept=2), Slow()
    for scale in (1.0, 2.0, 3.0, 3.0, 2.0, 1.0):
        answers(cache, slow, graph(scale=scale))
    assert len(cache) == 2
    assert slow.asked == 4  # the oldest one was forgotten


def test_a_provider_that_answers_quickly_is_simply_asked() -> None:
    cache, plain = ClaimCache(), ReferenceProvider()
    assert len(list(cache.claims(plain, graph()))) == 2
    assert len(cache) == 0 and not cache.hits and not cache.misses


def test_sessions_ask_through_the_cache_until_a_provider_is_registered_anew() -> None:
    made: list[Slow] = []

    def factory() -> Slow:
        made.append(Slow())
        return made[-1]

    proto = onnx_format.to_proto(graph())
    x = {"x": np.float32([[-1.0]])}
    for _ in range(2):
        REGISTRY.register("slow", factory, auto=False)
        try:
            for _ in range(2):
                with rv.load(proto.SerializeToString(), providers=["slow", "reference"]) as session:
                    np.testing.assert_array_equal(session.run(x)["y"], [[2.0]])
                    assert {n.provider for n in session.report.nodes} == {"slow", "reference"}
        finally:
            REGISTRY.unregister("slow")
    assert [each.asked for each in made] == [1, 1]


class Broken(ReferenceProvider):
    """Fails when it is asked, after the first answer."""

    name = "broken"
    error: Exception = ValueError("no idea")

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        for node in view:
            yield Claim((node,))
            raise self.error


@pytest.fixture
def broken() -> Iterator[type[Broken]]:
    made = type("Broken", (Broken,), {})
    REGISTRY.register("broken", made, auto=False)
    yield made
    REGISTRY.unregister("broken")


@pytest.mark.parametrize("policy", ["cost", "priority"])
@pytest.mark.parametrize("error", [ValueError("no idea"), OutOfMemory("no idea"), MemoryError("no idea")])
def test_a_provider_that_fails_to_answer_gets_nothing(broken: type[Broken], error: Exception, policy: str) -> None:
    broken.error = error
    model = onnx_format.to_proto(graph()).SerializeToString()
    with rv.load(model, providers=["broken", "cpu", "reference"], policy=policy) as session:
        np.testing.assert_array_equal(session.run({"x": np.array([[-1.0]], np.float32)})["y"], [[2.0]])
        for node in session.report.nodes:
            assert node.provider in ("cpu", "reference")
            assert ("broken", f"failed to say what it takes ({type(error).__name__}: no idea)") in node.declined
    with pytest.raises(UnsupportedOp, match=r"broken: failed to say what it takes .*no idea"):
        rv.load(model, providers=["broken"], fallback="off")
    assert rv.select_backend("Relu", 10, ["broken", "cpu"]) == "cpu"


@pytest.mark.parametrize("error", [InvalidConfig("wrong option"), ImportError("ours", name="ranvier.absent")])
def test_what_is_no_fault_of_a_provider_is_told(broken: type[Broken], error: Exception) -> None:
    broken.error = error
    with pytest.raises(type(error)):
        REGISTRY.claims.claims(broken(), graph())
