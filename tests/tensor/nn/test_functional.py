"""Layers as functions, against plain NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ranvier as rv
import ranvier.nn.functional as F
from ranvier import nn
from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch

RNG = np.random.default_rng(11)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def close(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(found.numpy(), wanted, rtol=tolerance, atol=tolerance)


def windows(x: np.ndarray, kernel: int, stride: int, pad: int, value: float) -> np.ndarray:
    """[batch, channels, rows, columns, kernel, kernel] of square windows."""
    wide = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=value)
    found = np.lib.stride_tricks.sliding_window_view(wide, (kernel, kernel), axis=(2, 3))
    return found[:, :, ::stride, ::stride]


def test_linear_and_bilinear() -> None:
    x, w, b = numbers(2, 3, 5), numbers(4, 5), numbers(4)
    close(F.linear(x, w, b), x @ w.T + b)
    close(F.linear(x[0, 0], w), x[0, 0] @ w.T)
    assert F.linear(np.zeros((0, 5), np.float32), w).shape == (0, 4)
    with pytest.raises(ShapeMismatch, match=r"\[2, 3, 5\] do not fit a weight of \[4, 6\]"):
        F.linear(x, numbers(4, 6))
    y, v = numbers(2, 3, 6), numbers(4, 5, 6)
    close(F.bilinear(x, y, v, b), np.einsum("nli,oij,nlj->nlo", x, v, y) + b)


@pytest.mark.parametrize(("stride", "pad", "groups"), [(1, 0, 1), (2, 1, 1), (1, 1, 2)])
def test_convolutions(stride: int, pad: int, groups: int) -> None:
    x, w, b = numbers(2, 4, 7, 7), numbers(6, 4 // groups, 3, 3), numbers(6)
    parts = windows(x, 3, stride, pad, 0.0)
    ins, outs = 4 // groups, 6 // groups
    found = [
        np.einsum("ncxykl,ockl->noxy", parts[:, g * ins : (g + 1) * ins], w[g * outs : (g + 1) * outs])
        for g in range(groups)
    ]
    wanted = np.concatenate(found, axis=1) + b[:, None, None]
    close(F.conv2d(x, w, b, stride, pad, groups=groups), wanted, 1e-4)
    close(F.conv2d(x[0], w, b, stride, pad, groups=groups), wanted[0], 1e-4)


def test_a_transposed_convolution_is_the_gradient_of_one() -> None:
    x, w = numbers(2, 6, 4, 4), numbers(6, 3, 3, 3)
    found = F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)
    assert found.shape == (2, 3, 8, 8)
    _, back = rv.vjp(
        lambda y: F.conv2d(y, rv.Tensor(w), stride=2, padding=1), rv.Tensor(np.zeros((2, 3, 8, 8), np.float32))
    )
    close(found, back(rv.Tensor(x))[0].numpy(), 1e-4)


def test_padding_that_keeps_the_size() -> None:
    x, w = numbers(1, 1, 6), np.ones((1, 1, 4), np.float32)
    wanted = np.convolve(x[0, 0], np.ones(4), "full")[2:8]  # one in front, two behind
    close(F.conv1d(x, w, padding="same")[0, 0], wanted)
    with pytest.raises(InvalidInput, match="stride of 1"):
        F.conv1d(x, w, stride=2, padding="same")
    around = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
    around.weight.assign(np.ones((1, 1, 3), np.float32))
    close(around(x)[0, 0], x[0, 0] + np.roll(x[0, 0], 1) + np.roll(x[0, 0], -1))


def test_pooling() -> None:
    x = numbers(2, 3, 7, 7)
    close(F.max_pool2d(x, 3, 2, 1), windows(x, 3, 2, 1, -np.inf).max((-1, -2)))
    close(F.avg_pool2d(x, 3, 2, 1), windows(x, 3, 2, 1, 0.0).mean((-1, -2)))
    counts = windows(np.ones_like(x), 3, 2, 1, 0.0).sum((-1, -2))
    close(F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), windows(x, 3, 2, 1, 0.0).sum((-1, -2)) / counts)
    assert F.max_pool1d(x[:, :, 0], 2, ceil_mode=True).shape == (2, 3, 4)
    close(F.adaptive_avg_pool2d(x, 1)[..., 0, 0], x.mean((2, 3)))
    close(F.adaptive_max_pool1d(x[0], 3), np.stack([x[0][..., a:b].max(-1) for a, b in ((0, 3), (2, 5), (4, 7))], -1))
    close(F.adaptive_avg_pool2d(x[..., :6, :6], (3, None)), x[..., :6, :6].reshape(2, 3, 3, 2, 6).mean(3))


def test_norms() -> None:
    x, gain, shift = numbers(3, 4, 5, 5), numbers(4), numbers(4)
    along = (slice(None), None, None)

    def standard(y: np.ndarray, axes: Any) -> np.ndarray:
        return (y - y.mean(axes, keepdims=True)) / np.sqrt(y.var(axes, keepdims=True) + 1e-5)

    close(F.instance_norm(x, weight=gain, bias=shift), standard(x, (2, 3)) * gain[along] + shift[along], 1e-4)
    grouped = standard(x.reshape(3, 2, -1), 2).reshape(x.shape)
    close(F.group_norm(x, 2, gain, shift), grouped * gain[along] + shift[along], 1e-4)
    w = numbers(5, 5)
    close(F.layer_norm(x, (5, 5), w), standard(x, (2, 3)) * w, 1e-4)
    root = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    close(F.rms_norm(x, 5, eps=1e-6), x / root, 1e-4)
    close(F.normalize(x, dim=1), x / np.linalg.norm(x, axis=1, keepdims=True), 1e-4)
    with pytest.raises(ShapeMismatch, match="does not end in"):
        F.layer_norm(x, 4)


def test_batch_norm_learns_statistics_and_uses_them() -> None:
    layer = nn.BatchNorm2d(4)
    x = numbers(3, 4, 5, 5)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    wanted = (x - mean[:, None, None]) / np.sqrt(var[:, None, None] + 1e-5)
    close(layer(rv.Tensor(x)), wanted, 1e-4)
    close(layer.running_mean, 0.1 * mean)
    close(layer.running_var, 0.9 + 0.1 * var * 75 / 74)
    assert int(layer.num_batches_tracked) == 1
    layer.eval()
    settled = (x - 0.1 * mean[:, None, None]) / np.sqrt((0.9 + 0.1 * var * 75 / 74)[:, None, None] + 1e-5)
    close(layer(rv.Tensor(x)), settled, 1e-4)
    assert int(layer.num_batches_tracked) == 1
    with pytest.raises(ShapeMismatch):
        layer(rv.Tensor(x[0]))


def test_attention() -> None:
    q, k, v = numbers(2, 4, 5, 8), numbers(2, 4, 6, 8), numbers(2, 4, 6, 3)

    def wanted(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any = 0.0) -> np.ndarray:
        scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(8) + mask
        grown = np.exp(scores - scores.max(-1, keepdims=True))
        return grown / grown.sum(-1, keepdims=True) @ v

    close(F.scaled_dot_product_attention(q, k, v), wanted(q, k, v))
    ahead = np.where(np.tril(np.ones((5, 6), bool)), 0.0, -np.inf)
    close(F.scaled_dot_product_attention(q, k, v, is_causal=True), wanted(q, k, v, ahead))
    allowed = RNG.random((5, 6)) < 0.7
    allowed[:, 0] = True
    close(F.scaled_dot_product_attention(q, k, v, rv.Tensor(allowed)), wanted(q, k, v, np.where(allowed, 0, -np.inf)))
    shared = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    close(shared, wanted(q, np.repeat(k[:, :2], 2, 1), np.repeat(v[:, :2], 2, 1)))
    with pytest.raises(InvalidInput, match="one of the two"):
        F.scaled_dot_product_attention(q, k, v, rv.Tensor(allowed), is_causal=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_keep_lengths_and_tell_distances(interleaved: bool) -> None:
    x = np.tile(numbers(1, 8), (6, 1))
    turned = F.rotary_embedding(x, interleaved=interleaved).numpy()
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    products = turned @ turned.T  # of equal vectors: by distance alone
    for apart in range(6):
        diagonal = np.diagonal(products, apart)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)
    np.testing.assert_allclose(turned[0], x[0], rtol=1e-6)
    moved = F.rotary_embedding(x[:3], rv.Tensor(np.arange(3, 6)), interleaved=interleaved)
    close(moved, turned[3:])


def test_heads_that_share_and_turn() -> None:
    layer = nn.MultiheadAttention(8, 4, batch_first=True, num_kv_heads=2, rope=True)
    assert layer.in_proj_weight.shape == (16, 8)
    x = rv.Tensor(numbers(2, 5, 8))
    out, weights = layer(x, x, x, is_causal=True)
    assert out.shape == (2, 5, 8) and weights is not None
    np.testing.assert_allclose(weights.numpy().sum(-1), 1, rtol=1e-5)
    assert not np.triu(weights.numpy(), 1).any()
    changed = np.array(x.numpy())
    changed[:, 4] += 1
    later, _ = layer(*[rv.Tensor(changed)] * 3, is_causal=True)
    close(later[:, :4], out.numpy()[:, :4], 1e-6)  # what comes later is not seen


def test_tables() -> None:
    table = nn.Parameter(numbers(6, 3))
    places = np.array([[0, 5], [2, 2]])
    close(F.embedding(places, table), table.numpy()[places])
    F.embedding(places, table, padding_idx=2).sum().backward()
    assert table.grad is not None
    np.testing.assert_array_equal(table.grad.numpy()[:, 0], [1, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(F.one_hot(places, 6).numpy(), np.eye(6)[places])
    assert F.one_hot(places).shape == (2, 2, 6)
    with pytest.raises(DTypeMismatch):
        F.embedding(numbers(2), table)


def test_shapes() -> None:
    x = numbers(2, 4, 3, 3)
    assert F.flatten(x, 1, 2).shape == (2, 12, 3)
    np.testing.assert_array_equal(
        F.pad(x, (1, 2, 0, 1), value=7.0).numpy(),
        np.pad(x, ((0, 0), (0, 0), (0, 1), (1, 2)), constant_values=7.0),
    )
    np.testing.assert_array_equal(
        F.pad(x, (1, 1, 2, 2), "reflect").numpy(), np.pad(x, ((0, 0), (0, 0), (2, 2), (1, 1)), mode="reflect")
    )
    np.testing.assert_array_equal(F.interpolate(x, scale_factor=2).numpy(), x.repeat(2, 2).repeat(2, 3))
    shuffled = F.pixel_shuffle(x, 2).numpy()
    np.testing.assert_array_equal(shuffled[:, 0, 1::2, ::2], x[:, 2])
    assert nn.Unflatten(1, (2, 2))(rv.Tensor(x)).shape == (2, 2, 2, 3, 3)


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


ACTIVATIONS: dict[str, Any] = {
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "celu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "softplus": _softplus,
    "logsigmoid": lambda x: -_softplus(-x),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "tanhshrink": lambda x: x - np.tanh(x),
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "hardtanh": lambda x: np.clip(x, -1, 1),
    "glu": lambda x: x[..., :4] / (1 + np.exp(-x[..., 4:])),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    x = numbers(5, 8) * 3
    close(getattr(F, name)(x), ACTIVATIONS[name](x))


def test_autocast_lowers_products_and_keeps_the_rest() -> None:
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    x = rv.Tensor(numbers(4, 8))
    plain = layer(x)
    with nn.autocast("bf16"):
        low = layer(x)
        assert low.dtype.name == "bfloat16" and norm(low).dtype.name == "float32"
        assert F.mse_loss(low, plain).dtype.name == "float32"
        with nn.autocast(enabled=False):
            assert layer(x).dtype.name == "float32"
    assert layer(x).dtype.name == "float32"
    close(low.astype("float32"), plain.numpy(), 3e-2)
    low.astype("float32").sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype.name == "float32"


def test_compiled_functions_notice_autocast() -> None:
    layer, x = nn.Linear(8, 8), rv.Tensor(numbers(4, 8))
    run = rv.jit(lambda x: layer(x))
    inside = rv.jit(nn.autocast("fp16")(lambda x: layer(x)))
    assert run(x).dtype.name == "float32"
    with nn.autocast("fp16"):
        assert run(x).dtype.name == "float16"
    assert run(x).dtype.name == "float32" and run.traces == 2
    assert inside(x).dtype.name == "float16" and inside(x).dtype.name == "float16" and inside.traces == 1
