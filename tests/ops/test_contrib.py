"""com.microsoft operators against ONNX Runtime, and against NumPy formulas where its CPU provider lacks them."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.errors import InvalidValue
from tests.ops.contrib_tools import Draw, check, check_rules, run, scalar

draw = Draw()


@pytest.fixture(autouse=True)
def _fresh_numbers():
    draw.restart()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def erf(x):
    import math

    return np.vectorize(math.erf)(x)


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gelus(dtype):
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype is np.float16 else {}
    x, bias = (draw.floats(2, 3, 8) * 3).astype(dtype), draw.floats(8).astype(dtype)
    check("Gelu", [x], **tolerance)
    check("FastGelu", [x], **tolerance)
    check("FastGelu", [x, bias], **tolerance)
    check("QuickGelu", [x], **tolerance)
    check("QuickGelu", [x], alpha=1.3, **tolerance)


def test_activations_with_operands():
    x, y = draw.floats(2, 3, 8), draw.floats(2, 3, 8)
    check("BiasGelu", [x, draw.floats(8)])
    check("ScaledSiLU", [x], alpha=1.3)
    check("ScaledSiLU", [x, scalar(0.5)])
    check("GatedAdd", [x, y, draw.floats(2, 3, 1)])


def test_sums_of_diffusion_models():
    x, bias, skip = draw.floats(2, 3, 8), draw.floats(8), draw.floats(2, 3, 8)
    np.testing.assert_allclose(run("BiasAdd", x, bias, skip), x + bias + skip, rtol=1e-6)
    left, right = np.split(x + bias, 2, axis=-1)
    expected = left * right * 0.5 * (1 + erf(right / np.sqrt(2)))
    found = run("BiasSplitGelu", x, bias)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    check_rules("BiasSplitGelu", [x, bias], [found], ["y"], {})


def test_bias_dropout():
    x, bias, residual = draw.floats(4, 50), draw.floats(50), draw.floats(4, 50)
    y, mask = run("BiasDropout", x, bias, residual, outputs=2)
    np.testing.assert_allclose(y, x + bias + residual, rtol=1e-6)
    assert mask.all()
    y, mask = run("BiasDropout", x, bias, residual, scalar(0.25), np.array(True), outputs=2, seed=3)
    np.testing.assert_allclose(y, np.where(mask, (x + bias) / 0.75, 0) + residual, rtol=1e-5, atol=1e-6)
    assert 0.6 < mask.mean() < 0.9
    again = run("BiasDropout", x, bias, residual, scalar(0.25), np.array(True), outputs=2, seed=3)
    np.testing.assert_array_equal(mask, again[1])


@pytest.mark.parametrize("inner", [0, 1])
def test_bias_softmax(inner):
    scores = draw.floats(2, 3, 4, 5)
    bias = draw.floats(2, 1, 1, 5) if inner else draw.floats(1, 1, 4, 5)
    summed = scores + bias
    weights = np.exp(summed - summed.max(axis=-1, keepdims=True))
    found = run("BiasSoftmax", scores, bias, axis=3, is_inner_broadcast=inner)
    np.testing.assert_allclose(found, weights / weights.sum(axis=-1, keepdims=True), rtol=1e-5)


def test_is_all_finite():
    fine, nan, inf = np.ones(3, np.float32), np.array([1, np.nan], np.float32), np.array([np.inf], np.float32)
    assert run("IsAllFinite", fine, fine)
    assert not run("IsAllFinite", fine, inf)
    assert run("IsAllFinite", nan, isinf_only=1)
    assert run("IsAllFinite", inf, isnan_only=1)


# -- fused products ---------------------------------------------------------------------------------------------------


def test_fused_matmul():
    check("FusedMatMul", [draw.floats(4, 5), draw.floats(6, 5)], transB=1, alpha=0.5)
    check("FusedMatMul", [draw.floats(2, 3, 5, 4), draw.floats(2, 3, 5, 6)], transA=1, alpha=2.0)
    check("FusedMatMul", [draw.floats(5, 2, 3, 4), draw.floats(2, 3, 4, 6)], transBatchA=1)
    turned = {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1}
    check("FusedMatMul", [draw.floats(4, 2, 3, 5), draw.floats(6, 2, 3, 4)], **turned)
    check("TransposeMatMul", [draw.floats(5, 4), draw.floats(5, 6)], transA=1)
    a, b = draw.floats(4, 5), draw.floats(6, 5)
    found = run("FusedMatMulActivation", a, b, activation="Relu", transB=1, alpha=2.0)
    np.testing.assert_allclose(found, np.maximum(2 * a @ b.T, 0), rtol=1e-5)
    x = a @ b.T + 1
    expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    found = run("GemmFastGelu", a, np.ascontiguousarray(b.T), np.ones(6, np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [
        ("", {}),
        ("Relu", {}),
        ("Tanh", {}),
        ("LeakyRelu", {"activation_alpha": 0.2}),
        ("Elu", {"activation_alpha": 0.7}),
        ("Selu", {"activation_alpha": 1.5, "activation_gamma": 1.1}),
        ("HardSigmoid", {"activation_alpha": 0.3, "activation_beta": 0.6}),
    ],
)
def test_fused_gemm(activation, parameters):
    if activation:
        parameters = {"activation": activation, **parameters}
    elif not activation:
        a, b, c = draw.floats(4, 5), draw.floats(6, 5), draw.floats(6)
        np.testing.assert_allclose(run("FusedGemm", a, b, c, transB=1), a @ b.T + c, rtol=1e-5, atol=1e-6)
        return
    check("FusedGemm", [draw.floats(4, 5), draw.floats(6, 5), draw.floats(6)], transB=1, beta=0.5, **parameters)


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", None), ("Tanh", None), ("LeakyRelu", [0.1]), ("Clip", [-0.5, 0.5]), ("HardSigmoid", [0.3, 0.5])],
)
def test_fused_conv(activation, parameters):
    attrs = {"activation": activation, "pads": [1, 1, 1, 1], "group": 2, "strides": [2, 1]}
    if parameters:
        attrs["activation_params"] = parameters
    operands = [draw.floats(2, 4, 6, 7), draw.floats(6, 2, 3, 3), draw.floats(6)]
    check("FusedConv", operands, **attrs)
    check("FusedConv", [*operands, draw.floats(2, 6, 3, 7)], **attrs)
    nchw = run("FusedConv", *operands, **attrs)
    x, w, b = operands
    x = np.moveaxis(x, 1, -1)
    nhwc = run("NhwcFusedConv", x, w, b, **attrs)
    np.testing.assert_allclose(np.moveaxis(nhwc, -1, 1), nchw, rtol=1e-5, atol=1e-6)
    check_rules("NhwcFusedConv", [x, w, b], [nhwc], ["y"], attrs)


def test_nhwc_conv_has_filters_last_too():
    x, w = draw.floats(2, 4, 6, 7), draw.floats(6, 4, 3, 3)
    inputs = [np.moveaxis(x, 1, -1), np.moveaxis(w, 1, -1)]
    found = run("NhwcConv", *inputs, pads=(1, 1, 1, 1))
    expected = run("FusedConv", x, w, pads=(1, 1, 1, 1))
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), expected, rtol=1e-5, atol=1e-6)
    check_rules("NhwcConv", inputs, [found], ["y"], {"pads": (1, 1, 1, 1)})


def test_conv_transpose_with_dynamic_pads():
    pads = np.array([1, 0, 1, 1])
    operands = [draw.floats(1, 3, 5, 6), draw.floats(3, 2, 3, 3), pads, draw.floats(2)]
    check("ConvTransposeWithDynamicPads", operands, strides=[2, 2])


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_tensor_operators():
    check("Inverse", [draw.floats(2, 3, 4, 4)], rtol=1e-3, atol=1e-3)
    for metric in ("sqeuclidean", "euclidean"):
        check("CDist", [draw.floats(4, 5), draw.floats(6, 5)], metric=metric, atol=1e-4)
    for axis in (-1, 0, 1):
        check("ExpandDims", [draw.floats(2, 3), np.array(axis, np.int32)])
    check("Trilu", [draw.floats(3, 4), np.array(1)], upper=0)
    check("GatherND", [draw.floats(3, 4, 5), np.array([[0, 1], [2, 3]], np.int32)])
    check("Unique", [draw.ints(0, 5, 20, dtype=np.float32)], ["y", "i", "n"])
    check("Range", [np.array(3, np.int32), np.array(10, np.int32), np.array(2, np.int32)])
    check("Range", [np.array([1], np.float32), np.array([4], np.float32)])
    check("Pad", [draw.floats(2, 3), np.array([[0, 1, 2, 0]]), np.array([1.5], np.float32)])
    check("Pad", [draw.floats(4, 3), np.array([1, 1, 2, 0])], mode="reflect")
    check("UnfoldTensor", [draw.floats(2, 9, 3)], dim=1, size=4, step=2)
    check("UnfoldTensor", [draw.floats(2, 9)], size=3)
    for size in (1, 2, 3):
        ids = draw.ints(0, 4, 3, 12, dtype=np.int64)
        check("NGramRepeatBlock", [ids, draw.floats(3, 6)], ngram_size=size)
    found = run("TorchEmbedding", draw.floats(5, 3), np.array([[1, 4], [0, 2]]))
    assert found.shape == (2, 2, 3)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("size", [(3, 4), (1, 5), (1, 1)])
def test_crop_and_resize(mode, size):
    boxes = np.array([[0, 0, 1, 1], [0.1, 0.2, 0.7, 0.9], [0.5, 0.5, 0.2, 0.1], [-0.2, 0, 1.2, 0.5]], np.float32)
    operands = [draw.floats(2, 3, 6, 7), boxes, np.array([0, 1, 1, 0], np.int32), np.array(size, np.int32)]
    check("CropAndResize", operands, mode=mode, extrapolation_value=-3.0)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_grid_sample(mode):
    grid = (draw.rng.random((2, 4, 3, 2)) * 2.4 - 1.2).astype(np.float32)
    check("GridSample", [draw.floats(2, 3, 5, 6), grid], mode=mode, padding_mode="border", atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 7), (7, 4), (1, 6), (30, 20)])
def test_dynamic_time_warping(shape):
    check("DynamicTimeWarping", [np.abs(draw.floats(*shape))])


@pytest.mark.parametrize("rank", [1, 2])
def test_fourier_round_trip(rank):
    x = draw.floats(2, 6, 8)
    spectrum = run("Rfft", x, signal_ndim=rank)
    wanted = np.fft.rfftn(x, axes=tuple(range(-rank, 0)))
    np.testing.assert_allclose(spectrum[..., 0] + 1j * spectrum[..., 1], wanted, rtol=1e-4, atol=1e-4)
    back = run("Irfft", spectrum, signal_ndim=rank)
    np.testing.assert_allclose(back, x, atol=1e-5)
    check_rules("Rfft", [x], [spectrum], ["y"], {"signal_ndim": rank})
    check_rules("Irfft", [spectrum], [back], ["y"], {"signal_ndim": rank})


def test_complex_products():
    a, b = draw.floats(3, 4, 2), draw.floats(4, 2)
    left, right = a[..., 0] + 1j * a[..., 1], b[..., 0] + 1j * b[..., 1]
    for name, expected in (("ComplexMul", left * right), ("ComplexMulConj", left * right.conj())):
        found = run(name, a, b)
        np.testing.assert_allclose(found[..., 0] + 1j * found[..., 1], expected, rtol=1e-5, atol=1e-6)


# -- normalizations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_skip_normalizations(dtype):
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if dtype is np.float16 else {}

    def floats(*shape):
        return draw.floats(*shape).astype(dtype)

    x = floats(2, 3, 16)
    all_but_statistics = ["y", "", "", "s"]
    vectors = [floats(16), floats(16), floats(16)]
    check("SkipLayerNormalization", [x, floats(2, 3, 16), *vectors], all_but_statistics, epsilon=1e-5, **tolerance)
    check("SkipLayerNormalization", [x, floats(3, 16), floats(16)], **tolerance)
    check("SkipLayerNormalization", [x, floats(1, 3, 16), *vectors[:2]], all_but_statistics, **tolerance)
    rms = [x, floats(2, 3, 16), *vectors[:2]]
    check("SkipSimplifiedLayerNormalization", rms, all_but_statistics, epsilon=1e-5, **tolerance)
    check("SkipSimplifiedLayerNormalization", [floats(6, 16), floats(6, 16), floats(16)], epsilon=1e-5, **tolerance)
    check("SimplifiedLayerNormalization", [x, floats(16)], ["y", "v"], domain="", epsilon=1e-5, **tolerance)
    check("GatedRMSNorm", [x, floats(4), floats(2, 3, 16)], **tolerance)
    check("GatedRMSNorm", [x, floats(16), floats(2, 3, 16)], activation="sigmoid", **tolerance)


def test_both_homes_of_simplified_layer_normalization_agree():
    x, scale = draw.floats(2, 3, 4), draw.floats(3, 4)
    here = run("SimplifiedLayerNormalization", x, scale, axis=1)
    there = run("SimplifiedLayerNormalization", x, scale, axis=1, domain="")
    np.testing.assert_array_equal(here, there)


def test_layer_normalization_in_models_older_than_the_operator():
    x, scale, bias = draw.floats(2, 3, 4), draw.floats(4), draw.floats(4)
    early = run("LayerNormalization", x, scale, bias, domain="", version=11, outputs=3)
    today = run("LayerNormalization", x, scale, bias, domain="", version=17, outputs=3)
    for a, b in zip(early, today):
        np.testing.assert_array_equal(a, b)


def test_branchwise_rms_norm():
    check("BranchwiseRMSNorm", [draw.floats(2, 3, 4, 8), draw.floats(4, 8)])
    for scale in ([draw.floats(32)], [draw.floats(8)], []):
        check("BranchwiseRMSNorm", [draw.floats(2, 3, 32), *scale], num_branches=4)


def test_embed_layer_normalization():
    ids, segments = draw.ints(0, 10, 2, 5), draw.ints(0, 2, 2, 5)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    words, positions, kinds = draw.floats(10, 8), draw.floats(6, 8), draw.floats(2, 8)
    scale, shift = draw.floats(8), draw.floats(8)
    check("EmbedLayerNormalization", [ids, segments, words, positions, kinds, scale, shift, mask], ["y", "m", "s"])
    order = np.array([[3, 2, 1, 0, 5]], np.int32)
    plain = [ids, None, words, positions, None, scale, shift]
    check("EmbedLayerNormalization", [*plain, mask, order], ["y", "m", "s"], epsilon=1e-5)
    check("EmbedLayerNormalization", plain, ["y", "m"], epsilon=1e-5)
    with pytest.raises(InvalidValue, match="word index"):
        run("EmbedLayerNormalization", ids + 9, *plain[1:])


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("activation", [0, 1])
def test_group_norm(last, activation):
    x, gamma, beta = draw.floats(2, 8, 3, 5), draw.floats(8), draw.floats(8)
    groups = x.reshape(2, 4, -1)
    centred = groups - groups.mean(axis=2, keepdims=True)
    y = (centred / np.sqrt((centred**2).mean(axis=2, keepdims=True) + 1e-5)).reshape(x.shape)
    y = y * gamma[:, None, None] + beta[:, None, None]
    expected = y * sigmoid(y) if activation else y
    attrs = {"groups": 4, "activation": activation, "channels_last": last}
    image = np.moveaxis(x, 1, -1) if last else x
    found = run("GroupNorm", image, gamma, beta, **attrs)
    np.testing.assert_allclose(np.moveaxis(found, -1, 1) if last else found, expected, rtol=1e-4, atol=1e-5)
    # the same with the input split into summands
    skip, bias = draw.floats(2, 8), draw.floats(8)
    summand = x - skip[:, :, None, None] - bias[:, None, None]
    summand = np.moveaxis(summand, 1, -1) if last else summand
    y, total = run("SkipGroupNorm", summand, gamma, beta, skip, bias, outputs=2, **attrs)
    np.testing.assert_allclose(y, found, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(total, image, rtol=1e-4, atol=1e-5)
    check_rules("SkipGroupNorm", [summand, gamma, beta, skip, bias], [y, total], ["y", "s"], attrs)


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize(("k", "normalize"), [(1, 0), (2, 1), (2, 0)])
def test_mixture_of_experts(activation, k, normalize):
    experts, hidden, inner = 4, 8, 12
    first = [draw.floats(experts, inner, hidden), draw.floats(experts, inner)]
    second = [draw.floats(experts, hidden, inner), draw.floats(experts, hidden)]
    attrs = {"activation_type": activation, "k": k, "normalize_routing_weights": normalize}
    check("MoE", [draw.floats(2, 5, hidden), draw.floats(10, experts), *first, *second], atol=1e-4, **attrs)


def test_mixture_of_experts_with_swiglu():
    experts, hidden, inner = 4, 8, 12
    x, router = draw.floats(10, hidden), draw.floats(10, experts)
    first, bias = draw.floats(experts, 2 * inner, hidden), draw.floats(experts, 2 * inner)
    second = [draw.floats(experts, hidden, inner), draw.floats(experts, hidden)]
    attrs = {
        "activation_type": "swiglu",
        "k": 2,
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        "swiglu_limit": 7.0,
    }
    check("MoE", [x, router, first, bias, *second], atol=1e-4, swiglu_fusion=1, **attrs)
    # gate and linear part interleaved, one behind the other, or as two layers: all the same
    woven = run("MoE", x, router, first, bias, *second, swiglu_fusion=1, **attrs)
    halves = [np.concatenate([t[:, 0::2], t[:, 1::2]], axis=1) for t in (first, bias)]
    np.testing.assert_allclose(run("MoE", x, router, *halves, *second, swiglu_fusion=2, **attrs), woven, rtol=1e-5)
    apart = [first[:, 0::2], bias[:, 0::2], *second, first[:, 1::2], bias[:, 1::2]]
    np.testing.assert_allclose(run("MoE", x, router, *apart, **attrs), woven, rtol=1e-5)
