"""The provider of ternary models: what it takes, what its option changes, what it keeps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.errors import InvalidConfig, RanvierError
from ranvier.graph.ir import Graph
from ranvier.passes.ternary import Layer, Weights
from ranvier.providers.base import ProviderCapability
from ranvier.providers.bitnet.cache import TernaryCache
from ranvier.providers.bitnet.provider import BitNetOptions, BitNetProvider
from ranvier.providers.cpu.provider import CpuProvider
from ranvier.providers.registry import REGISTRY
from tests.providers.cpu.test_bitlinear import block

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(14)


def two_bit_model(n: int, k: int, *, ternary: bool = True) -> tuple[onnx.ModelProto, Array, Array]:
    """MatMulNBits and a float operator behind it; the weights, and an input."""
    w = RNG.integers(-1, 2 if ternary else 3, (n, k)).astype(np.int8)
    w[0, :2] = (-1, 1 if ternary else 2)
    stored = {
        "b": (w + 1).astype(np.uint8).reshape(n, k // 32, 8, 4),
        "s": np.full((n, k // 32), 0.25, np.float32),
        "z": np.full((n, -(-(k // 32) // 4)), 0b01010101, np.uint8),
    }
    stored["b"] = (stored["b"] << np.array([0, 2, 4, 6], np.uint8)).sum(axis=-1, dtype=np.uint8)
    attrs = {"K": k, "N": n, "bits": 2, "block_size": 32}
    nodes = [
        helper.make_node("MatMulNBits", ["x", "b", "s", "z"], ["m"], domain="com.microsoft", name="layer", **attrs),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "two bits",
        [helper.make_tensor_value_info("x", 1, ["rows", k])],
        [helper.make_tensor_value_info("y", 1, ["rows", n])],
        [onnx.numpy_helper.from_array(v, name) for name, v in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), w, RNG.standard_normal((3, k)).astype("f4")


def test_it_can_what_the_cpu_provider_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that says about itself, by whatever field: nothing is told by hand."""
    other = {bool: True, str: "told", tuple: ("told",), frozenset: frozenset({"told"})}
    usual = {each.name: getattr(ProviderCapability(), each.name) for each in fields(ProviderCapability)}
    said: dict[str, Any] = {name: other.get(type(x), 7) if x is not True else False for name, x in usual.items()}
    monkeypatch.setattr(CpuProvider, "capability", lambda self: ProviderCapability(**said))
    found = BitNetProvider().capability()
    assert found == ProviderCapability(**{**said, "notes": "ternary weights in 2 bits, told"})


def test_it_is_there_and_asked_for_by_name() -> None:
    assert "bitnet" in REGISTRY.names() and not REGISTRY.automatic("bitnet")
    assert REGISTRY.resolve("BitNetExecutionProvider") == "bitnet"
    provider = REGISTRY.get("bitnet")
    assert "BitLinear" in provider.capability().ops
    assert "2 bits" in provider.capability().notes
    assert provider.device.kind == "cpu"
    (status,) = REGISTRY.status("bitnet")
    assert status.ready


def test_it_takes_whole_models_with_ternary_layers() -> None:
    made, x = block(64, 32, 48)
    with rv.load(made, providers=["bitnet", "cpu"]) as session:
        assert {node.provider for node in session.report.nodes} == {"bitnet"}
        found = session.run({"x": x})["y"]
    with rv.load(made, providers=["cpu"]) as session:
        np.testing.assert_array_equal(found, session.run({"x": x})["y"])


