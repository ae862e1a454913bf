"""The operators of ``ai.onnx.ml``: against ONNX Runtime, against plain definitions, and against malformed models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper, numpy_helper

import ranvier.ops.ml
import ranvier.ops.ml_labels
import ranvier.ops.ml_linear
import ranvier.ops.ml_maps
import ranvier.ops.ml_trees  # noqa: F401
from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch, InvalidValue, ResourceLimit, ShapeMismatch
from ranvier.graph.types import MapType, TensorType
from ranvier.ops.allocation import tensor_limit
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import TypeCall, get
from ranvier.ops.registry import evaluate as evaluate_any

ML = "ai.onnx.ml"
FINITE = st.floats(-100, 100, width=32)
MATRICES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=FINITE)
BRANCHES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
NUMERIC = [np.float32, np.float64, np.int32, np.int64]


def law(*strategies):
    """``@given`` with few enough examples that the whole file stays quick."""
    return lambda test: settings(max_examples=30, deadline=None)(given(*strategies)(test))


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):  # as the runtime does around every body
        yield


def evaluate(name: str, *inputs: Any, version: int = 1, outputs: int = 1, **attrs: Any) -> Any:
    return evaluate_any(name, *inputs, domain=ML, version=version, outputs=outputs, **attrs)


def strings(*values: str) -> np.ndarray:
    return np.array(values, object)


# -- ONNX Runtime as the oracle -----------------------------------------------------------------------------------------


def oracle(name: str, *inputs: Any, version: int = 1, outputs: int = 1, **attrs: Any) -> Any:
    """What ONNX Runtime answers to one node."""
    onnxruntime = pytest.importorskip("onnxruntime")
    attrs = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    names = [f"x{k}" for k in range(len(inputs))]
    results = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(name, names, results, domain=ML, **attrs)
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_value_info(n, _proto_type(x)) for n, x in zip(names, inputs)],
        [helper.make_empty_tensor_value_info(n) for n in results],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, version)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    answers = session.run(None, dict(zip(names, inputs)))
    return answers[0] if outputs == 1 else answers


def _proto_type(x: Any) -> onnx.TypeProto:
    if isinstance(x, dict):
        key = onnx.TensorProto.STRING if isinstance(next(iter(x)), str) else onnx.TensorProto.INT64
        return helper.make_map_type_proto(key, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, []))
    return helper.make_tensor_type_proto(of(x).onnx, x.shape)


def assert_like(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    if isinstance(want, list):
        assert got == want
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if want.dtype == object:
        assert got.tolist() == want.tolist()
    else:
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def assert_like_onnxruntime(name: str, *inputs: Any, version: int = 1, outputs: int = 1, **attrs: Any) -> None:
    got = evaluate(name, *inputs, version=version, outputs=outputs, **attrs)
    want = oracle(name, *inputs, version=version, outputs=outputs, **attrs)
    for mine, theirs in zip(got, want) if outputs > 1 else [(got, want)]:
        assert_like(mine, theirs)


X = np.array([[0.9, 3, 0], [-3, 0.6, 1], [0, 0, 6]], np.float32)


@pytest.mark.parametrize("dtype", NUMERIC)
def test_features_like_onnxruntime(dtype):
    x = X.astype(dtype)
    assert_like_onnxruntime("Scaler", x, offset=[1.0, 2.0, 0.5], scale=[2.0, 3.0, 4.0])
    assert_like_onnxruntime("Scaler", x, offset=[1.0], scale=[2.0])
    for norm in ("MAX", "L1", "L2"):
        assert_like_onnxruntime("Normalizer", x, norm=norm)
        assert_like_onnxruntime("Normalizer", x[0], norm=norm)
    assert_like_onnxruntime("ArrayFeatureExtractor", x, np.array([[2, 0]]))
    assert_like_onnxruntime("ArrayFeatureExtractor", x[0], np.array([1]))
    assert_like_onnxruntime("FeatureVectorizer", x, x[:, :1], inputdimensions=[3, 1])
    assert_like_onnxruntime("FeatureVectorizer", x, x[:, :1], inputdimensions=[2, 2])
    if dtype is not np.int32:
        assert_like_onnxruntime("OneHotEncoder", x, cats_int64s=[0, 1, -3])


def test_more_features_like_onnxruntime():
    gaps = np.array([[0, np.nan, 2], [1, 0, np.nan]], np.float32)
    assert_like_onnxruntime("Binarizer", X, threshold=0.75)
    assert_like_onnxruntime("OneHotEncoder", strings("a", "b"), cats_strings=["b", "c"])
    assert_like_onnxruntime("Imputer", gaps, replaced_value_float=0.0, imputed_value_floats=[7.0])
    assert_like_onnxruntime("Imputer", gaps, replaced_value_float=math.nan, imputed_value_floats=[7.0, 8.0, 9.0])
    ints = np.array([[1, 2], [3, 1]])
    assert_like_onnxruntime("Imputer", ints, replaced_value_int64=1, imputed_value_int64s=[7, 8])


def test_labels_and_maps_like_onnxruntime():
    assert_like_onnxruntime("LabelEncoder", strings("a", "b", "q"), classes_strings=["b", "a"])
    assert_like_onnxruntime("LabelEncoder", np.array([0, 1, 2, -1]), classes_strings=["b", "a"])
    keys = {
        "keys_strings": (["a", "b", "c"], strings("a", "x", "c")),
        "keys_int64s": ([1, 2, 3], np.array([[3, 9, 1]])),
        "keys_floats": ([1.0, 2.5, -3.0], np.array([2.5, 0, -3], np.float32)),
    }
    values = {"values_strings": ["x", "y", "z"], "values_int64s": [5, 6, 7], "values_floats": [0.5, 0.25, 0.125]}
    for version in (2, 4):
        for key, (known, x) in keys.items():
            for name, labels in values.items():
                assert_like_onnxruntime("LabelEncoder", x, version=version, **{key: known, name: labels})
    mapper = {"cats_strings": ["a", "b"], "cats_int64s": [3, 4]}
    assert_like_onnxruntime("CategoryMapper", strings("a", "b", "q"), **mapper)
    assert_like_onnxruntime("CategoryMapper", np.array([[3, 7]]), **mapper)
    assert_like_onnxruntime("ZipMap", X, classlabels_strings=["a", "b", "c"])
    assert_like_onnxruntime("ZipMap", X[0], classlabels_int64s=[1, 5, 9])
    assert_like_onnxruntime("CastMap", {1: 2.5, 0: 3.0}, cast_to="TO_STRING")
    assert_like_onnxruntime("CastMap", {1: 2.5, 0: 3.0}, cast_to="TO_INT64", map_form="SPARSE", max_map=4)
    assert_like_onnxruntime("DictVectorizer", {1: 4.5, 7: 2.0}, int64_vocabulary=[0, 1])
    assert_like_onnxruntime("DictVectorizer", {"a": 4.5, "z": 1.0}, string_vocabulary=["a", "b"])


def normals(rng: np.random.Generator, *shape: int) -> list[float]:
    return rng.standard_normal(math.prod(shape)).astype(np.float32).tolist()


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_linear_models_like_onnxruntime(classes, transform):
    rng = np.random.default_rng(classes)
    x = rng.standard_normal((5, 3)).astype(np.float32)
    model = {"coefficients": normals(rng, classes, 3), "intercepts": normals(rng, classes)}
    labels = list("abcd"[:classes])
    assert_like_onnxruntime("LinearRegressor", x, targets=classes, post_transform=transform, **model)
    for data in (x, x[0], x.astype(np.float64), (x * 3).astype(np.int32)):
        assert_like_onnxruntime(
            "LinearClassifier", data, outputs=2, classlabels_strings=labels, post_transform=transform, **model
        )


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_support_vector_classifiers_like_onnxruntime(classes, probabilities, kernel):
    rng = np.random.default_rng(classes)
    per_class = rng.integers(1, 4, classes).tolist()
    pairs = classes * (classes - 1) // 2
    model = {
        "coefficients": normals(rng, classes - 1, sum(per_class)),
        "rho": normals(rng, pairs),
        "support_vectors": normals(rng, sum(per_class), 3),
        "vectors_per_class": per_class,
        "kernel_type": kernel,
        "kernel_params": [0.3, 0.5, 3.0],
        "classlabels_ints": list(range(7, 7 + classes)),
    }
    if probabilities:
        model |= {"prob_a": (-np.abs(normals(rng, pairs))).tolist(), "prob_b": normals(rng, pairs)}
    assert_like_onnxruntime("SVMClassifier", rng.standard_normal((6, 3)).astype(np.float32), outputs=2, **model)


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("supports", [0, 4])
@pytest.mark.parametrize("one_class", [0, 1])
def test_support_vector_regressors_like_onnxruntime(kernel, supports, one_class):
    rng = np.random.default_rng(supports)
    model = {
        "coefficients": normals(rng, supports or 3),
        "rho": normals(rng, 1),
        "kernel_type": kernel,
        "kernel_params": [0.3, 0.5, 2.0],
        "n_supports": supports,
        "one_class": one_class,
    }
    if supports:
        model["support_vectors"] = normals(rng, supports, 3)
    assert_like_onnxruntime("SVMRegressor", rng.standard_normal((5, 3)).astype(np.float32), **model)


# -- laws of features, labels and maps ---------------------------------------------------------------------------------


@law(MATRICES)
def test_normalized_rows_have_norm_one(x):
    for norm, order in (("L1", 1), ("L2", 2)):
        size = np.linalg.norm(x.astype(np.float64), order, axis=1)
        got = np.linalg.norm(evaluate("Normalizer", x, norm=norm).astype(np.float64), order, axis=1)
        np.testing.assert_allclose(got[size > 1e-30], 1, rtol=1e-5)
        assert (got[size == 0] == 0).all()


@law(MATRICES)
def test_scaler_undoes_itself(x):
    there = evaluate("Scaler", x, offset=(3.0,), scale=(4.0,))
    np.testing.assert_allclose(evaluate("Scaler", there, offset=(-12.0,), scale=(0.25,)), x, atol=1e-4)


@law(st.lists(st.text(max_size=3), min_size=1, max_size=6, unique=True), st.data())
def test_label_encoder_and_its_inverse(labels, data):
    picked = data.draw(st.lists(st.sampled_from(labels), max_size=6))
    there = evaluate("LabelEncoder", strings(*picked), version=2, keys_strings=labels, values_int64s=range(len(labels)))
    assert there.tolist() == [labels.index(label) for label in picked]
    back = evaluate("LabelEncoder", there, version=2, keys_int64s=range(len(labels)), values_strings=labels)
    assert back.tolist() == picked
    assert evaluate("LabelEncoder", there, classes_strings=tuple(labels)).tolist() == picked


def test_label_encoder_takes_tensors_nan_and_the_last_of_equal_keys():
    got = evaluate(
        "LabelEncoder",
        np.array([np.nan, 2.0, -0.0, 5.0]),
        version=4,
        keys_tensor=np.array([2.0, np.nan, 0.0, 2.0]),
        values_tensor=np.array([1, 2, 3, 4], np.int16),
        default_tensor=np.array([-7], np.int16),
    )
    assert got.dtype == np.int16
    assert got.tolist() == [2, 4, 3, -7]


@law(hnp.arrays(np.int64, hnp.array_shapes(max_dims=3, max_side=4), elements=st.integers(-2, 4)))
def test_one_hot_marks_the_category(x):
    got = evaluate("OneHotEncoder", x, cats_int64s=(3, 0, 2))
    assert got.shape == (*x.shape, 3)
    np.testing.assert_array_equal(got, x[..., np.newaxis] == np.array([3, 0, 2]))
    np.testing.assert_array_equal(evaluate("OneHotEncoder", x + 0.5 * np.sign(x), cats_int64s=(3, 0, 2)), got)


def test_one_hot_of_numbers_that_are_no_integers():
    x = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    assert not evaluate("OneHotEncoder", x, cats_int64s=(0, 1, -(2**63))).any()


@law(st.dictionaries(st.sampled_from("abcdef"), st.floats(-9, 9, width=32)))
def test_a_row_of_a_map_zips_back_into_it(values):
    labels = tuple("fabced")
    row = evaluate("DictVectorizer", values, string_vocabulary=labels)
    assert row.shape == (1, 6)
    (zipped,) = evaluate("ZipMap", row.astype(np.float32), classlabels_strings=labels)
    assert {k: v for k, v in zipped.items() if k in values} == values


@pytest.mark.parametrize(
    ("values", "dtype"),
    [({"a": 1}, np.int64), ({"a": "t"}, object), ({"a": np.float64(1)}, np.float64), ({}, np.float32)],
)
def test_the_element_type_of_a_vectorized_map(values, dtype):
    assert evaluate("DictVectorizer", values, string_vocabulary=("a", "b")).dtype == dtype


@law(hnp.arrays(np.float32, (3, 4), elements=st.floats(-50, 50, width=32)))
def test_score_transforms(scores):
    identity = tuple(np.eye(4, dtype=np.float32).ravel().tolist())

    def transformed(kind: str) -> np.ndarray:
        return evaluate("LinearRegressor", scores, coefficients=identity, targets=4, post_transform=kind)

    np.testing.assert_array_equal(transformed("NONE"), scores)
    np.testing.assert_allclose(transformed("SOFTMAX").sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(transformed("LOGISTIC"), 1 / (1 + np.exp(-scores.astype(np.float64))), rtol=1e-5)
    sparse = transformed("SOFTMAX_ZERO")
    assert (sparse[scores == 0] == 0).all()
    np.testing.assert_allclose(sparse.sum(axis=1), (np.abs(scores) > 1e-7).any(axis=1), rtol=1e-5)


def test_probit_is_the_normal_quantile():
    scores = np.array([[0.5, 0.975], [0.0, 1.0], [-0.1, 1.1]], np.float32)
    got = evaluate("LinearRegressor", scores, coefficients=(1.0, 0.0, 0.0, 1.0), targets=2, post_transform="PROBIT")
    np.testing.assert_allclose(got, [[0, 1.959964], [-np.inf, np.inf], [np.nan, np.nan]], rtol=1e-5)


# -- trees --------------------------------------------------------------------------------------------------------------


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
    assert_like(got, oracle("TreeEnsembleRegressor", x, version=3, **attrs))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("classes", [2, 3])
def test_tree_classifier_like_onnxruntime(seed, classes):
    rng = np.random.default_rng(seed)
    targets = [0] if classes == 2 else [0, 1, 2]  # two classes: the form converters write
    forest = random_forest(rng, features=3, targets=targets, group="class", all_vote=True)
    attrs: dict[str, Any] = forest | {"post_transform": ["NONE", "LOGISTIC"][seed % 2]}
    if seed % 3 == 0:
        attrs["base_values"] = normals(rng, len(targets))
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
        assert_like(got, oracle("TreeEnsemble", x, version=5, **attrs))


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
    assert_like(got, oracle("TreeEnsemble", x, version=5, **attrs))
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


# -- malformed models and data ------------------------------------------------------------------------------------------

VECTOR = np.zeros((1, 2), np.float32)


@pytest.mark.parametrize(
    ("error", "complaint", "name", "inputs", "attrs"),
    [
        (InvalidValue, "index 2 is out of range for 2 features", "ArrayFeatureExtractor", [VECTOR, np.array([2])], {}),
        (InvalidValue, "index -1 is out of range", "ArrayFeatureExtractor", [VECTOR, np.array([-1])], {}),
        (ShapeMismatch, "expected 1 or 2 values of 'scale'", "Scaler", [VECTOR], {"scale": (1.0, 2.0, 3.0)}),
        (InvalidValue, "norm must be", "Normalizer", [VECTOR], {"norm": "L3"}),
        (ShapeMismatch, "imputed_value_floats", "Imputer", [VECTOR], {}),
        (InvalidValue, "int32", "Imputer", [np.zeros(1, np.int32)], {"imputed_value_int64s": (2**40,)}),
        (InvalidValue, "no class labels", "OneHotEncoder", [VECTOR], {}),
        (InvalidValue, "not among the categories", "OneHotEncoder", [VECTOR], {"cats_int64s": (1,), "zeros": 0}),
        (DTypeMismatch, "string", "OneHotEncoder", [VECTOR], {"cats_strings": ("a",)}),
        (InvalidValue, "inputdimensions", "FeatureVectorizer", [VECTOR], {"inputdimensions": (1, 1)}),
        (InvalidValue, "inputdimensions", "FeatureVectorizer", [VECTOR, VECTOR], {"inputdimensions": (-1, 3)}),
        (ShapeMismatch, "rows", "FeatureVectorizer", [VECTOR, np.zeros((2, 1), np.float32)], {}),
        (InvalidValue, "as many integers", "CategoryMapper", [np.array([1])], {"cats_strings": ("a",)}),
        (InvalidValue, "cannot be read", "CastMap", [{0: "pear"}], {}),
        (InvalidValue, "do not fit a row of 2", "CastMap", [{2: 1.0}], {"map_form": "SPARSE", "max_map": 2}),
        (InvalidValue, "cast_to", "CastMap", [{2: 1.0}], {"cast_to": "TO_HEX"}),
        (InvalidValue, "no class labels", "DictVectorizer", [{2: 1.0}], {}),
        (ShapeMismatch, "for 3 labels", "ZipMap", [VECTOR], {"classlabels_int64s": (1, 2, 3)}),
        (ShapeMismatch, "coefficients", "LinearRegressor", [VECTOR], {"coefficients": (1.0,)}),
        (
            InvalidValue,
            "intercepts",
            "LinearRegressor",
            [VECTOR],
            {"coefficients": (1.0, 2.0), "intercepts": (1.0, 2.0)},
        ),
        (InvalidValue, "rho", "SVMRegressor", [VECTOR], {"coefficients": (1.0, 2.0)}),
        (
            ShapeMismatch,
            "3 support vectors of 2 features",
            "SVMRegressor",
            [VECTOR],
            {"rho": (0.0,), "n_supports": 3, "support_vectors": (1.0,)},
        ),
    ],
)
def test_bad_models_and_data(error, complaint, name, inputs, attrs):
    with pytest.raises(error, match=f"^{name}: .*{complaint}"):
        evaluate(name, *inputs, **attrs)


def test_bad_label_encoders():
    keys = {"keys_int64s": (1, 2)}
    with pytest.raises(InvalidValue, match="exactly one of values_tensor"):
        evaluate("LabelEncoder", np.array([1]), version=4, **keys)
    with pytest.raises(InvalidValue, match="2 keys, but 1 values"):
        evaluate("LabelEncoder", np.array([1]), version=4, values_floats=(1.0,), **keys)
    with pytest.raises(DTypeMismatch, match="the keys are int64, but the input is float32"):
        evaluate("LabelEncoder", VECTOR, version=4, values_floats=(1.0, 2.0), **keys)
    with pytest.raises(InvalidValue, match="does not fit int16"):
        small = np.array([1, 2], np.int16)
        evaluate("LabelEncoder", np.array([1]), version=4, values_tensor=small, default_int64=2**20, **keys)


def test_a_huge_one_hot_is_refused():
    with tensor_limit(1000), pytest.raises(ResourceLimit):
        evaluate("OneHotEncoder", np.zeros(100, np.int64), cats_int64s=tuple(range(100)))


# -- types and preparation ----------------------------------------------------------------------------------------------


def inferred(name: str, kind: Any, outputs: int = 1, **attrs: Any) -> list[Any]:
    rule = get(ML, name, 1).infer_rule
    assert rule is not None
    return list(rule(TypeCall([kind], [None], attrs, outputs, 1)))


def test_inferred_types():
    rows = TensorType(DType.float64, (None, 2))
    scores = TensorType(DType.float32, (None, 3))
    labels = TensorType(DType.string, (None,))
    abc = ("a", "b", "c")
    assert inferred("Scaler", rows) == [TensorType(DType.float32, (None, 2))]
    assert inferred("Normalizer", rows) == [TensorType(DType.float32, (None, 2))]
    assert inferred("Imputer", rows) == [rows]
    assert inferred("FeatureVectorizer", rows, inputdimensions=(1, 2)) == [scores]
    assert inferred("LinearRegressor", rows, targets=3) == [scores]
    assert inferred("TreeEnsembleRegressor", rows, n_targets=3) == [scores]
    assert inferred("TreeEnsembleClassifier", rows, 2, classlabels_strings=abc) == [labels, scores]
    assert inferred("SVMClassifier", rows, 2, classlabels_strings=abc) == [labels, scores]
    assert inferred("SVMRegressor", rows) == [TensorType(DType.float32, (None, 1))]
    assert inferred("LabelEncoder", rows) == [TensorType(DType.string, (None, 2))]
    some_map = MapType(DType.string, TensorType(DType.float64, ()))
    assert inferred("DictVectorizer", some_map, string_vocabulary=abc) == [TensorType(DType.float64, (1, 3))]
    assert inferred("CastMap", some_map, cast_to="TO_INT64") == [TensorType(DType.int64, (1, None))]


def test_attributes_are_prepared_once():
    calls = []

    @prepared
    def total(values, *, scale):
        calls.append(values)
        return sum(values) * scale

    values = (1, 2, 3)
    assert [total(values, scale=2), total(values, scale=2)] == [12, 12]
    assert total((4, 5), scale=2) == 18
    assert len(calls) == 2
    changing = [1]
    assert total(changing, scale=1) == 1
    changing.append(2)
    assert total(changing, scale=1) == 3
