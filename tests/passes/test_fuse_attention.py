"""Attention as exporters spell it out, with every kind of scale and mask, and what must not become one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.passes.fuse_tools import Fused, Sketch, assert_same, fused

HEADS, SIZE = 2, 4
BOTH = (0, 1, 3, 2)


def qkv(s: Sketch, batch: Any = "b", heads: int = HEADS, keys: Any = "t") -> tuple[str, str, str]:
    """Q, K and V as [batch, heads, time, size]."""
    return (
        s.input("q", [batch, heads, "s", SIZE]),
        s.input("k", [batch, heads, keys, SIZE]),
        s.input("v", [batch, heads, keys, SIZE]),
    )


def attend(s: Sketch, scores: str, v: str) -> str:
    return s.MatMul(s.Softmax(scores, axis=-1), v)


def scores_of(s: Sketch, q: str, k: str, scale: float = 0.5) -> str:
    return s.Mul(s.MatMul(q, s.Transpose(k, perm=BOTH)), scale)


def check(s: Sketch, y: str, **sizes: int) -> Fused:
    return assert_same(s.model(y), sizes={"s": 3, "t": 5, "b": 2, **sizes})


def attrs(found: Fused) -> dict[str, Any]:
    return dict(found.only("Attention").attrs)


# -- scale ----------------------------------------------------------------------------------------------------------


def test_divided_scores() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    found = check(s, attend(s, s.Div(s.MatMul(q, s.Transpose(k, perm=BOTH)), 2.0), v))
    assert found.ops == {"Attention": 1}
    assert attrs(found) == {"scale": 0.5}


def test_no_scale_at_all() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    found = check(s, attend(s, s.MatMul(q, s.Transpose(k, perm=BOTH)), v))
    assert attrs(found) == {"scale": 1.0}


def test_scaled_queries() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    found = check(s, attend(s, s.MatMul(s.Mul(q, 0.25), s.Transpose(k, perm=BOTH)), v))
    assert found.ops == {"Attention": 1} and attrs(found) == {"scale": 0.25}


@pytest.mark.parametrize("before", [False, True])
def test_root_of_the_scale_on_both_sides(before: bool) -> None:
    s = Sketch()
    q, k, v = qkv(s)
    root = math.sqrt(0.5)
    keys = s.Transpose(s.Mul(k, root), perm=BOTH) if before else s.Mul(s.Transpose(k, perm=BOTH), root)
    found = check(s, attend(s, s.MatMul(s.Mul(q, root), keys), v))
    assert found.ops == {"Attention": 1}
    assert attrs(found)["scale"] == pytest.approx(0.5)


def test_a_learnt_scale_per_head_stays_on_the_queries() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    gain = np.linspace(0.5, 1, HEADS, dtype=np.float32).reshape(HEADS, 1, 1)
    found = check(s, attend(s, s.MatMul(s.Mul(q, gain), s.Transpose(k, perm=BOTH)), v))
    assert found.ops == {"Mul": 1, "Attention": 1}


def test_a_scale_per_head_on_the_scores_is_a_reason() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    gain = np.linspace(0.5, 1, HEADS, dtype=np.float32).reshape(HEADS, 1, 1)
    found = check(s, attend(s, s.Mul(s.MatMul(q, s.Transpose(k, perm=BOTH)), gain), v))
    assert "Attention" not in found.ops
    assert "the scale is not one positive constant number" in found.reasons()


def test_capped_scores() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    capped = s.Mul(s.Tanh(s.Div(scores_of(s, q, k), 3.0)), 3.0)
    found = check(s, attend(s, capped, v))
    assert found.ops == {"Attention": 1} and attrs(found) == {"scale": 0.5, "softcap": 3.0}


def test_softmax_in_float32() -> None:
    s = Sketch(dtype=np.float16)
    q, k, v = qkv(s)
    weights = s.Cast(s.Softmax(s.Cast(scores_of(s, q, k), to=1), axis=-1), to=10)
    found = check(s, s.MatMul(weights, v))
    assert found.ops == {"Attention": 1}
    assert attrs(found) == {"scale": 0.5, "softmax_precision": 1}
    assert str(found.graph.outputs[0].type) == f"float16[b, {HEADS}, s, {SIZE}]"


# -- layout ---------------------------------------------------------------------------------------------------------


def test_keys_transposed_from_time_before_heads() -> None:
    s = Sketch()
    q, v = s.input("q", ["b", HEADS, "s", SIZE]), s.input("v", ["b", HEADS, "t", SIZE])
    k = s.input("k", ["b", "t", HEADS, SIZE])
    found = check(s, attend(s, s.MatMul(q, s.Transpose(k, perm=(0, 2, 3, 1))), v))
    assert found.ops == {"Transpose": 1, "Attention": 1}
    assert found.only("Transpose").attrs["perm"] == (0, 2, 1, 3)


def test_keys_kept_transposed() -> None:
    s = Sketch()
    q, v = s.input("q", ["b", HEADS, "s", SIZE]), s.input("v", ["b", HEADS, "t", SIZE])
    k = s.input("k", ["b", HEADS, SIZE, "t"])
    assert check(s, attend(s, s.MatMul(q, k), v)).ops == {"Transpose": 1, "Attention": 1}


def test_transposed_keys_that_leave_the_model() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    keys = s.Transpose(k, perm=BOTH)
    y = attend(s, s.MatMul(q, keys), v)
    found = assert_same(s.model(y, keys))
    assert found.ops["Attention"] == 1


def test_keys_transposed_with_flattened_heads() -> None:
    """The path of torch.onnx's newest exporter, with its guard against rows of NaN."""
    s = Sketch()
    q, k, v = qkv(s)
    shape = s.Shape(k)
    time, size = s.Slice(shape, [-2], [-1]), s.Slice(shape, [-1], [1 << 62])
    flat = s.Reshape(k, s.Concat([-1], time, size, axis=0))
    lead = s.Slice(shape, [0], [-2])
    keys = s.Reshape(s.Transpose(flat, perm=(0, 2, 1)), s.Concat(lead, size, time, axis=0))
    weights = s.Softmax(s.Add(s.MatMul(s.Mul(q, 0.7), s.Mul(keys, 0.7)), s.input("mask", ["b", 1, "s", "t"])), axis=-1)
    y = s.MatMul(s.Where(s.IsNaN(weights), 0.0, weights), v)
    found = check(s, y)
    assert found.ops["Attention"] == 1
    assert not found.ops.keys() & {"Softmax", "MatMul", "IsNaN", "Reshape", "Transpose"}
    assert attrs(found)["scale"] == pytest.approx(0.49)


