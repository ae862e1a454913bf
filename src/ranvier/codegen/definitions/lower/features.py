"""Features of classical models (``ai.onnx.ml``): scaling, filling gaps, linear models."""

from __future__ import annotations

import math

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import add, cast, compare, const, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.contraction import ACTIVATIONS, multiply
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import between, position
from ranvier.codegen.definitions.lower.reduction import softmax
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS, NUMERIC
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value

ML = "ai.onnx.ml"
INT64, FLOAT32, FLOAT64 = DType.int64, DType.float32, DType.float64


@lowers("Binarizer", domain=ML, dtypes=NUMERIC)
def binarizer(n: NodeView, b: Definitions) -> None:
    threshold, dtype = float(n.attr("threshold", 0.0)), n.dtype(0)
    exact = dtype if dtype in FLOATS else FLOAT64

    def compute(e: list[Expr]) -> Expr:
        return cast(compare("gt", cast(e[0], exact), const(threshold, exact)), dtype)

    b.pointwise([n.input(0)], compute, dtype, out=n.outputs[0])


def _column(n: NodeView, b: Definitions, values: object, dtype: DType) -> Value:
    """An attribute with one number for all features, or one for each."""
    array = np.asarray(values, dtype.numpy)
    if array.size not in (1, n.shape(0)[-1] if n.rank(0) else 1):
        raise Declined(f"{n.op}: {array.size} values for {list(n.shape(0))}")
    return b.constant(array, dtype)


@lowers("Scaler", domain=ML, dtypes=NUMERIC)
def scaler(n: NodeView, b: Definitions) -> None:
    kind = FLOAT64 if n.dtype(0) is FLOAT64 else FLOAT32
    given = [(name, n.attr(name)) for name in ("offset", "scale") if n.attr(name)]
    operands = [n.input(0), *(_column(n, b, values, FLOAT32) for _, values in given)]

    def compute(e: list[Expr]) -> Expr:
        value = cast(e[0], kind)
        for (name, _), other in zip(given, e[1:]):
            value = (sub if name == "offset" else mul)(value, cast(other, kind))
        return cast(value, FLOAT32)

    b.pointwise(operands, compute, FLOAT32, shape=n.shape(0), out=n.outputs[0])


@lowers("Imputer", domain=ML, dtypes=NUMERIC)
def imputer(n: NodeView, b: Definitions) -> None:
    dtype = n.dtype(0)
    is_float = dtype in FLOATS
    values = n.attr("imputed_value_floats" if is_float else "imputed_value_int64s")
    gap = n.attr("replaced_value_float", 0.0) if is_float else n.attr("replaced_value_int64", 0)
    if not values:
        raise Declined("Imputer: no values")
    filler = _column(n, b, values, dtype)

    def compute(e: list[Expr]) -> Expr:
        x, other = e
        missing = op("isnan", x, dtype=DType.bool) if gap != gap else compare("eq", x, const(gap, x))
        return where(missing, other, x)

    b.pointwise([n.input(0), filler], compute, dtype, shape=n.shape(0), out=n.outputs[0])


@lowers("Normalizer", domain=ML, dtypes=NUMERIC)
def normalizer(n: NodeView, b: Definitions) -> None:
    norm, rank = n.attr("norm", "MAX"), n.rank(0)
    if norm not in ("MAX", "L1", "L2") or rank not in (1, 2):
        raise Declined(f"Normalizer: norm {norm!r} of {list(n.shape(0))}")

    def build(e: list[Expr]) -> RowBody:
        x = cast(e[0], FLOAT64)
        value = x if norm == "MAX" else op("abs", x) if norm == "L1" else mul(x, x)
        size: Expr = Result(0, FLOAT64)
        size = op("sqrt", size) if norm == "L2" else size
        safe = where(compare("eq", size, const(0.0, size)), const(1.0, size), size)
        return RowBody(
            [Reduce("max" if norm == "MAX" else "sum", value, FLOAT64)], maps={0: cast(div(x, safe), FLOAT32)}
        )

    b.rows([n.input(0)], [rank - 1], build, [(FLOAT32, True)], domain=n.shape(0), results=[n.outputs[0]])


def _simple_transform(node: Node) -> str | None:
    name = node.attrs.get("post_transform") or "NONE"
    return None if name in ("NONE", "LOGISTIC", "SOFTMAX") else f"post_transform {name!r}"


@lowers("LinearRegressor", domain=ML, dtypes=NUMERIC, check=_simple_transform)
def linear_regressor(n: NodeView, b: Definitions) -> None:
    shape, targets = n.shape(0), int(n.attr("targets", 1))
    rows, features = (1, shape[0]) if len(shape) == 1 else shape if len(shape) == 2 else (0, 0)
    weights = np.asarray(n.attr("coefficients", ()), np.float32)
    offsets = n.attr("intercepts")
    if weights.size != targets * features or (offsets and len(offsets) != targets) or not math.prod(shape):
        raise Declined(f"LinearRegressor: {weights.size} coefficients for {list(shape)}")
    kind = FLOAT64 if n.dtype(0) is FLOAT64 else FLOAT32
    x = n.input(0)
    if n.dtype(0) is not kind:
        x = b.pointwise([x], lambda e: cast(e[0], kind), kind)
    matrix = b.constant(np.ascontiguousarray(weights.reshape(targets, features).T).astype(kind.numpy), kind)
    product = multiply(b, b.reshape(x, (rows, features)), matrix, (rows, targets))
    transform = n.attr("post_transform", "NONE")
    operands: list[Value | Use] = [product]
    if offsets:
        operands.append(b.constant(np.asarray(offsets, np.float32)))

    def compute(e: list[Expr]) -> Expr:
        value = add(e[0], cast(e[1], kind)) if len(e) > 1 else e[0]
        value = ACTIVATIONS["Sigmoid"](value) if transform == "LOGISTIC" else value
        return cast(value, FLOAT32)

    if transform == "SOFTMAX":
        softmax(b, b.pointwise(operands, compute, FLOAT32, shape=(rows, targets)), 1, out=n.outputs[0])
    else:
        b.pointwise(operands, compute, FLOAT32, shape=(rows, targets), out=n.outputs[0])


@lowers("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(n: NodeView, b: Definitions) -> None:
    """The features of the last axis that the second operand names; a vector counts as one row."""
    shape = n.shape(0)
    count = math.prod(n.shape(1))
    if not shape or not shape[-1] or not count:
        raise Declined(f"ArrayFeatureExtractor: {count} of {list(shape)}")
    size, lead = shape[-1], shape[:-1] or (1,)
    wanted = b.reshape(n.input(1), (count,))

    def outside(e: list[Expr]) -> RowBody:
        bad = op("not", between(const(0, INT64), cast(e[0], INT64), Size(size)), dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    (flag,) = b.rows([wanted], [0], outside, [(DType.bool, False)], keepdims=False)
    b.check(flag, f"ArrayFeatureExtractor: an index is out of range for {size} features")

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        source, places = views
        place = position(nest.load(places, (*(0 for _ in lead), places.strides[0])), size)
        return nest.load(source, (*source.strides[:-1], 0), at=mul(place, Size(source.strides[-1])))

    b.moved([b.reshape(n.input(0), (*lead, size)), wanted], compute, n.dtype(0), (*lead, count), n.outputs[0])
