"""The operators of ``ai.onnx.ml``: against ONNX Runtime, against plain definitions, and against malformed models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ranvier.ops.ml.features
import ranvier.ops.ml.labels
import ranvier.ops.ml.linear
import ranvier.ops.ml.maps
import ranvier.ops.ml.trees  # noqa: F401
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidValue, ResourceLimit, ShapeMismatch
from ranvier.graph.types import MapType, TensorType
from ranvier.ops.allocation import tensor_limit
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import TypeCall, get
from tests.ops.ml_tools import ML, assert_like_onnxruntime, evaluate

FINITE = st.floats(-100, 100, width=32)
MATRICES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=FINITE)
NUMERIC = [np.float32, np.float64, np.int32, np.int64]


def law(*strategies):
    """``@given`` with few enough examples that the whole file stays quick."""
    return lambda test: settings(max_examples=30, deadline=None)(given(*strategies)(test))


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):  # as the runtime does around every body
        yield


def strings(*values: str) -> np.ndarray:
    return np.array(values, object)


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


# -- laws of features, labels and maps --------------------------------------------------------------------------------


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


# -- malformed models and data ----------------------------------------------------------------------------------------

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


# -- types and preparation --------------------------------------------------------------------------------------------


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
