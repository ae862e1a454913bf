"""Rotary embeddings as Llama, GPT-NeoX, GPT-J and others export them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.passes.fuse_tools import Fused, Sketch, assert_same

BATCH, HEADS, TIME, SIZE = 2, 3, 5, 8
END = np.iinfo(np.int64).max


def sliced(s: Sketch, x: str, start: int, end: int, step: int | None = None) -> str:
    return s.Slice(x, [start], [end], [-1], *([] if step is None else [[step]]))


def rotate_half(s: Sketch, x: str, size: int = SIZE, split: bool = False) -> str:
    if split:
        first, second = s.Split(x, axis=-1, num_outputs=2, outputs=2)
    else:
        first, second = sliced(s, x, 0, size // 2, 1), sliced(s, x, size // 2, END, 1)
    return s.Concat(s.Neg(second), first, axis=-1)


def rotate_every_two(s: Sketch, x: str) -> str:
    even, odd = sliced(s, x, 0, END, 2), sliced(s, x, 1, END, 2)
    pairs = s.Concat(s.Unsqueeze(s.Neg(odd), [-1]), s.Unsqueeze(even, [-1]), axis=-1)
    return s.Reshape(pairs, s.Shape(x))


def computed_angles(s: Sketch, batch: Any = BATCH, time: Any = TIME, size: int = SIZE) -> tuple[str, str]:
    """Cosine and sine as Llama computes them: every frequency twice, alike for all heads."""
    frequencies = s.input("frequencies", [batch, time, size // 2])
    doubled = s.Concat(frequencies, frequencies, axis=-1)
    return s.Unsqueeze(s.Cos(doubled), [1]), s.Unsqueeze(s.Sin(doubled), [1])


def constant_angles(*shape: int, interleaved: bool = False, dtype: object = np.float32) -> tuple[np.ndarray, ...]:
    half = np.random.default_rng(3).uniform(0, 6, (*shape[:-1], shape[-1] // 2))
    angles = np.repeat(half, 2, axis=-1) if interleaved else np.concatenate([half, half], axis=-1)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def turned(s: Sketch, x: str, cos: Any, sin: Any, **how: Any) -> str:
    return s.Add(s.Mul(x, cos), s.Mul(rotate_half(s, x, **how), sin))


def rotary(found: Fused) -> Any:
    assert not found.ops.keys() & {"Neg", "Mul", "Add", "Sub"}
    return found.only("RotaryEmbedding")


# -- halves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
def test_llama(split: bool) -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = computed_angles(s)
    node = rotary(assert_same(s.model(turned(s, x, cos, sin, split=split))))
    assert node.attrs == {} and str(node.inputs[1].type) == f"float32[{BATCH}, {TIME}, {SIZE // 2}]"


def test_llama_with_symbolic_sizes() -> None:
    s = Sketch()
    x = s.input("x", ["b", HEADS, "t", SIZE])
    cos, sin = computed_angles(s, "b", "t")
    rotary(assert_same(s.model(turned(s, x, cos, sin)), sizes={"b": 2, "t": 5}))


def test_queries_and_keys_share_their_angles() -> None:
    s = Sketch()
    q, k = s.input("q", [BATCH, HEADS, TIME, SIZE]), s.input("k", [BATCH, 1, TIME, SIZE])
    cos, sin = computed_angles(s)
    found = assert_same(s.model(turned(s, q, cos, sin), turned(s, k, cos, sin)))
    assert found.ops["RotaryEmbedding"] == 2


@pytest.mark.parametrize("batch", ["b", BATCH])
def test_angles_alike_for_all_samples(batch: Any) -> None:
    s = Sketch()
    x = s.input("x", [batch, HEADS, TIME, SIZE])
    cos, sin = computed_angles(s, 1)
    node = rotary(assert_same(s.model(turned(s, x, cos, sin)), sizes={"b": 2}))
    assert node.inputs[1].producer.op == "Expand"


@pytest.mark.parametrize("shape", [(1, 1, TIME, SIZE), (1, TIME, SIZE), (TIME, SIZE)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_constant_angles(shape: tuple[int, ...], dtype: object) -> None:
    s = Sketch(dtype=dtype)
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    rotary(assert_same(s.model(turned(s, x, *constant_angles(*shape, dtype=dtype)))))


def test_rows_of_a_table_by_position() -> None:
    s = Sketch()
    x = s.input("x", ["b", HEADS, "t", SIZE])
    positions = s.input("positions", ["b", "t"], np.int64)
    cos, sin = (s.Unsqueeze(s.Gather(table, positions), [1]) for table in constant_angles(16, SIZE))
    rotary(assert_same(s.model(turned(s, x, cos, sin)), sizes={"b": 2, "t": 5}))


def test_time_before_heads() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, TIME, HEADS, SIZE])
    cos, sin = constant_angles(BATCH, TIME, 1, SIZE)
    node = rotary(assert_same(s.model(turned(s, x, cos, sin))))
    assert node.attrs == {"num_heads": HEADS}


@pytest.mark.parametrize("split", [False, True])
def test_halves_rotated_one_by_one(split: bool) -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = s.input("cos", [BATCH, 1, TIME, SIZE // 2]), s.input("sin", [BATCH, 1, TIME, SIZE // 2])
    if split:
        first, second = s.Split(x, [4, 4], axis=3, outputs=2)
    else:
        first, second = sliced(s, x, 0, 4), sliced(s, x, 4, 8)
    left = s.Sub(s.Mul(first, cos), s.Mul(second, sin))
    right = s.Add(s.Mul(second, cos), s.Mul(first, sin))
    rotary(assert_same(s.model(s.Concat(left, right, axis=-1))))


def test_a_part_of_the_features() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, 12])
    front, rest = sliced(s, x, 0, SIZE), sliced(s, x, SIZE, END)
    y = turned(s, front, *constant_angles(1, 1, TIME, SIZE))
    node = rotary(assert_same(s.model(s.Concat(y, rest, axis=-1))))
    assert node.attrs == {"rotary_embedding_dim": SIZE} and node.inputs[0].name == "x"


# -- neighbours -----------------------------------------------------------------------------------------------------


def test_every_two() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = constant_angles(1, 1, TIME, SIZE, interleaved=True)
    found = assert_same(s.model(s.Add(s.Mul(x, cos), s.Mul(rotate_every_two(s, x), sin))))
    assert rotary(found).attrs == {"interleaved": 1}


def test_every_two_with_computed_angles() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    frequencies = s.Unsqueeze(s.input("frequencies", [BATCH, TIME, SIZE // 2]), [-1])
    doubled = s.Reshape(s.Concat(frequencies, frequencies, axis=-1), [BATCH, TIME, SIZE])
    cos, sin = s.Unsqueeze(s.Cos(doubled), [1]), s.Unsqueeze(s.Sin(doubled), [1])
    found = assert_same(s.model(s.Add(s.Mul(x, cos), s.Mul(rotate_every_two(s, x), sin))))
    assert rotary(found).attrs == {"interleaved": 1}


def test_pairs_rotated_one_by_one() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = s.input("cos", [BATCH, 1, TIME, SIZE // 2]), s.input("sin", [BATCH, 1, TIME, SIZE // 2])
    even, odd = sliced(s, x, 0, END, 2), sliced(s, x, 1, END, 2)
    real = s.Sub(s.Mul(even, cos), s.Mul(odd, sin))
    imaginary = s.Add(s.Mul(even, sin), s.Mul(odd, cos))
    pairs = s.Concat(s.Unsqueeze(real, [4]), s.Unsqueeze(imaginary, [4]), axis=-1)
    found = assert_same(s.model(s.Reshape(pairs, [BATCH, HEADS, TIME, SIZE])))
    assert rotary(found).attrs == {"interleaved": 1}


# -- near misses ----------------------------------------------------------------------------------------------------


def declined(s: Sketch, y: str, reason: str) -> None:
    found = assert_same(s.model(y))
    assert "RotaryEmbedding" not in found.ops
    assert reason in found.reasons()


def test_angles_that_differ_within_a_pair() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = constant_angles(1, 1, TIME, SIZE, interleaved=True)
    declined(s, turned(s, x, cos, sin), "not known to be turned by one angle")


def test_angles_from_outside() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = s.input("cos", [BATCH, 1, TIME, SIZE]), s.input("sin", [BATCH, 1, TIME, SIZE])
    declined(s, turned(s, x, cos, sin), "not known to be turned by one angle")


def test_angles_that_differ_between_heads() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = constant_angles(1, HEADS, TIME, SIZE)
    declined(s, turned(s, x, cos, sin), "alike for all heads")


def test_parts_that_are_not_halves() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = constant_angles(1, 1, TIME, SIZE)
    joined = s.Concat(s.Neg(sliced(s, x, 3, END)), sliced(s, x, 0, 3), axis=-1)
    declined(s, s.Add(s.Mul(x, cos), s.Mul(joined, sin)), "not the two parts of the features")


def test_a_size_that_is_not_known() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, None])
    cos, sin = s.input("cos", [BATCH, 1, TIME, None]), s.input("sin", [BATCH, 1, TIME, None])
    y = s.Add(s.Mul(x, cos), s.Mul(rotate_half(s, x, 2), sin))
    feeds = [np.ones((BATCH, HEADS, TIME, 2), np.float32), *[np.ones((BATCH, 1, TIME, 2), np.float32)] * 2]
    found = assert_same(s.model(y), feeds)
    assert "the number of features is not known" in found.reasons()


def test_float64_has_no_operator() -> None:
    s = Sketch(dtype=np.float64)
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    declined(s, turned(s, x, *constant_angles(1, 1, TIME, SIZE, dtype=np.float64)), "float32, float16 or bfloat16")


def test_the_wrong_half_negated() -> None:
    s = Sketch()
    x = s.input("x", [BATCH, HEADS, TIME, SIZE])
    cos, sin = constant_angles(1, 1, TIME, SIZE)
    joined = s.Concat(sliced(s, x, 4, END), s.Neg(sliced(s, x, 0, 4)), axis=-1)
    assert "RotaryEmbedding" not in assert_same(s.model(s.Add(s.Mul(x, cos), s.Mul(joined, sin)))).ops