def test_layers_in_bodies_count() -> None:
    """A model with its ternary layers in branches has some, wherever in it that is asked."""
    stored = {
        "c": onnx.numpy_helper.from_array(np.full((8, 4), 0b01100001, np.uint8), "c"),
        "s": onnx.numpy_helper.from_array(np.array(0.5, np.float32), "s"),
    }
    ternary = helper.make_node("BitLinear", ["h", "c", "s"], ["t"], domain="ranvier", K=16, N=8)
    value = helper.make_tensor_value_info("t", 1, None)
    branches = {
        "then_branch": helper.make_graph([ternary], "then", [], [value]),
        "else_branch": helper.make_graph([helper.make_node("Neg", ["l"], ["t"])], "else", [], [value]),
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Slice", ["x", "first", "last", "axis"], ["l"]),
        helper.make_node("If", ["p"], ["y"], **branches),
    ]
    ends = [onnx.numpy_helper.from_array(np.array([n]), k) for k, n in (("first", 0), ("last", 8), ("axis", 1))]
    inputs = [helper.make_tensor_value_info("p", 9, []), helper.make_tensor_value_info("x", 1, ["rows", 16])]
    outputs = [helper.make_tensor_value_info("y", 1, ["rows", 8])]
    graph = helper.make_graph(nodes, "branches", inputs, outputs, [*stored.values(), *ends])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ranvier", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    x = RNG.standard_normal((3, 16)).astype("f4")
    found = []
    for providers in (["bitnet", "cpu", "reference"], ["reference"]):
        with rv.load(made, providers=providers, optimization="none") as session:
            found.append([session.run({"p": np.array(p), "x": x})["y"] for p in (True, False)])
            if "bitnet" in providers:
                assert "no ternary layers" not in str(session.report)
                assert {node.provider for node in session.report.nodes if node.op != "If"} == {"bitnet"}
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_it_leaves_other_models_alone() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "plain",
        [helper.make_tensor_value_info("x", 1, [4])],
        [helper.make_tensor_value_info("y", 1, [4])],
    )
    with rv.load(helper.make_model(graph, ir_version=10), providers=["bitnet", "cpu"]) as session:
        (node,) = session.report.nodes
        assert node.provider == "cpu"
        assert "no ternary layers" in str(node.declined)


def test_two_bit_layers_stay_float_unless_asked() -> None:
    made, w, x = two_bit_model(20, 64)
    exact = np.maximum(x @ w.T.astype(np.float32) * np.float32(0.25), 0)
    with rv.load(made, providers=["bitnet", "cpu"]) as session:
        assert {node.provider for node in session.report.nodes} == {"bitnet"}
        np.testing.assert_allclose(session.run({"x": x})["y"], exact, rtol=1e-4, atol=1e-4)


def test_two_bit_layers_as_bitlinear() -> None:
    made, w, x = two_bit_model(20, 64)
    reach = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-5))
    by = np.float32(127) / reach
    sums = np.rint(x * by).astype(np.int64) @ w.T.astype(np.int64)
    expected = np.maximum(sums.astype(np.float32) * (np.float32(0.25) / by), 0)
    provider = REGISTRY.get("bitnet")
    assert isinstance(provider, BitNetProvider)
    provider.cache.clear()
    hits = provider.cache.hits
    options = {"bitnet": {"matmul_nbits": True}}
    for _ in range(2):
        with rv.load(made, providers=["bitnet", "cpu"], provider_options=options) as session:
            np.testing.assert_array_equal(session.run({"x": x})["y"], expected)
            np.testing.assert_array_equal(session.run({"x": x[:1]})["y"], expected[:1])
            assert list(session.run({"x": x}, ["y"])) == ["y"]
    assert provider.cache.nbytes > 0
    assert provider.cache.hits > hits  # the second session found what the first had made


def test_two_bit_layers_with_four_levels_are_no_ternary_ones() -> None:
    made, _, _ = two_bit_model(20, 64, ternary=False)
    with rv.load(made, providers=["bitnet", "cpu"], provider_options={"bitnet": {"matmul_nbits": True}}) as session:
        assert {node.provider for node in session.report.nodes} == {"cpu"}


