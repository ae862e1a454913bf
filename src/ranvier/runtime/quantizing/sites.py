"""Which nodes of a graph, and of bodies in it, can be quantized: products and convolutions of float32 with constant
weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.passes.facts import dtype_of
from ranvier.records import dataclass

_LEAST = 256  # weights below which nothing is gained
_LEAST_TERMS = 8  # of a product's sums: with fewer, scales and filled groups take what codes save


@dataclass(frozen=True)
class Site:
    """A layer: ``outputs`` and ``inner`` are axes of its weights."""

    node: Node
    outputs: int  # the axis of output channels
    inner: int | None  # the one axis that is summed over; None for convolutions, which sum over several

    @property
    def name(self) -> str:
        return self.node.name or self.node.output.name

    @property
    def graph(self) -> Graph:
        """The one it stands in: the model's, or a body."""
        assert self.node.graph is not None
        return self.node.graph

    @property
    def data(self) -> Value:
        found = self.node.inputs[0]
        assert found is not None
        return found

    @property
    def weight(self) -> Value:
        found = self.node.inputs[1]
        assert found is not None
        return found

    @property
    def numbers(self) -> np.ndarray:
        assert self.weight.const is not None
        return self.weight.const.numpy()

    @property
    def matrix(self) -> np.ndarray:
        """The weights of a product as [out, in]."""
        numbers = self.numbers
        return numbers if self.outputs == 0 else numbers.T

    @property
    def bias(self) -> Value | None:
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None

    @property
    def row(self) -> np.ndarray | None:
        """The bias as a number for each output channel; None where it has none, or one that is not constant."""
        if self.bias is None or self.bias.const is None:
            return None
        return np.broadcast_to(self.bias.const.numpy().reshape(-1), (self.numbers.shape[self.outputs],))


def by_graph(sites: Iterable[Site]) -> dict[Graph, list[Site]]:
    """Layers by the graph that they stand in, in order."""
    found: dict[Graph, list[Site]] = {}
    for site in sites:
        found.setdefault(site.graph, []).append(site)
    return found


def beside(weight: Value, array: np.ndarray[Any, Any], name: str) -> Value:
    """A constant in the graph that has another one, so that whoever reads that sees it too."""
    assert weight.owner is not None
    return weight.owner.add_constant(ConstTensor.of(array), f"{weight.name}.{name}")


@contextlib.contextmanager
def noted_in_errors(note: str) -> Iterator[None]:
    """Errors about numbers say whose they are, and what can be done."""
    try:
        yield
    except RanvierError as error:
        if note:
            error.add_note(note)
        raise


def named_in_errors(layer: str, what: str = "its weights") -> contextlib.AbstractContextManager[None]:
    """Errors about numbers say which layer has them."""
    return noted_in_errors(f"layer {layer!r}, {what}; `keep` leaves a layer as it is")


def find_sites(graph: Graph, *, products_only: bool = False, bodies: bool = False) -> list[Site]:
    """The layers of a graph in order; ``bodies``: also those in bodies of loops and branches."""
    found = (_site(node) for node in (graph.all_nodes() if bodies else graph))
    return [site for site in found if site is not None and not (products_only and site.inner is None)]


def _site(node: Node) -> Site | None:
    if not could_be_coded(node) or not is_plain(node):
        return None
    if node.op == "Conv":
        return Site(node, 0, None)
    turned = _is_turned(node)
    return Site(node, 0 if turned else 1, 1 if turned else 0)


def could_be_coded(node: Node) -> bool:
    """Whether a node has weights that codes can stand for, whatever else it does."""
    if node.domain or node.op not in ("Conv", "MatMul", "Gemm"):
        return False
    data, weight = node.inputs[0], node.inputs[1]
    if node.op == "Conv":
        return has_weights(data, weight)
    return can_have_codes(data, weight, inner=1 if _is_turned(node) else 0)


def can_have_codes(data: Value | None, weight: Value | None, *, inner: int = 0) -> bool:
    """Whether codes can stand for a constant matrix that data are multiplied by; ``inner``: its axis of sums."""
    if not has_weights(data, weight) or weight is None or weight.const is None:
        return False
    shape = weight.const.shape
    return len(shape) == 2 and shape[inner] >= _LEAST_TERMS


def has_weights(data: Value | None, weight: Value | None) -> bool:
    """Whether data have constant weights, of float32 both, enough of them."""
    if data is None or data.const is not None or weight is None or weight.const is None:
        return False
    return dtype_of(data) is DType.float32 and weight.const.dtype is DType.float32 and weight.const.size >= _LEAST


def _is_turned(product: Node) -> bool:
    """Whether its weights are [out, in]."""
    return product.op == "Gemm" and bool(product.attrs.get("transB", 0))


def is_plain(node: Node) -> bool:
    """Whether a layer multiplies data by weights, and adds a row of constants at most."""
    if node.op != "Gemm":
        return True
    factors = node.attrs.get("alpha", 1.0) == 1.0 and node.attrs.get("beta", 1.0) == 1.0
    return factors and not node.attrs.get("transA", 0) and is_row(node.input(2))


def is_row(bias: Value | None) -> bool:
    """Whether a bias is the same for all rows of a result, and known, or there is none."""
    return bias is None or (bias.const is not None and bias.const.shape[:-1] in ((), (1,)))
