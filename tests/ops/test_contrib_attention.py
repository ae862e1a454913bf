"""com.microsoft attention and positions against ONNX Runtime, and against NumPy where its CPU provider lacks them."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from tests.ops.contrib_tools import Draw, check, check_rules, run, scalar

draw = Draw()


@pytest.fixture(autouse=True)
def _fresh_numbers():
    draw.restart()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# -- attention --------------------------------------------------------------------------------------------------------

B, S, N, H = 2, 5, 4, 8
D = N * H


def projection():
    return [draw.floats(B, S, D), draw.floats(D, 3 * D) * 0.2, draw.floats(3 * D)]


MASKS = {
    "lengths": lambda: np.array([3, 5], np.int32),
    "ends and starts": lambda: np.array([4, 5, 1, 0], np.int32),
    "lengths and offsets": lambda: np.array([3, 5, 0, 3, 8, 0, 3, 8], np.int32),
    "keys": lambda: draw.bits(B, S),
    "queries and keys": lambda: draw.bits(B, S, S),
    "dummy": lambda: np.ones((B, 1), np.int32),
    "none": lambda: None,
}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_masks(mask, causal):
    check("Attention", [*projection(), MASKS[mask]()], ["y", "present"], num_heads=N, unidirectional=causal)


def test_attention_options():
    operands = projection()
    check("Attention", [*operands, MASKS["lengths"]()], num_heads=N, mask_filter_value=-5.0, scale=0.3)
    past = draw.floats(2, B, N, 3, H)
    check("Attention", [*operands, None, past], ["y", "present"], num_heads=N, unidirectional=1)
    step = [operands[0][:, :1].copy(), *operands[1:], draw.bits(B, 4), past]
    check("Attention", step, ["y", "present"], num_heads=N, unidirectional=1)
    for shape in ((B, N, S, S), (1, 1, S, S)):
        check("Attention", [*operands, None, None, draw.floats(*shape)], num_heads=N)
    uneven = [operands[0], draw.floats(D, 2 * D + 2 * N) * 0.2, draw.floats(2 * D + 2 * N)]
    check("Attention", uneven, num_heads=N, qkv_hidden_sizes=[D, D, 2 * N])


def test_attention_with_a_mask_over_the_longest_sequence():
    """The Megatron form: one mask for all positions up to a maximum, of which a call uses a window."""
    longest = np.tril(np.ones((8, 8), np.int32))[None, None].repeat(B, axis=0)
    x, w, b = projection()
    past = draw.floats(2, B, N, 3, H)
    found = run("Attention", x, w, b, longest, past, num_heads=N)
    expected = run("Attention", x, w, b, None, past, num_heads=N, unidirectional=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_attention_into_a_shared_buffer():
    x, w, b = projection()
    past = draw.floats(2, B, N, 3, H)
    y, present = run("Attention", x, w, b, None, past, num_heads=N, unidirectional=1, outputs=2)
    buffer = np.concatenate([past, np.full((2, B, N, 7, H), 9, np.float32)], axis=3)
    shared = {"num_heads": N, "unidirectional": 1, "past_present_share_buffer": 1}
    used = np.array([3], np.int32)
    y2, present2 = run("Attention", x, w, b, None, buffer, None, used, outputs=2, **shared)
    np.testing.assert_array_equal(y, y2)
    np.testing.assert_array_equal(present, present2[:, :, :, :8])
    assert (present2[:, :, :, 8:] == 9).all()


def test_attention_rotates_by_position():
    """With rotary positions only distances matter: a shifted start gives the same result."""
    x, w, _ = projection()
    empty, padded = np.zeros((2, B, N, 0, H), np.float32), np.zeros((2, B, N, 2, H), np.float32)
    plain = run("Attention", x, w, None, None, empty, num_heads=N, do_rotary=1, unidirectional=1)
    mask = np.array([S + 2, S + 2, 2, 2], np.int32)  # hide the two made-up past keys
    shifted = run(
        "Attention", x, w, None, mask, padded, num_heads=N, do_rotary=1, unidirectional=1, mask_filter_value=-1e30
    )
    np.testing.assert_allclose(plain, shifted, rtol=1e-3, atol=1e-4)
    assert np.abs(plain - run("Attention", x, w, num_heads=N, unidirectional=1)).max() > 1e-2


def test_qattention():
    x, w = draw.codes(np.uint8, B, S, D), draw.weights(D, 3 * D)
    bias, zero = draw.floats(3 * D), scalar(120, np.uint8)
    check("QAttention", [x, w, bias, scalar(0.02), scalar(0.01), None, zero], ["y", "present"], num_heads=N, atol=1e-4)
    columns = [draw.steps(3 * D), MASKS["lengths"](), zero, np.zeros(3 * D, np.int8), draw.floats(2, B, N, 3, H)]
    operands = [x, w, bias, scalar(0.02), *columns]
    check("QAttention", operands, ["y", "present"], num_heads=N, unidirectional=1, atol=1e-4)
    unsigned = [x, w.view(np.uint8), bias, scalar(0.02), scalar(0.01), MASKS["lengths"](), zero, scalar(128, np.uint8)]
    check("QAttention", unsigned, num_heads=N, atol=1e-4)


def test_multi_head_attention():
    length = 7
    q, k, v = draw.floats(B, S, D), draw.floats(B, length, D), draw.floats(B, length, 2 * D)
    check("MultiHeadAttention", [q, k, v, draw.floats(4 * D)], num_heads=N)
    check("MultiHeadAttention", [q, k, v], num_heads=N, scale=0.2)
    v, bias = draw.floats(B, length, D), draw.floats(3 * D)
    for mask in (MASKS["lengths"](), draw.bits(B, length), draw.bits(B, S, length)):
        check("MultiHeadAttention", [q, k, v, bias, mask], num_heads=N)
    scores_bias = draw.floats(1, N, S, length)
    check("MultiHeadAttention", [q, k, v, bias, None, scores_bias], ["y", "k", "v"], num_heads=N)
    past = [draw.floats(B, N, 3, H), draw.floats(B, N, 3, H)]
    own = [q, draw.floats(B, S, D), draw.floats(B, S, D)]
    with_past = [*own, bias, None, None, *past]
    check("MultiHeadAttention", with_past, ["y", "k", "v", "float"], num_heads=N, unidirectional=1, atol=1e-4)
    check("MultiHeadAttention", [*own, None, None, draw.floats(B, 1, S, S + 3), *past], ["y", "k", "v"], num_heads=N)
    cached = [q, draw.floats(B, N, length, H), draw.floats(B, N, length, H)]
    check("MultiHeadAttention", [*cached, bias], num_heads=N)
    check("MultiHeadAttention", cached, num_heads=N)


def test_multi_head_attention_packed_forms():
    q, k, v = (draw.floats(B, S, D) for _ in range(3))
    expected = run("MultiHeadAttention", q, k, v, num_heads=N)
    heads = [x.reshape(B, S, N, H) for x in (q, k, v)]
    np.testing.assert_allclose(run("MultiHeadAttention", np.stack(heads, 3), num_heads=N), expected, rtol=1e-6)
    pairs = np.stack(heads[1:], 3)
    np.testing.assert_allclose(run("MultiHeadAttention", q, pairs, num_heads=N), expected, rtol=1e-6)
    check_rules("MultiHeadAttention", [q, pairs, None], [expected], ["y"], {"num_heads": N})
    with pytest.raises(ShapeMismatch, match="no known form"):
        run("MultiHeadAttention", q, k[..., 0], v, num_heads=N)


def test_decoder_masked_multi_head_attention():
    name, attrs = "DecoderMaskedMultiHeadAttention", {"num_heads": N, "past_present_share_buffer": 1}
    q, k, v = (draw.floats(4, 1, D) for _ in range(3))
    caches = [draw.floats(4, N, 10, H), draw.floats(4, N, 10, H), np.array([6], np.int32)]
    check(name, [q, k, v, None, None, *caches, None, None, draw.floats(3 * D)], ["y", "k", "v"], **attrs)
    check(name, [q, k, v, draw.bits(4, 7), draw.floats(1, N, 1, 7), *caches], ["y", "k", "v"], **attrs)
    beams = [np.array([2], np.int32), draw.ints(0, 2, 2, 2, 10)]
    operands = [q, k, v, draw.bits(4, 7), None, *caches, *beams]
    check(name, operands, ["y", "k", "v", "float"], output_qk=1, rtol=1e-3, **attrs)
    check(name, [q, draw.floats(4, N, 7, H), draw.floats(4, N, 7, H), draw.bits(4, 7)], num_heads=N)


def test_packed_attention_is_attention_without_the_padding():
    lengths = np.array([1, 2, 4], np.int32)
    x, w, b = draw.floats(3, 4, D), draw.floats(D, 3 * D) * 0.2, draw.floats(3 * D)
    tokens, offsets, ends, longest = run("RemovePadding", x, lengths, outputs=4)
    assert ends.tolist() == [0, 1, 3, 7]
    assert longest.tolist() == [4]
    packed = run("PackedAttention", tokens, w, b, offsets, ends, num_heads=N)
    padded = run("Attention", x, w, b, lengths, num_heads=N, mask_filter_value=-1e30)
    real = np.arange(4) < lengths[:, None]
    restored = run("RestorePadding", packed, offsets)
    np.testing.assert_allclose(restored[real], padded[real], rtol=1e-5, atol=1e-6)
    assert not restored[~real].any()
    check_rules("PackedAttention", [tokens, w, b, offsets, ends], [packed], ["y"], {"num_heads": N})

    q, k, v = (draw.floats(7, D) for _ in range(3))
    bias = draw.floats(3, N, 4, 4)
    found = run("PackedMultiHeadAttention", q, k, v, b, offsets, ends, bias, num_heads=N)
    wide = [run("RestorePadding", part, offsets) for part in (q, k, v)]
    padded = run("MultiHeadAttention", *wide, b, lengths, bias, num_heads=N, mask_filter_value=-1e30)
    np.testing.assert_allclose(found, padded[real], rtol=1e-5, atol=1e-6)
    together = np.stack([part.reshape(7, N, H) for part in (q, k, v)], axis=2)
    np.testing.assert_array_equal(
        run("PackedMultiHeadAttention", together, None, None, b, offsets, ends, bias, num_heads=N), found
    )


# -- grouped attention ------------------------------------------------------------------------------------------------

K, G = 2, 16  # key heads, and the head size that ONNX Runtime wants here
GROUPED = {"num_heads": N, "kv_num_heads": K}


def angles(rows=30, half=8):
    phase = np.arange(rows)[:, None] / 10000 ** (np.arange(half) / half)
    return [np.cos(phase).astype(np.float32), np.sin(phase).astype(np.float32)]


def grouped(batch, length):
    return [draw.floats(batch, length, N * G), draw.floats(batch, length, K * G), draw.floats(batch, length, K * G)]


def lengths(*totals):
    return [np.array([t - 1 for t in totals], np.int32), np.array(max(totals), np.int32)]


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"softcap": 2.0},
        {"local_window_size": 2},
        {"scale": 0.1, "smooth_softmax": 1},
        {"do_rotary": 1},
        {"do_rotary": 1, "rotary_interleaved": 1},
    ],
    ids=str,
)
def test_group_query_attention(attrs):
    name, outputs = "GroupQueryAttention", ["y", "k", "v"]
    tables = angles() if "do_rotary" in attrs else []
    attrs = {**GROUPED, **attrs}
    prompt = grouped(B, S)
    check(name, [*prompt, None, None, *lengths(S, S), *tables], outputs, **attrs)
    packed = [np.concatenate(prompt, axis=-1), None, None]
    check(name, [*packed, None, None, *lengths(S, S), *tables], outputs, **attrs)
    for rows in (8, 12):  # a cache that is just full, and one with room
        caches = [draw.floats(B, K, rows, G), draw.floats(B, K, rows, G)]
        check(name, [*grouped(B, 1), *caches, *lengths(9, 6), *tables], outputs, **attrs)
    caches = [draw.floats(1, K, 8, G), draw.floats(1, K, 8, G)]
    check(name, [*grouped(1, 3), *caches, *lengths(11), *tables], outputs, **attrs)


def test_group_query_attention_operands():
    name, outputs = "GroupQueryAttention", ["y", "k", "v"]
    prompt = [*grouped(B, S), None, None, *lengths(S, S)]
    check(name, prompt, outputs, causal=0, **GROUPED)
    check(name, [*prompt, None, None, None, draw.floats(1, N, S, S), draw.floats(N)], outputs, **GROUPED)
    for kind in (1, 2):
        check(name, prompt, [*outputs, "float"], qk_output=kind, **GROUPED)
    caches = [draw.floats(B, K, 8, G), draw.floats(B, K, 8, G)]
    placed = [*grouped(B, 1), *caches, *lengths(9, 6), *angles(), np.array([[3], [4]]), draw.floats(B, 1, 1, 9)]
    check(name, placed, outputs, do_rotary=1, **GROUPED)
    nothing_new = [draw.floats(B, 1, N * G), np.zeros((B, 0, K * G), np.float32), np.zeros((B, 0, K * G), np.float32)]
    check(name, [*nothing_new, *caches, *lengths(8, 6)], outputs, **GROUPED)
    with pytest.raises(NotSupported, match="sliding_window_cache"):
        run(name, *prompt, sliding_window_cache=1, local_window_size=4, **GROUPED)


@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("bits", [8, 4])
def test_group_query_attention_with_a_quantized_cache(kind, bits):
    dtype, width = (np.int8, G) if bits == 8 else (np.uint8, G // 2)
    step = draw.steps(1) if kind == "PER_TENSOR" else draw.steps(1, K, 1, G)
    step = step if bits == 8 else step * 15
    caches = [draw.codes(dtype, B, K, 8, width), draw.codes(dtype, B, K, 8, width)]
    operands = [*grouped(B, 1), *caches, *lengths(9, 6), None, None, None, None, None, step, step]
    quantized = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
    check("GroupQueryAttention", operands, ["y", "k", "v"], atol=3e-2, **quantized, **GROUPED)


def test_group_query_attention_normalizes_heads():
    q, k, v = grouped(B, S)
    weight = [draw.floats(G), draw.floats(G)]

    def normalized(x, heads, scale):
        parts = x.reshape(B, S, heads, G)
        return (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-6) * scale).reshape(x.shape)

    rest = [None, None, *lengths(S, S)]
    found = run("GroupQueryAttention", q, k, v, *rest, *[None] * 7, *weight, **GROUPED)
    plain = run("GroupQueryAttention", normalized(q, N, weight[0]), normalized(k, K, weight[1]), v, *rest, **GROUPED)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)


def dense_attention(q, k, v, visible):
    """Grouped attention spelled out for one sequence; ``visible`` is [heads, queries, keys]."""
    q, k, v = q.reshape(-1, N, G), k.reshape(-1, K, G), v.reshape(-1, K, G)
    y = np.empty_like(q)
    for n in range(N):
        scores = np.where(visible[n], q[:, n] @ k[:, n // (N // K)].T / np.sqrt(G), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y[:, n] = weights / weights.sum(-1, keepdims=True) @ v[:, n // (N // K)]
    return y.reshape(len(q), -1)


def test_sparse_attention():
    layouts = np.array(
        [
            [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]],
        ]
    )
    columns = np.full((2, 9), -1, np.int32)
    for layout, listed in zip(layouts, columns):
        found = np.nonzero(layout)[1]
        listed[: len(found)] = found
    rows = np.concatenate([np.zeros((2, 1)), np.cumsum(layouts.sum(2), axis=1)], axis=1).astype(np.int32)
    attrs = {**GROUPED, "sparse_block_size": 16}
    keys, values = draw.floats(1, 40, K * G), draw.floats(1, 40, K * G)
    query = draw.floats(1, 40, N * G)
    caches = [draw.floats(1, K, 64, G), draw.floats(1, K, 64, G)]
    sizes = [np.array([40], np.int32), np.array([40], np.int32)]
    y, present_key, _ = run("SparseAttention", query, keys, values, *caches, rows, columns, *sizes, outputs=3, **attrs)
    expanded = layouts.repeat(16, 1).repeat(16, 2)[:, :40, :40].astype(bool) & np.tri(40, dtype=bool)
    visible = expanded[np.arange(N) % 2]
    np.testing.assert_allclose(y[0], dense_attention(query[0], keys[0], values[0], visible), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(present_key[:, :, 40:], caches[0][:, :, 40:])
    # a step that follows reads the cache and agrees with the last row of the whole
    first = [x[:, :39] for x in (query, keys, values)]
    sizes = [np.array([39], np.int32), np.array([39], np.int32)]
    _, *caches = run("SparseAttention", *first, *caches, rows, columns, *sizes, outputs=3, **attrs)
    last = [x[:, 39:] for x in (query, keys, values)]
    sizes = [np.array([40], np.int32), np.array([40], np.int32)]
    step = run("SparseAttention", *last, *caches, rows, columns, *sizes, **attrs)
    np.testing.assert_allclose(step[0, 0], y[0, 39], rtol=1e-4, atol=1e-5)


# -- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved):
    tables = angles(20)
    where = draw.ints(0, 20, 2, 5, dtype=np.int64)
    check("RotaryEmbedding", [draw.floats(2, 5, 64), np.array([3]), *tables], interleaved=interleaved, num_heads=4)
    check("RotaryEmbedding", [draw.floats(2, 5, 64), where, *tables], interleaved=interleaved)
    check("RotaryEmbedding", [draw.floats(2, 4, 5, 16), where, *tables], interleaved=interleaved)
    part = {"interleaved": interleaved, "num_heads": 4, "rotary_embedding_dim": 16}
    check("RotaryEmbedding", [draw.floats(2, 5, 4 * 24), where, *tables], **part)
    with pytest.raises(InvalidValue, match="positions"):
        run("RotaryEmbedding", draw.floats(2, 5, 64), np.array([18]), *tables, num_heads=4)


@pytest.mark.parametrize(("layout", "sections"), [(0, [2, 3, 3]), (1, [4, 2, 2])])
def test_multimodal_rotary_embedding(layout, sections):
    where = draw.ints(0, 20, 3, 2, 5, dtype=np.int64)
    attrs = {"mrope_section": sections, "mrope_layout": layout}
    check("MRotaryEmbedding", [draw.floats(2, 5, 64), where, *angles(20)], num_heads=4, **attrs)
    check("MRotaryEmbedding", [draw.floats(2, 4, 5, 16), where, *angles(20)], scale=2.0, interleaved=1, **attrs)


def test_gemma_rotary_embedding():
    angle, q, q_rot, k, k_rot = draw.floats(2, 5, 8), *(draw.floats(2, 3, 5, 8) for _ in range(4))
    turned = run("GemmaRotaryEmbedding", angle, q, q_rot, k, k_rot, outputs=2)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    np.testing.assert_allclose(turned[0], q * cos + q_rot * sin, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(turned[1], k * cos + k_rot * sin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("both_ways", [0, 1])
def test_relative_position_bias(both_ways):
    table = draw.floats(32, 3)
    attrs = {"is_bidirectional": both_ways, "max_distance": 128}
    found = run("RelativePositionBias", table, np.array(50), np.array(50), **attrs)
    assert found.shape == (1, 3, 50, 50)
    by_head = table.reshape(3, 32)  # in memory the table is stored by head
    near = 8 if both_ways else 16
    for distance in range(near):
        np.testing.assert_array_equal(found[0, :, 49, 49 - distance], by_head[:, distance])
    # one bias per distance: the matrix is constant along its diagonals
    np.testing.assert_array_equal(found[..., 1:, 1:], found[..., :-1, :-1])
    if not both_ways:
        assert (found[0, :, 0] == found[0, :, 0, :1]).all()  # keys to come all count as distance 0


def test_gated_relative_position_bias():
    query, shift = draw.floats(2, 5, D), draw.floats(D)
    positions, weight, bias, eco = draw.floats(1, N, 5, 5), draw.floats(H, 8), draw.floats(8), draw.floats(1, N, 1, 1)
    found = run("GatedRelativePositionBias", query, shift, positions, weight, bias, eco, num_heads=N)
    heads = (query + shift).reshape(2, 5, N, H).transpose(0, 2, 1, 3)
    gates = sigmoid((heads @ weight + bias).reshape(2, N, 5, 2, 4).sum(-1))
    expected = (gates[..., :1] * (gates[..., 1:] * eco - 1) + 2) * positions
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
