"""QMoE: against ONNX Runtime where its CPU provider has it, against MoE with the decoded weights where it has not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.dtypes import DType, of
from ranvier.errors import InvalidValue, NotSupported, RanvierError, ShapeMismatch
from ranvier.graph.types import TensorType
from ranvier.ops import registry
from ranvier.ops.contrib.weight_only import packed, unpacked
from tests.ops.contrib_tools import Draw, check, check_rules, run
from tests.passes.gradient_tools import Case, r
from tests.passes.gradient_tools import check as check_gradient
from tests.passes.test_differentiate_contrib import fused
from tests.passes.test_differentiate_few_bits import codes

Array = np.ndarray[Any, Any]
EXPERTS, HIDDEN, INNER = 4, 32, 64
draw = Draw()


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    draw.restart()


class Layer:
    """Random codes of one layer, and the weights that they stand for. ``zeros``: whether there are zero points, or the
    type of those that lie between codes."""

    def __init__(self, n: int, k: int, bits: int, block: int, zeros: bool | type, experts: int = EXPERTS) -> None:
        codes = draw.ints(0, 1 << bits, experts, n, k, dtype=np.uint8)
        blocks = k // block if block else 1
        self.codes = packed(codes, bits)
        self.scales = draw.steps(experts, n, blocks, top=0.8 / (1 << bits))
        self.bias = draw.floats(experts, n)
        zero = draw.ints(0, 1 << bits, experts, n, blocks, dtype=np.uint8)
        self.zeros = None
        middle: Array = np.full(zero.shape, 1 << (bits - 1), np.uint8)
        if isinstance(zeros, type):
            zero = (draw.rng.random(zero.shape) * (1 << bits)).astype(zeros)
            self.zeros, middle = zero if block else zero[..., 0], zero.astype(np.float32)
        elif zeros:
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


@pytest.mark.parametrize("blocks", [(16, 16, 16), (32, 16, 8)])
def test_bits_and_blocks_of_single_layers_and_a_third_layer(blocks: tuple[int, int, int]) -> None:
    shapes = ((INNER, HIDDEN, 8), (HIDDEN, INNER, 2), (INNER, HIDDEN, 4))
    layers = [Layer(*shape, block, block != 8) for shape, block in zip(shapes, blocks)]
    given = _trimmed(operands([*layers], 5))
    own = {"fc1_expert_weight_bits": 8, "fc2_expert_weight_bits": 2}
    own |= {f"fc{k}_block_size": block for k, block in enumerate(blocks, 1) if block != 16}
    how = {"k": 2, "activation_type": "swiglu", "activation_alpha": 1.3}
    found = run("QMoE", *given, block_size=16, **own, **how)
    first, second, third = ([layer.weights, layer.bias] for layer in layers)
    whole = run("MoE", *given[:2], *first, *second, *third, normalize_routing_weights=1, **how)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)
    check_rules("QMoE", given, [found], ["y"], {"block_size": 16, **own, **how})


@pytest.mark.parametrize("bits", [3, 5, 6])
@pytest.mark.parametrize(("block", "zeros"), [(0, False), (0, True), (16, False), (32, True)])
def test_widths_that_fill_no_byte(bits: int, block: int, zeros: bool) -> None:
    layers = [Layer(INNER, HIDDEN, bits, block, zeros), Layer(HIDDEN, INNER, bits, block, zeros)]
    given = _trimmed(operands([*layers, None], 5))
    own, how = {"expert_weight_bits": bits, "block_size": block}, {"k": 2, "activation_type": "silu"}
    found = run("QMoE", *given, **own, **how)
    numbers = [x for layer in layers for x in (layer.weights, layer.bias)]
    whole = run("MoE", *given[:2], *numbers, normalize_routing_weights=1, **how)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)
    check_rules("QMoE", given, [found], ["y"], {**own, **how})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block", [0, 16, 32])
def test_zero_points_between_codes(block: int, dtype: type) -> None:
    """Each layer has its own kind of them."""
    own = {"fc2_expert_weight_bits": 8, "block_size": block}
    how: dict[str, Any] = {"k": 2, "activation_type": "silu"}
    for kinds in ((dtype, True, False), (False, dtype, True), (True, False, dtype), (dtype, dtype, dtype)):
        layers = [
            Layer(INNER, HIDDEN, 4, block, kinds[0]),
            Layer(HIDDEN, INNER, 8, block, kinds[1]),
            Layer(INNER, HIDDEN, 4, block, kinds[2]),
        ]
        given = _trimmed(operands([*layers], 5))
        found = run("QMoE", *given, **own, **how)
        numbers = [x for layer in layers for x in (layer.weights, layer.bias)]
        whole = run("MoE", *given[:2], *numbers, normalize_routing_weights=1, **how)
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-4)
        check_rules("QMoE", given, [found], ["y"], {**own, **how})


def test_zero_points_between_codes_with_one_block() -> None:
    """Rows that have one may say so by an axis or not."""
    one, two = Layer(INNER, HIDDEN, 4, 0, np.float32), Layer(HIDDEN, INNER, 4, 0, np.float32)
    given = operands([one, two, None], 3)
    found = run("QMoE", *given, k=2)
    for k in (11, 12):
        zeros = given[k]
        assert zeros is not None
        given[k] = zeros[..., None]
        np.testing.assert_array_equal(run("QMoE", *given, k=2), found)


@pytest.mark.parametrize("block", [0, 2])
def test_gradient_with_zero_points_between_codes(block: int) -> None:
    blocks = (2, 4) if block else (1, 1)
    scales = [r(3, 8, blocks[0], low=0.2, seed=3) / 16, r(3, 4, blocks[1], low=0.2, seed=4) / 16]
    zeros = [r(*each.shape, low=1.0, high=9.0, seed=7).astype(np.float32) for each in scales]
    if not block:
        zeros[0] = zeros[0][:, :, 0]
    weights = [codes(3, 8, 2), scales[0], codes(3, 4, 4, seed=1), scales[1]]
    order = (0, 1, 2, 3, None, 4, 5, *[None] * 4, 6, 7)
    build = fused("QMoE", k=2, activation_type="silu", block_size=block, order=order)
    check_gradient(Case(build, [r(4, 4), r(4, 3, seed=9)], [*weights, *zeros]))


def test_work_of_layers_with_bits_of_their_own() -> None:
    layers = [Layer(INNER, HIDDEN, 8, 16, True), Layer(HIDDEN, INNER, 2, 16, False), Layer(INNER, HIDDEN, 4, 16, True)]
    given = operands([*layers], 5)
    rule = registry.get("com.microsoft", "QMoE").cost_rule
    assert rule is not None
    types = [None if x is None else TensorType(of(x), x.shape) for x in given]
    own = {"fc1_expert_weight_bits": 8, "fc2_expert_weight_bits": 2, "k": 2}
    assert rule(registry.TypeCall(types, given, own, 1, 1)).flops == 2 * 5 * 2 * 3 * INNER * HIDDEN
    codes8 = TensorType(DType.float8_e4m3fn, (EXPERTS, INNER, HIDDEN))
    types = [*types[:2], codes8, None, None, codes8]
    assert rule(registry.TypeCall(types, [], {"quant_type": "fp8"}, 1, 1)).flops == 2 * 5 * 2 * INNER * HIDDEN


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
    floats: Array = np.zeros((EXPERTS, HIDDEN, INNER // 32), np.float32)
    run("QMoE", *good[:12], floats, *good[13:], **attrs)
    for wrong in (floats[:, :, :1], floats[:, :, 0], floats[:3], floats.reshape(-1)):
        refused(ShapeMismatch, "fc2 has zero points", {12: wrong})
    for kind in (np.float64, np.int8):
        refused(InvalidValue, f"fc2 has zero points of {np.dtype(kind)}", {12: floats.astype(kind)})
    refused(ShapeMismatch, "blocks of 128", block_size=128)
    refused(ShapeMismatch, "top 9", k=9)
    refused(ShapeMismatch, "router_weights", {14: draw.floats(2, EXPERTS)})
    refused(ShapeMismatch, "fc1 takes 32 features, got 16", {0: draw.floats(3, 16)})
    refused(InvalidValue, "7 bits", expert_weight_bits=7)
    refused(InvalidValue, "swiglu needs fc3", activation_type="swiglu")
    refused(InvalidValue, "activation_type", activation_type="cube")
    refused(NotSupported, "quant_type 'fp2'", quant_type="fp2")
    refused(NotSupported, "use_sparse_mixer", use_sparse_mixer=1)
    refused(NotSupported, "weights_prepacked", weights_prepacked=1)
    refused(InvalidValue, "float8e4m3fn", quant_type="fp8")
