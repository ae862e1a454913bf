"""Tree ensembles: against a plain walk node by node, against ONNX Runtime, and against malformed trees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ranvier.ops.ml.trees  # noqa: F401
from ranvier.errors import InvalidValue, ShapeMismatch
from tests.ops.ml_tools import assert_like, assert_like_onnxruntime, evaluate, onnxruntime_answer

BRANCHES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):  # as the runtime does around every body
        yield


def random_forest(
    rng: np.random.Generator, *, features: int, targets: list[int], group: str, all_vote: bool = False
) -> dict[str, Any]:
    """Attributes of TreeEnsembleRegressor (group "target") or TreeEnsembleClassifier (group "class")."""
    fields = ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids")
    nodes: dict[str, list[Any]] = {f"nodes_{f}": [] for f in (*fields, "missing_value_tracks_true")}
    votes: dict[str, list[Any]] = {f"{group}_{f}": [] for f in ("treeids", "nodeids", "ids", "weights")}

    def grow(tree: int, depth: int, next_id: list[int]) -> int:
        node = next_id[0]
        next_id[0] += 1
        place = len(nodes["nodes_modes"])
        is_leaf = depth == 0 or (rng.random() < 0.2)
        row = (
            tree,
            node,
            "LEAF" if is_leaf else str(rng.choice(BRANCHES)),
            0 if is_leaf else int(rng.integers(features)),
            float(rng.integers(-2, 3)),
            0,
            0,
            int(rng.random() < 0.5),
        )
        for column, value in zip(nodes.values(), row):
            column.append(value)
        if is_leaf:
            for target in targets if all_vote else [int(rng.choice(targets))]:
                for column, value in zip(votes.values(), (tree, node, target, float(np.float32(rng.normal())))):
                    column.append(value)
        else:
            nodes["nodes_truenodeids"][place] = grow(tree, depth - 1, next_id)
            nodes["nodes_falsenodeids"][place] = grow(tree, depth - 1, next_id)
        return node

    for tree in range(int(rng.integers(1, 6))):
        grow(tree, int(rng.integers(0, 5)), [0])
    return nodes | votes


def rows_with_gaps(rng: np.random.Generator, features: int) -> np.ndarray:
    x = rng.integers(-3, 4, (7, features)).astype(np.float32)
    x[rng.random(x.shape) < 0.15] = np.nan
    return x


def leaf_of(forest: dict[str, Any], tree: int, row: np.ndarray) -> int:
    """The plain definition of a walk, one node after another."""
    compare = dict(zip(BRANCHES, ("__le__", "__lt__", "__ge__", "__gt__", "__eq__", "__ne__")))
    here = {n: k for k, (t, n) in enumerate(zip(forest["nodes_treeids"], forest["nodes_nodeids"])) if t == tree}
    node = 0
    while forest["nodes_modes"][here[node]] != "LEAF":
        k = here[node]
        value = float(row[forest["nodes_featureids"][k]])
        taken = getattr(value, compare[forest["nodes_modes"][k]])(forest["nodes_values"][k])
        taken = taken or (math.isnan(value) and forest["nodes_missing_value_tracks_true"][k] == 1)
        node = forest["nodes_truenodeids" if taken else "nodes_falsenodeids"][k]
    return node


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_tree_regressor_is_its_definition(seed, aggregate):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, features=3, targets=[0, 1], group="target", all_vote=bool(seed % 2))
    x = rows_with_gaps(rng, 3)
    trees = sorted(set(forest["nodes_treeids"]))
    want = np.zeros((len(x), 2))
    for r, row in enumerate(x):
        leaves = {(tree, leaf_of(forest, tree, row)) for tree in trees}
        for target in (0, 1):
            votes = [
                w
                for t, n, i, w in zip(*(forest[f"target_{f}"] for f in ("treeids", "nodeids", "ids", "weights")))
                if (t, n) in leaves and i == target
            ]
            combine = {"SUM": sum, "AVERAGE": lambda v: sum(v) / len(trees), "MIN": min, "MAX": max}[aggregate]
            want[r, target] = combine(votes) if votes else 0
    attrs = forest | {"n_targets": 2, "aggregate_function": aggregate}
    got = evaluate("TreeEnsembleRegressor", x, version=3, **attrs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert_like(got, onnxruntime_answer("TreeEnsembleRegressor", x, version=3, **attrs))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("classes", [2, 3])
def test_tree_classifier_like_onnxruntime(seed, classes):
    rng = np.random.default_rng(seed)
    targets = [0] if classes == 2 else [0, 1, 2]  # two classes: the form converters write
    forest = random_forest(rng, features=3, targets=targets, group="class", all_vote=True)
    attrs: dict[str, Any] = forest | {"post_transform": ["NONE", "LOGISTIC"][seed % 2]}
    if seed % 3 == 0:
        attrs["base_values"] = rng.standard_normal(len(targets)).astype(np.float32).tolist()
    attrs |= {"classlabels_strings": list("xyz"[:classes])} if seed % 4 else {"classlabels_int64s": [4, 2, 9][:classes]}
    x = rows_with_gaps(rng, 3)
    for data in (x, x.astype(np.float64), np.nan_to_num(x).astype(np.int64)):
        assert_like_onnxruntime("TreeEnsembleClassifier", data, version=3, outputs=2, **attrs)


def test_binary_forest_of_probabilities():
    stump = stump_attrs("class", ids=[0, 0], weights=[0.2, 0.7]) | {"classlabels_strings": ("no", "yes")}
    x = np.array([[-1.0], [1.0]], np.float32)
    labels, scores = evaluate("TreeEnsembleClassifier", x, outputs=2, **stump)
    assert labels.tolist() == ["no", "yes"]
    np.testing.assert_allclose(scores, [[0.8, 0.2], [0.3, 0.7]], rtol=1e-6)
    assert_like_onnxruntime("TreeEnsembleClassifier", x, outputs=2, **stump)


def test_forest_in_double_precision():
    """A threshold and weights that float32 cannot hold."""
    split, weight = 1 + 1e-12, 1e-12
    attrs = stump_attrs("target", ids=[0, 0], weights=None) | {
        "nodes_values": (),
        "nodes_values_as_tensor": np.array([split, 0, 0]),
        "target_weights_as_tensor": np.array([weight, 2.0]),
        "base_values_as_tensor": np.array([1e-13]),
        "n_targets": 1,
    }
    x = np.array([[split], [split + 1e-13]])
    np.testing.assert_allclose(evaluate("TreeEnsembleRegressor", x, version=3, **attrs), [[1.1e-12], [2.0]], rtol=1e-6)
    del attrs["nodes_values"]
    assert_like_onnxruntime("TreeEnsembleRegressor", x, version=3, **attrs)


def by_position(forest: dict[str, Any], dtype: type) -> dict[str, Any]:
    """A regressor's forest, one vote per leaf, in the form of TreeEnsemble."""
    nodes = list(zip(forest["nodes_treeids"], forest["nodes_nodeids"]))
    inner = [k for k, mode in enumerate(forest["nodes_modes"]) if mode != "LEAF"]
    leaves = list(zip(forest["target_treeids"], forest["target_nodeids"]))
    place = {nodes[k]: (i, 0) for i, k in enumerate(inner)} | {leaf: (i, 1) for i, leaf in enumerate(leaves)}
    true = [place[nodes[k][0], forest["nodes_truenodeids"][k]] for k in inner]
    false = [place[nodes[k][0], forest["nodes_falsenodeids"][k]] for k in inner]
    modes = [BRANCHES.index(forest["nodes_modes"][k]) for k in inner]
    values, features, missing = (
        [forest[f"nodes_{f}"][k] for k in inner] for f in ("values", "featureids", "missing_value_tracks_true")
    )
    roots = []
    for tree in sorted(set(forest["nodes_treeids"])):
        position, is_leaf = place[tree, 0]
        if is_leaf:  # a tree that is a leaf is written as a node whose branches meet there
            true.append((position, 1))
            false.append((position, 1))
            modes, values, features, missing = [*modes, 0], [*values, 0.0], [*features, 0], [*missing, 0]
            position = len(true) - 1
        roots.append(position)
    return {
        "tree_roots": roots,
        "nodes_modes": np.array(modes, np.uint8),
        "nodes_splits": np.array(values, dtype),
        "nodes_featureids": features,
        "nodes_missing_value_tracks_true": missing,
        "nodes_truenodeids": [p for p, _ in true],
        "nodes_trueleafs": [leaf for _, leaf in true],
        "nodes_falsenodeids": [p for p, _ in false],
        "nodes_falseleafs": [leaf for _, leaf in false],
        "leaf_targetids": forest["target_ids"],
        "leaf_weights": np.array(forest["target_weights"], dtype),
        "n_targets": 2,
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_both_ways_to_write_a_forest_agree(seed, dtype):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, features=3, targets=[0, 1], group="target")
    x = rows_with_gaps(rng, 3).astype(dtype)
    number = seed % 4
    name = ("AVERAGE", "SUM", "MIN", "MAX")[number]
    want = evaluate("TreeEnsembleRegressor", x.astype(np.float32), n_targets=2, aggregate_function=name, **forest)
    attrs = by_position(forest, dtype) | {"aggregate_function": number}
    got = evaluate("TreeEnsemble", x, version=5, **attrs)
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got, want, rtol=2e-3 if dtype == np.float16 else 1e-5, atol=1e-2 if dtype == np.float16 else 1e-6
    )
    if dtype != np.float16:  # ONNX Runtime has no kernel for it
        assert_like(got, onnxruntime_answer("TreeEnsemble", x, version=5, **attrs))


