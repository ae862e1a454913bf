"""MoE and QMoE on the CPU provider against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranvier as rv
from ranvier.ops import evaluate
from tests.providers.cpu.compare import Array, check, one_node

MICROSOFT = "com.microsoft"
EXPERTS, HIDDEN, INNER = 5, 32, 48
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
TYPES = {"float32": (np.float32, 2e-4), "float16": (np.float16, 2e-2), "bfloat16": (ml_dtypes.bfloat16, 0.2)}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return rng(seed).standard_normal(shape).astype(dtype)


def plain(n: int, k: int, seed: int, dtype: Any = np.float32) -> list[Array | None]:
    return [(floats(EXPERTS, n, k, seed=seed) / 4).astype(dtype), floats(EXPERTS, n, seed=seed + 1, dtype=dtype)]


def coded(
    n: int, k: int, bits: int, block: int, seed: int, zeros: bool | type = False, experts: int = EXPERTS
) -> tuple[list[Array], Array | None]:  # fmt: skip
    """Weights, scales and bias as QMoE takes them, and zero points, which lie between codes if they have a type."""
    draw = rng(seed)
    weights = draw.integers(0, 256, (experts, n, k * bits // 8)).astype(np.uint8)
    blocks = k // block if block else 1
    scales = draw.uniform(0.01, 0.1, (experts, n, blocks) if block else (experts, n)).astype(np.float32)
    scales *= np.float32(8 / (1 << bits))
    shape = (experts, n, -(-blocks * bits // 8)) if block else (experts, -(-n * bits // 8))
    stored: Array | None = None
    if isinstance(zeros, type):
        stored = draw.uniform(-2, 2 + (1 << bits), scales.shape).astype(zeros)
    elif zeros:
        stored = draw.integers(0, 256, shape).astype(np.uint8)
    return [weights, scales, floats(experts, n, seed=seed)], stored


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
def test_moe(tokens: int, activation: str) -> None:
    layers = [*plain(INNER, HIDDEN, 1), *plain(HIDDEN, INNER, 3)]
    given = [floats(1, tokens, HIDDEN), floats(tokens, EXPERTS, seed=9), *layers]
    for k, normalize in ((1, 0), (3, 1), (EXPERTS, 0)):
        attrs = {"k": k, "activation_type": activation, "normalize_routing_weights": normalize}
        check("MoE", given, attrs, domain=MICROSOFT, constant=range(2, 8), **CLOSE)
    third = [*given, *plain(INNER, HIDDEN, 5)]
    check("MoE", third, {"k": 2, "activation_type": activation}, domain=MICROSOFT, constant=range(2, 8), **CLOSE)


@pytest.mark.parametrize("name", TYPES)
def test_types(name: str) -> None:
    dtype, off = TYPES[name]
    layers = [*plain(INNER, HIDDEN, 1, dtype), *plain(HIDDEN, INNER, 3, dtype)]
    for tokens in (1, 60):
        given = [floats(tokens, HIDDEN, dtype=dtype), floats(tokens, EXPERTS, seed=9, dtype=dtype), *layers]
        how = {"domain": MICROSOFT, "constant": range(2, 6), "rtol": off, "atol": off}
        check("MoE", given, {"k": 2}, **how)


@pytest.mark.parametrize("fusion", [0, 1, 2])
def test_swiglu(fusion: int) -> None:
    wide = INNER * (2 if fusion else 1)
    first, second = coded(wide, HIDDEN, 4, 16, 1), coded(HIDDEN, INNER, 4, 16, 2)
    third = coded(INNER, HIDDEN, 4, 16, 3)[0] if not fusion else []
    for tokens in (1, 12):
        given = [floats(tokens, HIDDEN), floats(tokens, EXPERTS, seed=9), *first[0], *second[0], *third]
        attrs = {"k": 2, "block_size": 16, "activation_type": "swiglu", "swiglu_fusion": fusion}
        check("QMoE", given, attrs, domain=MICROSOFT, constant=range(2, 14), **CLOSE)
        more = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.5}
        check("QMoE", given, {**attrs, **more}, domain=MICROSOFT, constant=range(2, 14), **CLOSE)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_integers(bits: int, block: int, zeros: bool) -> None:
    layers = [coded(INNER, HIDDEN, bits, block, 1, zeros), coded(HIDDEN, INNER, bits, block, 2, zeros)]
    weights = [x for layer, _ in layers for x in layer]
    attrs = {"k": 2, "expert_weight_bits": bits, "block_size": block, "activation_type": "silu"}
    for tokens in (1, 5, 60):
        x, router = floats(tokens, HIDDEN), floats(tokens, EXPERTS, seed=9)
        weigher = np.abs(floats(tokens, EXPERTS, seed=4))
        stored = [*(zero for _, zero in layers), None]
        given = [x, router, *weights, None, None, None, *stored]
        constant = range(2, 14)
        check("QMoE", given, attrs, domain=MICROSOFT, constant=constant, **CLOSE)
        check("QMoE", [*given, weigher], attrs, domain=MICROSOFT, constant=constant, **CLOSE)
        normal = {**attrs, "normalize_routing_weights": 1}
        check("QMoE", [*given, weigher], normal, domain=MICROSOFT, constant=constant, **CLOSE)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_activations_of_eight_bits(bits: int, zeros: bool) -> None:
    """``accuracy_level`` 4: close, and not the same."""
    layers = [coded(INNER, HIDDEN, bits, 16, 1, zeros), coded(HIDDEN, INNER, bits, 16, 2, zeros)]
    weights = [*(x for layer, _ in layers for x in layer), None, None, None, *(zero for _, zero in layers)]
    for tokens in (1, 5, 60):
        given = [floats(tokens, HIDDEN), floats(tokens, EXPERTS, seed=9), *weights]
        while given[-1] is None:
            given.pop()
        attrs = {"k": 2, "expert_weight_bits": bits, "block_size": 16, "accuracy_level": 4}
        model = one_node("QMoE", given, attrs, domain=MICROSOFT, constant=range(2, 14))
        expected = evaluate("QMoE", *given, domain=MICROSOFT, **attrs)
        with rv.load(model, providers=["cpu"]) as session:
            (found,) = session.run({"x0": given[0], "x1": given[1]}).values()
        assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


def own_bits(block: int, zeros: bool | type) -> tuple[list[Any], dict[str, Any]]:
    """Three layers of eight experts, all operands but tokens and router, of which the second has other bits."""
    layers = [
        coded(64, HIDDEN, 4, block, 1, zeros, 8),
        coded(HIDDEN, 64, 8, block, 2, zeros, 8),
        coded(64, HIDDEN, 4, block, 3, zeros, 8),
    ]
    attrs = {"k": 2, "block_size": block, "activation_type": "silu", "fc2_expert_weight_bits": 8}
    return [*(x for layer, _ in layers for x in layer), *(zero for _, zero in layers)], attrs


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("block", [0, 16, 32])
def test_zero_points_between_codes(block: int, name: str) -> None:
    operands, attrs = own_bits(block, TYPES[name][0])
    for tokens in (1, 3, 17, 64):
        given = [floats(tokens, HIDDEN), floats(tokens, 8, seed=9), *operands]
        check("QMoE", given, attrs, domain=MICROSOFT, constant=range(2, 14), **CLOSE)


@pytest.mark.parametrize("zeros", [False, True, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
def test_activations_of_eight_bits_and_layers_with_bits_of_their_own(block: int, zeros: bool | type) -> None:
    operands, attrs = own_bits(block, zeros)
    attrs["accuracy_level"] = 4
    for tokens in (1, 3, 17, 64):
        given = [floats(tokens, HIDDEN), floats(tokens, 8, seed=9), *operands]
        model = one_node("QMoE", given, attrs, domain=MICROSOFT, constant=range(2, 14))
        expected = evaluate("QMoE", *given, domain=MICROSOFT, **attrs)
        with rv.load(model, providers=["cpu"]) as session:
            (found,) = session.run({"x0": given[0], "x1": given[1]}).values()
        assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_zero_points_between_codes_of_columns_that_fill_no_panel(bits: int) -> None:
    first, second = coded(40, 24, bits, 8, 1, np.float32), coded(24, 40, bits, 8, 2, np.float32)
    attrs = {"k": 2, "block_size": 8, "expert_weight_bits": bits}
    for tokens in (1, 40):
        given = [floats(tokens, 24), floats(tokens, EXPERTS, seed=9), *first[0], *second[0], *[None] * 3]
        stored = [first[1], second[1]]
        check("QMoE", [*given, *stored], attrs, domain=MICROSOFT, constant=range(2, 13), **CLOSE)


def small_floats(kind: str) -> tuple[list[Any], dict[str, Any]]:
    """All operands of QMoE but tokens and router, with weights in floats of few bits, and attributes."""
    draw = rng(3)
    attrs: dict[str, Any] = {"k": 2, "quant_type": kind.split()[0]}
    layers: list[Any] = []
    wholes: list[Any] = []
    for n, k in ((64, HIDDEN), (HIDDEN, 64)):
        if kind.startswith("fp8"):
            weights: Array = (floats(EXPERTS, n, k) / 2).astype(ml_dtypes.float8_e4m3fn)
            scales: Any = None
            if kind == "fp8 in blocks":
                attrs["block_size"] = 24
                scales = draw.uniform(0.1, 0.3, (EXPERTS, -(-n // 24), -(-k // 24))).astype(np.float32)
        else:
            weights = draw.integers(0, 256, (EXPERTS, n, k // 2)).astype(np.uint8)
            exponents = draw.integers(120, 126, (EXPERTS, n, k // 32)).astype(np.uint8)
            scales = exponents.view(ml_dtypes.float8_e8m0fnu)
            if kind == "nvfp4":
                scales = draw.uniform(0.05, 0.2, (EXPERTS, n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
        layers += [weights, scales, None]
        wholes.append(None if kind == "fp8 in blocks" else draw.uniform(0.5, 1.5, EXPERTS).astype(np.float32))
    operands = [*layers, *[None] * 7, *wholes]
    while operands[-1] is None:
        operands.pop()
    return operands, attrs


SMALL_FLOATS = ["fp4", "nvfp4", "fp8", "fp8 in blocks"]


@pytest.mark.parametrize("kind", SMALL_FLOATS)
def test_floats_of_few_bits(kind: str) -> None:
    operands, attrs = small_floats(kind)
    for tokens in (1, 60):
        given = [floats(tokens, HIDDEN), floats(tokens, EXPERTS, seed=9), *operands]
        check("QMoE", given, attrs, domain=MICROSOFT, constant=range(2, 17), **CLOSE)


def test_weights_that_are_no_numbers() -> None:
    """Kernels take float8 for numbers: such a layer is the reference's, and shows them."""
    operands, attrs = small_floats("fp8")
    operands[0] = operands[0].copy()
    operands[0].view(np.uint8)[:, 3, 5] = 0x7F
    given = [floats(4, HIDDEN), floats(4, EXPERTS, seed=9), *operands]
    model = one_node("QMoE", given, attrs, domain=MICROSOFT, constant=range(2, 17))
    with rv.load(model, providers=["cpu", "reference"]) as session:
        (found,) = session.run({"x0": given[0], "x1": given[1]}).values()
    expected = evaluate("QMoE", *given, domain=MICROSOFT, **attrs)
    assert np.isnan(expected).any()
    np.testing.assert_allclose(found, expected, equal_nan=True, **CLOSE)


