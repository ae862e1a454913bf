"""Codes of 3, 5 and 6 bits in 4 and 8, for tools that read no others: the same numbers, raised by what their middle is
below that of more bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.quantized_moe import NAME as EXPERTS
from ranvier.ops.contrib.quantized_moe import PLACES, Stored
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.contrib.weight_only import WIDER, packed, raised_by, unpacked
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_CODES = {"MatMulNBits": 1, "GatherBlockQuantized": 0}  # which operand has them
_SCALES, _ZEROS = 2, 3


def widen(graph: Graph) -> None:
    """Bring products, tables and layers of experts with constant codes of such bits into ones that ONNX Runtime
    reads."""
    places: dict[Value, list[tuple[Node, int]]] = {}
    wide: dict[Value, Array] = {}
    for node in list(graph):
        layers = [layer for layer in _layers(node) if layer.bits in WIDER]
        if not all(layer.is_constant for layer in layers):
            continue
        for layer in layers:
            codes, zeros = node.input(layer.codes), node.input(layer.zeros)
            assert codes is not None and codes.const is not None
            places.setdefault(codes, []).append((node, layer.codes))
            wide[codes] = _raised(codes.const.numpy(), layer.bits)
            if zeros is not None and zeros.const is not None:
                places.setdefault(zeros, []).append((node, layer.zeros))
                wide[zeros] = layer.raised_zeros(zeros.const.numpy())
        if layers:
            _tell(node)
    for value, uses in places.items():
        for node, k in uses:
            node.set_input(k, None)
        if not value.uses and value not in graph.outputs:
            graph.remove_constant(value)  # the other one has its name
        made = graph.add_constant(ConstTensor.of(wide[value]), value.name)
        for node, k in uses:
            node.set_input(k, made)


@dataclass(frozen=True)
class _Layer:
    """Codes of a node, and where they, their scales and zeros are among its operands."""

    node: Node
    bits: int
    codes: int
    scales: int = _SCALES
    zeros: int = _ZEROS

    @property
    def is_constant(self) -> bool:
        codes, scales, zeros = (self.node.input(k) for k in (self.codes, self.scales, self.zeros))
        given = [each for each in (scales, zeros) if each is not None]
        return codes is not None and all(each.const is not None for each in (codes, *given))

    def raised_zeros(self, zeros: Array) -> Array:
        if zeros.dtype != np.uint8:
            return np.asarray(widened(zeros) + raised_by(self.bits))  # halves have less room above
        if self.node.op != "MatMulNBits":
            return _raised(zeros, self.bits, self._beside(zeros.ndim))
        attrs = self.node.attrs
        blocks = -(-int(attrs["K"]) // int(attrs["block_size"]))
        raised = _raised(zeros.reshape(int(attrs["N"]), -1), self.bits, blocks)
        return raised.reshape(-1) if zeros.ndim == 1 else raised

    def _beside(self, rank: int) -> int:
        """Zeros along the last axis: of the blocks of a row, of rows where these have one each."""
        codes, scales = self.node.input(self.codes), self.node.input(self.scales)
        assert codes is not None and codes.const is not None and scales is not None and scales.const is not None
        if rank < len(codes.const.shape):
            return codes.const.shape[-2]
        return scales.const.shape[-1] if len(scales.const.shape) == rank else 1


def _layers(node: Node) -> Iterator[_Layer]:
    if node.domain != MICROSOFT:
        return
    if node.op in _CODES:
        yield _Layer(node, int(node.attrs.get("bits", 4)), _CODES[node.op])
    elif node.op == EXPERTS:
        for name, (codes, scales, _, zeros, _) in PLACES.items():
            stored = Stored.of(node.attrs, name)
            if stored.kind == "int" and node.input(codes) is not None:
                yield _Layer(node, stored.bits, codes, scales, zeros)


def _tell(node: Node) -> None:
    """How many bits codes have now; layers of experts have their own where they differ."""
    if node.op in _CODES:
        node.attrs["bits"] = WIDER[int(node.attrs.get("bits", 4))]
        return
    bits = "expert_weight_bits"
    given = [name for name, (codes, *_) in PLACES.items() if node.input(codes) is not None]
    found = {name: Stored.of(node.attrs, name).bits for name in given}
    wide = {name: WIDER.get(each, each) for name, each in found.items()}
    for name in PLACES:
        node.attrs.pop(f"{name}_{bits}", None)
    node.attrs[bits] = wide["fc1"]
    node.attrs |= {f"{name}_{bits}": each for name, each in wide.items() if each != wide["fc1"]}


def _raised(codes: Array, bits: int, count: int | None = None) -> Array:
    """``count``: of them in a row, where bytes have room for more."""
    return packed(unpacked(codes, bits)[..., :count] + np.uint8(raised_by(bits)), WIDER[bits])
