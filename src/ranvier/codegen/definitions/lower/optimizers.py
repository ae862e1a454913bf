"""One step of an optimizer: Adagrad, Adam, Momentum."""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import add, cast, compare, const, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr
from ranvier.dtypes import DType

PREVIEW = "ai.onnx.preview.training"
FLOAT64 = DType.float64


Step = Callable[[Expr, list[Expr]], tuple[Expr, ...]]  # rate, tensors of one variable -> what becomes of them


def _update(n: NodeView, b: Definitions, kinds: int, rate: Callable[[Expr, Expr], Expr], step: Step) -> None:
    """Each variable's value, gradient and state through one step; inputs and outputs are grouped by kind."""
    count, left = divmod(len(n.inputs) - 2, kinds)
    if left or not count:
        raise Declined(f"{n.op}: {len(n.inputs) - 2} tensors")
    factor = b.pointwise(
        [Use(n.input(0), ()), Use(n.input(1), ())],
        lambda e: rate(cast(e[0], FLOAT64), cast(e[1], FLOAT64)),
        FLOAT64,
    )
    for k in range(count):
        own = [n.input(2 + k + kind * count) for kind in range(kinds)]
        dtype = b.dtype(own[0])
        for place in range(kinds - 1):
            if not n.wants(k + place * count):
                continue

            def compute(e: list[Expr], place: int = place, dtype: DType = dtype) -> Expr:
                return step(cast(e[0], dtype), e[1:])[place]

            b.pointwise([factor, *own], compute, dtype, shape=b.shape(own[0]), out=n.outputs[k + place * count])


def _decayed(n: NodeView, x: Expr, g: Expr) -> Expr:
    coefficient = float(n.attr("norm_coefficient", 0.0))
    return add(mul(const(coefficient, x), x), g)


@lowers("Adagrad", domain=PREVIEW, dtypes=FLOATS | {DType.int64})
def adagrad(n: NodeView, b: Definitions) -> None:
    decay, epsilon = float(n.attr("decay_factor", 0.0)), float(n.attr("epsilon", 1e-6))

    def rate(r: Expr, t: Expr) -> Expr:
        return div(r, add(const(1.0, r), mul(t, const(decay, r))))

    def step(factor: Expr, e: list[Expr]) -> tuple[Expr, ...]:
        x, g, h = e
        gradient = _decayed(n, x, g)
        squares = add(h, mul(gradient, gradient))
        change = div(mul(factor, gradient), add(op("sqrt", squares), const(epsilon, x)))
        return sub(x, change), squares

    _update(n, b, 3, rate, step)


@lowers("Adam", domain=PREVIEW, dtypes=FLOATS | {DType.int64})
def adam(n: NodeView, b: Definitions) -> None:
    alpha, beta = float(n.attr("alpha", 0.9)), float(n.attr("beta", 0.999))
    epsilon, after = float(n.attr("epsilon", 1e-6)), float(n.attr("norm_coefficient_post", 0.0))

    def rate(r: Expr, t: Expr) -> Expr:
        one = const(1.0, r)
        corrected = div(op("sqrt", sub(one, op("pow", const(beta, r), t))), sub(one, op("pow", const(alpha, r), t)))
        return mul(r, where(compare("gt", t, const(0.0, t)), corrected, one))

    def step(factor: Expr, e: list[Expr]) -> tuple[Expr, ...]:
        x, g, v, h = e
        gradient = _decayed(n, x, g)
        mean = add(mul(const(alpha, x), v), mul(const(1 - alpha, x), gradient))
        squares = add(mul(const(beta, x), h), mul(mul(const(1 - beta, x), gradient), gradient))
        change = div(mul(factor, mean), add(op("sqrt", squares), const(epsilon, x)))
        return mul(const(1 - after, x), sub(x, change)), mean, squares

    _update(n, b, 4, rate, step)


@lowers("Momentum", domain=PREVIEW, dtypes=FLOATS | {DType.int64})
def momentum_(n: NodeView, b: Definitions) -> None:
    alpha, beta, plain = float(n.attr("alpha")), float(n.attr("beta")), n.attr("mode") == "standard"
    if n.attr("mode") not in ("standard", "nesterov"):
        raise Declined(f"Momentum: mode {n.attr('mode')!r}")
    first = Use(n.input(1), ())
    count = (len(n.inputs) - 2) // 3
    # the first gradient enters unscaled: there is no momentum yet to balance it
    scale = b.pointwise(
        [first],
        lambda e: where(compare("gt", e[0], const(0, e[0])), const(beta, FLOAT64), const(1.0, FLOAT64)),
        FLOAT64,
    )
    for k in range(count):
        x, g, v = (n.input(2 + k + kind * count) for kind in range(3))
        dtype, shape = b.dtype(x), b.shape(x)

        def moving(e: list[Expr], dtype: DType = dtype) -> Expr:
            return add(mul(const(alpha, dtype), e[3]), mul(cast(e[0], dtype), _decayed(n, e[1], e[2])))

        def stepped(e: list[Expr], dtype: DType = dtype) -> Expr:
            rate, x, g, mean = e
            direction = mean if plain else add(_decayed(n, x, g), mul(const(alpha, x), mean))
            return sub(x, mul(cast(rate, dtype), direction))

        new = b.pointwise([scale, x, g, v], moving, dtype, shape=shape, out=n.outputs[count + k])
        b.pointwise([Use(n.input(0), ()), x, g, new], stepped, dtype, shape=shape, out=n.outputs[k])
