"""Layers as ``ranvier::BitLinear``: float ones by the mean of their magnitudes, 2-bit ones that are ternary already.

These change results, so no session does them by itself: a float layer keeps three levels of its weights, and every
converted layer rounds its tokens to 8 bits. Models that were trained so lose nothing by it; others should be looked at.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, InvalidValue, nearest
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.contrib.weight_only import unpacked
from ranvier.ops.own.bitlinear import DOMAIN, pack_codes
from ranvier.passes.edit import builder, bypass
from ranvier.passes.facts import dtype_of, rank_of
from ranvier.quantize.base import Quantized
from ranvier.quantize.ternary import Ternary
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_ORIGIN = "bitnet"
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)


@dataclass(frozen=True)
class Weights:
    """What a BitLinear has beside its tokens: codes as it stores them, one scale or one for each output."""

    codes: Array
    scale: Array

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scale.nbytes)


@dataclass(frozen=True)
class Layer:
    """A node that a BitLinear may stand for; ``weights`` are made when called, None where they are not ternary."""

    node: Node
    depth: int
    weights: Callable[[], Weights | None]
    sources: tuple[Array, ...]  # what they are made from …
    how: tuple[object, ...]  # … and what else they depend on
    coded: bool  # in 2 bits already
    bias: Value | Array | None = None

    @property
    def name(self) -> str:
        return self.node.name or self.node.output.name


Quantize = Callable[[Layer], Weights | None]


def convert_to_bitnet(
    graph: Graph,
    keep: str | Sequence[str] = (),
    *,
    wanted: Callable[[Layer], bool] | None = None,
    quantize: Quantize | None = None,
) -> list[str]:
    """Let BitLinear stand for products with constant weights; returns the names of those it stands for now.

    ``keep``: names of layers that stay, or patterns of them; each is that of a node, here or elsewhere in the model.
    ``wanted`` is asked about the others. ``quantize`` makes the weights of a layer, by default ``Layer.weights``. What
    is no plain product with a constant matrix, or is coded but not ternary, stays in any case.
    """
    kept = _patterns(graph, keep)
    done = []
    for node in list(graph):
        found = two_bit_layer(node) or float_layer(node)
        if found is None or any(fnmatch.fnmatchcase(found.name, p) for p in kept):
            continue
        if wanted is not None and not wanted(found):
            continue
        weights = found.weights() if quantize is None else quantize(found)
        if weights is None:
            continue
        done.append(found.name)
        x = node.input(0)
        assert x is not None
        before = [v for v in node.inputs[1:] if v is not None and v.const is not None and v.producer is None]
        bypass(node, _bitlinear(builder(node, _ORIGIN), x, weights, found.depth, found.bias), _ORIGIN)
        _forget(before)
    return done


def _patterns(graph: Graph, keep: Any) -> tuple[str, ...]:
    """What is to stay; a name that is nobody's is a mistake, and the layer that was meant would be converted."""
    given = (keep,) if isinstance(keep, str) else keep
    if not isinstance(given, Sequence | Set) or not all(isinstance(each, str) for each in given):
        raise InvalidConfig(f"keep is a name, a pattern, or several of them, got {keep!r:.200}")
    if not given:
        return ()
    named = {node.name or node.output.name: node for each in graph.root().all_graphs() for node in each if node.outputs}
    for pattern in given:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in named):
            layers = [name for name, node in named.items() if two_bit_layer(node) or float_layer(node)]
            raise InvalidConfig(f"keep: no layer has the name {pattern!r}{nearest(pattern, layers or named)}")
    return tuple(given)


def _forget(constants: Sequence[Value]) -> None:
    """Weights that nobody reads any more would be saved beside their codes."""
    for value in dict.fromkeys(constants):
        if value.graph is not None and not value.uses and not value.is_graph_output:
            value.graph.remove_constant(value)


def _bitlinear(ops: GraphOps, x: Value, weights: Weights, depth: int, bias: Value | Array | None) -> Value:
    operands = [x, weights.codes, weights.scale, *([bias] if bias is not None else [])]
    ops.graph.opsets.setdefault(DOMAIN, 1)
    attrs = {"K": depth, "N": len(weights.codes)}
    return ops.node("BitLinear", operands, attrs, domain=DOMAIN, version=1).output