def test_three_axes_with_heads_among_the_samples() -> None:
    s = Sketch()
    q, k, v = s.input("q", ["b", "s", SIZE]), s.input("k", ["b", "t", SIZE]), s.input("v", ["b", "t", SIZE])
    scores = s.MatMul(s.Mul(q, 0.5), s.Transpose(k, perm=(0, 2, 1)))
    found = check(s, attend(s, s.Add(scores, s.input("mask", ["b", "s", "t"])), v))
    assert found.ops["Attention"] == 1 and not found.ops.keys() & {"Softmax", "MatMul", "Add", "Transpose"}


def test_one_head_of_keys_for_all_queries() -> None:
    s = Sketch()
    q = s.input("q", ["b", HEADS, "s", SIZE])
    k, v = s.input("k", ["b", 1, "t", SIZE]), s.input("v", ["b", 1, "t", SIZE])
    assert check(s, attend(s, scores_of(s, q, k), v)).ops == {"Attention": 1}


def test_repeated_key_heads_are_shared() -> None:
    s = Sketch()
    q = s.input("q", [2, 2 * HEADS, 3, SIZE])
    k, v = s.input("k", [2, HEADS, 5, SIZE]), s.input("v", [2, HEADS, 5, SIZE])

    def wide(x: str) -> str:
        spread = s.Expand(s.Unsqueeze(x, [2]), [2, HEADS, 2, 5, SIZE])
        return s.Reshape(spread, [2, 2 * HEADS, 5, SIZE])

    found = check(s, attend(s, scores_of(s, q, wide(k)), wide(v)))
    assert found.ops == {"Attention": 1}


