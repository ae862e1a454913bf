"""Tree ensembles of ``ai.onnx.ml``: TreeEnsembleClassifier, TreeEnsembleRegressor and TreeEnsemble.

The operators differ in how they write a forest down and in what they make of the leaves' votes; walking the trees and
counting the votes is :mod:`ranvier.ops.forest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType
from ranvier.ops.forest import LEAF, MODES, Forest, Votes, forest_by_ids, forest_by_positions
from ranvier.ops.ml_scores import TRANSFORMS, class_labels, labels_type, row_count, scores_type, transform_scores
from ranvier.ops.registry import Array, Cost, TypeCall, op

DOMAIN = "ai.onnx.ml"
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")  # in the order TreeEnsemble-5 numbers them


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
        nodes_treeids,
        nodes_nodeids,
        nodes_modes,
        nodes_featureids,
        nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor,
        nodes_truenodeids,
        nodes_falsenodeids,
        nodes_missing_value_tracks_true,
        target_treeids,
        target_nodeids,
        target_ids,
        target_weights if target_weights_as_tensor is None else target_weights_as_tensor,
        n_targets,
    )
    base = _base("TreeEnsembleRegressor", base_values, base_values_as_tensor, n_targets)
    scores = _aggregate("TreeEnsembleRegressor", forest, _rows("TreeEnsembleRegressor", X), aggregate_function) + base
    return transform_scores("TreeEnsembleRegressor", scores, post_transform).astype(np.float32)


@tree_ensemble_regressor.infer
def _(call: TypeCall) -> list[TensorType]:
    return [scores_type(call, call.attr("n_targets", 1))]


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
        tree_roots,
        nodes_modes,
        nodes_featureids,
        nodes_splits,
        nodes_truenodeids,
        nodes_trueleafs,
        nodes_falsenodeids,
        nodes_falseleafs,
        nodes_missing_value_tracks_true,
        membership_values,
        leaf_targetids,
        leaf_weights,
        n_targets,
    )
    aggregate = _numbered("TreeEnsemble", "aggregate_function", aggregate_function, _AGGREGATES)
    transform = _numbered("TreeEnsemble", "post_transform", post_transform, TRANSFORMS)
    scores = _aggregate("TreeEnsemble", forest, _rows("TreeEnsemble", X), aggregate)
    return transform_scores("TreeEnsemble", scores, transform).astype(X.dtype)


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
        nodes_treeids,
        nodes_nodeids,
        nodes_modes,
        nodes_featureids,
        nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor,
        nodes_truenodeids,
        nodes_falsenodeids,
        nodes_missing_value_tracks_true,
        class_treeids,
        class_nodeids,
        class_ids,
        class_weights if class_weights_as_tensor is None else class_weights_as_tensor,
        len(labels),
    )
    votes = forest.votes(_rows("TreeEnsembleClassifier", X))
    base = _base("TreeEnsembleClassifier", base_values, base_values_as_tensor, len(labels))
    if len(labels) == 2 and forest.single_target is not None:
        best, scores = _one_sided(forest, votes, base)
    else:
        scores = votes.sums() + base
        candidates = scores if base.any() else np.where(votes.counts() > 0, scores, -np.inf)
        best = candidates.argmax(axis=1)
    return labels[best], transform_scores("TreeEnsembleClassifier", scores, post_transform).astype(np.float32)


@tree_ensemble_classifier.infer
def _(call: TypeCall) -> list[TensorType]:
    classes = len(call.attr("classlabels_int64s") or call.attr("classlabels_strings") or ())
    return [labels_type(call, "classlabels_strings"), scores_type(call, classes)]


def _one_sided(forest: Forest, votes: Votes, base: Array) -> tuple[Array, Array]:
    raise NotImplementedError
