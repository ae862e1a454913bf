"""Quantize and dequantize, element by element: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import add, cast, compare, const, div, mul, op, ratio, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.narrow_cast import FORMATS, NARROW_INTEGERS, as_bytes, from_code, to_code
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL, BYTES, FLOATS
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, from_onnx
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops import registry as operators

if TYPE_CHECKING:
    pass

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
_CODES = BYTES | {DType.int16, DType.uint16}
_SMALL = frozenset(NARROW_INTEGERS) | frozenset(FORMATS)  # read and written as bytes
_EXPONENTS = DType.float8_e8m0fnu  # powers of two, as scales of blocks
_EVERY = frozenset(DType) - {DType.string}


# -- arithmetic -------------------------------------------------------------------------------------------------------


def saturated(x: Expr, zero: Expr | None, dtype: DType) -> Expr:
    """Numbers rounded half to even, shifted by the zero point and clipped to an integer type; NaN is the lowest."""
    codes = op("round", x)
    if zero is not None:
        codes = add(codes, cast(zero, codes.dtype))
    if dtype in NARROW_INTEGERS:
        low, high = NARROW_INTEGERS[dtype]
        codes = where(compare("gt", codes, const(float(low), codes)), codes, const(float(low), codes))
        return to_code(op("min", codes, const(float(high), codes)), dtype)
    if dtype.name.startswith("u"):
        return cast(codes, dtype)  # saturates, and NaN becomes 0
    # through the unsigned type of the same size, whose lowest number is the one NaN becomes in a cast
    half = 1 << (dtype.bits - 1)
    unsigned = DType[f"u{dtype.name}"]
    code = cast(add(codes, const(float(half), codes)), unsigned)
    return op("bits", op("bitxor", code, const(half, unsigned)), dtype=dtype)


def real(x: Expr, zero: Expr | None, scale: Expr) -> Expr:
    """The float32 numbers that codes of up to 16 bits stand for."""
    value = cast(x, DType.float32)
    if zero is not None:
        value = sub(value, cast(zero, DType.float32))
    return mul(value, cast(scale, DType.float32))


# -- constants --------------------------------------------------------------------------------------------------------


class Derived:
    """What was worked out from constant arrays: made once, and kept for as long as the first of them lives.

    Packed weights are known by the identity of the array they come from, so every specialisation must see the same.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Array] = {}

    def get(self, arrays: Sequence[object | None], more: Hashable, make: Callable[[], Array]) -> Array:
        """``arrays``, or what stands for one whose numbers are not always there (:attr:`ConstTensor.origin`)."""
        key = (tuple(id(a) for a in arrays), more)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
            found.flags.writeable = False  # so that nobody makes a view to protect it: it is known by its identity
            for array in arrays:
                if array is not None:
                    weakref.finalize(array, self._made.pop, key, None).atexit = False
        return found


DERIVED = Derived()


def constants(n: NodeView) -> list[Array | None] | None:
    """The operands of a node whose content is wholly constant."""
    values = [None if v is None else v.const for v in n.inputs]
    if any(v is not None and c is None for v, c in zip(n.inputs, values)):
        return None
    return [None if c is None else c.numpy() for c in values]


def fold(n: NodeView, b: Definitions) -> bool:
    """Let a node of constants be one: its result is what the reference makes of them."""
    arrays = constants(n)
    if arrays is None:
        return False
    definition = operators.get(n.node.domain, n.op, n.version)
    call = operators.Call((True,), n.version, node=n.node)
    more = (n.node.domain, n.op, n.version, tuple(sorted((k, v) for k, v in n.attrs.items())))

    def make() -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(definition.run(list(arrays), n.attrs, call)[0])

    b.known[n.outputs[0]] = DERIVED.get(arrays, more, make)
    return True


# -- scales and zero points -------------------------------------------------------------------------------------------


