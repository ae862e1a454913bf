"""com.microsoft operators of two or three steps against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import InvalidValue
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(12)
MICROSOFT = "com.microsoft"


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.normal(size=shape).astype(dtype)


def same(op: str, operands: list[Array | None], attrs: dict[str, Any] | None = None, **how: Any) -> None:
    half = any(x is not None and x.dtype == np.float16 for x in operands)
    close = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
    check(op, operands, attrs, domain=MICROSOFT, **close, **how)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sums_and_gates(dtype: Any) -> None:
    x, y, row = (numbers(*shape, dtype=dtype) for shape in ((2, 3, 8), (2, 3, 8), (8,)))
    same("BiasAdd", [x, row, y])
    same("GatedAdd", [x, y, numbers(2, 3, 1, dtype=dtype)])
    same("BiasSplitGelu", [x, row])
    same("ScaledSiLU", [x], {"alpha": 0.7})
    same("SimplifiedLayerNormalization", [x, row])


@pytest.mark.parametrize(
    ("shape", "bias", "axis", "inner"),
    [((2, 3, 4, 8), (2, 1, 1, 8), 3, 1), ((2, 3, 4, 8), (1, 3, 4, 8), 2, 0), ((6, 8), (3, 8), 1, 0)],
)
def test_softmax_of_a_sum(shape: tuple[int, ...], bias: tuple[int, ...], axis: int, inner: int) -> None:
    same("BiasSoftmax", [numbers(*shape), numbers(*bias)], {"axis": axis, "is_inner_broadcast": inner})


def embedding() -> list[Array | None]:
    words, kinds = RNG.integers(0, 20, (2, 5)).astype(np.int32), RNG.integers(0, 2, (2, 5)).astype(np.int32)
    return [words, kinds, numbers(20, 16), numbers(9, 16), numbers(2, 16), numbers(16), numbers(16)]


def test_embeddings() -> None:
    given = embedding()
    mask = (RNG.random((2, 5)) > 0.5).astype(np.int32)
    same("EmbedLayerNormalization", given, outputs=2)
    same("EmbedLayerNormalization", [*given, mask], outputs=3)
    given[1] = given[4] = None
    for lead in (1, 2):
        places = RNG.integers(0, 9, (lead, 5)).astype(np.int32)
        same("EmbedLayerNormalization", [*given, None, places], outputs=3)


def test_a_word_outside_the_table_is_an_error() -> None:
    given = embedding()
    assert given[0] is not None
    given[0][1, 2] = -1
    model = one_node("EmbedLayerNormalization", given, domain=MICROSOFT)
    with rv.load(model, providers=["cpu"]) as session, pytest.raises(InvalidValue):
        session.run({f"x{k}": x for k, x in enumerate(given) if x is not None})


def test_products_with_an_activation() -> None:
    op = "FusedMatMulActivation"
    same(op, [numbers(3, 5), numbers(5, 7)], {"activation": "Relu", "alpha": 0.5})
    attrs = {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1}
    same(op, [numbers(2, 3, 5), numbers(2, 7, 5)], attrs)
    same(op, [numbers(3, 2, 5), numbers(2, 5, 7)], {"activation": "Tanh", "transBatchA": 1})
    same(op, [numbers(3, 5), numbers(5, 7)], {"activation": "HardSigmoid"})
    same("GemmFastGelu", [numbers(3, 5), numbers(5, 7), numbers(7)])
    same("GemmFastGelu", [numbers(2, 3, 5), numbers(5, 7)])


def test_convolutions_with_channels_last() -> None:
    x = numbers(1, 9, 8, 6)
    same("NhwcConv", [x, numbers(12, 3, 3, 6), numbers(12)], {"pads": [1] * 4}, constant=(1, 2))
    same("NhwcConv", [x, numbers(12, 3, 3, 1)], {"strides": [2, 2], "group": 6}, constant=(1,))
    same("NhwcConv", [numbers(1, 9, 6, dtype=np.float16), numbers(12, 3, 6, dtype=np.float16)])
    attrs = {"pads": [1] * 4, "activation": "Clip", "activation_params": [0.0, 6.0]}
    same("NhwcFusedConv", [x, numbers(12, 6, 3, 3), numbers(12), numbers(1, 9, 8, 12)], attrs, constant=(1, 2))
    same("NhwcFusedConv", [x, numbers(12, 6, 1, 1)], {"activation": "Relu"})
