"""Losses, against plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranvier as rv
import ranvier.nn.functional as F
from ranvier import nn
from ranvier.errors import InvalidInput, ShapeMismatch

RNG = np.random.default_rng(3)
X, Y = (RNG.standard_normal((6, 4)).astype(np.float32) for _ in range(2))
P = 1 / (1 + np.exp(-Y))
CLASSES = np.array([0, 3, 1, 1, -100, 2])
WEIGHT = np.array([1.0, 2.0, 0.5, 3.0], np.float32)


def log_softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def entropy(weight: np.ndarray | None, smoothing: float, reduction: str) -> Any:
    logs = log_softmax(X)
    own = np.ones(4) if weight is None else weight
    losses, shares = np.zeros(6), np.zeros(6)
    for k, c in enumerate(CLASSES):
        if c >= 0:
            shares[k] = own[c]
            losses[k] = -(1 - smoothing) * own[c] * logs[k, c] - smoothing / 4 * (own * logs[k]).sum()
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / shares.sum()}[reduction]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_cross_entropy_of_classes(weight: np.ndarray | None, smoothing: float, reduction: str) -> None:
    found = F.cross_entropy(X, CLASSES, weight, reduction=reduction, label_smoothing=smoothing)
    np.testing.assert_allclose(found.numpy(), entropy(weight, smoothing, reduction), rtol=2e-5, atol=1e-6)


def test_cross_entropy_of_probabilities_and_places() -> None:
    target = P / P.sum(1, keepdims=True)
    wanted = -(log_softmax(X) * (0.9 * target + 0.1 / 4) * WEIGHT).sum(1)
    found = F.cross_entropy(X, target, WEIGHT, label_smoothing=0.1)
    np.testing.assert_allclose(found.numpy(), wanted.mean(), rtol=2e-5)
    image = RNG.standard_normal((2, 4, 3, 3)).astype(np.float32)
    places = RNG.integers(0, 4, (2, 3, 3))
    picked = np.take_along_axis(log_softmax(image), places[:, None], 1)
    np.testing.assert_allclose(F.cross_entropy(image, places).numpy(), -picked.mean(), rtol=2e-5)
    np.testing.assert_allclose(F.cross_entropy(X[0], np.array(2)).numpy(), -log_softmax(X)[0, 2], rtol=2e-5)
    np.testing.assert_allclose(
        F.nll_loss(log_softmax(X), CLASSES).numpy(), F.cross_entropy(X, CLASSES).numpy(), rtol=2e-5
    )


def test_the_gradient_of_cross_entropy_is_known_by_heart() -> None:
    scores = nn.Parameter(X)
    F.cross_entropy(scores, rv.Tensor(CLASSES)).backward()
    wanted = np.exp(log_softmax(X))
    for k, c in enumerate(CLASSES):
        wanted[k] = 0 if c < 0 else wanted[k] - np.eye(4)[c]
    assert scores.grad is not None
    np.testing.assert_allclose(scores.grad.numpy(), wanted / 5, rtol=2e-5, atol=1e-6)


def _huber(d: np.ndarray, delta: float) -> np.ndarray:
    return np.where(np.abs(d) <= delta, d * d / 2, delta * (np.abs(d) - delta / 2))


SIGNS = np.array([1, -1, 1, -1, -1, 1])
LENGTHS = np.linalg.norm(X, axis=1) * np.linalg.norm(Y, axis=1)
COSINE = (X * Y).sum(1) / LENGTHS
PAIRS: dict[str, tuple[Callable[..., rv.Tensor], np.ndarray]] = {
    "mse": (lambda r: F.mse_loss(X, Y, r), (X - Y) ** 2),
    "l1": (lambda r: F.l1_loss(X, Y, r), np.abs(X - Y)),
    "smooth_l1": (lambda r: F.smooth_l1_loss(X, Y, r, beta=0.7), _huber(X - Y, 0.7) / 0.7),
    "huber": (lambda r: F.huber_loss(X, Y, r, delta=0.7), _huber(X - Y, 0.7)),
    "bce": (
        lambda r: F.binary_cross_entropy(P, P[::-1], None, r),
        -(P[::-1] * np.log(P) + (1 - P[::-1]) * np.log1p(-P)),
    ),
    "bce with logits": (
        lambda r: F.binary_cross_entropy_with_logits(X, P, WEIGHT, r, pos_weight=WEIGHT),
        WEIGHT * ((1 - P) * X + (1 + (WEIGHT - 1) * P) * np.logaddexp(0, -X)),
    ),
    "kl": (lambda r: F.kl_div(log_softmax(X), P, r), P * (np.log(P) - log_softmax(X))),
    "kl of logarithms": (lambda r: F.kl_div(X, np.log(P), r, log_target=True), P * (np.log(P) - X)),
    "gaussian": (lambda r: F.gaussian_nll_loss(X, Y, P, reduction=r), (np.log(P) + (X - Y) ** 2 / P) / 2),
    "poisson": (lambda r: F.poisson_nll_loss(X, P, reduction=r), np.exp(X) - P * X),
    "cosine": (
        lambda r: F.cosine_embedding_loss(X, Y, SIGNS, 0.1, r),
        np.where(SIGNS > 0, 1 - COSINE, np.maximum(COSINE - 0.1, 0)),
    ),
    "hinge": (
        lambda r: F.hinge_embedding_loss(X[:, 0], SIGNS, reduction=r),
        np.where(SIGNS > 0, X[:, 0], np.maximum(1 - X[:, 0], 0)),
    ),
    "ranking": (
        lambda r: F.margin_ranking_loss(X[:, 0], Y[:, 0], SIGNS, 0.5, r),
        np.maximum(0.5 - SIGNS * (X - Y)[:, 0], 0),
    ),
    "triplet": (
        lambda r: F.triplet_margin_loss(X, Y, P, reduction=r),
        np.maximum(np.linalg.norm(X - Y + 1e-6, axis=1) - np.linalg.norm(X - P + 1e-6, axis=1) + 1, 0),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_numbers(name: str) -> None:
    function, wanted = PAIRS[name]
    np.testing.assert_allclose(function("none").numpy(), wanted, rtol=5e-5, atol=2e-6)
    np.testing.assert_allclose(function("mean").numpy(), wanted.mean(), rtol=5e-5)
    np.testing.assert_allclose(function("sum").numpy(), wanted.sum(), rtol=5e-5)


def test_far_scores_and_certain_probabilities_stay_finite() -> None:
    far = np.array([200.0, -200.0], np.float32)
    np.testing.assert_allclose(
        F.binary_cross_entropy_with_logits(far, 1 - (far > 0), reduction="none").numpy(), [200, 200]
    )
    np.testing.assert_allclose(F.binary_cross_entropy(np.array([0.0], np.float32), np.ones(1, np.float32)).numpy(), 100)
    np.testing.assert_array_equal(F.kl_div(np.zeros(2, np.float32), np.zeros(2, np.float32), "none").numpy(), [0, 0])
    assert np.isfinite(F.cross_entropy(far[None] * 1e3, np.array([1])).numpy())


def test_modules_keep_their_arguments() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2, reduction="sum")
    np.testing.assert_allclose(loss(X, CLASSES).numpy(), entropy(WEIGHT, 0.2, "sum"), rtol=2e-5)
    assert (
        list(loss.state_dict()) == ["weight"] and repr(loss) == "CrossEntropyLoss(label_smoothing=0.2, reduction=sum)"
    )
    np.testing.assert_allclose(nn.MSELoss()(X, Y).numpy(), ((X - Y) ** 2).mean(), rtol=1e-5)


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeMismatch, match=r"classes of shape \[6\]"):
        F.cross_entropy(X, CLASSES[:5])
    with pytest.raises(ShapeMismatch, match=r"target of shape"):
        F.mse_loss(X, Y[0])
    with pytest.raises(InvalidInput, match="'mean', 'sum' or 'none'"):
        F.l1_loss(X, Y, "average")
    with pytest.raises(TypeError, match="reduction"):
        nn.MSELoss(size=3)
