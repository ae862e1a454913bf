"""Gradients of rules against those of torch, in float64 and by the default providers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.tensor.nn import functional as own_functions

torch = pytest.importorskip("torch")

Array = np.ndarray[Any, Any]


def r(*shape: int, low: float = -1.5, high: float = 1.5, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape) * 31 + len(shape)).uniform(low, high, shape)


# the same call in both libraries: (functions, tensors) -> result
Case = tuple[Callable[..., Any], list[Array]]
LAYERS: dict[str, Case] = {
    "linear": (lambda f, x, w, b: f.linear(x, w, b), [r(3, 4), r(5, 4), r(5)]),
    "conv1d": (lambda f, x, w, b: f.conv1d(x, w, b, stride=2, padding=1), [r(2, 3, 9), r(4, 3, 3), r(4)]),
    "conv2d": (lambda f, x, w, b: f.conv2d(x, w, b, padding=1), [r(2, 3, 5, 6), r(4, 3, 3, 3), r(4)]),
    "conv2d strided": (lambda f, x, w: f.conv2d(x, w, stride=2, dilation=2), [r(1, 2, 9, 8), r(3, 2, 3, 2)]),
    "conv2d groups": (lambda f, x, w: f.conv2d(x, w, groups=2, padding=1), [r(1, 4, 5, 5), r(6, 2, 3, 3)]),
    "conv2d depthwise": (lambda f, x, w: f.conv2d(x, w, groups=4), [r(2, 4, 5, 5), r(4, 1, 3, 3)]),
    "conv_transpose2d": (lambda f, x, w, b: f.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
                         [r(1, 3, 4, 4), r(3, 2, 3, 3), r(2)]),
    "max_pool2d": (lambda f, x: f.max_pool2d(x, 3, stride=2, padding=1), [r(2, 3, 7, 7)]),
    "avg_pool2d": (lambda f, x: f.avg_pool2d(x, 2), [r(2, 3, 6, 6)]),
    "adaptive_avg_pool2d": (lambda f, x: f.adaptive_avg_pool2d(x, 1), [r(2, 3, 5, 4)]),
    "layer_norm": (lambda f, x, w, b: f.layer_norm(x, (6,), w, b), [r(2, 3, 6), r(6), r(6)]),
    "group_norm": (lambda f, x, w, b: f.group_norm(x, 2, w, b), [r(2, 4, 3, 3), r(4), r(4)]),
    "batch_norm": (lambda f, x, w, b: f.batch_norm(x, None, None, w, b, training=True), [r(4, 3, 2, 2), r(3), r(3)]),
    "softmax": (lambda f, x: f.softmax(x, dim=1), [r(3, 5)]),
    "log_softmax": (lambda f, x: f.log_softmax(x, dim=0), [r(3, 5)]),
    "attention": (lambda f, q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True),
                  [r(1, 2, 4, 3), r(1, 2, 4, 3, seed=1), r(1, 2, 4, 3, seed=2)]),
    "mse_loss": (lambda f, x, t: f.mse_loss(x, t), [r(3, 4), r(3, 4, seed=1)]),
    "smooth_l1_loss": (lambda f, x, t: f.smooth_l1_loss(x, t, beta=0.5), [r(3, 4), r(3, 4, seed=1)]),
    "pad reflect": (lambda f, x: f.pad(x, (2, 1, 1, 2), mode="reflect"), [r(1, 2, 4, 5)]),
    "pad replicate": (lambda f, x: f.pad(x, (2, 1, 1, 2), mode="replicate"), [r(1, 2, 4, 5)]),
    "pad circular": (lambda f, x: f.pad(x, (2, 1, 1, 2), mode="circular"), [r(1, 2, 4, 5)]),
    "pad constant": (lambda f, x: f.pad(x, (2, 1, -1, 2), value=0.5), [r(1, 2, 4, 5)]),
    **{name: (lambda f, x, name=name: getattr(f, name)(x), [r(4, 5, low=-3, high=3)])
       for name in ("relu", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign",
                    "hardsigmoid", "hardswish", "hardtanh", "logsigmoid", "tanhshrink")},
}  # fmt: skip
# functions by ranvier.numpy and by torch
PLAIN: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Array]]] = {
    "prod": (lambda x: rnp.prod(x, axis=1), lambda x: x.prod(1), [np.array([[1.0, 0.0, 2.0], [3.0, -1.0, 0.5]])]),
    "cumprod": (lambda x: rnp.cumulative_prod(x, axis=1), lambda x: x.cumprod(1), [r(3, 6)]),
    "cumsum": (lambda x: rnp.cumulative_sum(x, axis=0), lambda x: x.cumsum(0), [r(3, 6)]),
    "det": (lambda x: rnp.linalg.det(x), lambda x: torch.linalg.det(x), [r(2, 4, 4)]),
    "logsumexp": (lambda x: rnp.logsumexp(x, axis=1), lambda x: torch.logsumexp(x, 1), [r(3, 4)]),
    "var": (lambda x: x.var(axis=0), lambda x: x.var(0, unbiased=False), [r(3, 4)]),
    "max": (lambda x: x.max(axis=1), lambda x: x.amax(1), [r(3, 4)]),
    "sort": (lambda x: rnp.sort(x, axis=1) ** 2, lambda x: x.sort(1).values ** 2, [r(3, 4)]),
    "pow": (lambda x, y: x**y, lambda x, y: x**y, [r(3, 4, low=0.3), r(4)]),
    "atan2": (rnp.atan2, torch.atan2, [r(3, 4), r(3, 4, seed=1)]),
    "hypot": (rnp.hypot, torch.hypot, [r(3, 4), r(3, 4, seed=1)]),
    "einsum": (lambda x, y: rnp.einsum("bij,bkj->bik", x, y), lambda x, y: torch.einsum("bij,bkj->bik", x, y),
               [r(2, 3, 4), r(2, 5, 4)]),
    "broadcast matmul": (lambda x, y: x @ y, lambda x, y: x @ y, [r(2, 1, 3, 4), r(5, 4, 2)]),
    "take": (lambda x: rnp.take(x, rv.Tensor([2, 0, 2]), axis=1), lambda x: x[:, [2, 0, 2]], [r(3, 4)]),
    "steps": (lambda x: x[::-1, 1::2], lambda x: x.flip(0)[:, 1::2], [r(3, 6)]),
    "where": (lambda x, y: rnp.where(x > y, x * y, y), lambda x, y: torch.where(x > y, x * y, y), [r(3, 4), r(4)]),
    "norm": (lambda x: rnp.linalg.vector_norm(x, axis=1), lambda x: torch.linalg.vector_norm(x, dim=1), [r(3, 4)]),
    "stack": (lambda x, y: rnp.stack([x, y * 2], axis=1), lambda x, y: torch.stack([x, y * 2], 1), [r(3), r(3)]),
    "tile": (lambda x: rnp.tile(x, (2, 3)) ** 2, lambda x: x.tile(2, 3) ** 2, [r(2, 3)]),
}  # fmt: skip


SINGLE = {"selu", "hardsigmoid"}  # the standard has their constants in float32


def compare(ours: Callable[..., Any], theirs: Callable[..., Any], arrays: list[Array], tolerance: float = 1e-8) -> None:
    inputs = [torch.tensor(a, requires_grad=True) for a in arrays]
    expected = theirs(*inputs)
    weights = r(*expected.shape, seed=7)
    slopes = torch.autograd.grad((expected * torch.tensor(weights)).sum(), inputs)
    found, back = rv.vjp(ours, *(rv.Tensor(a) for a in arrays))
    np.testing.assert_allclose(found.numpy(), expected.detach().numpy(), rtol=tolerance, atol=tolerance / 100)
    for mine, slope in zip(back(rv.Tensor(weights)), slopes):
        np.testing.assert_allclose(mine.numpy(), slope.numpy(), rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    function, arrays = LAYERS[name]
    own, theirs = (functools.partial(function, of) for of in (own_functions, torch.nn.functional))
    compare(own, theirs, arrays, 1e-6 if name in SINGLE else 1e-8)


@pytest.mark.parametrize("name", PLAIN)
def test_functions(name: str) -> None:
    compare(*PLAIN[name])


def test_cross_entropy_and_embedding() -> None:
    classes, places = np.array([1, 0, 3]), np.array([[0, 2], [2, 2]])
    compare(
        lambda x: own_functions.cross_entropy(x, rv.Tensor(classes), label_smoothing=0.1),
        lambda x: torch.nn.functional.cross_entropy(x, torch.tensor(classes), label_smoothing=0.1),
        [r(3, 4)],
    )
    compare(
        lambda w: own_functions.embedding(rv.Tensor(places), w),
        lambda w: torch.nn.functional.embedding(torch.tensor(places), w),
        [r(4, 3)],
    )


def test_second_derivatives() -> None:
    x, w = r(3, 4), r(2, 4)

    def penalty(of: Any, derive: Callable[..., Any], x: Any, w: Any) -> Any:
        slope = derive(lambda x: (of.gelu(of.linear(x, w)) ** 2).sum(), x)
        return (slope**2).sum()

    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    theirs = penalty(torch.nn.functional, lambda f, v: torch.autograd.grad(f(v), v, create_graph=True)[0], tx, tw)
    expected = torch.autograd.grad(theirs, (tx, tw))
    found = rv.grad(lambda x, w: penalty(own_functions, lambda f, v: rv.grad(f)(v), x, w), (0, 1))(
        rv.Tensor(x), rv.Tensor(w)
    )
    for mine, slope in zip(found, expected):
        np.testing.assert_allclose(mine.numpy(), slope.numpy(), rtol=1e-8, atol=1e-10)


def test_forwards() -> None:
    x, t = r(3, 4), r(3, 4, seed=5)

    def function(of: Any) -> Callable[[Any], Any]:
        return lambda v: of.softmax(of.gelu(v), dim=1)

    expected = torch.func.jvp(function(torch.nn.functional), (torch.tensor(x),), (torch.tensor(t),))
    found = rv.jvp(function(own_functions), (rv.Tensor(x),), (rv.Tensor(t),))
    for mine, theirs in zip(found, expected):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-8, atol=1e-10)
