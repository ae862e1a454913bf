"""Layers as ``ranvier::BitLinear``: float ones by the mean of their magnitudes, 2-bit ones that are ternary already.

These change results, so no session does them by itself: a float layer keeps three levels of its weights, and every
converted layer rounds its tokens to 8 bits. Models that were trained so lose nothing by it; others should be looked at.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.contrib.weight_only import unpacked
from ranvier.ops.own.bitlinear import DOMAIN, pack_codes
from ranvier.passes.edit import builder, bypass
from ranvier.passes.facts import dtype_of
from ranvier.quantize.base import Quantized
from ranvier.quantize.ternary import Ternary
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_ORIGIN = "bitnet"
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)


@dataclass(frozen=True)
class Layer:
    """A node that a BitLinear can stand for; ``weights`` are [N, K], made when called."""

    node: Node
    weights: Callable[[], Quantized]
    sources: tuple[Array, ...]  # what they are made from …
    how: tuple[object, ...]  # … and what else they depend on
    coded: bool  # ternary already
    bias: Value | None = None

    @property
    def name(self) -> str:
        return self.node.name or self.node.output.name


Quantize = Callable[[Layer], Quantized]


def convert_to_bitnet(
    graph: Graph,
    keep: Sequence[str] = (),
    *,
    wanted: Callable[[Layer], bool] | None = None,
    quantize: Quantize | None = None,
) -> list[str]:
    """Let BitLinear stand for products with constant weights; returns the names of those it stands for now.

    ``keep``: patterns of names of layers that stay; ``wanted`` is asked about the others. ``quantize`` makes the
    weights of a layer, by default ``Layer.weights``. What is no plain product with a constant matrix, or is coded but
    not ternary, stays in any case.
    """
    done = []
    for node in list(graph):
        found = ternary_layer(node) or float_layer(node)
        if found is None or any(fnmatch.fnmatchcase(found.name, p) for p in keep):
            continue
        if wanted is not None and not wanted(found):
            continue
        weights = found.weights() if quantize is None else quantize(found)
        done.append(found.name)
        x = node.input(0)
        assert x is not None
        bypass(node, ternary_linear(builder(node, _ORIGIN), x, weights, found.bias), _ORIGIN)
    return done


def ternary_linear(ops: GraphOps, x: Value, weights: Quantized, bias: Value | None = None) -> Value:
    """The product of tokens and ternary weights [N, K], as nodes.

    With one scale, or one for each output, it is a BitLinear. Scales of blocks along K (llama.cpp's TQ1_0 and TQ2_0
    have one for 256) cannot be taken out of an integer sum: that is a MatMulNBits of 2 bits, whose tokens stay float.
    Neither it nor what llama.cpp does there, which is to scale tokens by block too, is what such models are trained
    with; where the blocks of a row agree, as in files made from a trained ternary model, they are one scale here.
    """
    codes, scales = np.asarray(weights.codes), np.asarray(weights.scales, np.float32)
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or np.abs(codes.astype(np.int16)).max(initial=0) > 1:
        raise InvalidValue("a ternary layer has a matrix of -1, 0 and 1")
    n, k = codes.shape
    joined = _joined(codes, scales, weights.block)
    operands: list[Any]
    if joined is not None:
        operands = [x, pack_codes(codes.astype(np.int8)), joined, *([bias] if bias is not None else [])]
        ops.graph.opsets.setdefault(DOMAIN, 1)
        return ops.node("BitLinear", operands, {"K": k, "N": n}, domain=DOMAIN, version=1).output
    size = weights.block[-1]
    if weights.block[0] != 1 or size < 16 or size & (size - 1) or k % size:
        raise InvalidValue(f"ternary weights {n} x {k} with scales for blocks of {list(weights.block)}")
    blocks = k // size
    zeros = np.full((n, -(-blocks // 4)), 0b01010101, np.uint8)
    operands = [x, pack_codes(codes.astype(np.int8)).reshape(n, blocks, size // 4), scales.reshape(n, blocks), zeros]
    operands += [None, bias] if bias is not None else []
    attrs = {"K": k, "N": n, "bits": 2, "block_size": size}
    ops.graph.opsets.setdefault(MICROSOFT, 1)
    return ops.node("MatMulNBits", operands, attrs, domain=MICROSOFT, version=1).output


def _joined(codes: Array, scales: Array, block: Sequence[int]) -> Array | None:
    """One scale for all, or one for each row; None where blocks of a row differ. Scales of zeros do not count."""
    n, k = codes.shape
    rows, size = block[0], block[-1]
    wide = np.repeat(scales, rows, axis=0)[:n] if scales.shape[0] != n else scales
    if wide.shape[1] > 1:
        starts = np.arange(0, k, size)
        used = np.add.reduceat(np.abs(codes).astype(np.int32), starts, axis=1) > 0
        largest = np.where(used, wide, 0).max(axis=1, keepdims=True)
        if (np.where(used, wide, largest) != largest).any():
            return None
        wide = np.where(used.any(axis=1, keepdims=True), largest, largest.max(initial=0))
    wide = wide.reshape(-1)
    alike = wide.size > 0 and (wide == wide[0]).all()
    return np.asarray(wide[0] if alike else wide, np.float32)


def float_layer(node: Node) -> Layer | None:
    """A MatMul or Gemm with a constant float matrix."""
    if node.domain or node.op not in ("MatMul", "Gemm"):
        return None
    x, weight = node.input(0), node.input(1)
    if x is None or x.const is not None or weight is None or weight.const is None or dtype_of(x) not in _FLOATS:
        return None
    if len(weight.const.shape) != 2 or 0 in weight.const.shape:
        return None
    bias = node.input(2)
    if node.op == "Gemm":
        plain = node.attrs.get("alpha", 1.0) == 1.0 and node.attrs.get("beta", 1.0) == 1.0
        columns = weight.const.shape[0 if node.attrs.get("transB", 0) else 1]
        row = bias is None or (bias.const is not None and bias.const.shape == (columns,))
        if not plain or node.attrs.get("transA", 0) or not row:
            return None
    stored = weight.const.numpy()

    def weights() -> Quantized:
        return Ternary().quantize(stored if node.attrs.get("transB", 0) else stored.T)

    return Layer(node, weights, (stored,), ("absmean", bool(node.attrs.get("transB", 0))), False, bias)


def ternary_layer(node: Node) -> Layer | None:
    """A MatMulNBits of 2 bits whose codes, less their zero points, are -1, 0 and 1, with one scale, or one per row."""
    if (node.domain, node.op) != (MICROSOFT, "MatMulNBits") or node.attrs.get("bits", 4) != 2:
        return None
    x, b, scales, zeros, order, bias = (node.input(k) for k in range(6))
    if x is None or dtype_of(x) not in _FLOATS or b is None or b.const is None or scales is None:
        return None
    if scales.const is None or order is not None or (zeros is not None and zeros.const is None):
        return None
    sources = [b.const.numpy(), scales.const.numpy()]
    if zeros is not None and zeros.const is not None:
        if zeros.const.dtype is not DType.uint8:
            return None
        sources.append(zeros.const.numpy())
    n, k, size = (int(node.attrs[name]) for name in ("N", "K", "block_size"))

    def weights() -> Quantized:
        return _two_bits(sources, n, k, size)

    found = weights()
    if np.abs(found.codes).max(initial=0) > 1 or _joined(found.codes, found.scales, found.block) is None:
        return None
    return Layer(node, weights, tuple(sources), ("two bits", n, k, size), True, bias)


def _two_bits(sources: Sequence[Array], n: int, k: int, size: int) -> Quantized:
    """Codes less their zero points, from -3 to 3."""
    blocks = -(-k // size)
    codes = unpacked(sources[0].reshape(n, blocks, -1), 2).astype(np.int8)
    zero: Array = np.full((n, blocks), 2, np.int8)
    if len(sources) > 2:
        zero = unpacked(sources[2].reshape(n, -1), 2)[:, :blocks].astype(np.int8)
    whole = (codes - zero[..., None]).reshape(n, -1)[:, :k]
    return Quantized("ternary", whole, sources[1].astype(np.float32).reshape(n, blocks), (1, size), 2, axis=1)
