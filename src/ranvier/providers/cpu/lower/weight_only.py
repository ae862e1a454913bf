"""Products with constant weights in a few bits: MatMulNBits and its relatives. The weights stay coded in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import add, cast
from ranvier.codegen.definitions.lower.contraction import matmul_of
from ranvier.codegen.definitions.lower.quantization import DERIVED
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.products import folded_stride
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.coded import Accuracy, CodedB, Coding, Groups, coded_matmul, pack_coded
from ranvier.codegen.llvm.coded.held import held
from ranvier.codegen.llvm.gemm.pack import multiplies_pairs
from ranvier.codegen.loops.ir import Epilogue, Expr
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.ops.contrib.levels import E2M1_LEVELS, FP4_LEVELS, NF4_LEVELS
from ranvier.ops.contrib.weight_only import WIDTHS, zeros_of
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser
from ranvier.providers.cpu.target import Target

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
FLOAT8 = frozenset({DType.float8_e4m3fn, DType.float8_e5m2})
TAKEN = frozenset({DType.float32, DType.float16, DType.bfloat16, DType.uint8, DType.int32}) | FLOAT8
# Twice the numbers of 4-bit floats, which are whole: scales of those are half as large.
TWICE_E2M1 = Coding(4, "levels", tuple(float(2 * x) for x in E2M1_LEVELS))
# MatMulNBits' accuracy_level: what activations may be rounded to
LEVELS: dict[int, Accuracy] = {3: "bfloat16", 4: "int8"}


def computed(node: Node, operands: Sequence[int]) -> str | None:
    """Weights are packed once: they have to be there before anything runs."""
    for k in operands:
        given = node.inputs[k] if k < len(node.inputs) else None
        if given is not None and given.const is None:
            return f"operand {k} is no constant"
    return None


def constant(n: NodeView, k: int) -> ConstTensor:
    found = n.constant(k)
    if found is None:
        raise Declined(f"{n.op}: operand {k} is no constant")
    return found


def product(
    n: NodeView,
    b: Definitions,
    columns: int,
    pack: Callable[[Realiser], CodedB],
    sources: Sequence[ConstTensor | None],
    more: Hashable,
    accuracy: Accuracy,
    bias: Value | Use | None = None,
) -> None:
    """``pack`` makes the weights of ``sources``, once for all ``more`` that they depend on."""
    x, shape, dtype = n.input(0), n.out_shape(), n.out_dtype()
    inner = b.shape(x)
    if not inner:
        raise Declined(f"{n.op} of a scalar")
    if len(inner) == 1:
        x = b.reshape(x, (1, *inner))
    full = (*b.shape(x)[:-1], columns)

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        (left,) = views
        asked: Accuracy = "int8" if r.target.int8_activations else accuracy
        if asked == "float32" and left.dtype is DType.bfloat16:  # rounded already
            asked = "bfloat16"
        packed = r.packs.shared(sources, ("coded", n.op, more, r.isa), make=lambda: pack(r))
        return coded_matmul(left, packed, target, r.isa, epilogue=epilogue, threads=r.threads, accuracy=asked)

    def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
        batch = folded_stride(full[:-2], strides[:-2])
        return None if batch is None else (batch, strides[-2], strides[-1])

    flops = 2.0 * math.prod(full) * inner[-1]
    narrow = _narrow if dtype is DType.float32 else None
    target = n.outputs[0] if len(inner) > 1 else None
    if bias is None:
        value = b.contraction([x], realise, fold, dtype, full, target, flops=flops, narrow=narrow)
    else:
        value = b.contraction([x], realise, fold, DType.float32, full, flops=flops, narrow=narrow)

        def compute(e: list[Expr]) -> Expr:
            return cast(add(e[0], cast(e[1], DType.float32)), dtype)  # rounded once

        value = b.pointwise([value, bias], compute, dtype, shape=full, out=target)
    if len(inner) == 1:
        b.reshape(value, shape, out=n.outputs[0])


def _bias(n: NodeView, k: int, columns: int) -> Use | None:
    """A number for every column, whatever the shape they come in."""
    return Use(n.input(k), (columns,)) if n.has(k) else None


def _narrow(target: Target) -> str | None:
    if target.narrow is DType.bfloat16 and not multiplies_pairs(target.isa):
        return f"{target.isa.name} multiplies no bfloat16"
    return None


def _nbits(node: Node) -> str | None:
    return "weight_prepacked" if node.attrs.get("weight_prepacked") else computed(node, (1, 2, 3, 4))


@lowers("MatMulNBits", domain=MICROSOFT, dtypes=TAKEN, check=_nbits)
def matmul_nbits(n: NodeView, b: Definitions) -> None:
    k, columns, block = (int(n.attr(name, 0)) for name in ("K", "N", "block_size"))
    bits = int(n.attr("bits", 4))
    if bits not in WIDTHS or min(k, columns, block) < 1 or (block * bits) % 8 or n.shape(0)[-1:] != (k,):
        raise Declined(f"{bits} bits in blocks of {block}, K = {k}, N = {columns}")
    codes, scales, zeros, listed = constant(n, 1), constant(n, 2), n.constant(3), n.constant(4)
    blocks = -(-k // block)
    fits = codes.size == columns * blocks * (block * bits // 8) and scales.size == columns * blocks
    if zeros is not None:
        fits &= zeros.size == columns * (-(-blocks * bits // 8) if zeros.dtype is DType.uint8 else blocks)
    group_of = None if listed is None else listed.numpy().reshape(-1)[:k]
    if group_of is not None:
        fits &= len(group_of) == k and group_of.min() >= 0 and group_of.max() < blocks
    if not fits:
        raise Declined("sizes of its operands do not fit")

    accuracy = LEVELS.get(int(n.attr("accuracy_level", 0)), "float32")

    def pack(r: Realiser) -> CodedB:
        rows = codes.numpy().reshape(columns, -1)
        coding = held(bits, r.isa, rows, k)
        if group_of is None or np.array_equal(group_of, np.arange(k) // block):
            groups = Groups.even(k, block, coding)
        else:
            groups = Groups.listed(group_of, blocks, coding)
        points = None if zeros is None else zeros_of(n.op, zeros.numpy(), columns, blocks, bits)
        factors = scales.numpy().reshape(columns, blocks).astype(np.float32, copy=False)
        return pack_coded(
            *(lambda first, last: rows[first:last], coding, columns, groups, factors, points, r.isa),
            filled=True,
            bits=bits,
            below=1 << (bits - 1),
        )

    product(n, b, columns, pack, (codes, scales, zeros, listed), (bits, block, k), accuracy, _bias(n, 5, columns))


@lowers("MatMulBnb4", domain=MICROSOFT, dtypes=TAKEN, check=lambda node: computed(node, (1, 2)))
def matmul_bnb4(n: NodeView, b: Definitions) -> None:
    """The weight is stored as N rows of K, block after block, and multiplied by turned or (transB = 0) as it is."""
    k, rows, block, kind = (int(n.attr(name, -1)) for name in ("K", "N", "block_size", "quant_type"))
    codes, largest, turned = constant(n, 1), constant(n, 2), bool(n.attr("transB", 1))
    fits = kind in (0, 1) and block >= 1 and k > 0 and rows > 0 and n.shape(0)[-1:] == (k if turned else rows,)
    if not fits or codes.size != -(-rows * k // 2) or largest.size != -(-rows * k // block):
        raise Declined("sizes of its operands do not fit")
    levels = NF4_LEVELS if kind else FP4_LEVELS

    def apart(held: Array, first: int, last: int) -> Array:
        bytes_ = held.reshape(-1)[first * k // 2 : -(-last * k // 2)]
        pairs = np.stack((bytes_ >> 4, bytes_ & 15), axis=-1).reshape(-1)
        return pairs[first * k % 2 :][: (last - first) * k].reshape(last - first, k)

    def filled(held: Array, first: int, last: int) -> Array:
        bytes_ = held.reshape(rows, k // 2)[first:last]
        return bytes_ >> 4 | bytes_ << 4

    if not turned:
        # blocks run along columns: kept as codes, each k of a column would need a scale of its own
        def make() -> Array:
            factors = np.repeat(largest.numpy().reshape(-1).astype(np.float32), block)[: rows * k]
            return np.asarray(levels[apart(codes.numpy(), 0, rows)] * factors.reshape(rows, k))

        weight = DERIVED.get([codes.origin, largest.origin], ("bnb4", k, block, kind), make)
        _as_it_is(n, b, b.constant(weight))
        return
    # blocks run over the flattened weight: what divides them and rows has one scale
    group = math.gcd(block, k)

    def pack(r: Realiser) -> CodedB:
        coding = Coding(4, "levels", tuple(float(x) for x in levels))
        starts = np.arange(0, rows * k, group) // block
        scales = largest.numpy().reshape(-1).astype(np.float32)[starts].reshape(rows, k // group)
        groups, whole = Groups.even(k, group, coding), not k % 2
        some = functools.partial(filled if whole else apart, codes.numpy())
        return pack_coded(some, coding, rows, groups, scales, None, r.isa, filled=whole)

    product(n, b, rows, pack, (codes, largest), (k, block, kind), "float32")


def _as_it_is(n: NodeView, b: Definitions, weight: Value) -> None:
    """The product with a weight of float32, rounded once to the type of the activation."""
    x, dtype, shape = n.input(0), n.out_dtype(), n.out_shape()
    if dtype is DType.float32:
        matmul_of(n, b, x, weight, shape, n.outputs[0])
        return
    wide = b.pointwise([x], lambda e: cast(e[0], DType.float32), DType.float32, shape=b.shape(x))
    made = matmul_of(n, b, wide, weight, shape, None)
    b.pointwise([made], lambda e: cast(e[0], dtype), dtype, shape=shape, out=n.outputs[0])


_CODINGS = {DType.float8_e4m3fn: Coding(8, "e4m3"), DType.float8_e5m2: Coding(8, "e5m2")}


def all_finite(codes: ConstTensor) -> bool:
    """Whether float8 stands for numbers alone, as kernels take it; looked at once."""
    return bool(
        DERIVED.get([codes.origin], "finite", lambda: np.asarray(np.isfinite(codes.numpy().astype(np.float32)).all()))
    )


def _blocks(codes_k: int, columns: int, scales: ConstTensor, block: int) -> None:
    if scales.shape != (columns, -(-codes_k // block)):
        raise Declined("scales do not fit the blocks")


def _fp8(node: Node) -> str | None:
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return "activations in float8"
    return computed(node, (1, 2))


@lowers("MatMulBlockQuantizedFp8Weight", domain=MICROSOFT, dtypes=TAKEN, check=_fp8)
def matmul_fp8(n: NodeView, b: Definitions) -> None:
    codes, scales, block = constant(n, 1), constant(n, 2), int(n.attr("block_size", 128))
    coding = _CODINGS.get(codes.dtype)
    if coding is None or len(codes.shape) != 2 or block < 1 or n.shape(0)[-1:] != codes.shape[1:]:
        raise Declined(f"weights of {codes.dtype}, {list(codes.shape)}")
    if not all_finite(codes):
        raise Declined("weights that are no numbers")
    columns, k = codes.shape
    _blocks(k, columns, scales, block)

    def pack(r: Realiser) -> CodedB:
        raw, factors = codes.numpy().view(np.uint8), scales.numpy().astype(np.float32)
        groups = Groups.even(k, block, coding)
        return pack_coded(lambda first, last: raw[first:last], coding, columns, groups, factors, None, r.isa)

    product(n, b, columns, pack, (codes, scales), block, "float32", _bias(n, 4, columns))


@lowers("MatMulBlockQuantizedFp4Weight", domain=MICROSOFT, dtypes=TAKEN, check=lambda node: computed(node, (1, 2, 3)))
def matmul_fp4(n: NodeView, b: Definitions) -> None:
    codes, steps, whole, block = constant(n, 1), constant(n, 2), constant(n, 3), int(n.attr("block_size", 16))
    if len(codes.shape) != 2 or block < 1 or n.shape(0)[-1:] != (2 * codes.shape[1],) or whole.size != 1:
        raise Declined(f"weights of {list(codes.shape)}")
    columns, k = codes.shape[0], 2 * codes.shape[1]
    _blocks(k, columns, steps, block)

    def pack(r: Realiser) -> CodedB:
        rows, groups = codes.numpy(), Groups.even(k, block, TWICE_E2M1)
        factors = steps.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        factors = factors * np.float32(whole.numpy().reshape(-1)[0])
        return pack_coded(
            *(lambda first, last: rows[first:last], TWICE_E2M1, columns, groups, factors / 2, None, r.isa), filled=True
        )

    product(n, b, columns, pack, (codes, steps, whole), block, "float32", _bias(n, 5, columns))
