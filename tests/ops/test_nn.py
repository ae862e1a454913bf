"""Contractions, convolutions and pools against oracles written as plainly as possible, and against laws."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.dtypes import DType
from ranvier.graph.types import Symbol, TensorType
from ranvier.ops.nn import window
from ranvier.ops.registry import TypeCall, get
from tests.ops.nn_tools import close, evaluate, floats, ints, quick

# -- contractions -----------------------------------------------------------------------------------------------------


def test_matmul_of_halves_is_summed_in_float32() -> None:
    a = np.full((1, 4096), 0.1, np.float16)
    y = evaluate("MatMul", a, a.T)
    assert y.dtype == np.float16
    assert abs(float(y[0, 0]) - 4096 * float(a[0, 0]) ** 2) < 0.05


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integer_matmul_wraps_like_the_type(dtype: Any) -> None:
    info = np.iinfo(dtype)
    a = np.random.default_rng(1).integers(info.min, info.max, (3, 5), dtype)
    b = np.random.default_rng(2).integers(info.min, info.max, (5, 4), dtype)
    expected = np.array([[sum(int(p) * int(q) for p, q in zip(row, col)) for col in b.T] for row in a], object)
    modulus = 1 << info.bits
    exact = np.array([[(v - int(info.min)) % modulus + int(info.min) for v in row] for row in expected], dtype)
    np.testing.assert_array_equal(evaluate("MatMul", a, b), exact)


@pytest.mark.parametrize("version", [1, 6, 7, 9, 11, 13])
def test_gemm_in_every_version(version: int) -> None:
    a, b, c = floats(4, 3), floats(5, 3), floats(5)
    flag = {"broadcast": 1} if version < 7 else {}
    y = evaluate("Gemm", a, b, c, version=version, alpha=0.5, beta=2.0, transB=1, **flag)
    close(y, 0.5 * a @ b.T + 2 * c)


def test_gemm_of_integers_keeps_fractional_factors() -> None:
    a = np.arange(6, dtype=np.int32).reshape(2, 3)
    y = evaluate("Gemm", a, a.T.copy(), None, alpha=0.5)
    np.testing.assert_array_equal(y, (0.5 * (a @ a.T)).astype(np.int32))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ij,jk", [(2, 3), (3, 4)]), ("...ii->...i", [(2, 3, 3)]), ("bij,bkj->bik", [(2, 3, 4), (2, 5, 4)])],
)
def test_einsum_matches_numpy(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [floats(*s, seed=k) for k, s in enumerate(shapes)]
    close(evaluate("Einsum", *operands, equation=equation), np.einsum(equation, *operands))


def test_det_of_a_product() -> None:
    a, b = floats(4, 4, dtype=np.float64), floats(4, 4, seed=1, dtype=np.float64)
    close(evaluate("Det", a @ b), evaluate("Det", a) * evaluate("Det", b), 1e-8)


# -- convolutions -----------------------------------------------------------------------------------------------------


def naive_conv(x, w, strides, dilations, pads, group):
    """Every output element as the sum over its window, in float64 (or exactly, for integers)."""
    rank = w.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:])])
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations)]
    sizes = [(n - e) // s + 1 for n, e, s in zip(x.shape[2:], spans, strides)]
    y = np.zeros((x.shape[0], w.shape[0], *sizes), x.dtype)
    per_group, inputs = w.shape[0] // group, w.shape[1]
    for n, m in itertools.product(range(x.shape[0]), range(w.shape[0])):
        first = m // per_group * inputs
        for at in itertools.product(*map(range, sizes)):
            part = tuple(slice(a * s, a * s + e, d) for a, s, e, d in zip(at, strides, spans, dilations))
            y[(n, m, *at)] = (x[(n, slice(first, first + inputs), *part)] * w[m]).sum()
    return y


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 3))
    axes = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    group, inputs, outputs = draw(st.sampled_from([(1, 3, 2), (1, 1, 1), (2, 2, 3), (3, 1, 1), (4, 1, 2)]))
    kernel, dilations, strides = axes(1, 3), axes(1, 2), axes(1, 3)
    pads = axes(0, 2) + axes(0, 2)
    spatial = tuple(draw(st.integers((k - 1) * d + 1, (k - 1) * d + 4)) for k, d in zip(kernel, dilations))
    return {
        "x": (draw(st.integers(1, 2)), group * inputs, *spatial),
        "w": (group * outputs, inputs, *kernel),
        "geometry": {"strides": strides, "dilations": dilations, "pads": pads, "group": group},
    }


@quick
@given(convolutions())
def test_conv_is_a_sum_over_windows(case) -> None:
    x, w = floats(*case["x"]), floats(*case["w"], seed=1)
    bias = floats(w.shape[0], seed=2)
    expected = naive_conv(x.astype(np.float64), w.astype(np.float64), **case["geometry"])
    close(evaluate("Conv", x, w, bias, **case["geometry"]), expected + bias.reshape(-1, *(1,) * (x.ndim - 2)))


@quick
@given(convolutions())
def test_integer_convolution_is_exact(case) -> None:
    random = np.random.default_rng(3)
    x, w = random.integers(-128, 128, case["x"]), random.integers(-128, 128, case["w"])
    y = window.convolve(x.astype(np.int8), w.astype(np.int8), accumulate=np.dtype(np.int32), **case["geometry"])
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, naive_conv(x, w, **case["geometry"]))


@quick
@given(convolutions())
def test_conv_transpose_is_the_adjoint_of_conv(case) -> None:
    geometry = case["geometry"]
    rank = len(geometry["strides"])
    x, w = floats(*case["x"], dtype=np.float64), floats(*case["w"], seed=1, dtype=np.float64)
    y = evaluate("Conv", x, w, **geometry)
    rest = [
        (n + geometry["pads"][i] + geometry["pads"][i + rank] - (k - 1) * d - 1) % s
        for i, (n, k, d, s) in enumerate(zip(x.shape[2:], w.shape[2:], geometry["dilations"], geometry["strides"]))
    ]
    z = floats(*y.shape, seed=4, dtype=np.float64)
    back = evaluate("ConvTranspose", z, w, output_padding=rest, **geometry)
    assert back.shape == x.shape
    close((y * z).sum(), (x * back).sum(), 1e-9)


def test_a_convolution_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = floats(2, 6, 11, 7), floats(4, 3, 3, 2, seed=1)
    attrs = {"group": 2, "strides": (2, 1), "pads": (1, 0, 2, 1)}
    whole = evaluate("Conv", x, w, **attrs)
    monkeypatch.setattr(window, "_COLUMN_BYTES", 1)
    np.testing.assert_allclose(evaluate("Conv", x, w, **attrs), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_divides_the_size_by_the_stride(auto_pad: str, stride: int) -> None:
    x, w = floats(1, 2, 9, 8), floats(3, 2, 4, 3)
    y = evaluate("Conv", x, w, auto_pad=auto_pad, strides=(stride, stride))
    assert y.shape[2:] == (math.ceil(9 / stride), math.ceil(8 / stride))
    begin, _, end, _ = window.resolve_pads(auto_pad, None, (9, 8), (4, 3), (stride,) * 2, (1, 1))
    assert begin <= end if auto_pad == "SAME_UPPER" else begin >= end


def test_conv_transpose_output_shape_sets_the_size() -> None:
    x, w = floats(1, 1, 3, 3), floats(1, 2, 3, 3)
    y = evaluate("ConvTranspose", x, w, strides=(3, 2), output_shape=(10, 8))
    full = evaluate("ConvTranspose", x, w, strides=(3, 2))
    assert y.shape == (1, 2, 10, 8)
    np.testing.assert_array_equal(y[:, :, :9, :7], full)
    assert not y[:, :, 9:].any()
    assert not y[:, :, :, 7:].any()


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_deform_conv_without_offsets_is_conv(groups: tuple[int, int]) -> None:
    group, offset_group = groups
    x, w = floats(2, 4, 6, 5), floats(6, 4 // group, 3, 2)
    attrs = {"pads": (1, 0, 1, 1), "strides": (2, 1), "group": group}
    y = evaluate("Conv", x, w, **attrs)
    offset = np.zeros((2, offset_group * 12, *y.shape[2:]), np.float32)
    close(evaluate("DeformConv", x, w, offset, offset_group=offset_group, **attrs), y)
    mask = np.full((2, offset_group * 6, *y.shape[2:]), 0.5, np.float32)
    close(evaluate("DeformConv", x, w, offset, None, mask, offset_group=offset_group, **attrs), y / 2)


def test_deform_conv_samples_between_pixels() -> None:
    x = np.arange(20, dtype=np.float32).reshape(1, 1, 4, 5)
    offset = np.zeros((1, 2, 4, 5), np.float32)
    offset[:, 0], offset[:, 1] = 0.25, 0.5  # down, right
    y = evaluate("DeformConv", x, np.ones((1, 1, 1, 1), np.float32), offset)
    close(y[0, 0, :3, :4], x[0, 0, :3, :4] + 0.25 * 5 + 0.5)


def test_col2im_adds_what_overlaps() -> None:
    strides, dilations, pads = (2, 1), (1, 2), (1, 0, 1, 1)
    counts = window.output_sizes((5, 6), (3, 2), strides, dilations, pads)
    columns = floats(2, 3 * 6, math.prod(counts))
    blocks = columns.reshape(2, 3, 3, 2, *counts)
    expected = np.zeros((2, 3, 5, 6))
    for a, b, i, j in itertools.product(range(3), range(2), *map(range, counts)):
        row, column = 2 * i + a - 1, j + 2 * b
        if 0 <= row < 5 and 0 <= column < 6:
            expected[:, :, row, column] += blocks[:, :, a, b, i, j]
    y = evaluate("Col2Im", columns, ints(5, 6), ints(3, 2), strides=strides, dilations=dilations, pads=pads)
    close(y, expected)


def test_causal_conv_continues_from_its_state() -> None:
    x, w, bias = floats(2, 3, 9), floats(3, 1, 4), floats(3)
    whole, state = evaluate("CausalConvWithState", x, w, bias, outputs=2, activation="silu")
    first, between = evaluate("CausalConvWithState", x[..., :2], w, bias, outputs=2, activation="silu")
    second, last = evaluate("CausalConvWithState", x[..., 2:], w, bias, between, outputs=2, activation="silu")
    close(np.concatenate([first, second], axis=2), whole)
    np.testing.assert_array_equal(last, state)


# -- pooling ----------------------------------------------------------------------------------------------------------


def naive_pool(x, kernel, strides, dilations, pads, ceil_mode, reduce):
    """``reduce(values inside the image, number of positions inside image and pads)`` for each window."""
    rank, spatial = len(kernel), x.shape[2:]
    rounded = math.ceil if ceil_mode else math.floor
    sizes = []
    for i in range(rank):
        room = spatial[i] + pads[i] + pads[i + rank] - (kernel[i] - 1) * dilations[i] - 1
        size = rounded(room / strides[i]) + 1
        sizes.append(size - 1 if (size - 1) * strides[i] >= spatial[i] + pads[i] else size)
    y = np.zeros((*x.shape[:2], *sizes))
    for at in itertools.product(*(range(s) for s in y.shape)):
        values, counted = [], 0
        for tap in itertools.product(*map(range, kernel)):
            where = [at[2 + i] * strides[i] + tap[i] * dilations[i] - pads[i] for i in range(rank)]
            counted += all(w < n + pads[i + rank] for i, (w, n) in enumerate(zip(where, spatial)))
            if all(0 <= w < n for w, n in zip(where, spatial)):
                values.append(float(x[(*at[:2], *where)]))
        y[at] = reduce(values, counted)
    return y


@st.composite
def pools(draw):
    rank = draw(st.integers(1, 2))
    axes = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    kernel, dilations = axes(1, 3), axes(1, 2)
    pads = tuple(min(p, k - 1) for p, k in zip(axes(0, 2) + axes(0, 2), kernel * 2))
    spatial = tuple((k - 1) * d + draw(st.integers(1, 4)) for k, d in zip(kernel, dilations))
    geometry = {"strides": axes(1, 3), "dilations": dilations, "pads": pads, "ceil_mode": draw(st.integers(0, 1))}
    return spatial, kernel, geometry


@quick
@given(pools(), st.integers(0, 1))
def test_pools_reduce_every_window(case, include) -> None:
    spatial, kernel, geometry = case
    x = floats(1, 2, *spatial)
    means = lambda v, n: sum(v) / (n if include else max(len(v), 1))  # noqa: E731
    norms = lambda v, n: sum(abs(e) ** 3 for e in v) ** (1 / 3)  # noqa: E731
    expected = naive_pool(x, kernel, **geometry, reduce=lambda v, n: max(v, default=-np.inf))
    close(evaluate("MaxPool", x, kernel_shape=kernel, **geometry), expected)
    averaged = evaluate("AveragePool", x, kernel_shape=kernel, count_include_pad=include, **geometry)
    expected = naive_pool(x, kernel, **geometry, reduce=means)
    filled = np.isfinite(averaged)  # a window of nothing but padding has no mean
    close(averaged[filled], expected[filled])
    expected = naive_pool(x, kernel, **geometry, reduce=norms)
    close(evaluate("LpPool", x, kernel_shape=kernel, p=3, **geometry), expected)


@quick
@given(pools(), st.integers(0, 1))
def test_max_pool_indices_point_at_the_values(case, order) -> None:
    spatial, kernel, geometry = case
    x = np.round(floats(2, 2, *spatial))  # with ties
    y, at = evaluate("MaxPool", x, outputs=2, kernel_shape=kernel, storage_order=order, **geometry)
    flat = x.reshape(4, -1) if not order else np.stack([p.ravel(order="F") for p in x.reshape(4, *spatial)])
    held = np.isfinite(y)
    np.testing.assert_array_equal(flat.reshape(-1)[at[held]], y[held])
    planes = np.arange(4).reshape(2, 2, *(1,) * len(spatial))
    assert (at // math.prod(spatial) == planes)[held].all()


def test_max_pool_of_small_integers_ignores_padding() -> None:
    x = np.full((1, 1, 2, 2), -100, np.int8)
    y = evaluate("MaxPool", x, kernel_shape=(2, 2), pads=(1, 1, 1, 1), version=12)
    assert y.dtype == np.int8
    assert (y == -100).all()


def test_unpooling_undoes_pooling() -> None:
    x = floats(2, 3, 6, 8)
    y, at = evaluate("MaxPool", x, outputs=2, kernel_shape=(2, 2), strides=(2, 2))
    spread = evaluate("MaxUnpool", y, at, kernel_shape=(2, 2), strides=(2, 2))
    assert spread.shape == x.shape
    kept = spread != 0
    np.testing.assert_array_equal(spread[kept], x[kept])
    assert kept.sum() == y.size


def test_global_pools() -> None:
    x = floats(2, 3, 4, 5)
    close(evaluate("GlobalAveragePool", x), x.mean((2, 3), keepdims=True))
    close(evaluate("GlobalMaxPool", x), x.max((2, 3), keepdims=True))
    close(evaluate("GlobalLpPool", x, p=1), np.abs(x).sum((2, 3), keepdims=True))


# -- cost -------------------------------------------------------------------------------------------------------------


def cost(name: str, types: list[TensorType], result: TensorType, **attrs: Any) -> float:
    rule = get("", name).cost_rule
    assert rule is not None
    call = TypeCall(types, [None] * len(types), attrs, 1, 1, result_types=[result])
    estimate = rule(call)
    assert estimate.bytes > 0
    return estimate.flops


def tensor(*shape: Any) -> TensorType:
    return TensorType(DType.float32, shape)


def test_costs_count_multiplications_and_additions() -> None:
    assert cost("MatMul", [tensor(2, 3, 4), tensor(4, 5)], tensor(2, 3, 5)) == 2 * 2 * 3 * 4 * 5
    assert cost("Gemm", [tensor(4, 3), tensor(5, 4)], tensor(3, 5), transA=1, transB=1) == 2 * 3 * 4 * 5
    assert cost("Conv", [tensor(2, 4, 8, 8), tensor(6, 2, 3, 3)], tensor(2, 6, 6, 6), group=2) == 2 * 108 * 2 * 36
    assert cost("Einsum", [tensor(2, 3, 4), tensor(2, 4, 5)], tensor(2, 3, 5), equation="bij,bjk->bik") == 240
    assert cost("LSTM", [tensor(5, 2, 3), tensor(1, 16, 3), tensor(1, 16, 4)], tensor(5, 1, 2, 4)) == 2 * 112 * 10
    batch = Symbol("batch")
    assert cost("MatMul", [tensor(batch, 3, 4), tensor(4, 5)], tensor(batch, 3, 5)) == 2 * 3 * 4 * 5
