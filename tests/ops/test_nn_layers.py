"""Normalisation, recurrent layers and attention against their equations, one step at a time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.graph.ir import Graph
from ranvier.ops.registry import Call, get
from tests.ops.nn_tools import close, evaluate, floats, ints, quick, sigmoid

# -- normalisation ----------------------------------------------------------------------------------------------------


def test_batch_normalization_at_inference_and_in_training() -> None:
    x, scale, bias = floats(4, 3, 5), floats(3), floats(3, seed=1)
    mean, var = floats(3, seed=2), np.abs(floats(3, seed=3))
    column = lambda v: v.reshape(3, 1)  # noqa: E731
    y = evaluate("BatchNormalization", x, scale, bias, mean, var, version=9)
    close(y, (x - column(mean)) / np.sqrt(column(var) + 1e-5) * column(scale) + column(bias))
    y, running_mean, running_var = evaluate(
        "BatchNormalization", x, scale, bias, mean, var, outputs=3, training_mode=1, momentum=0.8
    )
    flat = (y - column(bias)) / column(scale)
    close(flat.mean((0, 2)), 0)
    close(flat.var((0, 2)), 1, 1e-3)
    close(running_mean, 0.8 * mean + 0.2 * x.mean((0, 2)))
    close(running_var, 0.8 * var + 0.2 * x.var((0, 2)))


@pytest.mark.parametrize("version", [1, 6, 7, 9])
def test_old_batch_normalization_trains_with_five_outputs(version: int) -> None:
    x, ones, zeros = floats(4, 3, 5), np.ones(3, np.float32), np.zeros(3, np.float32)
    results = evaluate("BatchNormalization", x, ones, zeros, zeros, ones, version=version, outputs=5)
    close(results[3], x.mean((0, 2)))
    close(results[4], x.var((0, 2)))


def test_batch_normalization_per_element() -> None:
    x, scale = floats(4, 3, 5), floats(3, 5)
    zeros, ones = np.zeros((3, 5), np.float32), np.ones((3, 5), np.float32)
    y = evaluate("BatchNormalization", x, scale, zeros, zeros, ones, version=7, spatial=0, epsilon=0.0)
    close(y, x * scale)


def test_group_normalization_between_instance_and_layer() -> None:
    x = floats(2, 6, 4)
    scale, bias = floats(6), floats(6, seed=1)
    per_channel = evaluate("GroupNormalization", x, scale, bias, num_groups=6)
    close(per_channel, evaluate("InstanceNormalization", x, scale, bias))
    ones, zeros = np.ones(6, np.float32), np.zeros(6, np.float32)
    whole = evaluate("GroupNormalization", x, ones, zeros, num_groups=1)
    close(whole, evaluate("LayerNormalization", x, np.ones((6, 4), np.float32), axis=1))
    old = evaluate("GroupNormalization", x, scale[:2], bias[:2], num_groups=2, version=18)
    close(old, evaluate("GroupNormalization", x, scale[:2].repeat(3), bias[:2].repeat(3), num_groups=2))


def test_layer_normalization_returns_its_statistics() -> None:
    x = (floats(2, 3, 8) * 50 + 100).astype(np.float16)
    scale, bias = floats(8).astype(np.float16), floats(8, seed=1).astype(np.float16)
    y, mean, inverse = evaluate("LayerNormalization", x, scale, bias, outputs=3)
    assert (y.dtype, mean.dtype, inverse.dtype) == (np.float16, np.float32, np.float32)
    exact = x.astype(np.float64)
    close(mean, exact.mean(-1, keepdims=True))
    close(inverse, 1 / np.sqrt(exact.var(-1, keepdims=True) + 1e-5))
    close(y, (exact - mean) * inverse * scale + bias, 1e-2)


def test_rms_normalization() -> None:
    x, scale = floats(2, 3, 8), floats(3, 8)
    expected = x / np.sqrt((x**2).mean((1, 2), keepdims=True) + 1e-5) * scale
    close(evaluate("RMSNormalization", x, scale, axis=1), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_lrn_divides_by_neighbouring_channels(size: int) -> None:
    x = floats(2, 4, 3)
    expected = np.empty_like(x)
    for c in range(4):
        near = x[:, max(0, c - (size - 1) // 2) : c + math.ceil((size - 1) / 2) + 1]
        expected[:, c] = x[:, c] / (2 + 0.5 / size * (near**2).sum(1)) ** 0.6
    close(evaluate("LRN", x, size=size, alpha=0.5, beta=0.6, bias=2.0), expected)


def test_mean_variance_normalization() -> None:
    y = evaluate("MeanVarianceNormalization", floats(2, 3, 4, 5) * 3 + 1)
    close(y.mean((0, 2, 3)), 0)
    close(y.std((0, 2, 3)), 1)


def test_dropout_drops_scales_and_repeats() -> None:
    x, on = floats(40, 50), np.array(True)
    y, mask = evaluate("Dropout", x, np.float32(0.25), on, outputs=2, seed=7)
    np.testing.assert_allclose(y, np.where(mask, x / 0.75, 0), rtol=1e-6)
    assert 0.7 < mask.mean() < 0.8
    np.testing.assert_array_equal(y, evaluate("Dropout", x, np.float32(0.25), on, seed=7))
    assert (y != evaluate("Dropout", x, np.float32(0.25), on, seed=8)).any()
    same, mask = evaluate("Dropout", x, np.float32(0.25), outputs=2)
    np.testing.assert_array_equal(same, x)
    assert mask.all()
    assert evaluate("Dropout", x, version=7, outputs=2)[1].dtype == np.float32
    assert evaluate("Dropout", x, version=10, outputs=2)[1].dtype == np.bool_
    np.testing.assert_array_equal(evaluate("Dropout", x, version=6, is_test=1), x)


# -- recurrent layers -------------------------------------------------------------------------------------------------


def naive_step(kind, x, w, r, b, h, c, linear):
    """One step of one sequence, from the equations."""
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    wx, rh = np.split(w @ x, gates), np.split(r @ h, gates)
    wb, rb = np.split(b[: len(b) // 2], gates), np.split(b[len(b) // 2 :], gates)
    if kind == "RNN":
        return np.tanh(wx[0] + rh[0] + wb[0] + rb[0]), c
    if kind == "GRU":
        z = sigmoid(wx[0] + rh[0] + wb[0] + rb[0])
        reset = sigmoid(wx[1] + rh[1] + wb[1] + rb[1])
        if linear:
            n = np.tanh(wx[2] + reset * (rh[2] + rb[2]) + wb[2])
        else:
            n = np.tanh(wx[2] + np.split(r, 3)[2] @ (reset * h) + rb[2] + wb[2])
        return (1 - z) * n + z * h, c
    i, o, f, g = (wx[k] + rh[k] + wb[k] + rb[k] for k in range(4))
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, (5, 2, 4)])
@pytest.mark.parametrize("linear", [0, 1])
def test_recurrent_layers_step_by_step(kind: str, direction: str, lengths: Any, linear: int) -> None:
    steps, batch, width, hidden = 5, 3, 4, 6
    gates, both = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind], direction == "bidirectional"
    d = 2 if both else 1
    x, w, r = (
        floats(steps, batch, width),
        floats(d, gates * hidden, width) * 0.5,
        floats(d, gates * hidden, hidden) * 0.5,
    )
    b, h0, c0 = floats(d, 2 * gates * hidden), floats(d, batch, hidden), floats(d, batch, hidden, seed=1)
    states = 2 if kind == "LSTM" else 1
    attrs = {"linear_before_reset": linear} if kind == "GRU" else {}
    lens = None if lengths is None else np.array(lengths, np.int32)
    initial = (h0, c0)[:states]
    results = evaluate(
        kind, x, w, r, b, lens, *initial, outputs=1 + states, direction=direction, hidden_size=hidden, **attrs
    )
    for k, n in itertools.product(range(d), range(batch)):
        h, c = h0[k, n].astype(np.float64), c0[k, n].astype(np.float64)
        end = steps if lengths is None else lengths[n]
        backwards = direction == "reverse" or k == 1
        for t in reversed(range(end)) if backwards else range(end):
            h, c = naive_step(kind, x[t, n], w[k], r[k], b[k], h, c, linear)
            close(results[0][t, k, n], h)
        assert not results[0][end:, k, n].any()
        close(results[1][k, n], h)
        if kind == "LSTM":
            close(results[2][k, n], c)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_batch_first_layout_is_a_transposition(kind: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    x, w, r, h0 = floats(5, 3, 4), floats(2, gates * 6, 4), floats(2, gates * 6, 6), floats(2, 3, 6)
    attrs = {"hidden_size": 6, "direction": "bidirectional"}
    y, h = evaluate(kind, x, w, r, None, None, h0, outputs=2, **attrs)
    y1, h1 = evaluate(kind, x.swapaxes(0, 1), w, r, None, None, h0.swapaxes(0, 1), outputs=2, layout=1, **attrs)
    close(y1, y.transpose(2, 0, 1, 3))
    close(h1, h.swapaxes(0, 1))


def test_lstm_peepholes_coupling_and_clip() -> None:
    x, w, r = floats(1, 1, 2), floats(1, 12, 2) * 3, floats(1, 12, 3)
    p, c0 = floats(1, 9), floats(1, 1, 3)
    zero = np.zeros((1, 1, 3), np.float32)
    _, _, c = evaluate("LSTM", x, w, r, None, None, zero, c0, p, outputs=3, input_forget=1, clip=0.5)
    limit = lambda v: np.clip(v, -0.5, 0.5)  # noqa: E731
    i, _, _, g = np.split(w[0] @ x[0, 0], 4)
    opened = sigmoid(limit(i + p[0, :3] * c0[0, 0]))
    close(c[0, 0], (1 - opened) * c0[0, 0] + opened * np.tanh(limit(g)))


def test_recurrent_activations_take_their_numbers_in_order() -> None:
    x, w, r = floats(1, 1, 2), floats(2, 3, 2), floats(2, 3, 3)
    y = evaluate(
        "RNN",
        x,
        w,
        r,
        direction="bidirectional",
        activations=("LeakyRelu", "Affine"),
        activation_alpha=(0.5, 2.0),
        activation_beta=(1.0,),
    )
    first, second = w[0] @ x[0, 0], w[1] @ x[0, 0]
    close(y[0, 0, 0], np.where(first >= 0, first, 0.5 * first))
    close(y[0, 1, 0], 2 * second + 1)


# -- attention --------------------------------------------------------------------------------------------------------


def naive_attention(q, k, v, allowed=None, bias=None, scale=None):
    """softmax(QKᵀ)V, head by head and query by query, in float64."""
    batch, heads, time, size = q.shape
    y = np.zeros((batch, heads, time, v.shape[3]))
    for n, h, t in itertools.product(range(batch), range(heads), range(time)):
        shared = h // (heads // k.shape[1])
        scores = k[n, shared].astype(np.float64) @ q[n, h, t] * (1 / math.sqrt(size) if scale is None else scale)
        if bias is not None:
            scores = scores + np.broadcast_to(bias, (batch, heads, time, len(scores)))[n, h, t]
        open_ = np.ones(len(scores), bool) if allowed is None else np.broadcast_to(allowed, (time, len(scores)))[t]
        weights = np.exp(scores - scores.max()) * open_
        y[n, h, t] = weights @ v[n, shared] / max(weights.sum(), 1e-300)
    return y


@quick
@given(
    st.integers(1, 2), st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]), st.integers(1, 5), st.integers(1, 5),
    st.booleans(), st.integers(-1, 2),
)  # fmt: skip
def test_attention_is_a_softmax_over_scores(batch, heads, time, keys, causal, left) -> None:
    q, k = floats(batch, heads[0], time, 4), floats(batch, heads[1], keys, 4, seed=1)
    v = floats(batch, heads[1], keys, 3, seed=2)
    distance = np.arange(keys) - np.arange(time)[:, None]
    allowed = ((distance <= 0) | (not causal)) & ((distance >= -left) | (left < 0))
    y = evaluate("Attention", q, k, v, is_causal=int(causal), left_window_size=left)
    close(y, naive_attention(q, k, v, allowed))
    bias = floats(time, keys, seed=3)
    close(evaluate("Attention", q, k, v, bias, scale=0.3), naive_attention(q, k, v, bias=bias, scale=0.3))


def test_attention_with_a_past_equals_attention_over_all() -> None:
    q, k, v = floats(2, 4, 7, 8), floats(2, 2, 7, 8, seed=1), floats(2, 2, 7, 8, seed=2)
    whole = evaluate("Attention", q, k, v, is_causal=1)
    y, key, value = evaluate(
        "Attention", q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], None, k[:, :, :4], v[:, :, :4], outputs=3, is_causal=1
    )
    close(y, whole[:, :, 4:])
    np.testing.assert_array_equal(key, k)
    np.testing.assert_array_equal(value, v)


def test_attention_over_a_padded_cache_ignores_the_padding() -> None:
    q, k, v = floats(2, 2, 2, 4), floats(2, 2, 6, 4, seed=1), floats(2, 2, 6, 4, seed=2)
    y = evaluate("Attention", q, k, v, None, None, None, ints(3, 6), is_causal=1)
    for n, real in enumerate((3, 6)):
        part = slice(n, n + 1)
        allowed = np.arange(real) <= np.arange(2)[:, None] + real - 2
        close(y[part], naive_attention(q[part], k[part, :, :real], v[part, :, :real], allowed))


def test_masked_attention_rows_are_zero_not_nan() -> None:
    q = floats(1, 1, 2, 4)
    mask = np.array([[False, False, False], [True, False, True]])
    keys = floats(1, 1, 3, 4, seed=1)
    y, _, _, weights = evaluate("Attention", q, keys, keys, mask, outputs=4, qk_matmul_output_mode=3)
    assert not y[0, 0, 0].any()
    assert not weights[0, 0, 0].any()
    close(weights[0, 0, 1].sum(), 1)
    assert weights[0, 0, 1, 1] == 0


def test_packed_heads_are_the_same_attention() -> None:
    q, k, v = floats(2, 4, 3, 8), floats(2, 2, 5, 8, seed=1), floats(2, 2, 5, 6, seed=2)
    pack = lambda t: t.transpose(0, 2, 1, 3).reshape(t.shape[0], t.shape[2], -1)  # noqa: E731
    y = evaluate("Attention", pack(q), pack(k), pack(v), q_num_heads=4, kv_num_heads=2, softcap=2.0)
    close(y, pack(evaluate("Attention", q, k, v, softcap=2.0)))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_attention_shows_its_scores(mode: int) -> None:
    q, k = floats(1, 1, 2, 4), floats(1, 1, 3, 4, seed=1)
    bias = floats(2, 3, seed=2)
    shown = evaluate("Attention", q, k, k, bias, outputs=4, qk_matmul_output_mode=mode, softcap=1.5)[3]
    raw = q @ k.swapaxes(2, 3) / 2
    capped = 1.5 * np.tanh(raw / 1.5)
    close(shown, [raw, capped, capped + bias][mode])


def test_flex_attention_runs_its_graphs() -> None:
    q, k = floats(1, 2, 3, 4), floats(1, 2, 5, 4, seed=1)
    bias = floats(3, 5, seed=2)
    score, prob = Graph("score"), Graph("prob")
    call = Call(run=lambda body, inputs: [inputs[0] + bias if body is score else inputs[0] * 2])
    y = get("ai.onnx.preview", "FlexAttention").run([q, k, k], {"score_mod": score, "prob_mod": prob}, call)[0]
    close(y, 2 * naive_attention(q, k, k, bias=bias))


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding_keeps_lengths_and_relative_angles(interleaved: int) -> None:
    angles = np.arange(10)[:, None] * np.array([1.0, 0.1, 0.01])
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    x = np.tile(floats(1, 1, 1, 8), (1, 1, 4, 1))
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": 6}
    y = evaluate("RotaryEmbedding", x, cos, sin, np.array([[0, 1, 5, 6]]), **attrs)
    close(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1))
    close(y[0, 0, 0], x[0, 0, 0])
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])
    close(y[0, 0, 0] @ y[0, 0, 1], y[0, 0, 2] @ y[0, 0, 3])


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention_steps_and_resumes(rule: str) -> None:
    batch, time, heads, shared, size = 2, 5, 4, 2, 3
    q, k = floats(batch, time, heads * size), floats(batch, time, shared * size, seed=1) * 0.3
    v = floats(batch, time, shared * 2, seed=2)
    decay = -np.abs(floats(batch, time, shared, seed=3)) if "gated" in rule else None
    beta = sigmoid(floats(batch, time, shared, seed=4)) if "delta" in rule else None
    attrs = {"q_num_heads": heads, "kv_num_heads": shared, "update_rule": rule, "outputs": 2}
    y, state = evaluate("LinearAttention", q, k, v, None, decay, beta, **attrs)
    memory = np.zeros((batch, shared, size, 2))
    for t in range(time):
        for n, h in itertools.product(range(batch), range(shared)):
            key, value = k[n, t].reshape(shared, size)[h], v[n, t].reshape(shared, 2)[h]
            m = memory[n, h] * (1 if decay is None else np.exp(decay[n, t, h]))
            value = value if beta is None else beta[n, t, h] * (value - m.T @ key)
            memory[n, h] = m + np.outer(key, value)
            for g in range(heads // shared):
                query = q[n, t].reshape(heads, size)[h * 2 + g]
                close(y[n, t].reshape(heads, 2)[h * 2 + g], memory[n, h].T @ query / math.sqrt(size))
    close(state, memory)
    part = lambda a, s: None if a is None else a[:, s]  # noqa: E731
    early, late = slice(0, 2), slice(2, None)
    _, between = evaluate(
        "LinearAttention", q[:, early], k[:, early], v[:, early], None, part(decay, early), part(beta, early), **attrs
    )
    rest, last = evaluate(
        "LinearAttention", q[:, late], k[:, late], v[:, late], between, part(decay, late), part(beta, late), **attrs
    )
    close(rest, y[:, 2:])
    close(last, state)
