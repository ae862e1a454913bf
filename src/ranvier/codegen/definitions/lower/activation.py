"""Activation functions, the standard's and ONNX Runtime's."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ranvier.codegen.definitions.defs import Use
from ranvier.codegen.definitions.exprs import add, cast, clamp, compare, const, div, mul, op, sub, where, wide
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS, NUMERIC
from ranvier.codegen.loops.ir import Expr
from ranvier.dtypes import DType
from ranvier.graph.ir import Node

Formula = Callable[[Expr, NodeView], Expr]
MICROSOFT = "com.microsoft"


def gelu(x: Expr) -> Expr:
    return mul(mul(const(0.5, x), x), add(const(1.0, x), op("erf", mul(x, const(math.sqrt(0.5), x)))))


def gelu_tanh(x: Expr) -> Expr:
    cubic = mul(mul(mul(const(0.044715, x), x), x), x)
    inner = mul(const(math.sqrt(2 / math.pi), x), add(x, cubic))
    return mul(mul(const(0.5, x), x), add(const(1.0, x), op("tanh", inner)))


def silu(x: Expr, alpha: float = 1.0) -> Expr:
    return mul(x, op("sigmoid", x if alpha == 1.0 else mul(const(alpha, x), x)))


def _tail(x: Expr) -> Expr:
    return op("expm1", op("min", x, const(0.0, x)))


def _negative(x: Expr, then: Expr, otherwise: Expr) -> Expr:
    return where(compare("lt", x, const(0.0, x)), then, otherwise)


def _selu(x: Expr, n: NodeView) -> Expr:
    exact = n.version >= 6
    alpha = n.attr("alpha", 1.6732631921768188 if exact else 1.6732)
    gamma = n.attr("gamma", 1.0507010221481323 if exact else 1.0507)
    return _negative(x, mul(const(alpha * gamma, x), _tail(x)), mul(const(gamma, x), x))


def _celu(x: Expr, n: NodeView) -> Expr:
    alpha = const(n.attr("alpha", 1.0), x)
    low = op("min", const(0.0, x), mul(alpha, op("expm1", div(x, alpha))))
    return add(op("max", x, const(0.0, x)), low)


def _shrink(x: Expr, n: NodeView) -> Expr:
    edge, bias = const(n.attr("lambd", 0.5), x), const(n.attr("bias", 0.0), x)
    low = compare("lt", x, op("neg", edge))
    return where(low, add(x, bias), where(compare("gt", x, edge), sub(x, bias), const(0.0, x)))


def _hard_sigmoid(x: Expr, n: NodeView) -> Expr:
    line = add(mul(x, const(n.attr("alpha", 0.2), x)), const(n.attr("beta", 0.5), x))
    return clamp(line, const(0.0, x), const(1.0, x))


def _hard_swish(x: Expr, n: NodeView) -> Expr:
    gate = add(mul(x, const(1 / 6, x)), const(0.5, x))
    return mul(x, clamp(gate, const(0.0, x), const(1.0, x)))


_FORMULAS: dict[str, Formula] = {
    "LeakyRelu": lambda x, n: _negative(x, mul(x, const(n.attr("alpha", 0.01), x)), x),
    "ThresholdedRelu": lambda x, n: where(compare("gt", x, const(n.attr("alpha", 1.0), x)), x, const(0.0, x)),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Sigmoid": lambda x, n: op("sigmoid", x),
    "Elu": lambda x, n: _negative(x, mul(const(n.attr("alpha", 1.0), x), _tail(x)), x),
    "Celu": _celu,
    "Selu": _selu,
    "Softplus": lambda x, n: op("softplus", x),
    "Softsign": lambda x, n: div(x, add(const(1.0, x), op("abs", x))),
    "Mish": lambda x, n: mul(x, op("tanh", op("softplus", x))),
    "Swish": lambda x, n: silu(x, n.attr("alpha", 1.0)),
    "Gelu": lambda x, n: gelu(x) if n.attr("approximate", "none") == "none" else gelu_tanh(x),
    "ParametricSoftplus": lambda x, n: mul(const(n.attr("alpha"), x), op("softplus", mul(const(n.attr("beta"), x), x))),
    "ScaledTanh": lambda x, n: mul(const(n.attr("alpha"), x), op("tanh", mul(const(n.attr("beta"), x), x))),
    "Affine": lambda x, n: add(mul(const(n.attr("alpha", 1.0), x), x), const(n.attr("beta", 0.0), x)),
    "Scale": lambda x, n: mul(x, const(n.attr("scale", 1.0), x)),
}


def _no_zero_alpha(node: Node) -> str | None:
    return "alpha is 0" if node.op == "Celu" and node.attrs.get("alpha", 1.0) == 0 else None


@lowers(*_FORMULAS, dtypes=FLOATS, check=_no_zero_alpha)
def activation(n: NodeView, b: Definitions) -> None:
    formula = _FORMULAS[n.op]
    b.pointwise([n.input(0)], lambda x: wide(lambda e: formula(e, n))(x[0]), n.out_dtype(), out=n.outputs[0])


@lowers("Relu", dtypes=NUMERIC)
def relu(n: NodeView, b: Definitions) -> None:
    b.pointwise([n.input(0)], lambda x: op("max", x[0], const(0, x[0])), n.out_dtype(), out=n.outputs[0])


@lowers("Shrink", dtypes=NUMERIC)
def shrink(n: NodeView, b: Definitions) -> None:
    def compute(x: list[Expr]) -> Expr:
        if x[0].dtype in FLOATS:
            return wide(lambda e: _shrink(e, n))(x[0])
        return cast(_shrink(cast(x[0], DType.float64), n), x[0].dtype)

    b.pointwise([n.input(0)], compute, n.out_dtype(), out=n.outputs[0])


@lowers("PRelu", since=7, dtypes=NUMERIC)
def prelu(n: NodeView, b: Definitions) -> None:
    b.pointwise(
        [n.input(0), n.input(1)],
        lambda x: where(compare("lt", x[0], const(0, x[0])), mul(*x), x[0]),
        n.out_dtype(),
        shape=n.shape(0),
        out=n.outputs[0],
    )


@lowers("SwiGLU", dtypes=FLOATS)
def swiglu(n: NodeView, b: Definitions) -> None:
    alpha = n.attr("alpha", 1.0)
    gated = wide(lambda gate, linear: mul(silu(gate, alpha), linear))
    b.pointwise([n.input(0), n.input(1)], lambda x: gated(*x), n.out_dtype(), out=n.outputs[0])


@lowers("ImageScaler", dtypes=FLOATS)
def image_scaler(n: NodeView, b: Definitions) -> None:
    scale, bias = n.attr("scale", 1.0), n.attr("bias", ())
    if not len(bias):
        b.pointwise([n.input(0)], lambda x: mul(x[0], const(scale, x[0])), n.out_dtype(), out=n.outputs[0])
        return
    offsets = b.constant(np.asarray(bias, n.dtype(0).numpy))
    b.pointwise(
        [n.input(0), Use(offsets, (len(bias), 1, 1))],
        lambda x: add(mul(x[0], const(scale, x[0])), x[1]),
        n.out_dtype(),
        out=n.outputs[0],
    )


# -- com.microsoft ----------------------------------------------------------------------------------------------------


@lowers("Gelu", domain=MICROSOFT, dtypes=FLOATS)
def gelu_ms(n: NodeView, b: Definitions) -> None:
    b.pointwise([n.input(0)], lambda x: wide(gelu)(x[0]), n.out_dtype(), out=n.outputs[0])


@lowers("QuickGelu", domain=MICROSOFT, dtypes=FLOATS)
def quick_gelu(n: NodeView, b: Definitions) -> None:
    alpha = n.attr("alpha", 1.702)
    b.pointwise([n.input(0)], lambda x: wide(lambda e: silu(e, alpha))(x[0]), n.out_dtype(), out=n.outputs[0])


@lowers("BiasGelu", "FastGelu", domain=MICROSOFT, dtypes=FLOATS)
def bias_gelu(n: NodeView, b: Definitions) -> None:
    formula = gelu if n.op == "BiasGelu" else gelu_tanh
    operands = [n.input(k) for k in range(2) if n.has(k)]

    def compute(x: list[Expr]) -> Expr:
        return wide(lambda *e: formula(add(*e) if len(e) == 2 else e[0]))(*x)

    b.pointwise(operands, compute, n.out_dtype(), shape=n.shape(0), out=n.outputs[0])