def ternary_weights(weights: Quantized) -> Weights | None:
    """What a BitLinear has for ternary weights [N, K]; None where scales of blocks along K differ."""
    codes, scales = np.asarray(weights.codes), np.asarray(weights.scales, np.float32)
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or np.abs(codes.astype(np.int16)).max(initial=0) > 1:
        raise InvalidValue("a ternary layer has a matrix of -1, 0 and 1")
    n, k = codes.shape
    size = weights.block[-1]
    if codes.size and scales.shape != (-(-n // weights.block[0]), -(-k // size)):
        raise InvalidValue(f"ternary weights {n} x {k}, blocks of {list(weights.block)}: scales {list(scales.shape)}")
    wide = np.repeat(scales, weights.block[0], axis=0)[:n] if len(scales) != n else scales
    joined = _joined(wide, lambda: np.logical_or.reduceat(codes != 0, np.arange(0, k, size), axis=1))
    return None if joined is None else Weights(pack_codes(codes.astype(np.int8)), joined)


def ternary_linear(ops: GraphOps, x: Value, weights: Quantized, bias: Value | None = None) -> Value:
    """The product of tokens and ternary weights [N, K], as nodes.

    With one scale, or one for each output, it is a BitLinear. Scales of blocks along K (llama.cpp's TQ1_0 and TQ2_0
    have one for 256) cannot be taken out of an integer sum: that is a MatMulNBits of 2 bits, whose tokens stay float.
    Neither it nor what llama.cpp does there, which is to scale tokens by block too, is what such models are trained
    with; where the blocks of a row agree, as in files made from a trained ternary model, they are one scale here.
    """
    joined = ternary_weights(weights)
    codes, scales = np.asarray(weights.codes), np.asarray(weights.scales, np.float32)
    (n, k), size = codes.shape, weights.block[-1]
    if joined is not None:
        return _bitlinear(ops, x, joined, k, bias)
    if weights.block[0] != 1 or size < 16 or size & (size - 1) or k % size:
        raise InvalidValue(f"ternary weights {n} x {k} with scales for blocks of {list(weights.block)}")
    blocks = k // size
    zeros = np.full((n, -(-blocks // 4)), 0b01010101, np.uint8)
    packed = pack_codes(codes.astype(np.int8)).reshape(n, blocks, size // 4)
    operands: list[Any] = [x, packed, scales.reshape(n, blocks), zeros]
    operands += [None, bias] if bias is not None else []
    attrs = {"K": k, "N": n, "bits": 2, "block_size": size}
    ops.graph.opsets.setdefault(MICROSOFT, 1)
    return ops.node("MatMulNBits", operands, attrs, domain=MICROSOFT, version=1).output


def _joined(scales: Array, used: Callable[[], Array]) -> Array | None:
    """One scale for all blocks [N, blocks], or one for each row; None where blocks of a row differ. Scales of blocks
    that hold nothing but zeros do not count: ``used`` tells the others."""
    if scales.size and (scales == scales[0, 0]).all():
        return np.asarray(scales[0, 0], np.float32)
    if scales.shape[1] > 1:
        there = used()
        some = there.any(axis=1, keepdims=True)
        first = np.take_along_axis(scales, there.argmax(axis=1)[:, None], axis=1)
        if (np.where(there, scales, first) != first).any():
            return None
        scales = np.where(some, first, first[some].max(initial=0)) if some.any() else first
    scales = scales.reshape(-1)
    alike = scales.size > 0 and (scales == scales[0]).all()
    return np.asarray(scales[0] if alike else scales, np.float32)


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

    turned = bool(node.attrs.get("transB", 0))

    def weights() -> Weights:
        made = Ternary().quantize(stored if turned else stored.T)
        return Weights(pack_codes(made.codes), np.asarray(made.scales.reshape(()), np.float32))

    return Layer(node, stored.shape[1 if turned else 0], weights, (stored,), ("absmean", turned), False, bias)


def two_bit_layer(node: Node) -> Layer | None:
    """A MatMulNBits of 2 bits; its weights are some if codes, less their zero points, are -1, 0 and 1, with one scale
    or one for each row."""
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
    n, k, size = (int(node.attrs.get(name, 0)) for name in ("N", "K", "block_size"))
    if min(n, k, size) < 1 or size % 4:
        return None
    flat: Value | Array | None = bias
    if bias is not None and rank_of(bias) not in (None, 1):
        if bias.const is None:
            return None
        flat = bias.const.numpy().reshape(-1)
    blocks = -(-k // size)
    if [x.size for x in sources] != [n * blocks * size // 4, n * blocks, n * -(-blocks // 4)][: len(sources)]:
        return None  # whoever runs it says what is wrong

    def weights() -> Weights | None:
        return _two_bits(sources, n, k, size)

    return Layer(node, k, weights, tuple(sources), ("two bits", n, k, size), True, flat)


def _two_bits(sources: Sequence[Array], n: int, k: int, size: int) -> Weights | None:
    """Bytes become bytes: both forms have the same order, and differ in where zero is."""
    blocks, width = -(-k // size), -(-k // 4)
    stored = sources[0].reshape(n, -1)[:, :width]
    zero: Array = np.full((n, blocks), 2, np.uint8)
    if len(sources) > 2:
        zero = unpacked(sources[2].reshape(n, -1), 2)[:, :blocks]
    if k % 4:  # what stands behind the last column is made to be zero
        own = np.uint8((1 << 2 * (k % 4)) - 1)
        stored = stored.copy()
        stored[:, -1] = (stored[:, -1] & own) | (zero[:, -1] * _ZEROS & ~own)
    by_byte = np.repeat(zero, size // 4, axis=1)[:, :width]
    codes = _raised().take((by_byte.astype(np.uint16) << 8) | stored)  # in half the time of an index
    if (codes == _NONE).any():
        return None

    def used() -> Array:
        return np.asarray(np.logical_or.reduceat(codes != _ZEROS, np.arange(0, width, size // 4), axis=1))

    scale = _joined(sources[1].astype(np.float32).reshape(n, blocks), used)
    return None if scale is None else Weights(codes, scale)


_ZEROS = np.uint8(0b01010101)  # four codes of weights that are zero
_NONE = np.uint8(0xFF)  # no byte of ternary codes


@functools.cache
def _raised() -> Array:
    """By zero point and byte: the same weights with a zero point of 1, or that they are not ternary."""
    codes = unpacked(np.arange(256, dtype=np.uint8)[:, None], 2).astype(np.int8)
    weights = codes - np.arange(4, dtype=np.int8)[:, None, None]
    ternary = np.abs(weights).max(axis=-1) <= 1
    bytes_ = pack_codes(np.clip(weights, -1, 1).reshape(-1, 4))[:, 0]
    return np.where(ternary.reshape(-1), bytes_, _NONE)
