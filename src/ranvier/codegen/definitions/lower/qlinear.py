"""com.microsoft operators on quantized tensors that compute in float32 and quantize once: QLinearAdd and relatives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import add, cast, compare, const, div, mul, op, ratio, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.quantization import real, saturated
from ranvier.codegen.definitions.lower.reduction import weight_of
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import BYTES
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value

MICROSOFT = "com.microsoft"
INT, FLOAT = DType.int32, DType.float32
QUANTIZED = BYTES | {FLOAT, INT, DType.bool}


def sum_type(count: int) -> DType:
    """An integer type that holds the sum of so many differences of codes and zero points."""
    return INT if count < 1 << 23 else DType.int64


def bytes_first(node: Node) -> str | None:
    out = node.outputs[0].type
    kind = getattr(out, "dtype", None)
    return None if kind in BYTES else f"a result of {kind}"


class Operands:
    """Collects uses, and finds their expressions again."""

    def __init__(self, n: NodeView, b: Definitions) -> None:
        self.n, self.b = n, b
        self.uses: list[Use] = []

    def add(self, k: int, *, single: bool = False) -> int | None:
        """The place of operand ``k``; None where it is absent."""
        if not self.n.has(k):
            return None
        if single and math.prod(self.n.shape(k)) != 1:
            raise Declined(f"{self.n.op}: operand {k} of shape {list(self.n.shape(k))} is one number")
        self.uses.append(Use(self.n.input(k), () if single else None))
        return len(self.uses) - 1

    def real(self, k: int) -> Callable[[list[Expr]], Expr]:
        """The numbers of a tensor at position ``k`` that its scale and zero point follow."""
        x, scale, zero = self.add(k), self.add(k + 1, single=True), self.add(k + 2, single=True)
        assert x is not None and scale is not None
        return lambda e: real(e[x], None if zero is None else e[zero], e[scale])

    def difference(self, k: int, zero: int) -> Callable[[list[Expr]], Expr]:
        """The codes at position ``k`` less their zero point: whole numbers as float32."""
        x, base = self.add(k), self.add(zero, single=True)
        assert x is not None
        return lambda e: cast(e[x], FLOAT) if base is None else sub(cast(e[x], FLOAT), cast(e[base], FLOAT))

    def factor(self, *scales: int, step: int) -> Callable[[list[Expr]], Expr]:
        """The product of scales in steps of another: one factor, so that ties between codes are ties."""
        value = self._factor([*scales, step])
        self.uses.append(Use(value, ()))
        place = len(self.uses) - 1
        return lambda e: e[place]

    def _factor(self, scales: list[int]) -> Value:
        """A number of its own, and a constant where all scales are."""
        alone = Operands(self.n, self.b)
        for k in scales:
            alone.add(k, single=True)
        known = [self.n.known(k) for k in scales]
        if all(array is not None for array in known):
            *factors, step = (np.asarray(array, np.float32).reshape(()) for array in known)
            with np.errstate(all="ignore"):
                return self.b.constant(np.asarray(functools.reduce(np.multiply, factors) / step))

        def compute(e: list[Expr]) -> Expr:
            *factors, step = (cast(each, FLOAT) for each in e)
            return div(functools.reduce(mul, factors), step)

        return self.b.pointwise(alone.uses, compute, FLOAT, ())

    def steps(self, k: int, step: int) -> Callable[[list[Expr]], Expr]:
        """The numbers of a tensor at position ``k`` in steps of the scale at position ``step``."""
        codes, factor = self.difference(k, k + 2), self.factor(k + 1, step=step)
        return lambda e: mul(codes(e), factor(e))

    def rounded(self, k: int, dtype: DType) -> Callable[[list[Expr], Expr], Expr]:
        """The nearest codes of numbers in steps, with the zero point at position ``k``."""
        zero = self.add(k, single=True)
        return lambda e, y: saturated(y, None if zero is None else e[zero], dtype)

    def coded(self, k: int, dtype: DType) -> Callable[[list[Expr], Expr], Expr]:
        """Codes by the scale at position ``k`` and the zero point behind it."""
        scale, zero = self.add(k, single=True), self.add(k + 1, single=True)
        assert scale is not None
        known = self.n.known(k)
        return lambda e, y: saturated(ratio(y, cast(e[scale], FLOAT), known), None if zero is None else e[zero], dtype)


@lowers("QLinearAdd", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_add(n: NodeView, b: Definitions) -> None:
    given, target = Operands(n, b), n.out_dtype()
    left, right, rounded = given.steps(0, 6), given.steps(3, 6), given.rounded(7, target)
    b.pointwise(given.uses, lambda e: rounded(e, add(left(e), right(e))), target, n.out_shape(), n.outputs[0])


@lowers("QLinearMul", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_mul(n: NodeView, b: Definitions) -> None:
    given, target = Operands(n, b), n.out_dtype()
    left, right, factor = given.difference(0, 2), given.difference(3, 5), given.factor(1, 4, step=6)
    rounded = given.rounded(7, target)

    def compute(e: list[Expr]) -> Expr:
        return rounded(e, mul(mul(left(e), right(e)), factor(e)))

    b.pointwise(given.uses, compute, target, n.out_shape(), n.outputs[0])


@lowers("QLinearSigmoid", "QLinearLeakyRelu", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_unary(n: NodeView, b: Definitions) -> None:
    given, target = Operands(n, b), n.out_dtype()
    number, coded = given.real(0), given.coded(3, target)
    alpha = float(n.attr("alpha", 0.01))

    def function(x: Expr) -> Expr:
        if n.op == "QLinearSigmoid":
            return op("sigmoid", x)
        return where(compare("ge", x, const(0.0, x)), x, mul(x, const(alpha, x)))

    b.pointwise(given.uses, lambda e: coded(e, function(number(e))), target, n.out_shape(), n.outputs[0])


@lowers("QLinearWhere", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_where(n: NodeView, b: Definitions) -> None:
    given, target = Operands(n, b), n.out_dtype()
    given.add(0)
    left, right, rounded = given.steps(1, 7), given.steps(4, 7), given.rounded(8, target)
    b.pointwise(given.uses, lambda e: rounded(e, where(e[0], left(e), right(e))), target, n.out_shape(), n.outputs[0])


@lowers("QLinearConcat", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_concat(n: NodeView, b: Definitions) -> None:
    def part(k: int) -> Value:
        given = Operands(n, b)
        number, rounded = given.steps(k, 0), given.rounded(1, n.out_dtype())
        return b.pointwise(given.uses, lambda e: rounded(e, number(e)), n.out_dtype(), n.shape(k))

    parts = [part(k) for k in range(2, len(n.inputs), 3)]
    axis, rank = int(n.attr("axis")), len(n.out_shape())
    if not -rank <= axis < rank:
        raise Declined(f"QLinearConcat: axis {axis} for rank {rank}")
    b.joined(parts, axis % rank, n.out_shape(), n.outputs[0])


@lowers("QLinearGlobalAveragePool", "QLinearReduceMean", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_mean(n: NodeView, b: Definitions) -> None:
    shape, target = n.shape(0), n.out_dtype()
    rank = len(shape)
    if n.op == "QLinearReduceMean":
        axes = tuple(int(a) % rank for a in n.attr("axes") or range(rank))
        keep = bool(n.attr("keepdims", 1))
    else:
        axes = tuple(range(1, rank - 1) if n.attr("channels_last", 0) else range(2, rank))
        keep = True
    count = math.prod(shape[a] for a in axes)
    whole = sum_type(count)
    # sums of codes are exact, and the same for all ways to group them
    (total,) = b.rows(
        [n.input(0)],
        axes,
        lambda e: RowBody([Reduce("sum", cast(e[0], whole), whole)], finals={0: Result(0, whole)}),
        [(whole, False)],
        keepdims=keep,
    )
    given = Operands(n, b)
    given.uses.append(Use(total))
    zero, factor, rounded = given.add(2, single=True), given.factor(1, step=3), given.rounded(4, target)

    def compute(e: list[Expr]) -> Expr:
        difference = e[0]
        if zero is not None:
            difference = sub(difference, mul(cast(e[zero], whole), cast(Size(count), whole)))
        mean = div(cast(difference, FLOAT), cast(Size(count), FLOAT))
        return rounded(e, mul(mean, factor(e)))

    b.pointwise(given.uses, compute, target, n.out_shape(), n.outputs[0])


@lowers("QLinearSoftmax", domain=MICROSOFT, dtypes=QUANTIZED, check=bytes_first)
def qlinear_softmax(n: NodeView, b: Definitions) -> None:
    shape, target = n.shape(0), n.out_dtype()
    if not shape:
        raise Declined(f"{n.op}: a scalar has no axis")
    if 0 in shape:
        b.identity(n.input(0), n.outputs[0])
        return
    axis = int(n.attr("axis", -1)) % len(shape)
    rows = shape
    if int(n.attr("opset")) < 13:  # all axes from this one on together
        rows, axis = (math.prod(shape[:axis]), math.prod(shape[axis:])), 1
    given = Operands(n, b)
    given.uses.append(Use(n.input(0), rows))
    scale, coded = given.add(1, single=True), given.coded(3, target)
    assert scale is not None

    def build(e: list[Expr]) -> RowBody:
        code = cast(e[0], FLOAT)
        weight = weight_of(mul(sub(code, Result(0, FLOAT)), e[scale]))  # a zero point would cancel
        share = coded(e, div(weight, Result(1, FLOAT)))
        return RowBody([Reduce("max", code, FLOAT), Reduce("sum", weight, FLOAT)], maps={0: share})

    flat = rows != shape
    (made,) = b.rows(given.uses, [axis], build, [(target, True)], domain=rows, results=[None if flat else n.outputs[0]])
    if flat:
        b.reshape(made, shape, n.outputs[0])


@lowers("ReduceSumInteger", domain=MICROSOFT, dtypes=BYTES | {INT, DType.uint32})
def reduce_sum_integer(n: NodeView, b: Definitions) -> None:
    rank, wide = n.rank(0), n.out_dtype()
    axes = tuple(int(a) % max(1, rank) for a in n.attr("axes") or range(rank))
    if not axes:
        b.pointwise([n.input(0)], lambda e: cast(e[0], wide), wide, out=n.outputs[0])
        return
    b.rows(
        [n.input(0)],
        axes,
        lambda e: RowBody([Reduce("sum", cast(e[0], wide), wide)], finals={0: Result(0, wide)}),
        [(wide, False)],
        keepdims=bool(n.attr("keepdims", 1)),
        results=[n.outputs[0]],
    )


@lowers("MulInteger", domain=MICROSOFT, dtypes=QUANTIZED)
def mul_integer(n: NodeView, b: Definitions) -> None:
    given = Operands(n, b)
    places = [(given.add(k), given.add(k + 1, single=True)) for k in (0, 2)]

    def compute(e: list[Expr]) -> Expr:
        factors = []
        for x, zero in places:
            assert x is not None
            code = cast(e[x], INT)
            factors.append(code if zero is None else sub(code, cast(e[zero], INT)))
        return mul(factors[0], factors[1])

    b.pointwise(given.uses, compute, INT, n.out_shape(), n.outputs[0])