def test_set_membership():
    attrs = {
        "tree_roots": (0,),
        "nodes_modes": np.array([6, 6], np.uint8),
        "nodes_splits": np.zeros(2, np.float32),
        "nodes_featureids": (0, 0),
        "nodes_truenodeids": (0, 1),
        "nodes_trueleafs": (1, 1),
        "nodes_falsenodeids": (1, 2),
        "nodes_falseleafs": (0, 1),
        "membership_values": np.array([1.5, 7, np.nan, 2, 1.5, np.nan], np.float32),
        "leaf_targetids": (0, 0, 0),
        "leaf_weights": np.array([10, 20, 30], np.float32),
        "n_targets": 1,
    }
    x = np.array([[1.5], [2], [7], [3], [np.nan]], np.float32)
    got = evaluate("TreeEnsemble", x, version=5, **attrs)
    assert got.ravel().tolist() == [10, 20, 10, 30, 30]
    assert_like(got, onnxruntime_answer("TreeEnsemble", x, version=5, **attrs))
    without_last_end = attrs | {"membership_values": attrs["membership_values"][:-1]}
    np.testing.assert_array_equal(evaluate("TreeEnsemble", x, version=5, **without_last_end), got)
    with pytest.raises(InvalidValue, match="2 nodes test for membership"):
        evaluate("TreeEnsemble", x, version=5, **attrs | {"membership_values": None})