def test_heads_repeated_in_turn_are_not_shared() -> None:
    s = Sketch()
    q = s.input("q", [2, 2 * HEADS, 3, SIZE])
    k, v = s.input("k", [2, HEADS, 5, SIZE]), s.input("v", [2, HEADS, 5, SIZE])

    def wide(x: str) -> str:
        spread = s.Expand(s.Unsqueeze(x, [1]), [2, 2, HEADS, 5, SIZE])
        return s.Reshape(spread, [2, 2 * HEADS, 5, SIZE])

    found = check(s, attend(s, scores_of(s, q, wide(k)), wide(v)))
    assert found.ops["Attention"] == 1 and found.ops["Expand"] == 2
    assert "the heads are not repeated one by one" in found.reasons()


@pytest.mark.parametrize("batch", [None, 1])
def test_a_batch_that_may_broadcast_is_a_reason(batch: int | None) -> None:
    s = Sketch()
    q = s.input("q", ["b", HEADS, "s", SIZE])
    k, v = s.input("k", [batch, HEADS, "t", SIZE]), s.input("v", [batch, HEADS, "t", SIZE])
    y = attend(s, scores_of(s, q, k), v)
    found = assert_same(s.model(y), sizes={"b": 3})
    assert "Attention" not in found.ops
    assert "not known to be of one batch" in found.reasons()


def test_unknown_ranks_are_a_reason() -> None:
    s = Sketch()
    q, k, v = (s.input(name, None) for name in "qkv")
    found = fused(s.model(attend(s, scores_of(s, q, k), v)))
    assert "Attention" not in found.ops
    assert "the ranks of Q, K and V are not known" in found.reasons()


def test_softmax_over_queries_is_a_reason() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    found = check(s, s.MatMul(s.Softmax(scores_of(s, q, k), axis=2), v))
    assert "Softmax does not run over the keys" in found.reasons()


def test_weights_that_leave_the_model_are_kept() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    weights = s.Softmax(scores_of(s, q, k), axis=-1)
    assert "Attention" not in assert_same(s.model(s.MatMul(weights, v), weights)).ops


# -- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [["b", 1, 1, "t"], ["b", HEADS, "s", "t"], ["s", "t"], [1, 1, "s", "t"], ["t"]])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_added_mask(shape: list[Any], dtype: object) -> None:
    s = Sketch(dtype=dtype)
    q, k, v = qkv(s)
    found = check(s, attend(s, s.Add(scores_of(s, q, k), s.input("mask", shape)), v))
    assert found.ops == {"Attention": 1}


def test_a_mask_of_length_one_is_spread_over_the_keys() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    found = check(s, attend(s, s.Add(scores_of(s, q, k), s.input("mask", ["b", 1, "s", 1])), v))
    assert found.ops == {"Attention": 1, "Shape": 1, "Expand": 1}


def test_a_mask_that_widens_the_scores_is_a_reason() -> None:
    s = Sketch()
    q, k, v = qkv(s, batch=1)
    found = check(s, attend(s, s.Add(scores_of(s, q, k), s.input("mask", ["b", 1, "s", "t"])), v))
    assert "Attention" not in found.ops
    assert "the mask may widen the scores" in found.reasons()


@pytest.mark.parametrize("kept", [False, True])
def test_scores_replaced_by_minus_infinity(kept: bool) -> None:
    s = Sketch()
    q, k, v = qkv(s)
    mask, scores = s.input("mask", ["b", 1, "s", "t"], np.bool_), scores_of(s, q, k)
    masked = s.Where(mask, scores, -math.inf) if kept else s.Where(mask, -math.inf, scores)
    model = s.model(attend(s, masked, v))
    rng = np.random.default_rng(1)
    x = [rng.standard_normal((2, HEADS, n, SIZE)).astype(np.float32) for n in (3, 5, 5)]
    allowed = rng.random((2, 1, 3, 5)) < 0.6
    allowed[..., 0] = True  # every query sees some key: else the exported model gives NaN
    found = assert_same(model, [*x, allowed if kept else ~allowed])
    assert found.ops == ({"Attention": 1} if kept else {"Attention": 1, "Not": 1})