def test_numbers_of_tokens_that_change() -> None:
    """One session, from one token to many and back, by two threads."""
    layers = [coded(INNER, HIDDEN, 4, 16, 1), coded(HIDDEN, INNER, 4, 16, 2)]
    weights = [x for layer, _ in layers for x in layer]
    attrs = {"k": 2, "block_size": 16}
    model = one_node(
        "QMoE", [floats(3, HIDDEN), floats(3, EXPERTS), *weights], attrs, domain=MICROSOFT, constant=range(2, 8)
    )
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "tokens"
    with rv.load(model, providers=["cpu"], threads=2) as session:
        for tokens in (1, 2, 3, 50, 1, 17, 90):
            x, router = floats(tokens, HIDDEN, seed=tokens), floats(tokens, EXPERTS, seed=tokens + 1)
            (found,) = session.run({"x0": x, "x1": router}).values()
            expected = evaluate("QMoE", x, router, *weights, domain=MICROSOFT, **attrs)
            np.testing.assert_allclose(found, expected, **CLOSE)


def test_all_tokens_like_the_same_experts() -> None:
    layers = [coded(INNER, HIDDEN, 4, 16, 1), coded(HIDDEN, INNER, 4, 16, 2)]
    weights = [x for layer, _ in layers for x in layer]
    for tokens in (3, 100):
        router = np.tile(np.array([0.0, 3.0, 0.0, 9.0, 0.0], np.float32), (tokens, 1))
        given = [floats(tokens, HIDDEN), router, *weights]
        check("QMoE", given, {"k": 2, "block_size": 16}, domain=MICROSOFT, constant=range(2, 8), **CLOSE)


def test_what_the_reference_runs() -> None:
    """Weights that come with the run, and what does not fit: words are the reference's."""
    layers = [*plain(INNER, HIDDEN, 1), *plain(HIDDEN, INNER, 3)]
    given = [floats(4, HIDDEN), floats(4, EXPERTS, seed=9), *layers]
    expected = evaluate("MoE", *given, domain=MICROSOFT, k=2)
    with rv.load(one_node("MoE", given, {"k": 2}, domain=MICROSOFT), providers=["cpu", "reference"]) as session:
        (found,) = session.run({f"x{k}": x for k, x in enumerate(given)}).values()
    np.testing.assert_allclose(found, expected, **CLOSE)
    given[1] = floats(5, EXPERTS)
    model = one_node("MoE", given, {"k": 2}, domain=MICROSOFT, constant=range(2, 6))
    with (
        rv.load(model, providers=["cpu", "reference"]) as session,
        pytest.raises(rv.errors.ShapeMismatch, match="router"),
    ):
        session.run({"x0": given[0], "x1": given[1]})
