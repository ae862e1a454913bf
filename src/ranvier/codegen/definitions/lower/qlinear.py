"""com.microsoft operators on quantized tensors that compute in float32 and quantize once: QLinearAdd and relatives."""

from __future__ import annotations

import math
from collections.abc import Callable

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import add, cast, compare, const, div, mul, op, ratio, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.quantization import real, saturated
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import BYTES
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value

MICROSOFT = "com.microsoft"
INT, FLOAT = DType.int32, DType.float32
_TYPES = BYTES | {FLOAT, INT, DType.bool}


def _bytes_first(node: Node) -> str | None:
    out = node.outputs[0].type
    kind = getattr(out, "dtype", None)
    return None if kind in BYTES else f"a result of {kind}"


class _Operands:
    """Collects uses, and finds their expressions again."""

    def __init__(self, n: NodeView) -> None:
        self.n = n
        self.uses: list[Use] = []

    def add(self, k: int, *, single: bool = False) -> int | None:
        """The place of operand ``k``; None where it is absent."""
        if not self.n.has(k):
            return None
        self.uses.append(Use(self.n.input(k), () if single else None))
        return len(self.uses) - 1

    def real(self, k: int) -> Callable[[list[Expr]], Expr]:
        """The numbers of a tensor at position ``k`` that its scale and zero point follow."""
        x, scale, zero = self.add(k), self.add(k + 1, single=True), self.add(k + 2, single=True)
        assert x is not None and scale is not None
        return lambda e: real(e[x], None if zero is None else e[zero], e[scale])

    def coded(self, k: int, dtype: DType) -> Callable[[list[Expr], Expr], Expr]:
        """Codes by the scale at position ``k`` and the zero point behind it."""
        scale, zero = self.add(k, single=True), self.add(k + 1, single=True)
        assert scale is not None
        known = self.n.known(k)
        return lambda e, y: saturated(ratio(y, cast(e[scale], FLOAT), known), None if zero is None else e[zero], dtype)


@lowers("QLinearAdd", "QLinearMul", domain=MICROSOFT, dtypes=_TYPES, check=_bytes_first)
def qlinear_binary(n: NodeView, b: Definitions) -> None:
    given, target = _Operands(n), n.out_dtype()
    left, right, coded = given.real(0), given.real(3), given.coded(6, target)
    join = add if n.op == "QLinearAdd" else mul
    b.pointwise(given.uses, lambda e: coded(e, join(left(e), right(e))), target, n.out_shape(), n.outputs[0])


@lowers("QLinearSigmoid", "QLinearLeakyRelu", domain=MICROSOFT, dtypes=_TYPES, check=_bytes_first)
def qlinear_unary(n: NodeView, b: Definitions) -> None:
    given, target = _Operands(n), n.out_dtype()
    number, coded = given.real(0), given.coded(3, target)
    alpha = float(n.attr("alpha", 0.01))

    def function(x: Expr) -> Expr:
        if n.op == "QLinearSigmoid":
            return op("sigmoid", x)
        return where(compare("ge", x, const(0.0, x)), x, mul(x, const(alpha, x)))

    b.pointwise(given.uses, lambda e: coded(e, function(number(e))), target, n.out_shape(), n.outputs[0])


@lowers("QLinearWhere", domain=MICROSOFT, dtypes=_TYPES, check=_bytes_first)
def qlinear_where(n: NodeView, b: Definitions) -> None:
    given, target = _Operands(n), n.out_dtype()
    given.add(0)
    left, right, coded = given.real(1), given.real(4), given.coded(7, target)
    b.pointwise(given.uses, lambda e: coded(e, where(e[0], left(e), right(e))), target, n.out_shape(), n.outputs[0])


@lowers("QLinearConcat", domain=MICROSOFT, dtypes=_TYPES, check=_bytes_first)
def qlinear_concat(n: NodeView, b: Definitions) -> None:
    def part(k: int) -> Value:
        given = _Operands(n)
        number, coded = given.real(k), given.coded(0, n.out_dtype())
        return b.pointwise(given.uses, lambda e: coded(e, number(e)), n.out_dtype(), n.shape(k))

    parts = [part(k) for k in range(2, len(n.inputs), 3)]
    axis, rank = int(n.attr("axis")), len(n.out_shape())
    if not -rank <= axis < rank:
        raise Declined(f"QLinearConcat: axis {axis} for rank {rank}")
    b.joined(parts, axis % rank, n.out_shape(), n.outputs[0])


@lowers("QLinearGlobalAveragePool", "QLinearReduceMean", domain=MICROSOFT, dtypes=_TYPES, check=_bytes_first)
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
    x = n.input(0)
    # sums of codes are exact, and the same for all ways to group them
    (total,) = b.rows(
        [x],
        axes,
        lambda e: RowBody([Reduce("sum", cast(e[0], INT), INT)], finals={0: Result(0, INT)}),
        [(INT, False)],
        keepdims=keep,
    )
    given = _Operands(n)
    given.uses.append(Use(total))
    scale, zero = given.add(1, single=True), given.add(2, single=True)
    coded = given.coded(3, target)
    assert scale is not None

    def compute(e: list[Expr]) -> Expr:
        mean = div(cast(e[0], FLOAT), cast(Size(count), FLOAT))
        if zero is not None:
            mean = sub(mean, cast(e[zero], FLOAT))
        return coded(e, mul(mean, e[scale]))

    b.pointwise(given.uses, compute, target, n.out_shape(), n.outputs[0])


@lowers("MulInteger", domain=MICROSOFT, dtypes=_TYPES)
def mul_integer(n: NodeView, b: Definitions) -> None:
    given = _Operands(n)
    places = [(given.add(k), given.add(k + 1, single=True)) for k in (0, 2)]

    def compute(e: list[Expr]) -> Expr:
        factors = []
        for x, zero in places:
            assert x is not None
            code = cast(e[x], INT)
            factors.append(code if zero is None else sub(code, cast(e[zero], INT)))
        return mul(factors[0], factors[1])

    b.pointwise(given.uses, compute, INT, n.out_shape(), n.outputs[0])
