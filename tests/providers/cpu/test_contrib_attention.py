"""com.microsoft attention in all its forms against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import InvalidValue
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(11)
MICROSOFT = "com.microsoft"
LOWEST = float(np.finfo(np.float32).min)


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.normal(size=shape).astype(dtype)


def tolerance(dtype: Any, loose: bool = False) -> dict[str, float]:
    if np.dtype(dtype) == np.float16:
        return {"rtol": 2e-2, "atol": 5e-3}
    return {"rtol": 1e-2, "atol": 3e-3} if loose else {"rtol": 1e-4, "atol": 1e-5}


def trimmed(operands: list[Array | None]) -> list[Array | None]:
    while operands[-1] is None:
        operands.pop()
    return operands


def padding(batch: int, keys: int, hidden: int) -> Array:
    """The first ``hidden`` keys of the first sequence are padding, some of the others too."""
    mask = (RNG.random((batch, keys)) > 0.3).astype(np.int32)
    mask[:, 0] = 1
    mask[0, :hidden], mask[0, hidden:] = 0, 1
    return mask


def attention(
    past: int = 0,
    time: int = 5,
    mask: Array | None = None,
    bias: Array | None = None,
    dtype: Any = np.float32,
    **how: Any,
) -> None:
    loose, batch, heads, hidden = how.pop("loose", False), 2, 4, 32
    sizes = how.get("qkv_hidden_sizes", [hidden] * 3)
    operands = trimmed(
        [
            numbers(batch, time, hidden, dtype=dtype),
            (numbers(hidden, sum(sizes)) * 0.2).astype(dtype),
            numbers(sum(sizes), dtype=dtype),
            mask,
            numbers(2, batch, heads, past, hidden // heads, dtype=dtype) if past else None,
            bias,
        ]
    )
    outputs = 2 if sizes[1] == sizes[2] else 1
    attrs = {"num_heads": heads, **how}
    check("Attention", operands, attrs, outputs=outputs, domain=MICROSOFT, constant=(1, 2), **tolerance(dtype, loose))


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"unidirectional": 1},
        {"past": 3, "unidirectional": 1},
        {"past": 7, "time": 1, "unidirectional": 1},
        {"scale": 0.3},
        {"qkv_hidden_sizes": [32, 32, 16]},
        {"past": 3, "unidirectional": 1, "dtype": np.float16, "mask": padding(2, 8, 0)},
    ],
    ids=str,
)
def test_attention_from_one_projection(form: dict[str, Any]) -> None:
    attention(**form)


@pytest.mark.parametrize(
    "form",
    [
        {"mask": np.array([3, 5], np.int32)},
        {"mask": np.array([3, 5, 1, 0], np.int32)},
        {"mask": np.array([3, 5, 0, 3, 8, 0, 3, 8], np.int32)},
        {"mask": padding(2, 5, 0)},
        {"mask": np.ones((2, 1), np.int32)},
        {"mask": (RNG.random((2, 5, 5)) > 0.3).astype(np.int32), "mask_filter_value": -100.0},
        {"mask": np.tri(9, 9, 0, np.int32)[None, None].repeat(2, 0), "past": 2},
        {"mask": padding(2, 8, 0), "past": 3, "unidirectional": 1},
        {"bias": numbers(1, 4, 5, 5)},
        {"bias": numbers(2, 1, 5, 8), "past": 3, "mask": padding(2, 8, 0), "unidirectional": 1},
    ],
    ids=lambda form: str(sorted(form)),
)
def test_masks_of_every_form(form: dict[str, Any]) -> None:
    attention(**form)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("value", [-10000.0, LOWEST])
def test_rows_that_see_only_padding(causal: int, value: float) -> None:
    """Scores are lowered, not removed: such a row is spread over all keys."""
    attention(3, mask=padding(2, 8, 8), unidirectional=causal, mask_filter_value=value, loose=True)
    attention(3, mask=padding(2, 8, 5), unidirectional=causal, mask_filter_value=value, loose=True)
    attention(40, time=1, mask=padding(2, 41, 41), unidirectional=causal, mask_filter_value=value, loose=True)


def multi_head(*operands: Array | None, **attrs: Any) -> None:
    assert operands[0] is not None
    how = tolerance(operands[0].dtype)
    check("MultiHeadAttention", trimmed(list(operands)), {"num_heads": 4, **attrs}, outputs=3, domain=MICROSOFT, **how)


def test_multi_head_attention_from_every_form() -> None:
    q, k = numbers(2, 5, 32), numbers(2, 7, 32)
    multi_head(q, k, numbers(2, 7, 48))
    multi_head(q, k, numbers(2, 7, 48), numbers(112))
    multi_head(q, numbers(2, 4, 7, 8), numbers(2, 4, 7, 8), numbers(96))
    multi_head(numbers(2, 5, 4, 3, 8), None, None, numbers(96))
    multi_head(q, numbers(2, 7, 4, 2, 8))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_multi_head_attention_after_a_past(dtype: Any) -> None:
    new = [numbers(2, 5, 32, dtype=dtype) for _ in range(3)]
    past = [numbers(2, 4, 3, 8, dtype=dtype) for _ in range(2)]
    multi_head(*new, None, None, None, *past, unidirectional=1)
    bias, extra = numbers(96, dtype=dtype), numbers(1, 1, 5, 8, dtype=dtype)
    multi_head(*new, bias, padding(2, 8, 0), extra, *past, unidirectional=1)


def grouped(time: int, total: int, past: int = 0, ends: list[int] | None = None, **how: Any) -> None:
    batch, heads, groups, size = 2, 4, 2, 8
    dtype, packed, rotary = how.pop("dtype", np.float32), how.pop("packed", False), how.pop("rotary", False)
    positions, bias = how.pop("positions", None), how.pop("bias", None)
    fresh = [numbers(batch, time, n * size, dtype=dtype) for n in (heads, groups, groups)]
    operands: list[Array | None] = [np.concatenate(fresh, -1), None, None] if packed else [*fresh]
    operands += [numbers(batch, groups, past, size, dtype=dtype) if past else None for _ in range(2)]
    operands += [np.array([total - 1] * batch if ends is None else ends, np.int32), np.array([total], np.int32)]
    operands += [numbers(64, size // 2, dtype=dtype) if rotary else None for _ in range(2)]
    operands += [positions, bias]
    attrs = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": int(rotary), **how}
    check("GroupQueryAttention", trimmed(operands), attrs, outputs=3, domain=MICROSOFT, **tolerance(dtype))


@pytest.mark.parametrize(
    "form",
    [
        {"time": 5, "total": 5},
        {"time": 5, "total": 5, "ends": [2, 4]},
        {"time": 5, "total": 5, "past": 16},
        {"time": 1, "total": 8, "past": 7},
        {"time": 1, "total": 8, "past": 16, "ends": [7, 4]},
        {"time": 3, "total": 8, "past": 16, "ends": [7, 5]},
        {"time": 5, "total": 5, "softcap": 2.0, "scale": 0.7},
        {"time": 5, "total": 5, "packed": True, "rotary": True},
        {"time": 1, "total": 8, "past": 16, "ends": [7, 4], "packed": True, "rotary": True},
        {"time": 1, "total": 8, "past": 16, "ends": [7, 4], "rotary": True, "rotary_interleaved": 1},
        {"time": 1, "total": 8, "past": 16, "rotary": True, "positions": np.array([[3], [4]])},
        {"time": 5, "total": 5, "rotary": True, "positions": np.arange(10).reshape(2, 5)},
        {"time": 1, "total": 8, "past": 16, "ends": [7, 4], "rotary": True, "dtype": np.float16},
        {"time": 5, "total": 5, "ends": [2, 4], "local_window_size": 2},
        {"time": 1, "total": 8, "past": 16, "ends": [7, 4], "local_window_size": 3},
        {"time": 3, "total": 8, "past": 16, "ends": [7, 5], "bias": numbers(1, 4, 3, 8)},
        {"time": 5, "total": 5, "ends": [2, 4], "local_window_size": 2, "bias": numbers(1, 4, 5, 5)},
    ],
    ids=lambda form: "-".join(f"{k}{v}" for k, v in form.items() if isinstance(v, int)),
)
def test_grouped_attention_over_a_cache(form: dict[str, Any]) -> None:
    grouped(**form)


def test_more_keys_than_the_cache_holds_are_an_error() -> None:
    operands: list[Array | None] = [numbers(1, 1, 32), numbers(1, 1, 16), numbers(1, 1, 16)]
    operands += [numbers(1, 2, 6, 8), numbers(1, 2, 6, 8), np.array([9], np.int32), np.array([6], np.int32)]
    attrs = {"num_heads": 4, "kv_num_heads": 2}
    model = one_node("GroupQueryAttention", operands, attrs, outputs=3, domain=MICROSOFT)
    with rv.load(model, providers=["cpu"]) as session, pytest.raises(InvalidValue):
        session.run({f"x{k}": x for k, x in enumerate(operands) if x is not None})


@pytest.mark.parametrize(
    ("shape", "positions", "attrs"),
    [
        ((2, 5, 32), np.array([3]), {}),
        ((2, 5, 32), RNG.integers(0, 32, (2, 5)), {"num_heads": 4}),
        ((2, 4, 5, 8), RNG.integers(0, 32, (2, 5)), {"interleaved": 1}),
        ((2, 5, 32), RNG.integers(0, 32, (2, 5)), {"num_heads": 2, "rotary_embedding_dim": 8}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rotary_embedding(shape: tuple[int, ...], positions: Array, attrs: dict[str, Any], dtype: Any) -> None:
    tables = [numbers(32, 4, dtype=dtype) for _ in range(2)]
    operands = [numbers(*shape, dtype=dtype), positions, *tables]
    check("RotaryEmbedding", operands, attrs, domain=MICROSOFT, **tolerance(dtype))


def test_a_position_outside_the_tables_is_an_error() -> None:
    operands = [numbers(1, 3, 8), np.array([30]), numbers(32, 4), numbers(32, 4)]
    model = one_node("RotaryEmbedding", operands, domain=MICROSOFT)
    with rv.load(model, providers=["cpu"]) as session, pytest.raises(InvalidValue):
        session.run({f"x{k}": x for k, x in enumerate(operands)})
