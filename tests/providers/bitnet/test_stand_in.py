"""A part in which BitLinear stands for other layers: compiled, planned and shared like any other part."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.passes.ternary import Layer, Weights
from ranvier.providers.bitnet.cache import TernaryCache
from ranvier.providers.bitnet.provider import BitNetProvider
from ranvier.providers.cpu.kernel import CpuKernel
from ranvier.providers.cpu.target import Packs
from ranvier.providers.registry import REGISTRY
from tests.providers.bitnet.test_provider import layer, two_bit_model

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(21)
SIZE = 64
OPTIONS: dict[str, Any] = {"providers": ["bitnet"], "provider_options": {"bitnet": {"matmul_nbits": True}}}


def ternary(x: Array, w: Array) -> Array:
    """What a two-bit layer of the model computes as a BitLinear."""
    by = np.float32(127) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-5))
    sums = np.rint(x * by).astype(np.int64) @ w.T.astype(np.int64)
    return np.asarray(sums.astype(np.float32) * (np.float32(0.25) / by))


def with_layer(
    nodes: list[onnx.NodeProto], inputs: dict[str, list[Any]], outputs: list[str], more: dict[str, Array] | None = None
) -> tuple[onnx.ModelProto, Array]:
    """A model of nodes that may read the operands b, s and z of a two-bit layer, and the layer's weights."""
    given, w, _ = two_bit_model(SIZE, SIZE)
    stored = [*given.graph.initializer, *(onnx.numpy_helper.from_array(v, name) for name, v in (more or {}).items())]
    graph = helper.make_graph(
        nodes,
        "stand in",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs],
        stored,
    )
    return helper.make_model(graph, opset_imports=given.opset_import, ir_version=10), w


def product(x: str, y: str) -> onnx.NodeProto:
    sizes = {"K": SIZE, "N": SIZE, "bits": 2, "block_size": 32}
    return helper.make_node("MatMulNBits", [x, "b", "s", "z"], [y], domain="com.microsoft", **sizes)


def numbers(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def no_plain_call(*_: Any, **__: Any) -> None:
    pytest.fail("the part was not bound to its shapes")


def test_runs_of_known_shapes_are_planned_once() -> None:
    """Without a plan every run looks for its code and memory anew, which takes thirty times as long."""
    nodes = [helper.make_node("Neg", ["x"], ["n"]), product("n", "m"), helper.make_node("Relu", ["m"], ["y"])]
    made, w = with_layer(nodes, {"x": ["rows", SIZE]}, ["y"])
    with mock.patch.object(CpuKernel, "_run", no_plain_call), rv.load(made, **OPTIONS) as session:
        for rows in (3, 1, 17, 3, 5):
            x = numbers(rows, SIZE)
            np.testing.assert_array_equal(session.run({"x": x})["y"], np.maximum(ternary(-x, w), 0))


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_that_grow(threads: int) -> None:
    """A step of a loop with a cache: one span of calls, and the numbers of each."""
    nodes = [
        product("x", "m"),
        helper.make_node("Concat", ["past", "m"], ["cache"], axis=0),
        helper.make_node("ReduceMax", ["cache", "first"], ["top"], keepdims=1),
        helper.make_node("Sub", ["cache", "top"], ["y"]),
    ]
    more = {"first": np.array([0])}
    made, w = with_layer(nodes, {"x": [1, SIZE], "past": ["length", SIZE]}, ["y", "cache"], more)
    spans = []
    grow = CpuKernel.grow

    def counted(*given: Any) -> Any:
        spans.append(grow(*given))
        return spans[-1]

    cache = numbers(2, SIZE)
    with (
        mock.patch.object(CpuKernel, "_run", no_plain_call),
        mock.patch.object(CpuKernel, "grow", counted),
        rv.load(made, threads=threads, **OPTIONS) as session,
    ):
        for _ in range(12):
            x = numbers(1, SIZE)
            wanted = np.concatenate([cache, ternary(x, w)])
            found = session.run({"x": x, "past": cache})
            np.testing.assert_array_equal(found["cache"], wanted)
            np.testing.assert_array_equal(found["y"], wanted - wanted.max(axis=0, keepdims=True))
            cache = wanted
    assert len(spans) == 1 and spans[0].calls >= 8


@pytest.mark.parametrize("optimization", ["none", "basic"])
def test_layers_in_branches_that_the_part_decides_about(optimization: str) -> None:
    """The condition depends on shapes alone, so the branches are no parts of their own."""
    value = helper.make_tensor_value_info("t", 1, None)
    branches = {
        "then_branch": helper.make_graph([product("x", "t")], "then", [], [value]),
        "else_branch": helper.make_graph([helper.make_node("Neg", ["x"], ["t"])], "else", [], [value]),
    }
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["rows"]),
        helper.make_node("Greater", ["rows", "two"], ["p"]),
        helper.make_node("If", ["p"], ["y"], **branches),
    ]
    made, w = with_layer(nodes, {"x": ["rows", SIZE]}, ["y"], {"zero": np.array(0), "two": np.array(2)})
    with rv.load(made, optimization=optimization, **OPTIONS) as session:
        assert {node.provider for node in session.report.nodes} == {"bitnet"}
        for rows in (3, 2, 7):
            x = numbers(rows, SIZE)
            np.testing.assert_array_equal(session.run({"x": x})["y"], ternary(x, w) if rows > 2 else -x)


def test_some_of_the_outputs() -> None:
    nodes = [product("x", "m"), helper.make_node("Relu", ["m"], ["y"]), helper.make_node("Exp", ["m"], ["e"])]
    made, w = with_layer(nodes, {"x": ["rows", SIZE]}, ["y", "m", "e"])
    x = numbers(3, SIZE)
    with rv.load(made, **OPTIONS) as session:
        for names in (["m"], ["y"], ["y", "m"], ["m", "y"]):
            found = session.run({"x": x}, names)
            assert list(found) == names
            for name in names:
                wanted = ternary(x, w)
                np.testing.assert_array_equal(found[name], np.maximum(wanted, 0) if name == "y" else wanted)


def test_what_kernels_make_of_weights_is_shared() -> None:
    """By sessions beside each other, and by the parts that give some of the outputs."""
    nodes = [product("x", "m"), helper.make_node("Relu", ["m"], ["y"])]
    made, w = with_layer(nodes, {"x": ["rows", SIZE]}, ["y", "m"])
    provider = REGISTRY.get("bitnet")
    assert isinstance(provider, BitNetProvider)
    provider.cache.clear()
    x = numbers(3, SIZE)
    packed, shared = [], Packs.shared

    def counted(self: Any, sources: Any, more: Any, make: Any) -> Any:
        def made_anew() -> Any:
            packed.append(more)
            return make()

        return shared(self, sources, more, made_anew)

    with (
        mock.patch.object(Packs, "shared", counted),
        rv.load(made, **OPTIONS) as first,
        rv.load(made, **OPTIONS) as second,
    ):
        for session in (first, second):
            for names in (None, ["m"]):
                np.testing.assert_array_equal(session.run({"x": x}, names)["m"], ternary(x, w))
    assert len(packed) == 1


def test_nobody_can_write_to_what_is_kept() -> None:
    cache = TernaryCache()
    given: tuple[Layer, list[int]] = layer(3)
    found = cache.weights(given[0])
    assert isinstance(found, Weights) and not found.codes.flags.writeable
