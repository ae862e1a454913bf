"""What is put together around products with weights of few bits, and what is left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ranvier as rv  # noqa: E402
from ranvier.providers.cuda import decode  # noqa: E402
from ranvier.providers.cuda.kernels import choose  # noqa: E402
from ranvier.providers.cuda.kernels.jit import Tile  # noqa: E402
from tests.torch.device import options as provider_options  # noqa: E402

Array = np.ndarray[Any, Any]
WIDTH, BLOCK = 32, 32
FLOAT = TensorProto.FLOAT


class Graph:
    """Nodes with constants that are made on the way."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._rng = np.random.default_rng(1)

    def constant(self, array: Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def drawn(self, *shape: int) -> str:
        return self.constant(self._rng.standard_normal(shape).astype(np.float32))

    def node(self, op: str, *inputs: str, results: int = 1, name: str = "", **attributes: Any) -> str:
        outputs = [name or f"v{len(self.nodes)}", *(f"v{len(self.nodes)}_{k}" for k in range(1, results))]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, **attributes))
        return outputs[0]

    def coded(
        self, x: str, n: int, bits: int = 4, *, zeros: bool = False, bias: bool = False, k: int = WIDTH, name: str = ""
    ) -> str:
        blocks = -(-k // BLOCK)
        codes = self.constant(self._rng.integers(0, 256, (n, blocks, BLOCK * bits // 8)).astype(np.uint8))
        scales = self.constant((self._rng.random((n, blocks)) * 0.02 + 0.01).astype(np.float32))
        given = [x, codes, scales]
        if zeros or bias:
            width = -(-blocks * bits // 8)
            points = self._rng.integers(0, 256, (n, width)).astype(np.uint8)
            given += [self.constant(points) if zeros else "", "", *([self.drawn(n)] if bias else [])]
        what: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": BLOCK}
        return self.node("MatMulNBits", *given, domain="com.microsoft", name=name, **what)

    def model(self, outputs: dict[str, int], width: int = WIDTH) -> Any:
        inputs = [helper.make_tensor_value_info("x", FLOAT, ["tokens", width])]
        results = [helper.make_tensor_value_info(name, FLOAT, ["tokens", n]) for name, n in outputs.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, results, self.weights)
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    with mock.patch.object(choose, "gemv_tile", lambda *_: Tile(16, 256, 1)):
        yield


def steps_of(model: Any, tokens: int, width: int = WIDTH) -> Counter[str]:
    """The kinds of steps that a model becomes; its results are compared with the reference's before and after."""
    seen: list[Counter[str]] = []
    whole = decode.Decoding.__call__

    def watched(self: Any, *given: Any) -> Any:
        steps = whole(self, *given)
        seen.append(Counter(type(step).__name__ for step in steps))
        return steps

    x = np.random.default_rng(tokens).standard_normal((tokens, width)).astype(np.float32)
    wanted = rv.load(model, providers=["reference"], optimization="none").run({"x": x})
    options = provider_options(triton=True)
    with (
        mock.patch.object(decode.Decoding, "__call__", watched),
        rv.load(model, providers=["cuda", "reference"], provider_options=options, fallback="off") as session,
    ):
        for _ in range(2):
            found = session.run({"x": x})
            for name, array in wanted.items():
                assert found[name].shape == array.shape
                np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-3 * np.abs(array).max())
    assert len(seen) == 1
    return seen[0]


@pytest.mark.parametrize("tokens", [1, 2, 20])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_products_with_codes(bits: int, tokens: int) -> None:
    g = Graph()
    g.coded("x", 24, bits, zeros=True, bias=True, name="y")
    assert list(steps_of(g.model({"y": 24}), tokens)) == ["ProductStep" if tokens <= 2 else "CodesStep"]


def test_codes_whose_rows_are_not_whole_blocks() -> None:
    g = Graph()
    g.coded("x", 24, k=40, name="y")
    assert steps_of(g.model({"y": 24}, 40), 1, 40) == Counter(ProductStep=1)


def gated_block(form: str) -> Any:
    """A norm, a gated pair and two sums, the second with a norm behind it."""
    g = Graph()
    y = g.node("RMSNormalization", "x", g.drawn(WIDTH), epsilon=1e-3)
    gate, up = g.coded(y, 8), g.coded(y, 8)
    if form == "Sigmoid":
        opened = g.node("Mul", g.node("Sigmoid", gate), gate)
    elif form == "QuickGelu":
        opened = g.node(form, gate, alpha=1.0, domain="com.microsoft")
    else:
        opened = g.node(form, gate)
    total = g.node("Add", g.coded(g.node("Mul", up, opened), WIDTH, k=8), "x")
    given = (total, g.coded(total, WIDTH), g.drawn(WIDTH))
    after = g.node("SkipSimplifiedLayerNormalization", *given, domain="com.microsoft", epsilon=1e-3)
    g.node("Add", g.coded(after, 8), g.coded(after, 8, 8), name="y")
    return g.model({"y": 8})


@pytest.mark.parametrize("form", ["Sigmoid", "Gelu", "QuickGelu", "Relu"])
def test_a_gated_pair_and_the_sums_around_it(form: str) -> None:
    assert steps_of(gated_block(form), 1) == Counter(ProductStep=5)


@pytest.mark.parametrize("order", [(3, 1), (1, 3)])
def test_codes_are_on_the_device_once(order: tuple[int, ...]) -> None:
    """Sizes that come later find the weights where the first ones have put them."""
    model, seen = gated_block("Sigmoid"), []
    whole = decode.Decoding.__call__

    def watched(self: Any, *given: Any) -> Any:
        seen.append(self)
        return whole(self, *given)

    exact = rv.load(model, providers=["reference"], optimization="none")
    options = provider_options(triton=True)
    with (
        mock.patch.object(decode.Decoding, "__call__", watched),
        rv.load(model, providers=["cuda", "reference"], provider_options=options, fallback="off") as session,
    ):
        for tokens in order:
            x = np.random.default_rng(tokens).standard_normal((tokens, WIDTH)).astype(np.float32)
            wanted = exact.run({"x": x})["y"]
            for _ in range(2):
                found = session.run({"x": x})["y"]
                np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())
            assert all(tensor.dtype != torch.uint8 for tensor in seen[-1]._constants.tensors.values())
    assert len(seen) == 2 and seen[0] is seen[1]


def test_what_somebody_else_reads_is_left_alone() -> None:
    """A norm, a gate and a product that are results, too."""
    g = Graph()
    y = g.node("RMSNormalization", "x", g.drawn(WIDTH), name="normed")
    gate, up = g.coded(y, 32, name="gate"), g.coded(y, 32)
    g.node("Mul", g.node("Mul", gate, g.node("Sigmoid", gate)), up, name="inner")
    made = steps_of(g.model({"normed": WIDTH, "gate": 32, "inner": 32}), 1)
    assert made["ProductStep"] == 2  # each product by itself, with nothing around it


def test_weights_of_different_kinds_are_not_put_together() -> None:
    g = Graph()
    parts = [g.coded("x", 16), g.coded("x", 16, zeros=True), g.coded("x", 16, bias=True), g.coded("x", 16, 8)]
    parts.append(g.coded("x", 16))
    g.node("Concat", *parts, axis=1, name="y")
    assert steps_of(g.model({"y": 80}), 1)["ProductStep"] == 5


@pytest.mark.parametrize("tokens", [1, 20])
def test_biases_go_with_their_products(tokens: int) -> None:
    """Two products of the same tokens, a third with a sum behind; each has a bias, as an operand or by an Add."""
    g = Graph()
    a, b = g.node("Add", g.drawn(16), g.coded("x", 16)), g.coded("x", 8, bias=True)
    c = g.node("Add", g.coded(g.node("Concat", a, b, "x", axis=1), WIDTH, k=56), g.drawn(WIDTH))
    g.node("Add", "x", c, name="y")
    made = steps_of(g.model({"y": WIDTH}), tokens)
    assert made["ProductStep" if tokens == 1 else "CodesStep"] == 2
    assert sum(made.values()) == (3 if tokens == 1 else 4)  # many tokens leave the sum to others
