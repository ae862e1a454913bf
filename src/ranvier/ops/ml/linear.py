"""Linear models and support vector machines of ``ai.onnx.ml``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType
from ranvier.ops.costs import dims, traffic
from ranvier.ops.ml.scores import (
    class_labels,
    feature_rows,
    float_array,
    labels_type,
    row_count,
    scores_type,
    transform_scores,
)
from ranvier.ops.registry import Array, Cost, TypeCall, op

DOMAIN = "ai.onnx.ml"


# -- linear models -----------------------------------------------------------------------------------------------------


@op("LinearRegressor", domain=DOMAIN)
def linear_regressor(
    X: Array,
    *,
    coefficients: Sequence[float] = (),
    intercepts: Sequence[float] = (),
    post_transform: str = "NONE",
    targets: int = 1,
) -> Array:
    if targets < 1:
        raise InvalidValue(f"LinearRegressor: targets must be positive, got {targets}")
    scores = _linear("LinearRegressor", feature_rows("LinearRegressor", X), coefficients, intercepts, targets)
    return transform_scores("LinearRegressor", scores, post_transform).astype(np.float32, copy=False)


@linear_regressor.infer
def _(call: TypeCall) -> list[TensorType]:
    return [scores_type(call, call.attr("targets", 1))]


@op("LinearClassifier", domain=DOMAIN)
def linear_classifier(
    X: Array,
    *,
    coefficients: Sequence[float],
    classlabels_ints: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    intercepts: Sequence[float] = (),
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[Array, Array]:
    """The best label of each row, and the scores of all classes.

    ``multi_class`` says how the model was trained; it changes nothing about how it is used.
    """
    rows = feature_rows("LinearClassifier", X)
    labels = class_labels("LinearClassifier", classlabels_ints, classlabels_strings)
    # two classes may share one separating plane: its score speaks for the second and against the first
    columns = len(intercepts) or (1 if len(labels) == 2 and len(coefficients) == rows.shape[1] else len(labels))
    scores = _linear("LinearClassifier", rows, coefficients, intercepts, columns)
    if columns == 1 and len(labels) == 2:
        scores = np.concatenate([-scores, scores], axis=1)
    elif columns != len(labels):
        raise InvalidValue(f"LinearClassifier: {len(labels)} class labels, but coefficients for {columns} classes")
    if len(labels) == 2 and columns == 1:
        best = (scores[:, 1] > 0).astype(np.int64)
    else:
        best = scores.argmax(axis=1)
    return labels[best], transform_scores("LinearClassifier", scores, post_transform).astype(np.float32, copy=False)


@linear_classifier.infer
def _(call: TypeCall) -> list[TensorType]:
    classes = len(call.attr("classlabels_ints") or call.attr("classlabels_strings") or ())
    return [labels_type(call, "classlabels_strings"), scores_type(call, classes)]


def _linear(
    op_name: str, rows: Array, coefficients: Sequence[float], intercepts: Sequence[float], columns: int
) -> Array:
    if len(coefficients) != columns * rows.shape[1]:
        raise ShapeMismatch(
            f"{op_name}: expected {columns} × {rows.shape[1]} coefficients for an input of "
            f"{rows.shape[1]} features, got {len(coefficients)}"
        )
    scores: Array = rows @ float_array(coefficients).reshape(columns, -1).T
    if not intercepts:
        return scores
    if len(intercepts) != columns:
        raise InvalidValue(f"{op_name}: expected {columns} intercepts, got {len(intercepts)}")
    return np.asarray(scores + float_array(intercepts))


@linear_regressor.cost
@linear_classifier.cost
def _(call: TypeCall) -> Cost:
    weights = len(call.attr("coefficients", ()))
    rows = row_count(call)
    return Cost(2 * weights * (rows if isinstance(rows, int) else 1), traffic(call) + 4 * weights)


# -- support vector machines -------------------------------------------------------------------------------------------


@op("SVMRegressor", domain=DOMAIN)
def svm_regressor(
    X: Array,
    *,
    coefficients: Sequence[float] = (),
    kernel_params: Sequence[float] = (),
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    rho: Sequence[float] = (),
    support_vectors: Sequence[float] = (),
) -> Array:
    rows = feature_rows("SVMRegressor", X)
    if not rho:
        raise InvalidValue("SVMRegressor: 'rho' is missing")
    weights = float_array(coefficients)
    if n_supports > 0:
        vectors = _support_vectors("SVMRegressor", rows, support_vectors, n_supports)
        if len(weights) != n_supports:
            raise InvalidValue(f"SVMRegressor: {n_supports} support vectors, but {len(weights)} coefficients")
        scores = _kernel("SVMRegressor", rows, vectors, kernel_type, kernel_params) @ weights
    else:
        scores = _linear("SVMRegressor", rows, coefficients, (), 1)[:, 0]
    scores = (scores + np.float32(rho[0]))[:, np.newaxis]
    if one_class:
        scores = np.where(scores > 0, 1, -1)
    return transform_scores("SVMRegressor", scores.astype(np.float32), post_transform)


@svm_regressor.infer
def _(call: TypeCall) -> list[TensorType]:
    return [scores_type(call, 1)]


@op("SVMClassifier", domain=DOMAIN)
def svm_classifier(
    X: Array,
    *,
    classlabels_ints: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    coefficients: Sequence[float] = (),
    kernel_params: Sequence[float] = (),
    kernel_type: str = "LINEAR",
    post_transform: str = "NONE",
    prob_a: Sequence[float] = (),
    prob_b: Sequence[float] = (),
    rho: Sequence[float] = (),
    support_vectors: Sequence[float] = (),
    vectors_per_class: Sequence[int] = (),
) -> tuple[Array, Array]:
    """The best label of each row, and scores: one per pair of classes, or one per class where they are probabilities.

    Every pair of classes has its machine, and each machine votes for one of the two. Without support vectors the
    model is linear, one plane per class.
    """
    rows = feature_rows("SVMClassifier", X)
    labels = class_labels("SVMClassifier", classlabels_ints, classlabels_strings)
    if not rho:
        raise InvalidValue("SVMClassifier: 'rho' is missing")
    if not sum(vectors_per_class):
        scores = _linear("SVMClassifier", rows, coefficients, (), len(labels)) + np.float32(rho[0])
        best = scores.argmax(axis=1)
        return labels[best], transform_scores("SVMClassifier", scores, post_transform).astype(np.float32, copy=False)
    vectors = _support_vectors("SVMClassifier", rows, support_vectors, sum(vectors_per_class))
    kernel = _kernel("SVMClassifier", rows, vectors, kernel_type, kernel_params)
    decisions, votes = _duels(kernel, coefficients, rho, vectors_per_class, len(labels))
    best = votes.argmax(axis=1)
    if prob_a:
        scores = _class_probabilities(decisions, prob_a, prob_b, len(labels))
    else:
        # the order every runtime writes, though a positive decision speaks for the first class
        scores = np.concatenate([-decisions, decisions], axis=1) if len(labels) == 2 else decisions
    return labels[best], transform_scores("SVMClassifier", scores, post_transform).astype(np.float32, copy=False)


@svm_classifier.infer
def _(call: TypeCall) -> list[TensorType]:
    classes = len(call.attr("classlabels_ints") or call.attr("classlabels_strings") or ())
    per_pair = call.attr("vectors_per_class") and not call.attr("prob_a") and classes > 2
    columns = classes * (classes - 1) // 2 if per_pair else classes
    return [labels_type(call, "classlabels_strings"), scores_type(call, columns)]


@svm_regressor.cost
@svm_classifier.cost
def _(call: TypeCall) -> Cost:
    weights = len(call.attr("support_vectors", ())) + len(call.attr("coefficients", ()))
    rows = dims(call.type(0))[:1] or (1,)
    return Cost(2 * weights * rows[0], traffic(call) + 4 * weights)


def _support_vectors(op_name: str, rows: Array, values: Sequence[float], count: int) -> Array:
    if len(values) != count * rows.shape[1]:
        raise ShapeMismatch(
            f"{op_name}: expected {count} support vectors of {rows.shape[1]} features, got {len(values)} numbers"
        )
    return float_array(values).reshape(count, -1)


def _kernel(op_name: str, rows: Array, vectors: Array, kind: str, params: Sequence[float]) -> Array:
    """The kernel of every row with every support vector, [N, V]."""
    if params and len(params) != 3:
        raise InvalidValue(f"{op_name}: kernel_params must be gamma, coef0 and degree, got {len(params)} numbers")
    gamma, coef0, degree = params or (0.0, 0.0, 0.0)
    if kind == "RBF":
        return np.asarray(np.exp(-gamma * _squared_distances(rows, vectors)))
    products: Array = rows @ vectors.T
    if kind == "LINEAR":
        return products
    if kind == "POLY":
        return np.asarray((gamma * products + coef0) ** degree)
    if kind == "SIGMOID":
        return np.tanh(gamma * products + coef0)
    raise InvalidValue(f"{op_name}: kernel_type must be LINEAR, POLY, RBF or SIGMOID, got {kind!r}")


def _squared_distances(rows: Array, vectors: Array) -> Array:
    """|x - v|² as x² - 2xv + v²: one matrix product, in float64 because near neighbours cancel."""
    x, v = rows.astype(np.float64), vectors.astype(np.float64)
    distances = (x * x).sum(axis=1, keepdims=True) - 2 * (x @ v.T) + (v * v).sum(axis=1)
    return np.asarray(np.maximum(distances, 0))


def _duels(
    kernel: Array, coefficients: Sequence[float], rho: Sequence[float], per_class: Sequence[int], classes: int
) -> tuple[Array, Array]:
    """The decision of each pair's machine, [N, pairs], and the votes each class collects, [N, classes].

    A support vector of class i has a coefficient against every other class: row j - 1 for j > i, row j for j < i.
    """
    pairs = classes * (classes - 1) // 2
    if len(per_class) != classes or min(per_class) < 0:
        raise InvalidValue(f"SVMClassifier: vectors_per_class needs a count for each of {classes} classes")
    if len(coefficients) != (classes - 1) * kernel.shape[1] or len(rho) < pairs:
        raise InvalidValue(
            f"SVMClassifier: expected {classes - 1} × {kernel.shape[1]} coefficients and {pairs} values of rho, "
            f"got {len(coefficients)} and {len(rho)}"
        )
    weights = float_array(coefficients).reshape(classes - 1, -1)
    ends = np.cumsum(per_class).tolist()
    of_class = [slice(end - count, end) for end, count in zip(ends, per_class)]
    decisions = np.empty((len(kernel), pairs), kernel.dtype)
    votes = np.zeros((len(kernel), classes), np.int64)
    for pair, (i, j) in enumerate(_pairs(classes)):
        a, b = of_class[i], of_class[j]
        decision = kernel[:, a] @ weights[j - 1, a] + kernel[:, b] @ weights[i, b] + np.float32(rho[pair])
        decisions[:, pair] = decision
        votes[:, i] += decision > 0
        votes[:, j] += decision <= 0
    return decisions, votes


def _pairs(classes: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(classes) for j in range(i + 1, classes)]


def _class_probabilities(decisions: Array, prob_a: Sequence[float], prob_b: Sequence[float], classes: int) -> Array:
    """Probabilities of the classes that fit best the pairwise ones (Wu, Lin and Weng, 2004, their second method).

    ``pairwise[i, j]`` is the probability of class i given i or j. The wanted p minimises Σ (pairwise[j, i] pᵢ -
    pairwise[i, j] pⱼ)²; it is found by improving one coordinate after another, for all rows at once.
    """
    pairs = _pairs(classes)
    if len(prob_a) != len(prob_b) or len(prob_a) < len(pairs):
        raise InvalidValue(
            f"SVMClassifier: expected {len(pairs)} values of prob_a and prob_b, got {len(prob_a)} and {len(prob_b)}"
        )
    rows = len(decisions)
    pairwise = np.zeros((rows, classes, classes))
    for pair, (i, j) in enumerate(pairs):
        sigmoid = 1 / (1 + np.exp(decisions[:, pair].astype(np.float64) * prob_a[pair] + prob_b[pair]))
        pairwise[:, i, j] = np.clip(sigmoid, 1e-7, 1 - 1e-7)
        pairwise[:, j, i] = 1 - pairwise[:, i, j]
    Q = -pairwise * pairwise.transpose(0, 2, 1)
    diagonal = np.arange(classes)
    Q[:, diagonal, diagonal] = (pairwise**2).sum(axis=1)
    p = np.full((rows, classes), 1 / classes)
    tolerance = 0.005 / classes
    for _ in range(max(100, classes)):
        gradient = np.einsum("nij,nj->ni", Q, p)
        objective = (p * gradient).sum(axis=1)
        open_rows = np.abs(gradient - objective[:, np.newaxis]).max(axis=1, initial=0) >= tolerance
        if not open_rows.any():
            break
        for t in range(classes):
            step = np.where(open_rows, (objective - gradient[:, t]) / Q[:, t, t], 0)
            p[:, t] += step
            objective = (objective + step * (step * Q[:, t, t] + 2 * gradient[:, t])) / (1 + step) ** 2
            p /= (1 + step)[:, np.newaxis]
            gradient = (gradient + step[:, np.newaxis] * Q[:, t]) / (1 + step)[:, np.newaxis]
    return p