class Parameters:
    """How scale and zero point lie beside the tensor they belong to: one, one per index of an axis, or per block."""

    def __init__(self, n: NodeView, b: Definitions) -> None:
        self.b, self.shape = b, n.shape(0)
        self.block = int(n.attr("block_size", 0))
        rank = len(self.shape)
        axis = int(n.attr("axis", 1))
        scale = n.shape(1)
        self.single = int(np.prod(scale)) == 1 and len(scale) <= 1 and self.block == 0
        if self.single:
            return
        if not -rank <= axis < rank:
            raise Declined(f"{n.op}: axis {axis} of rank {rank}")
        self.axis = axis % rank
        size = self.shape[self.axis]
        wanted: tuple[int, ...] = (size,)
        if self.block:
            wanted = (*self.shape[: self.axis], -(-size // self.block), *self.shape[self.axis + 1 :])
        if self.block < 0 or scale != wanted:
            raise Declined(f"{n.op}: a scale of shape {list(scale)} for {list(self.shape)}")

    def use(self, value: Value) -> Use | Value:
        """The parameter as an operand that broadcasts to the tensor."""
        if self.single or (not self.block and math.prod(self.b.shape(value)) == 1):
            return Use(value, ())  # one zero point beside many scales too
        if not self.block:
            return Use(value, (self.shape[self.axis], *(1,) * (len(self.shape) - self.axis - 1)))
        axis, block = self.axis, self.block

        def repeated(nest: NestBuilder, views: list[View]) -> Expr:
            (view,) = views
            steps = tuple(0 if k == axis else s for k, s in enumerate(view.strides))
            place = mul(op("floordiv", Index(axis), Size(block)), Size(view.strides[axis]))
            return nest.load(view, steps, at=place)

        return self.b.moved([value], repeated, self.b.dtype(value), self.shape)


def _codes(b: Definitions, value: Value) -> Value:
    return as_bytes(b, value) if b.dtype(value) in _SMALL | {_EXPONENTS} else value


def _all_zero(n: NodeView, k: int) -> bool:
    known = n.known(k)
    return known is not None and not np.any(known.astype(np.float32) if known.dtype.kind not in "iu" else known)


# -- QuantizeLinear, DequantizeLinear ---------------------------------------------------------------------------------


def _dtype(node: Node, k: int) -> DType | None:
    value = node.input(k)
    return value.type.dtype if value is not None and isinstance(value.type, TensorType) else None


def is_constant(node: Node) -> bool:
    return all(v is None or v.const is not None for v in node.inputs)


def _division_type(scale: DType) -> DType:
    """The type that numbers are divided by such a scale in."""
    if scale in FLOATS:
        return scale
    return DType.float64 if scale.is_integer else DType.float32


def _quantizes(node: Node) -> str | None:
    out = node.outputs[0].type
    target = out.dtype if isinstance(out, TensorType) else None
    if target not in _CODES | _SMALL:
        return f"quantization to {target}"
    source, scale = _dtype(node, 0), _dtype(node, 1)
    if source not in FLOATS | {DType.int32} or scale not in FLOATS | {DType.int32, _EXPONENTS}:
        return f"quantization of {source} by a scale of {scale}"
    if node.input(2) is not None and _dtype(node, 2) is not target:
        return "a zero point of another type than the result"
    return None


@lowers("QuantizeLinear", dtypes=ALL | _SMALL | {_EXPONENTS}, check=_quantizes)
@lowers("QuantizeLinear", domain=MICROSOFT, dtypes=ALL | _SMALL, check=_quantizes)
def quantize_linear(n: NodeView, b: Definitions) -> None:
    target, scale = n.out_dtype(), n.dtype(1)
    precision = int(n.attr("precision", 0))
    working = from_onnx(precision) if precision else _division_type(scale)
    if working not in FLOATS:
        raise Declined(f"QuantizeLinear: division in {working}")
    parameters = Parameters(n, b)
    has_zero = n.has(2) and not _all_zero(n, 2)
    exact = DType.float64 if working is DType.float64 else DType.float32
    zero_type, saturate = n.dtype(2) if has_zero else target, bool(n.attr("saturate", 1))
    known = n.known(1)

    def compute(e: list[Expr]) -> Expr:
        divisor = cast(from_code(e[1], scale), working)
        quotient = ratio(cast(e[0], working), divisor, known if target in _CODES else None)
        zero = from_code(e[2], zero_type) if has_zero else None
        if target in FORMATS:
            number = cast(quotient, DType.float32)
            return to_code(number if zero is None else add(number, zero), target, saturate)
        return saturated(cast(quotient, exact), zero, target)

    operands: list[Use | Value] = [n.input(0), parameters.use(_codes(b, n.input(1)))]
    if has_zero:
        operands.append(parameters.use(_codes(b, n.input(2))))
    if target in _SMALL:
        codes = b.pointwise(operands, compute, DType.uint8, shape=n.shape(0))
        as_bytes(b, codes, target, n.outputs[0])
    else:
        b.pointwise(operands, compute, target, shape=n.shape(0), out=n.outputs[0])


def _dequantizes(node: Node) -> str | None:
    out = node.outputs[0].type
    target = out.dtype if isinstance(out, TensorType) else None
    if target not in FLOATS:
        return f"a result of {target}"
    source, scale = _dtype(node, 0), _dtype(node, 1)
    if is_constant(node):
        return None
    if source not in _CODES | _SMALL | {DType.int32}:
        return f"dequantization of {source}"
    if scale not in FLOATS | {_EXPONENTS}:
        return f"a scale of {scale}"
    return None if node.input(2) is None or _dtype(node, 2) is source else "a zero point of another type"


@lowers("DequantizeLinear", dtypes=_EVERY, check=_dequantizes)
@lowers("DequantizeLinear", domain=MICROSOFT, dtypes=ALL | _SMALL, check=_dequantizes)
def dequantize_linear(n: NodeView, b: Definitions) -> None:
    if fold(n, b):
        return
    target, source, scale = n.out_dtype(), n.dtype(0), n.dtype(1)
    parameters = Parameters(n, b)
    has_zero = n.has(2) and not _all_zero(n, 2)
    working = DType.float64 if target is DType.float64 else DType.float32

    def compute(e: list[Expr]) -> Expr:
        codes = from_code(e[0], source)
        if has_zero:
            wide = DType.int64 if source is DType.int32 else working
            codes = sub(cast(codes, wide), cast(from_code(e[2], source), wide))
        return cast(mul(cast(codes, working), cast(from_code(e[1], scale), working)), target)

    operands: list[Use | Value] = [_codes(b, n.input(0)), parameters.use(_codes(b, n.input(1)))]
    if has_zero:
        operands.append(parameters.use(_codes(b, n.input(2))))
    b.pointwise(operands, compute, target, shape=n.shape(0), out=n.outputs[0])


# -- DynamicQuantizeLinear --------------------------------------------------------------------------------------------


def dynamic_parameters(
    b: Definitions, x: Value, scale: Value | None = None, zero: Value | None = None
) -> tuple[Value, Value]:
    """Scale and uint8 zero point that map the range of float32 ``x``, zero included, onto uint8."""
    shape = b.shape(x)
    if 0 in shape:
        raise Declined("the range of nothing")
    if not shape:
        x, shape = b.reshape(x, (1,)), (1,)

    def build(e: list[Expr]) -> RowBody:
        nothing = const(0.0, e[0])
        number = where(op("isnan", e[0], dtype=DType.bool), nothing, e[0])
        low = op("min", Result(0, DType.float32), nothing)
        high = op("max", Result(1, DType.float32), nothing)
        step = div(sub(high, low), const(255.0, high))
        step = where(compare("gt", high, low), step, const(1.0, high))
        shift = cast(op("round", div(op("neg", low), step)), DType.uint8)
        stages = [Reduce("min", number, DType.float32), Reduce("max", number, DType.float32)]
        return RowBody(stages, finals={0: step, 1: shift})

    outs = [(DType.float32, False), (DType.uint8, False)]
    made = b.rows([x], range(len(shape)), build, outs, keepdims=False, results=[scale, zero])
    return made[0], made[1]


def quantized_dynamically(
    b: Definitions, x: Value, out: Value | None = None, scale: Value | None = None, zero: Value | None = None
) -> tuple[Value, Value, Value]:
    """``x`` as uint8 with the scale and zero point of its own range."""
    step, shift = dynamic_parameters(b, x, scale, zero)

    def compute(e: list[Expr]) -> Expr:
        return saturated(div(e[0], e[1]), e[2], DType.uint8)

    return b.pointwise([x, step, shift], compute, DType.uint8, shape=b.shape(x), out=out), step, shift


@lowers("DynamicQuantizeLinear", dtypes=frozenset({DType.float32, DType.uint8}))
def dynamic_quantize_linear(n: NodeView, b: Definitions) -> None:
    outs = [n.outputs[k] if k < len(n.outputs) else None for k in range(3)]
    quantized_dynamically(b, n.input(0), *outs)


# -- tables -----------------------------------------------------------------------------------------------------------
