"""QMoE: against ONNX Runtime where its CPU provider has it, against MoE with the decoded weights where it has not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.errors import InvalidValue, NotSupported, RanvierError, ShapeMismatch
from ranvier.ops.contrib.weight_only import packed, unpacked
from tests.ops.contrib_tools import Draw, check, check_rules, run

Array = np.ndarray[Any, Any]
EXPERTS, HIDDEN, INNER = 4, 32, 64
draw = Draw()


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    draw.restart()


class Layer:
    """Random codes of one layer, and the weights that they stand for."""

    def __init__(self, n: int, k: int, bits: int, block: int, zeros: bool, experts: int = EXPERTS) -> None:
        codes = draw.ints(0, 1 << bits, experts, n, k, dtype=np.uint8)
        blocks = k // block if block else 1
        self.codes = packed(codes, bits)
        self.scales = draw.steps(experts, n, blocks, top=0.8 / (1 << bits))
        self.bias = draw.floats(experts, n)
        zero = draw.ints(0, 1 << bits, experts, n, blocks, dtype=np.uint8)
        self.zeros = None
        middle: Array = np.full(zero.shape, 1 << (bits - 1), np.uint8)
        if zeros:
            self.zeros, middle = packed(zero, bits) if block else packed(zero[..., 0], bits), zero
        each = k // blocks
        self.weights = (codes.astype(np.float32) - np.repeat(middle, each, axis=2)) * np.repeat(
            self.scales, each, axis=2
        )
        if not block:
            self.scales = self.scales[..., 0]


def operands(layers: list[Layer | None], tokens: int, weigher: Array | None = None) -> list[Array | None]:
    found: list[Array | None] = [draw.floats(tokens, HIDDEN), draw.floats(tokens, EXPERTS)]
    for layer in layers:
        found += [None] * 3 if layer is None else [layer.codes, layer.scales, layer.bias]
    return [*found, *(None if layer is None else layer.zeros for layer in layers), weigher]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("block", "zeros"), [(0, False), (0, True), (16, False), (32, True)])
def test_like_onnxruntime(bits: int, block: int, zeros: bool) -> None:
    layers: list[Layer | None] = [
        Layer(INNER, HIDDEN, bits, block, zeros),
        Layer(HIDDEN, INNER, bits, block, zeros),
        None,
    ]
    attrs = {"expert_weight_bits": bits, **({"block_size": block} if block else {})}
    for k, weigher in ((1, None), (2, None), (2, np.abs(draw.floats(6, EXPERTS)))):
        for normalize in (0, 1):
            given = operands(layers, 6, weigher)
            more = {"k": k, "normalize_routing_weights": normalize, "activation_type": "silu"}
            check("QMoE", _trimmed(given), ("float",), atol=1e-4, **attrs, **more)


def test_swiglu_like_onnxruntime() -> None:
    layers: list[Layer | None] = [Layer(2 * INNER, HIDDEN, 4, 32, False), Layer(HIDDEN, INNER, 4, 32, False), None]
    attrs = {"block_size": 32, "k": 2, "activation_type": "swiglu", "swiglu_fusion": 1}
    check("QMoE", _trimmed(operands(layers, 5)), ("float",), atol=1e-4, **attrs)
    more = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0}
    check("QMoE", _trimmed(operands(layers, 5)), ("float",), atol=1e-4, **attrs, **more)


def _trimmed(given: list[Array | None]) -> list[Array | None]:
    while given[-1] is None:
        given.pop()
    return given


def test_bits_of_single_layers_and_a_third_layer() -> None:
    layers = [Layer(INNER, HIDDEN, 8, 16, True), Layer(HIDDEN, INNER, 2, 16, False), Layer(INNER, HIDDEN, 4, 16, True)]
    given = _trimmed(operands([*layers], 5))
    own = {"fc1_expert_weight_bits": 8, "fc2_expert_weight_bits": 2}
    how = {"k": 2, "activation_type": "swiglu", "activation_alpha": 1.3}
    found = run("QMoE", *given, block_size=16, **own, **how)
    first, second, third = ([layer.weights, layer.bias] for layer in layers)
    whole = run("MoE", *given[:2], *first, *second, *third, normalize_routing_weights=1, **how)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)
    check_rules("QMoE", given, [found], ["y"], {"block_size": 16, **own, **how})


@pytest.mark.parametrize("kind", ["fp4", "nvfp4", "fp8", "fp8 in blocks"])
def test_floats_of_few_bits(kind: str) -> None:
    attrs: dict[str, Any] = {"k": 2, "quant_type": kind.split()[0], "activation_type": "relu"}
    weights, given, whole = [], [], []
    inner = 48 if kind == "nvfp4" else 64
    for n, k in ((inner, HIDDEN), (HIDDEN, inner)):
        each = (draw.rng.random(EXPERTS) + 0.5).astype(np.float32)
        if kind == "fp8 in blocks":
            attrs["block_size"] = 24
            codes = draw.floats(EXPERTS, n, k).astype(ml_dtypes.float8_e4m3fn)
            scales = draw.steps(EXPERTS, -(-n // 24), -(-k // 24), top=0.3)
            spread = np.repeat(np.repeat(scales, 24, axis=1)[:, :n], 24, axis=2)[:, :, :k]
            weights.append(codes.astype(np.float32) * spread)
            given.append([codes, scales])
            whole.append(None)
        elif kind == "fp8":
            codes = draw.floats(EXPERTS, n, k).astype(ml_dtypes.float8_e4m3fn)
            weights.append(codes.astype(np.float32) * each[:, None, None])
            given.append([codes, None])
            whole.append(each)
        else:
            block = 32 if kind == "fp4" else 16
            codes = draw.codes(np.uint8, EXPERTS, n, k // 2)
            scales = (
                draw.ints(122, 128, EXPERTS, n, k // block, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
                if kind == "fp4"
                else draw.steps(EXPERTS, n, k // block, top=0.5).astype(ml_dtypes.float8_e4m3fn)
            )
            values = unpacked(codes, 4).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
            weights.append(values * np.repeat(scales.astype(np.float32), block, axis=2) * each[:, None, None])
            given.append([codes, scales])
            whole.append(each)
    x, router = draw.floats(5, HIDDEN), draw.floats(5, EXPERTS)
    inputs = [x, router, *given[0], None, *given[1], *[None] * 8, *whole]
    found = run("QMoE", *inputs, **attrs)
    expected = run(
        *("MoE", x, router, weights[0], None, weights[1]), k=2, activation_type="relu", normalize_routing_weights=1
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_likes_that_a_softmax_cannot_tell_apart() -> None:
    """The best are found among what the router says, not among shares, of which all but one may be nothing."""
    x, router = draw.floats(1, HIDDEN), np.array([[-400.0, -200.0, 0.0]], np.float32)
    codes = packed(draw.codes(np.uint8, 3, HIDDEN, HIDDEN), 8)
    scales = draw.steps(3, HIDDEN)
    weigher = np.array([[1.0, 10.0, 100.0]], np.float32)
    layer = [codes, scales, None]
    found = run("QMoE", x, router, *layer, *layer, *[None] * 6, weigher, k=2, expert_weight_bits=8)
    others = weigher.copy()
    others[0, 0] = 5.0
    again = run("QMoE", x, router, *layer, *layer, *[None] * 6, others, k=2, expert_weight_bits=8)
    np.testing.assert_array_equal(found, again)  # the first was not chosen


def test_what_does_not_fit() -> None:
    one, two = Layer(INNER, HIDDEN, 4, 32, True), Layer(HIDDEN, INNER, 4, 32, True)
    good = operands([one, two, None], 3)
    attrs: dict[str, Any] = {"block_size": 32, "k": 2}
    run("QMoE", *good, **attrs)

    def refused(kind: type[RanvierError], words: str, changed: dict[int, Any] | None = None, **more: Any) -> None:
        given = [(changed or {}).get(k, x) for k, x in enumerate(good)]
        with pytest.raises(kind, match=words):
            run("QMoE", *given, **{**attrs, **more})

    refused(ShapeMismatch, "fc1 weights .* 4 experts", {2: one.codes[:3]})
    refused(ShapeMismatch, "fc1 has scales", {3: one.scales[:, :5]})
    refused(ShapeMismatch, "fc1 bias", {4: one.bias[:, :5]})
    refused(ShapeMismatch, "fc2 has zero points", {12: two.zeros[:, :5] if two.zeros is not None else None})
    refused(ShapeMismatch, "blocks of 128", block_size=128)
    refused(ShapeMismatch, "top 9", k=9)
    refused(ShapeMismatch, "router_weights", {14: draw.floats(2, EXPERTS)})
    refused(ShapeMismatch, "fc1 takes 32 features, got 16", {0: draw.floats(3, 16)})
    refused(InvalidValue, "3 bits", expert_weight_bits=3)
    refused(InvalidValue, "swiglu needs fc3", activation_type="swiglu")
    refused(InvalidValue, "activation_type", activation_type="cube")
    refused(NotSupported, "quant_type 'fp2'", quant_type="fp2")
    refused(NotSupported, "use_sparse_mixer", use_sparse_mixer=1)
    refused(NotSupported, "weights_prepacked", weights_prepacked=1)
    refused(InvalidValue, "float8e4m3fn", quant_type="fp8")
