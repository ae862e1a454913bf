"""Gradients of ``ai.onnx.ml``'s models and features, whose results are float32: differences take longer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.errors import NotSupported
from ranvier.graph.ir import Value
from ranvier.graph.rewrite import GraphOps
from tests.passes.gradient_tools import Build, Case, check, r

ROWS = r(2, 3)


def model(name: str, output: int = 0, **attrs: Any) -> Build:
    def build(op: GraphOps, *given: Value) -> Value:
        outputs = output + 1
        made = op.node(name, list(given), attrs, outputs=outputs, domain="ai.onnx.ml", version=1).outputs[output]
        return op.Cast(made, to=11)

    return build


def numbers(count: int, seed: int = 0) -> list[float]:
    return [float(x) for x in r(count, seed=seed)]


def machine(kind: str, **attrs: Any) -> dict[str, Any]:
    """Three classes of four vectors in all."""
    return {
        "classlabels_ints": [0, 1, 2], "vectors_per_class": [1, 2, 1], "coefficients": numbers(8, 1),
        "support_vectors": numbers(12, 2), "rho": numbers(3, 3), "kernel_type": kind,
        "kernel_params": [0.3, 0.2, 2.0], **attrs,
    }  # fmt: skip


REGRESSOR: dict[str, Any] = {"n_supports": 4, "coefficients": numbers(4), "support_vectors": numbers(12), "rho": [0.3]}
PAIR: dict[str, Any] = {"classlabels_ints": [0, 1], "coefficients": numbers(3), "intercepts": [0.2]}
CASES = {
    "LinearRegressor": Case(
        model("LinearRegressor", coefficients=numbers(6), intercepts=numbers(2), targets=2), [ROWS]
    ),
    "LinearRegressor of a row": Case(
        model("LinearRegressor", coefficients=numbers(3), post_transform="LOGISTIC"), [r(3)], shape=(1, 1)
    ),
    "LinearClassifier": Case(
        model("LinearClassifier", 1, classlabels_ints=[0, 1, 2], coefficients=numbers(9), post_transform="SOFTMAX"),
        [ROWS],
    ),
    "LinearClassifier of two": Case(model("LinearClassifier", 1, **PAIR), [ROWS]),
    "LinearClassifier without zeros": Case(
        model("LinearClassifier", 1, post_transform="SOFTMAX_ZERO", **PAIR), [ROWS]
    ),
    **{
        f"SVMRegressor {kind}": Case(
            model("SVMRegressor", kernel_type=kind, kernel_params=[0.3, 0.2, 2.0], **REGRESSOR), [ROWS]
        )
        for kind in ("LINEAR", "POLY", "RBF", "SIGMOID")
    },
    "SVMRegressor of a plane": Case(model("SVMRegressor", coefficients=numbers(3), rho=[0.3]), [ROWS]),
    **{f"SVMClassifier {kind}": Case(model("SVMClassifier", 1, **machine(kind)), [ROWS]) for kind in ("RBF", "POLY")},
    "SVMClassifier of two": Case(
        model("SVMClassifier", 1, classlabels_ints=[0, 1], vectors_per_class=[2, 1], coefficients=numbers(3),
              support_vectors=numbers(9), rho=[0.1], kernel_type="SIGMOID", kernel_params=[0.3, 0.2, 2.0]),
        [ROWS],
    ),
    "SVMClassifier of planes": Case(
        model("SVMClassifier", 1, classlabels_ints=[0, 1], coefficients=numbers(6), rho=[0.1]), [ROWS]
    ),
    "Scaler": Case(model("Scaler", offset=numbers(3), scale=numbers(3, 1)), [ROWS]),
    **{f"Normalizer {norm}": Case(model("Normalizer", norm=norm), [r(2, 3, low=0.5)]) for norm in ("MAX", "L1", "L2")},
    "Imputer": Case(
        model("Imputer", imputed_value_floats=[0.7], replaced_value_float=float("nan")),
        [ROWS],
    ),
    "ArrayFeatureExtractor": Case(
        model("ArrayFeatureExtractor"), [ROWS], [np.array([2, 0, 2], np.int64)], shape=(2, 3)
    ),
    "FeatureVectorizer": Case(
        model("FeatureVectorizer", inputdimensions=[2, 5]), [ROWS, r(2, 4)], shape=(2, 7)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name], tolerance=2e-3, step=4e-3)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(model("SVMRegressor", one_class=1, **REGRESSOR), [ROWS]), "one_class"),
        (Case(model("LinearRegressor", coefficients=numbers(3), post_transform="PROBIT"), [ROWS]), "PROBIT"),
        (Case(model("SVMClassifier", 1, **machine("RBF", prob_a=[1.0] * 3, prob_b=[0.0] * 3)), [ROWS]), "iteration"),
    ],
)
def test_what_is_refused(case: Case, reason: str) -> None:
    with pytest.raises(NotSupported, match=reason):
        check(case)
