"""Products of 16 bits, embeddings and attention over codes against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import InvalidValue, ShapeMismatch
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(37)
MICROSOFT: dict[str, Any] = {"domain": "com.microsoft"}
KINDS = [np.uint8, np.int8]
SHORT = [np.int16, np.uint16]


def codes(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return np.asarray(RNG.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype))


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def steps(*shape: int) -> Array:
    return np.asarray(RNG.uniform(0.005, 0.02, shape), np.float32)


# -- MatMulInteger16 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", SHORT)
@pytest.mark.parametrize("right", SHORT)
def test_products_of_16_bits(left: type, right: type) -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((9, 33), (33, 7)),
        ((2, 33), (33, 7)),
        ((2, 1, 9, 5), (3, 5, 4)),
        ((5,), (5, 4)),
        ((6, 5), (5,)),
        ((7, 0), (0, 3)),
    ]
    for p, q in shapes:
        a, b = codes(left, *p), codes(right, *q)
        (found,) = check("MatMulInteger16", [a, b], **MICROSOFT)
        check("MatMulInteger16", [a, b], constant=[1], **MICROSOFT)
        unsigned = left is right is np.uint16
        exact = np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.uint32)
        np.testing.assert_array_equal(found, exact.view(np.uint32 if unsigned else np.int32))


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("rows", [1, 16])
def test_long_sums_of_16_bits_wrap_and_do_not_round(kind: type, rows: int) -> None:
    limits = np.iinfo(kind)
    for end in (limits.min, limits.max):
        a, b = np.full((rows, 3001), end, kind), np.full((3001, 5), end, kind)
        check("MatMulInteger16", [a, b], **MICROSOFT)


def test_matrices_of_16_bits_that_do_not_multiply() -> None:
    for p, q in (((2, 3), (4, 5)), ((2, 3, 4), (3, 4, 5))):
        given = [codes(np.int16, *p), codes(np.int16, *q)]
        with (
            rv.load(one_node("MatMulInteger16", given, **MICROSOFT), providers=["cpu"]) as session,
            pytest.raises(ShapeMismatch, match="MatMulInteger16: matrices"),
        ):
            session.run({"x0": given[0], "x1": given[1]})


# -- QEmbedLayerNormalization -----------------------------------------------------------------------------------------


def embedding(kind: type, *, segments: bool, mask: bool, hidden: int = 24) -> list[Array | None]:
    ids, parts = (RNG.integers(0, k, (3, 5)).astype(np.int32) for k in (9, 2))
    seen = RNG.integers(0, 3, (3, 5)).astype(np.int32)
    scales, zeros = [steps() for _ in range(5)], [codes(kind) for _ in range(5)]
    given: list[Array | None] = [ids, parts, codes(kind, 9, hidden), codes(kind, 6, hidden), codes(kind, 2, hidden)]
    given += [codes(kind, hidden), codes(kind, hidden), seen if mask else None, *scales, *zeros]
    for k in () if segments else (1, 4, 10, 15):
        given[k] = None
    return given


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments", [True, False])
def test_norm_of_quantized_embeddings(kind: type, segments: bool) -> None:
    for mask in (True, False):
        given = embedding(kind, segments=segments, mask=mask)
        how: dict[str, Any] = {"outputs": 2, "rtol": 1e-4, "atol": 1e-4, **MICROSOFT}
        check("QEmbedLayerNormalization", given, **how)
        tables = [k for k in range(2, 18) if given[k] is not None and k != 7]
        check("QEmbedLayerNormalization", given, {"epsilon": 1e-3}, constant=tables, **how)


def test_a_word_outside_the_quantized_table_is_an_error() -> None:
    given = embedding(np.uint8, segments=True, mask=False)
    assert given[0] is not None
    given[0][1, 2] = 9
    model = one_node("QEmbedLayerNormalization", given, outputs=2, **MICROSOFT)
    with rv.load(model, providers=["cpu"]) as session, pytest.raises(InvalidValue, match="outside"):
        session.run({f"x{k}": x for k, x in enumerate(given) if x is not None})


# -- QAttention -------------------------------------------------------------------------------------------------------

BATCH, TIME, HEADS, SIZE = 2, 5, 3, 8
WIDTH = HEADS * SIZE


def attention(kind: type, weights: type, *, mask: Array | None, past: int, columns: bool) -> list[Array | None]:
    per = (3 * WIDTH,) if columns else ()
    given: list[Array | None] = [codes(kind, BATCH, TIME, WIDTH), codes(weights, WIDTH, 3 * WIDTH), floats(3 * WIDTH)]
    given += [steps(), steps(*per) / 10, mask, codes(kind), codes(weights, *per)]
    return [*given, floats(2, BATCH, HEADS, past, SIZE)] if past else given


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_codes(kind: type, weights: type, columns: bool) -> None:
    how: dict[str, Any] = {"outputs": 2, "rtol": 1e-4, "atol": 1e-4, **MICROSOFT}
    given = attention(kind, weights, mask=None, past=0, columns=columns)
    check("QAttention", given, {"num_heads": HEADS}, **how)
    check("QAttention", given, {"num_heads": HEADS, "unidirectional": 1, "scale": 0.3}, constant=[1, 7], **how)
    given[6] = given[7] = None
    check("QAttention", given[:6], {"num_heads": HEADS}, **how)


@pytest.mark.parametrize("past", [0, 3])
def test_attention_over_codes_with_masks_and_a_past(past: int) -> None:
    keys = TIME + past
    how: dict[str, Any] = {"outputs": 2, "rtol": 1e-4, "atol": 1e-4, **MICROSOFT}
    masks: list[tuple[int, ...]] = [(BATCH,), (BATCH, keys), (BATCH, TIME, keys)]
    for shape in masks:
        mask = (RNG.integers(1, keys, shape) if len(shape) == 1 else RNG.integers(0, 2, shape)).astype(np.int32)
        given = attention(np.uint8, np.int8, mask=mask, past=past, columns=False)
        check("QAttention", given, {"num_heads": HEADS}, **how)
        check("QAttention", given, {"num_heads": HEADS, "unidirectional": 1}, **how)


def test_attention_over_codes_in_half_precision() -> None:
    given = attention(np.uint8, np.int8, mask=None, past=2, columns=False)
    for k in (2, 3, 4, 8):
        given[k] = np.asarray(given[k], np.float16)
    how: dict[str, Any] = {"outputs": 2, "rtol": 2e-3, "atol": 2e-3, **MICROSOFT}
    check("QAttention", given, {"num_heads": HEADS}, **how)
