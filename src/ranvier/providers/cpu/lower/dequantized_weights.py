"""Products with a constant weight behind DequantizeLinear: codes of 8 bits and fewer stay what they are in memory.

The scale belongs to the whole weight, to its columns, or to blocks along K. Every product that uses the weight has to
take it so: else it would be in memory twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.llvm.coded import CodedB, Coding, Groups, pack_coded
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.providers.cpu.lower.weight_only import all_finite, product
from ranvier.providers.cpu.realise import Realiser
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_LEAST = 4096  # elements of a weight that is worth it
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_CODINGS = {
    DType.int2: Coding(2),
    DType.uint2: Coding(2),
    DType.int4: Coding(4),
    DType.uint4: Coding(4),
    DType.int8: Coding(8),
    DType.uint8: Coding(8),
    DType.float8_e4m3fn: Coding(8, "e4m3"),
    DType.float8_e5m2: Coding(8, "e5m2"),
}


@dataclass(frozen=True)
class Weight:
    """Codes as they are stored, [K, N] or turned; scales and zero points [N, groups] or ready to be spread to that."""

    codes: ConstTensor
    turned: bool  # [N, K]
    scales: ConstTensor
    zeros: ConstTensor | None
    block: int  # k that share a scale

    @property
    def k(self) -> int:
        return int(self.codes.shape[1 if self.turned else 0])

    @property
    def n(self) -> int:
        return int(self.codes.shape[0 if self.turned else 1])

    def packed(self, r: Realiser) -> CodedB:
        coding = _CODINGS[self.codes.dtype]
        matrix = self.codes.numpy() if self.turned else self.codes.numpy().T
        groups = Groups.even(self.k, self.block, coding)
        zeros = None
        unsigned = self.codes.dtype.name.startswith("uint")
        if coding.kind == "integers" and (self.zeros is not None or unsigned):
            given = np.float32(0) if self.zeros is None else self._spread(self.zeros.numpy())
            zeros = np.broadcast_to(given - np.float32(coding.middle if unsigned else 0), (self.n, len(groups.order)))

        def some(first: int, last: int) -> Array:
            part = np.ascontiguousarray(matrix[first:last])
            if coding.kind != "integers":
                return part.view(np.uint8)
            return (part.astype(np.int16) + (0 if unsigned else coding.middle)).astype(np.uint8)

        scales = self._spread(self.scales.numpy())
        return pack_coded(some, coding, self.n, groups, scales, zeros, r.isa)

    def _spread(self, numbers: Array) -> Array:
        found = numbers.astype(np.float32)
        count = -(-self.k // self.block)
        if found.size == 1:
            return np.full((self.n, count), found.reshape(-1)[0], np.float32)
        if found.ndim == 1:
            return np.repeat(found[:, None], count, axis=1)
        return found if self.turned else found.T


def _weight(node: Node) -> Weight | None:
    """What a product multiplies by, where it is a weight that can stay coded."""
    if node.domain or node.op not in ("MatMul", "Gemm"):
        return None
    attrs = node.attrs
    if attrs.get("transA") or attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0:
        return None
    source = node.inputs[1].producer if node.inputs[1] is not None else None
    if source is None or source.op != "DequantizeLinear" or source.domain:
        return None
    given = [None if value is None else value.const for value in source.inputs]
    if len(given) < 2 or any(value is not None and found is None for value, found in zip(source.inputs, given)):
        return None
    codes, scales = given[0], given[1]
    zeros = given[2] if len(given) > 2 else None
    assert codes is not None and scales is not None
    if codes.dtype not in _CODINGS or len(codes.shape) != 2 or codes.size < _LEAST:
        return None
    turned = bool(attrs.get("transB"))
    along_k, along_n = (1, 0) if turned else (0, 1)
    axis, block = int(source.attrs.get("axis", 1)) % 2, int(source.attrs.get("block_size", 0))
    k = int(codes.shape[along_k])
    if block:
        wanted = [codes.shape[0], codes.shape[1]]
        wanted[along_k] = -(-k // block)
        if axis != along_k or scales.shape != tuple(wanted):
            return None
    elif scales.size != 1 and (axis != along_n or scales.shape != (codes.shape[along_n],)):
        return None
    if zeros is not None and zeros.shape != scales.shape:
        return None
    if _CODINGS[codes.dtype].kind != "integers":
        if zeros is not None and zeros.numpy().astype(np.float32).any():
            return None
        if not all_finite(codes):
            return None
        zeros = None
    return Weight(codes, turned, scales, zeros, block or k)


def _taken(node: Node, b: Definitions) -> Weight | None:
    """The weight of a product of this partition, whose other operands suit it."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y not in b.types or x not in b.types or y in b.known or not b.shape(x):
        return None
    if b.dtype(x) not in _FLOATS or b.dtype(y) is not b.dtype(x):
        return None
    return _weight(node)


def _kept(value: Value, b: Definitions) -> bool:
    """Whether all who use a dequantized weight take its codes."""
    return not value.is_graph_output and all(at == 1 and _taken(node, b) is not None for node, at in value.uses)


def stays_coded(n: NodeView, b: Definitions) -> bool:
    """Whether nobody needs the result of this DequantizeLinear."""
    return bool(n.outputs[0].uses) and _kept(n.outputs[0], b)


def multiplied(n: NodeView, b: Definitions) -> bool:
    """Define the product by the codes of its weight, where that stays coded."""
    weight = _taken(n.node, b)
    if weight is None or not _kept(n.input(1), b):
        return False
    sources, more = (weight.codes, weight.scales, weight.zeros), (weight.turned, weight.block)
    product(n, b, weight.n, weight.packed, sources, more, "float32", n.input(2) if n.has(2) else None)
    return True
