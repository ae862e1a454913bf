"""Tree ensembles of ``ai.onnx.ml``: TreeEnsembleClassifier, TreeEnsembleRegressor and TreeEnsemble.

The operators differ in how they write a forest down and in what they make of its votes; the forest itself is in
:mod:`ranvier.ops.ml.forest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType
from ranvier.ops.allocation import checked_shape
from ranvier.ops.ml.forest import Forest
from ranvier.ops.ml.forest_attributes import forest_by_ids, forest_by_positions
from ranvier.ops.ml.scores import TRANSFORMS, class_labels, labels_type, row_count, scores_type, transform_scores
from ranvier.ops.registry import Array, Cost, TypeCall, op

DOMAIN = "ai.onnx.ml"
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")  # in the order TreeEnsemble numbers them


@op("TreeEnsembleRegressor", domain=DOMAIN)
def tree_ensemble_regressor(
    X: Array,
    *,
    aggregate_function: str = "SUM",
    base_values: Sequence[float] = (),
    base_values_as_tensor: Array | None = None,
    n_targets: int = 1,
    nodes_falsenodeids: Sequence[int] = (),
    nodes_featureids: Sequence[int] = (),
    nodes_hitrates: Sequence[float] = (),
    nodes_hitrates_as_tensor: Array | None = None,
    nodes_missing_value_tracks_true: Sequence[int] = (),
    nodes_modes: Sequence[str] = (),
    nodes_nodeids: Sequence[int] = (),
    nodes_treeids: Sequence[int] = (),
    nodes_truenodeids: Sequence[int] = (),
    nodes_values: Sequence[float] = (),
    nodes_values_as_tensor: Array | None = None,
    post_transform: str = "NONE",
    target_ids: Sequence[int] = (),
    target_nodeids: Sequence[int] = (),
    target_treeids: Sequence[int] = (),
    target_weights: Sequence[float] = (),
    target_weights_as_tensor: Array | None = None,
) -> Array:
    forest = forest_by_ids(
        "TreeEnsembleRegressor",
        tree_ids=nodes_treeids,
        node_ids=nodes_nodeids,
        modes=nodes_modes,
        features=nodes_featureids,
        thresholds=nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor,
        true_ids=nodes_truenodeids,
        false_ids=nodes_falsenodeids,
        nan_is_true=nodes_missing_value_tracks_true,
        vote_tree_ids=target_treeids,
        vote_node_ids=target_nodeids,
        vote_targets=target_ids,
        vote_weights=target_weights if target_weights_as_tensor is None else target_weights_as_tensor,
        targets=n_targets,
    )
    scores, _counts = _aggregate(forest, X, aggregate_function)
    base = _base_values(base_values, base_values_as_tensor)
    if base.size not in (0, n_targets):
        raise InvalidValue(f"TreeEnsembleRegressor: expected {n_targets} base values, got {base.size}")
    if base.size:
        scores = scores + base
    return transform_scores("TreeEnsembleRegressor", scores, post_transform).astype(np.float32)


@tree_ensemble_regressor.infer
def _(call: TypeCall) -> list[TensorType]:
    return [scores_type(call, call.attr("n_targets", 1))]


@op("TreeEnsembleClassifier", domain=DOMAIN)
def tree_ensemble_classifier(
    X: Array,
    *,
    base_values: Sequence[float] = (),
    base_values_as_tensor: Array | None = None,
    class_ids: Sequence[int] = (),
    class_nodeids: Sequence[int] = (),
    class_treeids: Sequence[int] = (),
    class_weights: Sequence[float] = (),
    class_weights_as_tensor: Array | None = None,
    classlabels_int64s: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    nodes_falsenodeids: Sequence[int] = (),
    nodes_featureids: Sequence[int] = (),
    nodes_hitrates: Sequence[float] = (),
    nodes_hitrates_as_tensor: Array | None = None,
    nodes_missing_value_tracks_true: Sequence[int] = (),
    nodes_modes: Sequence[str] = (),
    nodes_nodeids: Sequence[int] = (),
    nodes_treeids: Sequence[int] = (),
    nodes_truenodeids: Sequence[int] = (),
    nodes_values: Sequence[float] = (),
    nodes_values_as_tensor: Array | None = None,
    post_transform: str = "NONE",
) -> tuple[Array, Array]:
    """The best label of each row, and the scores of all classes."""
    labels = class_labels("TreeEnsembleClassifier", classlabels_int64s, classlabels_strings)
    forest = forest_by_ids(
        "TreeEnsembleClassifier",
        tree_ids=nodes_treeids,
        node_ids=nodes_nodeids,
        modes=nodes_modes,
        features=nodes_featureids,
        thresholds=nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor,
        true_ids=nodes_truenodeids,
        false_ids=nodes_falsenodeids,
        nan_is_true=nodes_missing_value_tracks_true,
        vote_tree_ids=class_treeids,
        vote_node_ids=class_nodeids,
        vote_targets=class_ids,
        vote_weights=class_weights if class_weights_as_tensor is None else class_weights_as_tensor,
        targets=len(labels),
    )
    sums, counts = _aggregate(forest, X, "SUM")
    base = _base_values(base_values, base_values_as_tensor)
    if len(labels) == 2 and forest.only_target is not None and base.size < 2:
        best, scores = _one_margin(forest, sums[:, forest.only_target], base, post_transform)
    elif base.size == 0:
        best, scores = np.where(counts > 0, sums, -np.inf).argmax(axis=1), sums  # a class must be voted for to win
    elif base.size == len(labels):
        scores = sums + base
        best = scores.argmax(axis=1)
    else:
        raise InvalidValue(f"TreeEnsembleClassifier: expected {len(labels)} base values, got {base.size}")
    return labels[best], transform_scores("TreeEnsembleClassifier", scores, post_transform).astype(np.float32)


@tree_ensemble_classifier.infer
def _(call: TypeCall) -> list[TensorType]:
    classes = len(call.attr("classlabels_int64s") or call.attr("classlabels_strings") or ())
    return [labels_type(call, "classlabels_strings"), scores_type(call, classes)]


def _one_margin(forest: Forest, margin: Array, base: Array, transform: str) -> tuple[Array, Array]:
    """Best class and scores of two classes when the trees vote for one id only: the votes say how likely class 1 is.

    The standard is silent about this form, which all converters of boosted trees and binary forests write. Votes that
    are never negative are read as probabilities (their complement belongs to class 0), others as a signed margin;
    before a transform they are always a margin.
    """
    if base.size:
        margin = margin + base[0]
    is_probability = transform in ("NONE", "PROBIT") and bool((forest.vote_weight >= 0).all())
    best = (margin > (0.5 if is_probability else 0)).astype(np.int64)
    if forest.only_target == 1:
        opposite = np.zeros_like(margin)
    else:
        opposite = 1 - margin if is_probability else -margin
    return best, np.stack([opposite, margin], axis=1)


@op("TreeEnsemble", since=5, domain=DOMAIN)
def tree_ensemble(
    X: Array,
    *,
    leaf_targetids: Sequence[int],
    leaf_weights: Array,
    nodes_falseleafs: Sequence[int],
    nodes_falsenodeids: Sequence[int],
    nodes_featureids: Sequence[int],
    nodes_modes: Array,
    nodes_splits: Array,
    nodes_trueleafs: Sequence[int],
    nodes_truenodeids: Sequence[int],
    tree_roots: Sequence[int],
    aggregate_function: int = 1,
    membership_values: Array | None = None,
    n_targets: int = 1,
    nodes_hitrates: Array | None = None,
    nodes_missing_value_tracks_true: Sequence[int] = (),
    post_transform: int = 0,
) -> Array:
    forest = forest_by_positions(
        "TreeEnsemble",
        roots=tree_roots,
        modes=nodes_modes,
        features=nodes_featureids,
        thresholds=nodes_splits,
        true_positions=nodes_truenodeids,
        true_is_leaf=nodes_trueleafs,
        false_positions=nodes_falsenodeids,
        false_is_leaf=nodes_falseleafs,
        nan_is_true=nodes_missing_value_tracks_true,
        member_values=membership_values,
        leaf_targets=leaf_targetids,
        leaf_weights=leaf_weights,
        targets=n_targets,
    )
    for name, number, meanings in (
        ("aggregate_function", aggregate_function, _AGGREGATES),
        ("post_transform", post_transform, TRANSFORMS),
    ):
        if not 0 <= number < len(meanings):
            raise InvalidValue(f"TreeEnsemble: {name} must lie in 0..{len(meanings) - 1}, got {number}")
    scores, _counts = _aggregate(forest, X, _AGGREGATES[aggregate_function])
    return transform_scores("TreeEnsemble", scores, TRANSFORMS[post_transform]).astype(X.dtype)


def _aggregate(forest: Forest, X: Array, how: str) -> tuple[Array, Array]:
    op_name = forest.op_name
    if how not in _AGGREGATES:
        raise InvalidValue(f"{op_name}: aggregate_function must be one of {', '.join(_AGGREGATES)}, got {how!r}")
    if X.ndim not in (1, 2):
        raise ShapeMismatch(f"{op_name}: expected an input of shape [N, F] or [F], got {list(X.shape)}")
    rows = X.reshape(1, -1) if X.ndim == 1 else X
    checked_shape((len(rows), forest.targets), np.float64, op_name)
    # integers meet float thresholds: float64 holds both exactly enough to compare
    return forest.aggregate(rows.astype(np.float64) if rows.dtype.kind in "iu" else rows, how)


def _base_values(values: Sequence[float], as_tensor: Array | None) -> Array:
    return np.asarray(values, np.float32) if as_tensor is None else as_tensor.ravel()


@tree_ensemble_regressor.cost
@tree_ensemble_classifier.cost
@tree_ensemble.cost
def _(call: TypeCall) -> Cost:
    """A walk visits about log₂(nodes) nodes of each tree, and each visit reads scattered memory."""
    nodes = len(call.attr("nodes_featureids", ()))
    trees = len(call.attr("tree_roots", ())) or len(set(call.attr("nodes_treeids", ()))) or 1
    rows = row_count(call)
    visits = (rows if isinstance(rows, int) else 1) * trees * max(np.log2(max(nodes / trees, 2)), 1)
    return Cost(4 * visits, 64 * visits)