def test_scores_replaced_by_the_lowest_number() -> None:
    """A query without keys then sees all of them alike, and must go on to do so."""
    s = Sketch()
    q, k, v = qkv(s)
    lowest = float(np.finfo(np.float32).min)
    masked = s.Where(s.input("mask", ["b", 1, "s", "t"], np.bool_), scores_of(s, q, k), lowest)
    model = s.model(attend(s, masked, v))
    rng = np.random.default_rng(1)
    x = [rng.standard_normal((2, HEADS, n, SIZE)).astype(np.float32) for n in (3, 5, 5)]
    allowed = rng.random((2, 1, 3, 5)) < 0.5
    allowed[0, 0, 1] = False
    assert assert_same(model, [*x, allowed]).ops == {"Where": 1, "Attention": 1}


def test_scores_replaced_by_a_number_that_is_not_low_are_a_reason() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    masked = s.Where(s.input("mask", ["b", 1, "s", "t"], np.bool_), scores_of(s, q, k), -100.0)
    assert "masked scores become -100" in check(s, attend(s, masked, v)).reasons()


def test_a_condition_is_the_mask() -> None:
    s = Sketch()
    q, k, v = qkv(s)
    keep = s.input("mask", ["b", 1, "s", "t"], np.bool_)
    y = attend(s, s.Add(scores_of(s, q, k), s.Where(keep, 0.0, -math.inf)), v)
    rng = np.random.default_rng(1)
    x = [rng.standard_normal((2, HEADS, n, SIZE)).astype(np.float32) for n in (3, 5, 5)]
    allowed = rng.random((2, 1, 3, 5)) < 0.6
    allowed[..., 0] = True
    assert assert_same(s.model(y), [*x, allowed]).ops == {"Attention": 1}


@pytest.mark.parametrize("low", [-math.inf, float(np.finfo(np.float32).min), -1e9])
@pytest.mark.parametrize("keys", [4, 6])
def test_a_constant_causal_mask_becomes_an_attribute(low: float, keys: int) -> None:
    s = Sketch()
    q, k, v = (
        s.input("q", ["b", HEADS, 4, SIZE]),
        s.input("k", ["b", HEADS, keys, SIZE]),
        s.input("v", ["b", HEADS, keys, SIZE]),
    )
    mask = np.where(np.tri(4, keys, dtype=bool), 0, np.float32(low)).astype(np.float32)[None, None]
    found = check(s, attend(s, s.Add(scores_of(s, q, k), mask), v))
    assert found.ops == {"Attention": 1}
    assert attrs(found)["is_causal"] == 1 and len(found.only("Attention").inputs) == 3


def test_a_mask_that_is_nearly_causal_stays() -> None:
    s = Sketch()
    q, k, v = (
        s.input("q", ["b", HEADS, 4, SIZE]),
        s.input("k", ["b", HEADS, 4, SIZE]),
        s.input("v", ["b", HEADS, 4, SIZE]),
    )
    mask = np.where(np.tri(4, 4, 1, dtype=bool), 0, -np.inf).astype(np.float32)
    assert "is_causal" not in attrs(check(s, attend(s, s.Add(scores_of(s, q, k), mask), v)))


@pytest.mark.parametrize("boolean", [False, True])
def test_a_causal_mask_from_a_triangle_of_ones(boolean: bool) -> None:
    s = Sketch()
    q, k, v = (s.input(name, ["b", HEADS, 4, SIZE]) for name in "qkv")
    lower = s.Trilu(s.Expand(1.0, [4, 4]), upper=0)
    if boolean:
        masked = s.Where(s.Cast(lower, to=9), scores_of(s, q, k), -math.inf)
    else:
        masked = s.Add(scores_of(s, q, k), s.Where(s.Equal(lower, 0.0), -math.inf, 0.0))
    found = check(s, attend(s, masked, v))
    assert attrs(found)["is_causal"] == 1
    assert not found.ops.keys() & {"MatMul", "Softmax"}


def test_a_triangle_of_something_else_is_not_causal() -> None:
    s = Sketch()
    q, k, v = (s.input(name, ["b", HEADS, 4, SIZE]) for name in "qkv")
    lower = s.Trilu(s.Expand(1.0, [4, 4]), np.array(1), upper=0)
    masked = s.Where(s.Cast(lower, to=9), scores_of(s, q, k), -math.inf)
    assert "is_causal" not in attrs(check(s, attend(s, masked, v)))