def test_a_deep_tree_and_many_rows():
    """A chain of 3000 nodes would overflow a recursive walk; the rows need several chunks."""
    depth = 3000
    attrs = {
        "nodes_treeids": [0] * (2 * depth + 1),
        "nodes_nodeids": list(range(2 * depth + 1)),
        "nodes_modes": ["BRANCH_LEQ", "LEAF"] * depth + ["LEAF"],
        "nodes_featureids": [0] * (2 * depth + 1),
        "nodes_values": [float(k // 2) for k in range(2 * depth + 1)],
        "nodes_truenodeids": [k + 1 for k in range(2 * depth)] + [0],
        "nodes_falsenodeids": [k + 2 for k in range(2 * depth)] + [0],
        "target_treeids": [0] * (depth + 1),
        "target_nodeids": [*range(1, 2 * depth, 2), 2 * depth],
        "target_ids": [0] * (depth + 1),
        "target_weights": [float(k) for k in range(depth + 1)],
    }
    x = np.array([[-5.0], [1234.0], [1e9]], np.float32)
    assert evaluate("TreeEnsembleRegressor", x, n_targets=1, **attrs).ravel().tolist() == [0, 1234, depth]
    wide = np.zeros((300_000, 1), np.float32)
    stump = stump_attrs("target", ids=[0, 0], weights=[5.0, 6.0])
    assert (evaluate("TreeEnsembleRegressor", wide, n_targets=1, **stump) == 5).all()


def stump_attrs(group: str, ids: list[int], weights: list[float] | None) -> dict[str, Any]:
    """One tree: node 1 where feature 0 is at most 0, else node 2."""
    attrs = {
        "nodes_treeids": (0, 0, 0),
        "nodes_nodeids": (0, 1, 2),
        "nodes_modes": ("BRANCH_LEQ", "LEAF", "LEAF"),
        "nodes_featureids": (0, 0, 0),
        "nodes_values": (0.0, 0.0, 0.0),
        "nodes_truenodeids": (1, 0, 0),
        "nodes_falsenodeids": (2, 0, 0),
        f"{group}_treeids": (0, 0),
        f"{group}_nodeids": (1, 2),
        f"{group}_ids": tuple(ids),
    }
    return attrs if weights is None else attrs | {f"{group}_weights": tuple(weights)}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes_truenodeids": (0, 0, 0)}, "cycle"),
        ({"nodes_truenodeids": (7, 0, 0)}, "tree 0 has no node 7"),
        ({"nodes_nodeids": (0, 1, 1)}, "node 1 of tree 0 is defined twice"),
        ({"nodes_modes": ("BRANCH_ODD", "LEAF", "LEAF")}, "unknown node mode 'BRANCH_ODD'"),
        ({"nodes_modes": ("BRANCH_MEMBER", "LEAF", "LEAF")}, "unknown node mode 'BRANCH_MEMBER'"),
        ({"nodes_featureids": (-1, 0, 0)}, "negative"),
        ({"nodes_values": (0.0,)}, "expected 3 thresholds, got 1"),
        ({"target_ids": (0, 4)}, "out of range"),
        ({"target_nodeids": (1, 9)}, "has no node 9"),
        ({"target_weights": (1.0,)}, "expected 2 weights"),
        ({"aggregate_function": "MEDIAN"}, "aggregate_function"),
        ({"post_transform": "CUBE"}, "post_transform"),
        ({"base_values": (1.0, 2.0)}, "expected 1 base values"),
        ({"n_targets": 0}, "targets"),
        ({f"nodes_{f}": () for f in ("treeids", "nodeids", "modes", "featureids", "values")}, "no nodes"),
    ],
)
def test_malformed_trees(change, complaint):
    attrs = stump_attrs("target", ids=[0, 0], weights=[1.0, 2.0]) | {"n_targets": 1} | change
    with pytest.raises(InvalidValue, match=f"^TreeEnsembleRegressor: .*{complaint}"):
        evaluate("TreeEnsembleRegressor", np.zeros((1, 1), np.float32), **attrs)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes_truenodeids": (1, 0), "nodes_trueleafs": (0, 0)}, "cycle"),
        ({"nodes_truenodeids": (5, 0)}, "out of range"),
        ({"tree_roots": (9,)}, "out of range"),
        ({"nodes_modes": np.array([0, 9], np.uint8)}, "out of range"),
        ({"leaf_targetids": (3, 0)}, "out of range"),
        ({"aggregate_function": 4}, "aggregate_function must lie in 0..3"),
        ({"post_transform": -1}, "post_transform must lie in 0..4"),
    ],
)
def test_malformed_tree_ensembles(change, complaint):
    attrs = {
        "tree_roots": (0,),
        "nodes_modes": np.array([0, 0], np.uint8),
        "nodes_splits": np.zeros(2, np.float32),
        "nodes_featureids": (0, 0),
        "nodes_truenodeids": (0, 0),
        "nodes_trueleafs": (1, 1),
        "nodes_falsenodeids": (1, 1),
        "nodes_falseleafs": (0, 1),
        "leaf_targetids": (0, 0),
        "leaf_weights": np.ones(2, np.float32),
    } | change
    with pytest.raises(InvalidValue, match=f"^TreeEnsemble: .*{complaint}"):
        evaluate("TreeEnsemble", np.zeros((1, 1), np.float32), version=5, **attrs)


def test_trees_check_their_input():
    attrs = stump_attrs("target", ids=[0, 0], weights=[1.0, 2.0]) | {"nodes_featureids": (5, 0, 0)}
    with pytest.raises(ShapeMismatch, match="the trees use feature 5, the input has 2 features"):
        evaluate("TreeEnsembleRegressor", np.zeros((1, 2), np.float32), **attrs)
    with pytest.raises(ShapeMismatch, match=r"expected an input of shape \[N, F\]"):
        evaluate("TreeEnsembleRegressor", np.zeros((1, 2, 3), np.float32), **attrs)
    assert evaluate("TreeEnsembleRegressor", np.zeros((0, 9), np.float32), **attrs).shape == (0, 1)