def test_options_are_checked() -> None:
    with pytest.raises(InvalidConfig, match="matmul_nbits"):
        BitNetOptions(matmul_nbits="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"BitNetOptions: isa: unknown instruction set 'sse9'.*portable"):
        BitNetOptions(isa="sse9")
    assert BitNetOptions(isa="portable").isa == "portable"


def layer(content: int, size: int = 64) -> tuple[Layer, list[int]]:
    """A layer of some content, and how often its weights were made."""
    calls: list[int] = []

    def weights() -> Weights:
        calls.append(content)
        return Weights(np.full((1, size), content, np.uint8), np.ones((), "f4"))

    node = Graph().add("MatMul", [])
    return Layer(node, 4 * size, weights, (np.full(4, content, np.float32),), ("absmean",), False), calls


def test_the_cache_knows_content() -> None:
    cache = TernaryCache()
    (first, made), (same, never), (other, again) = layer(1), layer(1), layer(2)
    assert cache.weights(first) is cache.weights(same)
    assert cache.weights(other) is not cache.weights(first)
    assert (made, never, again) == ([1], [], [2])
    assert (cache.hits, cache.misses) == (2, 2)
    cache.clear()
    assert cache.nbytes == 0
    cache.weights(same)
    assert never == [1]


def test_weights_that_are_not_ternary_are_looked_at_once() -> None:
    cache = TernaryCache(limit=1200)
    calls: list[int] = []

    def none(content: int) -> Layer:
        node, source = Graph().add("MatMul", []), np.full(4, content, np.float32)
        return Layer(node, 256, lambda: calls.append(content), (source,), ("two bits",), True)

    assert cache.weights(none(1)) is None and cache.weights(none(1)) is None and cache.weights(none(2)) is None
    assert calls == [1, 2] and (cache.hits, cache.misses) == (1, 2)
    for content in range(3, 9):  # they are no more than others
        cache.weights(none(content))
    cache.weights(none(1))
    assert calls[-1] == 1 and cache.nbytes <= 1200


def test_the_cache_is_bounded() -> None:
    cache = TernaryCache(limit=3 * 68)
    layers = [layer(k) for k in range(5)]
    for each, _ in layers[:3]:
        cache.weights(each)
    cache.weights(layers[0][0])  # used again: the next one goes first
    cache.weights(layers[3][0])
    assert cache.nbytes == 3 * 68
    cache.weights(layers[0][0])
    cache.weights(layers[1][0])
    assert [len(calls) for _, calls in layers] == [1, 2, 1, 1, 0]
    huge, calls = layer(9, 1000)
    before = cache.nbytes
    cache.weights(huge)
    cache.weights(huge)
    assert len(calls) == 2 and cache.nbytes == before  # nothing went for what cannot stay


def test_threads_that_make_the_same_weights_share_one_copy() -> None:
    cache = TernaryCache()
    content = np.ones(4, np.float32)
    inside = threading.Barrier(2)

    def weights() -> Weights:
        inside.wait(10)  # both have looked, and found nothing
        return Weights(np.ones((1, 64), np.uint8), np.ones((), "f4"))

    node = Graph().add("MatMul", [])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(cache.weights, [Layer(node, 256, weights, (content,), (), True)] * 2))
    assert found[0] is found[1] and cache.nbytes == 68


@pytest.mark.parametrize(
    "change",
    [
        lambda node, given: given.update(b=given["b"][:, :1]),
        lambda node, given: given.update(s=given["s"][:, :1]),
        lambda node, given: given.update(z=given["z"][:3]),
        lambda node, given: node.attribute.extend([helper.make_attribute("block_size", 0)]),
        lambda node, given: node.attribute.extend([helper.make_attribute("K", 0)]),
    ],
)
def test_layers_that_do_not_fit_are_somebody_elses(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The provider says that nothing is ternary, and who runs the node says what is wrong."""
    made, _, x = two_bit_model(20, 64)
    given = {t.name: onnx.numpy_helper.to_array(t) for t in made.graph.initializer}
    node = made.graph.node[0]
    kept = {a.name: a for a in node.attribute}
    change(node, given)
    last = {a.name: a for a in [*kept.values(), *node.attribute]}
    del node.attribute[:]
    node.attribute.extend(last.values())
    del made.graph.initializer[:]
    made.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in given.items())
    options = {"bitnet": {"matmul_nbits": True}}
    chosen: dict[str, Any] = {"providers": ["bitnet", "cpu"], "provider_options": options}
    with pytest.raises(RanvierError, match="MatMulNBits"), rv.load(made, **chosen) as session:
        session.run({"x": x})
    assert "failed to say" not in caplog.text
