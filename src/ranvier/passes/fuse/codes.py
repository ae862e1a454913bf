"""What the passes over quantized graphs ask: which codes stand for a tensor, and how."""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.ops.registry import Array
from ranvier.passes.facts import array_of, dtype_of, rank_of
from ranvier.records import dataclass

BYTES = (DType.int8, DType.uint8)


@dataclass(frozen=True)
class Quantized:
    """A tensor given by codes: ``scale`` and ``zero`` are single numbers, or vectors along ``axis``."""

    codes: Value
    scale: Array
    zero: Array | None
    axis: int | None

    @property
    def is_single(self) -> bool:
        return self.axis is None

    def same_codes(self, other: Quantized) -> bool:
        """Do equal codes stand for equal numbers in both?"""
        mine, its = (np.zeros_like(q.scale) if q.zero is None else q.zero for q in (self, other))
        return self.axis == other.axis and np.array_equal(self.scale, other.scale) and np.array_equal(mine, its)


class Left(Exception):
    """Why a layer stays as it is."""


def code_type(last: Node) -> DType:
    target = dtype_of(last.output)
    if target not in BYTES or dtype_of(last.input(0)) is not DType.float32:
        raise Left(f"{dtype_of(last.input(0))} is quantized to {target}")
    return target


def parameters(node: Node) -> Quantized:
    """Scale and zero point of a node that quantizes or dequantizes; they must be constant."""
    scale, zero = array_of(node.input(1)), array_of(node.input(2))
    if scale is None or scale.dtype != np.float32 or (node.input(2) is not None and zero is None):
        raise Left("scale and zero point are not small constants of float32")
    if not np.all(scale > 0):
        raise Left("a scale is not above zero")
    if node.attrs.get("block_size", 0):
        raise Left("quantized in blocks")
    value = node.input(0)
    assert value is not None
    if scale.size == 1 and (zero is None or zero.size == 1):
        return Quantized(value, scale.reshape(()), None if zero is None else zero.reshape(()), None)
    rank = rank_of(value)
    if rank is None or scale.ndim != 1 or (zero is not None and zero.shape != scale.shape):
        raise Left("scale and zero point are of different shapes")
    return Quantized(value, scale, zero, int(node.attrs.get("axis", 1)) % rank)


def dequantized(value: Value | None, types: tuple[DType, ...] = BYTES) -> Quantized | None:
    node = value.producer if value is not None else None
    if node is None or node.op != "DequantizeLinear" or dtype_of(value) is not DType.float32:
        return None
    return parameters(node) if dtype_of(node.input(0)) in types else None


def triple(q: Quantized, op: GraphOps) -> list[Value]:
    kind = dtype_of(q.codes)
    assert kind is not None
    zero = np.zeros(q.scale.shape, kind.numpy) if q.zero is None else q.zero
    return [q.codes, op.constant(q.scale), op.constant(zero)]


def result_of(q: Quantized, target: DType, op: GraphOps) -> list[Value]:
    zero = np.zeros((), target.numpy) if q.zero is None else q.zero
    return [op.constant(q.scale), op.constant(zero)]
