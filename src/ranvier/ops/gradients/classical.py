"""Linear models, support vector machines and features of ``ai.onnx.ml``, as plain operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, attribute, first, operand, text
from ranvier.ops.gradients.parts import made_of

DOMAIN = "ai.onnx.ml"


def _numbers(b: Backward, node: Node, name: str, like: Value) -> np.ndarray:
    return np.asarray(attribute(node, name, None) or (), np.float32).astype(b.dtype(like).numpy)


def _features(b: Backward, node: Node) -> Value:
    """Rows of features; a vector is one row."""
    x = first(node)
    kind = b.dtype(x)
    wide = x if kind is DType.float64 else b.cast(x, DType.float32)
    return b.Unsqueeze(wide, b.whole(0)) if b.rank(x) == 1 else wide


def _single(b: Backward, y: Value) -> Value:
    return b.cast(y, DType.float32)


# -- models -----------------------------------------------------------------------------------------------------------


def _transformed(b: Backward, node: Node, scores: Value) -> Value:
    how = text(node, "post_transform", "NONE")
    if how == "LOGISTIC":
        scores = b.Sigmoid(scores)
    elif how == "SOFTMAX":
        scores = b.Softmax(scores, axis=1)
    elif how == "SOFTMAX_ZERO":  # a score of zero says "no vote" and stays zero
        voted = b.Greater(b.Abs(scores), b.number(1e-7, scores))
        powers = b.where(voted, b.Exp(scores))
        total = b.ReduceSum(powers, b.whole(1), keepdims=1)
        scores = b.Div(powers, b.Where(b.Equal(total, b.number(0.0, total)), b.number(1.0, total), total))
    elif how != "NONE":
        raise NotSupported(f"the gradient of {node.op} with post_transform {how} is not known")
    return _single(b, scores)


def _planes(b: Backward, rows: Value, weights: np.ndarray, columns: int) -> Value:
    return b.MatMul(rows, b.constant(np.ascontiguousarray(weights.reshape(columns, -1).T)))


@made_of("LinearRegressor", domain=DOMAIN)
def _linear_regressor(b: Backward, node: Node) -> Sequence[Value]:
    rows = _features(b, node)
    weights, offsets = (_numbers(b, node, k, rows) for k in ("coefficients", "intercepts"))
    scores = _planes(b, rows, weights, int(attribute(node, "targets", 1)))
    return [_transformed(b, node, b.Add(scores, b.constant(offsets)) if offsets.size else scores)]


def _labels(b: Backward, node: Node) -> Value:
    """The best of each row, which no gradient goes through, by the operator itself."""
    return b.node(node.op, list(node.inputs), dict(node.attrs), outputs=2, domain=DOMAIN, version=node.version).output


def _classes(node: Node) -> int:
    return len(attribute(node, "classlabels_ints", None) or attribute(node, "classlabels_strings", None) or ())


@made_of("LinearClassifier", domain=DOMAIN)
def _linear_classifier(b: Backward, node: Node) -> Sequence[Value]:
    rows, classes = _features(b, node), _classes(node)
    weights, offsets = (_numbers(b, node, k, rows) for k in ("coefficients", "intercepts"))
    columns = len(offsets) or (1 if classes == 2 and len(weights) == b.sizes(rows)[1] else classes)
    scores = _planes(b, rows, weights, columns)
    scores = b.Add(scores, b.constant(offsets)) if offsets.size else scores
    if columns == 1 and classes == 2:  # one plane speaks for the second and against the first
        scores = b.node("Concat", [b.Neg(scores), scores], {"axis": 1}).output
    return [_labels(b, node), _transformed(b, node, scores)]


def _kernel(b: Backward, node: Node, rows: Value) -> Value:
    """Of every row with every support vector."""
    vectors = _numbers(b, node, "support_vectors", rows).reshape(-1, b.sizes(rows)[1])
    gamma, shift, degree = (float(n) for n in attribute(node, "kernel_params", None) or (0.0, 0.0, 0.0))
    kind = text(node, "kernel_type", "LINEAR")
    if kind == "RBF":
        apart = b.Sub(b.Unsqueeze(rows, b.whole(1)), b.constant(vectors))
        squares = b.ReduceSum(b.Mul(apart, apart), b.whole(2), keepdims=0)
        return b.Exp(b.Mul(squares, b.number(-gamma, squares)))
    products = b.MatMul(rows, b.constant(np.ascontiguousarray(vectors.T)))
    if kind == "LINEAR":
        return products
    inner = b.Add(b.Mul(products, b.number(gamma, products)), b.number(shift, products))
    return b.Pow(inner, b.number(degree, inner)) if kind == "POLY" else b.Tanh(inner)


@made_of("SVMRegressor", domain=DOMAIN)
def _svm_regressor(b: Backward, node: Node) -> Sequence[Value]:
    if attribute(node, "one_class", 0):
        raise NotSupported("the gradient of SVMRegressor with one_class is not known: it is constant between jumps")
    rows = _features(b, node)
    weights, rho = _numbers(b, node, "coefficients", rows), _numbers(b, node, "rho", rows)
    source = _kernel(b, node, rows) if int(attribute(node, "n_supports", 0)) > 0 else rows
    return [_transformed(b, node, b.Add(_planes(b, source, weights, 1), b.constant(rho[:1])))]


@made_of("SVMClassifier", domain=DOMAIN)
def _svm_classifier(b: Backward, node: Node) -> Sequence[Value]:
    rows, classes = _features(b, node), _classes(node)
    counts = [int(n) for n in attribute(node, "vectors_per_class", None) or ()]
    weights, rho = _numbers(b, node, "coefficients", rows), _numbers(b, node, "rho", rows)
    if not sum(counts):
        scores = b.Add(_planes(b, rows, weights, classes), b.constant(rho[:1]))
        return [_labels(b, node), _transformed(b, node, scores)]
    if attribute(node, "prob_a", None):
        raise NotSupported("the gradient of SVMClassifier's probabilities is not known: they are found by iteration")
    own, ends = weights.reshape(classes - 1, -1), np.cumsum(counts)
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    duels = np.zeros((own.shape[1], len(pairs)), own.dtype)  # each pair's machine, over the vectors of both classes
    for pair, (i, j) in enumerate(pairs):
        for of, row in ((i, j - 1), (j, i)):
            part = slice(ends[of] - counts[of], ends[of])
            duels[part, pair] = own[row, part]
    scores = b.Add(b.MatMul(_kernel(b, node, rows), b.constant(duels)), b.constant(rho[: len(pairs)]))
    if classes == 2:
        scores = b.node("Concat", [b.Neg(scores), scores], {"axis": 1}).output
    return [_labels(b, node), _transformed(b, node, scores)]


# -- features ---------------------------------------------------------------------------------------------------------


@made_of("Scaler", domain=DOMAIN)
def _scaler(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    x = x if b.dtype(x) is DType.float64 else b.cast(x, DType.float32)
    offset, scale = (_numbers(b, node, k, x) for k in ("offset", "scale"))
    x = b.Sub(x, b.constant(offset)) if offset.size else x
    return [_single(b, b.Mul(x, b.constant(scale)) if scale.size else x)]


@made_of("Normalizer", domain=DOMAIN)
def _normalizer(b: Backward, node: Node) -> Sequence[Value]:
    rows = b.cast(_features(b, node), DType.float64)
    fold = {"MAX": b.ReduceMax, "L1": b.ReduceL1, "L2": b.ReduceL2}[text(node, "norm", "MAX")]
    size = fold(rows, b.whole(1), keepdims=1)
    size = b.Where(b.Equal(size, b.number(0.0, size)), b.number(1.0, size), size)
    return [_single(b, b.like(b.Div(rows, size), first(node)))]


@made_of("Imputer", domain=DOMAIN)
def _imputer(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    replaced = float(attribute(node, "replaced_value_float", 0.0))
    missing = b.IsNaN(x) if np.isnan(replaced) else b.Equal(x, b.number(replaced, x))
    return [b.Where(missing, b.constant(_numbers(b, node, "imputed_value_floats", x)), x)]


@made_of("ArrayFeatureExtractor", domain=DOMAIN)
def _extractor(b: Backward, node: Node) -> Sequence[Value]:
    x, wanted = first(node), node.inputs[1]
    rows = b.Unsqueeze(x, b.whole(0)) if b.rank(x) == 1 else x
    return [b.Gather(rows, b.Reshape(wanted, b.whole(-1)), axis=b.rank(rows) - 1)]


@made_of("FeatureVectorizer", domain=DOMAIN)
def _vectorizer(b: Backward, node: Node) -> Sequence[Value]:
    """Side by side; one that is not as wide as it is said to be is cut or filled up with zeros."""
    given = [operand(node, k) for k in range(len(node.inputs))]
    blocks = [
        b.cast(b.Reshape(x, b.whole(1, -1) if b.rank(x) < 2 else b.whole(b.sizes(x)[0], -1)), DType.float32)
        for x in given
        if x is not None
    ]
    widths = attribute(node, "inputdimensions", None) or [b.sizes(block)[1] for block in blocks]
    parts = []
    for block, width in zip(blocks, widths):
        have = b.sizes(block)[1]
        cut = b.Slice(block, b.whole(0), b.whole(int(width)), b.whole(1)) if width < have else block
        parts.append(b.Pad(cut, b.whole(0, 0, 0, int(width) - have), b.number(0.0, cut)) if width > have else cut)
    return [parts[0] if len(parts) == 1 else b.node("Concat", parts, {"axis": 1}).output]
