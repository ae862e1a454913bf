"""Forests as generated code against the reference, over random trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ranvier as rv
from ranvier.codegen.llvm.isa import available
from ranvier.errors import ShapeMismatch
from tests.providers.cpu.compare import agree, check, one_node

ML = "ai.onnx.ml"
COMPARISONS = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
FEATURES = 7
LEVELS = np.linspace(-2, 2, 17)  # features and thresholds meet often, so that < and <= differ


@pytest.fixture(params=[isa.name for isa in available()])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RANVIER_CPU_ISA", request.param)
    yield request.param


def forest(
    rng: np.random.Generator,
    trees: int,
    depth: int,
    modes: tuple[str, ...],
    *,
    targets: int,
    votes: str,
    votes_per_leaf: int = 1,
    missing: bool = False,
) -> dict[str, Any]:
    """Attributes by ids; ``votes`` is "class" or "target". Node ids are shuffled, some leaves come early."""
    at: dict[str, list[Any]] = {
        name: [] for name in ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids")
    }
    given: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}

    def grow(tree: int, names: list[int], left: int) -> int:
        name = names.pop()
        leaf = left == 0 or (left < depth and rng.random() < 0.2)
        true, false = (0, 0) if leaf else (grow(tree, names, left - 1), grow(tree, names, left - 1))
        kind = "LEAF" if leaf else modes[rng.integers(len(modes))]
        feature, value = int(rng.integers(FEATURES)), float(rng.choice(LEVELS))
        for field, item in zip(at, (tree, name, kind, feature, value, true, false)):
            at[field].append(item)
        if leaf:
            for _ in range(votes_per_leaf if votes_per_leaf < 2 else int(rng.integers(0, votes_per_leaf + 1))):
                for field, item in zip(given, (tree, name, int(rng.integers(targets)), float(rng.normal()))):
                    given[field].append(item)
        return name

    for tree in range(trees):
        grow(tree * 3 + 1, list(map(int, rng.permutation(2 << depth))), depth)
    made = {f"nodes_{name}": items for name, items in at.items()}
    made |= {f"{votes}_{name}": items for name, items in given.items()}
    if missing:
        made["nodes_missing_value_tracks_true"] = [int(k) for k in rng.integers(0, 2, len(at["modes"]))]
    return made


def rows(rng: np.random.Generator, count: int, dtype: Any = np.float32, *, gaps: bool = True) -> np.ndarray[Any, Any]:
    x = rng.choice(LEVELS, (count, FEATURES))
    if gaps and np.dtype(dtype).kind == "f":
        x[rng.random(x.shape) < 0.1] = np.nan
        x[rng.random(x.shape) < 0.05] = np.inf
    return x.astype(dtype)


@pytest.mark.parametrize("trees,count", [(1, 1), (8, 3), (13, 70), (3, 130)])
@pytest.mark.parametrize("modes,missing", [(("BRANCH_LEQ",), False), (("BRANCH_LT",), True), (COMPARISONS, True)])
def test_regressor(isa: str, trees: int, count: int, modes: tuple[str, ...], missing: bool) -> None:
    rng = np.random.default_rng(trees * count + len(modes))
    attrs = forest(rng, trees, 5, modes, targets=1, votes="target", missing=missing)
    check("TreeEnsembleRegressor", [rows(rng, count)], attrs, domain=ML, rtol=1e-6)


@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_aggregates_of_several_targets(isa: str, how: str) -> None:
    rng = np.random.default_rng(5)
    attrs = forest(rng, 9, 4, COMPARISONS, targets=4, votes="target", votes_per_leaf=3)
    attrs |= {"n_targets": 5, "aggregate_function": how, "base_values": [0.5, -1.0, 0.0, 2.0, 3.0]}
    check("TreeEnsembleRegressor", [rows(rng, 33)], attrs, domain=ML, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_features_of_other_types(dtype: Any) -> None:
    rng = np.random.default_rng(6)
    attrs = forest(rng, 10, 5, ("BRANCH_LEQ",), targets=3, votes="class")
    attrs["classlabels_int64s"] = [5, -3, 8]
    check("TreeEnsembleClassifier", [rows(rng, 20, dtype)], attrs, domain=ML, outputs=2, rtol=1e-6)


def test_wide_thresholds_are_not_rounded(isa: str) -> None:
    rng = np.random.default_rng(7)
    attrs = forest(rng, 4, 4, ("BRANCH_LT",), targets=1, votes="target")
    values = np.array(attrs.pop("nodes_values")) + 1e-12
    attrs["nodes_values_as_tensor"] = numpy_helper.from_array(values, "values")
    attrs["target_weights_as_tensor"] = numpy_helper.from_array(np.array(attrs.pop("target_weights")), "weights")
    model = one_node("TreeEnsembleRegressor", [rows(rng, 20)], attrs, domain=ML)
    model.opset_import[1].version = 3
    for dtype in (np.float32, np.float64):
        model.graph.input[0].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        agree(model, {"x0": rows(rng, 20, dtype)}, rtol=1e-6)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("based", [False, True])
def test_classifier(isa: str, transform: str, based: bool) -> None:
    rng = np.random.default_rng(8)
    attrs = forest(rng, 5, 4, ("BRANCH_LEQ",), targets=4, votes="class", votes_per_leaf=2)
    # the last class is never voted for, and wins only where base values let it
    attrs |= {"classlabels_int64s": [4, 3, 9, -1, 7], "post_transform": transform}
    if based:
        attrs["base_values"] = [0.0, 0.1, -0.1, 0.2, 0.4]
    check("TreeEnsembleClassifier", [rows(rng, 40)], attrs, domain=ML, outputs=2, rtol=1e-6)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("base", [None, 0.25])
def test_two_classes_of_which_one_is_voted_for(target: int, transform: str, positive: bool, base: float | None) -> None:
    rng = np.random.default_rng(9)
    attrs = forest(rng, 6, 4, ("BRANCH_LEQ",), targets=1, votes="class")
    attrs["class_ids"] = [target] * len(attrs["class_ids"])
    if positive:
        attrs["class_weights"] = [abs(w) / 6 for w in attrs["class_weights"]]
    if base is not None:
        attrs["base_values"] = [base]
    attrs |= {"classlabels_int64s": [10, 20], "post_transform": transform}
    labels, _ = check("TreeEnsembleClassifier", [rows(rng, 50)], attrs, domain=ML, outputs=2, rtol=1e-6)
    assert set(labels.tolist()) <= {10, 20}


def test_nan_votes_win() -> None:
    rng = np.random.default_rng(10)
    attrs = forest(rng, 3, 3, ("BRANCH_LEQ",), targets=3, votes="class")
    attrs["class_weights"][::5] = [float("nan")] * len(attrs["class_weights"][::5])
    attrs["classlabels_int64s"] = [0, 1, 2]
    check("TreeEnsembleClassifier", [rows(rng, 30)], attrs, domain=ML, outputs=2)


def test_trees_that_are_leaves_and_one_row_without_batch() -> None:
    rng = np.random.default_rng(11)
    attrs = forest(rng, 3, 0, ("BRANCH_LEQ",), targets=2, votes="target") | {"n_targets": 2}
    check("TreeEnsembleRegressor", [rows(rng, 1)[0]], attrs, domain=ML)


def ensemble(rng: np.random.Generator, dtype: Any, aggregate: int, transform: int) -> onnx.ModelProto:
    """TreeEnsemble-5: three inner nodes per tree, one of which asks for membership."""
    trees, targets = 6, 2
    true, true_leaf, false, false_leaf, modes, sets = [], [], [], [], [], []
    for tree in range(trees):
        true += [3 * tree + 1, 4 * tree, 4 * tree + 2]
        false += [3 * tree + 2, 4 * tree + 1, 4 * tree + 3]
        true_leaf += [0, 1, 1]
        false_leaf += [0, 1, 1]
        modes += [int(rng.integers(6)), 6, int(rng.integers(6))]
        sets += [*rng.choice(LEVELS, tree), np.nan]

    def tensor(name: str, values: Any, kind: Any = dtype) -> onnx.TensorProto:
        return numpy_helper.from_array(np.asarray(values, kind), name)

    attrs = {
        "n_targets": targets,
        "aggregate_function": aggregate,
        "post_transform": transform,
        "tree_roots": [3 * tree for tree in range(trees)],
        "nodes_modes": tensor("modes", modes, np.uint8),
        "nodes_featureids": [int(k) for k in rng.integers(0, FEATURES, 3 * trees)],
        "nodes_splits": tensor("splits", rng.choice(LEVELS, 3 * trees)),
        "nodes_truenodeids": true,
        "nodes_trueleafs": true_leaf,
        "nodes_falsenodeids": false,
        "nodes_falseleafs": false_leaf,
        "nodes_missing_value_tracks_true": [int(k) for k in rng.integers(0, 2, 3 * trees)],
        "membership_values": tensor("members", sets),
        "leaf_targetids": [int(k) for k in rng.integers(0, targets, 4 * trees)],
        "leaf_weights": tensor("weights", rng.normal(size=4 * trees)),
    }
    model = one_node("TreeEnsemble", [rows(rng, 30, dtype)], attrs, domain=ML)
    model.opset_import[1].version = 5
    return model


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("aggregate", range(4))
def test_tree_ensemble_with_sets(isa: str, dtype: Any, aggregate: int) -> None:
    rng = np.random.default_rng(12 + aggregate)
    model = ensemble(rng, dtype, aggregate, transform=aggregate)
    agree(model, {"x0": rows(rng, 30, dtype)}, rtol=1e-3 if dtype is np.float16 else 1e-6)


def test_no_rows_and_too_few_features() -> None:
    rng = np.random.default_rng(13)
    attrs = forest(rng, 3, 4, ("BRANCH_LEQ",), targets=2, votes="class") | {"classlabels_int64s": [1, 2]}
    check("TreeEnsembleClassifier", [rows(rng, 0)], attrs, domain=ML, outputs=2)
    narrow = np.zeros((2, 2), np.float32)
    model = one_node("TreeEnsembleClassifier", [narrow], attrs, domain=ML, outputs=2)
    with rv.load(model, providers=["cpu", "reference"]) as session, pytest.raises(ShapeMismatch):
        session.run({"x0": narrow})
