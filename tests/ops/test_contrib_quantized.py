"""com.microsoft operators on quantized data against ONNX Runtime, and against NumPy where it lacks them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from tests.ops.contrib_tools import Draw, check, check_rules, run, scalar

draw = Draw()


@pytest.fixture(autouse=True)
def _fresh_numbers():
    draw.restart()


# -- quantized operands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "zeros"), [(np.uint8, (120, 100, 130)), (np.int8, (3, -5, 7))])
def test_qlinear_operators(dtype, zeros):
    def codes(*shape):
        return draw.codes(dtype, *shape)

    za, zb, zc = (scalar(z, dtype) for z in zeros)
    low = scalar(np.iinfo(dtype).min, dtype)
    a, b = [codes(40, 50), scalar(0.02), za], [codes(50), scalar(0.03), zb]
    close = {"off_by_one": 0.02}
    check("QLinearAdd", [*a, *b, scalar(0.05), zc], **close)
    check("QLinearMul", [*a, *b, scalar(0.05), zc], **close)
    check("QLinearSigmoid", [codes(4, 50), scalar(0.05), za, scalar(1 / 256), low], **close)
    check("QLinearLeakyRelu", [codes(4, 50), scalar(0.05), za, scalar(0.04), zb], alpha=0.1, **close)
    for opset in (12, 13):
        share = [codes(4, 5, 6), scalar(0.05), za, scalar(1 / 256), low]
        check("QLinearSoftmax", share, axis=1, opset=opset, **close)
    parts = [codes(2, 3), scalar(0.02), zb, codes(2, 4), scalar(0.03), za]
    check("QLinearConcat", [scalar(0.03), za, *parts], axis=1, **close)
    chosen = [draw.bits(40, 50).astype(bool), *a, *b, scalar(0.025), zc]
    check("QLinearWhere", chosen, **close)
    scales = [scalar(0.02), za, scalar(0.015), zb]
    window = {"kernel_shape": [3, 3], "strides": [2, 2], **close}
    check("QLinearAveragePool", [codes(2, 3, 8, 9), *scales], pads=[1, 1, 1, 1], **window)
    check("QLinearAveragePool", [codes(2, 3, 8, 9), *scales], pads=[1, 1, 1, 1], count_include_pad=1, **window)
    check("QLinearAveragePool", [codes(2, 8, 9, 3), *scales], channels_last=1, ceil_mode=1, **window)
    check("QLinearGlobalAveragePool", [codes(2, 3, 8, 9), *scales], **close)
    check("QLinearGlobalAveragePool", [codes(2, 8, 9, 3), *scales], channels_last=1, **close)
    check("NhwcMaxPool", [codes(2, 8, 9, 3)], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])


@pytest.mark.parametrize("scale", [0.1, 0.02, 0.3, 0.7])
def test_means_that_lie_between_two_codes(scale):
    """Equal scales cancel, so a half is a half and becomes the even code, as in ONNX Runtime."""
    x = draw.codes(np.uint8, 2, 40, 2, 2)
    scales = [scalar(scale), scalar(7, np.uint8), scalar(scale), scalar(3, np.uint8)]
    exact = np.clip(np.rint((x.astype(np.int64) - 7).sum(axis=(2, 3), keepdims=True) / 4) + 3, 0, 255)
    assert (x.astype(np.int64).sum(axis=(2, 3)) % 4 == 2).any()
    for name, attrs in (("QLinearGlobalAveragePool", {}), ("QLinearAveragePool", {"kernel_shape": (2, 2)})):
        check(name, [x, *scales], **attrs)
        np.testing.assert_array_equal(run(name, x, *scales, **attrs), exact)
    np.testing.assert_array_equal(run("QLinearReduceMean", x, *scales, axes=(2, 3)), exact)


@pytest.mark.parametrize("scale", [0.1, 0.3, 0.013])
def test_sums_and_products_that_lie_between_two_codes(scale):
    a, b, zero = draw.codes(np.uint8, 200), draw.codes(np.uint8, 200), scalar(0, np.uint8)
    step, double = scalar(scale), scalar(2 * np.float32(scale))
    wide = a.astype(np.int64)
    total = np.clip(np.rint((wide + b) / 2), 0, 255)
    np.testing.assert_array_equal(run("QLinearAdd", a, step, zero, b, step, zero, double, zero), total)
    product = np.clip(np.rint(wide * b / 256), 0, 255)
    by_256 = scalar(256 * step * step)
    np.testing.assert_array_equal(run("QLinearMul", a, step, zero, b, step, zero, by_256, zero), product)
    halves = np.rint(wide / 2)
    np.testing.assert_array_equal(run("QLinearConcat", double, zero, a, step, zero, axis=0), halves)
    one = np.ones(200, bool)
    np.testing.assert_array_equal(run("QLinearWhere", one, a, step, zero, b, step, zero, double, zero), halves)


@pytest.mark.parametrize("last", [0, 1])
def test_contrib_qlinear_conv(last):
    x = draw.codes(np.uint8, 2, 7, 6, 4) if last else draw.codes(np.uint8, 2, 4, 7, 6)
    w, bias = draw.weights(6, 2, 3, 3), draw.ints(-1000, 1000, 6)
    weights = [w, draw.steps(6), np.zeros(6, np.int8)]
    operands = [x, scalar(0.02), scalar(120, np.uint8), *weights, scalar(0.4), scalar(100, np.uint8), bias]
    attrs = {"group": 2, "channels_last": last, "pads": [1, 1, 1, 1], "strides": [2, 1]}
    check("QLinearConv", operands, off_by_one=0.02, **attrs)


def test_qlinear_reduce_mean():
    data = draw.codes(np.uint8, 3, 4, 5)
    attrs = {"axes": (1, 2), "keepdims": 0}
    operands = [data, scalar(0.1), scalar(10, np.uint8), scalar(0.2), scalar(3, np.uint8)]
    mean = ((data.astype(np.float64) - 10) * 0.1).mean(axis=(1, 2))
    expected = np.clip(np.rint(mean / 0.2) + 3, 0, 255)
    found = run("QLinearReduceMean", *operands, **attrs)
    np.testing.assert_array_equal(found, expected)
    check_rules("QLinearReduceMean", operands, [found], ["y"], attrs)


def test_quantized_products():
    x, w = draw.floats(2, 5, 16), draw.weights(16, 6)
    check("DynamicQuantizeMatMul", [x, w, scalar(0.02)], atol=1e-4)
    check("DynamicQuantizeMatMul", [x, w, draw.steps(6), np.zeros(6, np.int8), draw.floats(6)], atol=1e-4)
    unsigned = draw.codes(np.uint8, 2, 16, 6)
    check("DynamicQuantizeMatMul", [x, unsigned, scalar(0.02), scalar(120, np.uint8)], atol=1e-4)
    a, zero = draw.codes(np.uint8, 2, 5, 16), scalar(110, np.uint8)
    check("MatMulIntegerToFloat", [a, w, scalar(0.02), scalar(0.03), zero], atol=1e-4)
    per_column = [a, w, scalar(0.02), draw.steps(6), zero, draw.codes(np.int8, 6), draw.floats(6)]
    check("MatMulIntegerToFloat", per_column, atol=1e-4)
    shorts = [draw.ints(-3000, 3000, 3, 4, dtype=np.int16), draw.ints(-3000, 3000, 4, 5, dtype=np.int16)]
    check("MatMulInteger16", shorts)


@pytest.mark.parametrize("turn_a", [0, 1])
@pytest.mark.parametrize("turn_b", [0, 1])
def test_qgemm(turn_a, turn_b):
    a = draw.codes(np.uint8, *((16, 5) if turn_a else (5, 16)))
    b = draw.weights(*((6, 16) if turn_b else (16, 6)))
    turns = {"transA": turn_a, "transB": turn_b}
    left = [a, scalar(0.02), scalar(110, np.uint8)]
    check("QGemm", [*left, b, scalar(0.03), scalar(3, np.int8)], ["float"], alpha=0.5, atol=1e-4, **turns)
    right = [b, draw.steps(6), draw.codes(np.int8, 6), draw.ints(-1000, 1000, 6)]
    check("QGemm", [*left, *right, scalar(0.3), scalar(100, np.uint8)], off_by_one=0.04, **turns)


def test_integer_products_are_exact():
    a, b = draw.codes(np.uint8, 3, 4), draw.codes(np.uint8, 4)
    zero_a, zero_b = scalar(5, np.uint8), scalar(200, np.uint8)
    expected = (a.astype(np.int64) - 5) * (b.astype(np.int64) - 200)
    found = run("MulInteger", a, zero_a, b, zero_b)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)
    check_rules("MulInteger", [a, zero_a, b, zero_b], [found], ["y"], {})
    total = run("ReduceSumInteger", a, axes=(1,), keepdims=0)
    assert total.dtype == np.uint32
    np.testing.assert_array_equal(total, a.astype(np.int64).sum(axis=1))
    check_rules("ReduceSumInteger", [a], [total], ["y"], {"axes": (1,), "keepdims": 0})


def test_contrib_quantize_and_dequantize():
    x = draw.floats(3, 4) * 3
    check("QuantizeLinear", [x, scalar(0.05), scalar(100, np.uint16)])
    check("QuantizeLinear", [x, draw.steps(4, top=0.1), draw.ints(-5, 5, 4, dtype=np.int8)], axis=1)
    check("QuantizeLinear", [x.astype(np.float16), scalar(0.05, np.float16), scalar(100, np.int16)])
    check("DequantizeLinear", [draw.ints(-3000, 3000, 3, 4, dtype=np.int16), scalar(0.05), scalar(100, np.int16)])
    check("DequantizeLinear", [draw.codes(np.uint8, 3, 4), draw.steps(3), draw.codes(np.uint8, 3)], axis=0)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("batch", [1, 3])
def test_dynamic_quantize_lstm(direction, batch):
    count = 2 if direction == "bidirectional" else 1
    steps, inputs, hidden = 7, 10, 12
    attrs = {"hidden_size": hidden, "direction": direction}
    outputs, tolerance = ["y", "h", "c"], {"atol": 1e-4}
    x, bias = draw.floats(steps, batch, inputs), draw.floats(count, 8 * hidden)
    w, r = draw.weights(count, inputs, 4 * hidden), draw.weights(count, hidden, 4 * hidden)
    zeros = np.zeros(count, np.int8)
    per_tensor = [draw.steps(count), zeros, draw.steps(count), zeros]
    nothing = [None] * 4
    check("DynamicQuantizeLSTM", [x, w, r, bias, *nothing, *per_tensor], outputs, **tolerance, **attrs)
    states = [draw.floats(count, batch, hidden), draw.floats(count, batch, hidden), draw.floats(count, 3 * hidden)]
    ends = draw.ints(1, steps + 1, batch)
    check("DynamicQuantizeLSTM", [x, w, r, bias, ends, *states, *per_tensor], outputs, **tolerance, **attrs)
    columns = np.zeros((count, 4 * hidden), np.int8)
    per_column = [draw.steps(count, 4 * hidden), columns, draw.steps(count, 4 * hidden), columns]
    coupled = {"input_forget": 1, "clip": 0.9, **attrs}
    check("DynamicQuantizeLSTM", [x, w, r, bias, *nothing, *per_column], outputs, **tolerance, **coupled)
    middle = [draw.steps(count), np.full(count, 128, np.uint8), draw.steps(count), np.full(count, 120, np.uint8)]
    unsigned = [x, w.view(np.uint8), r.view(np.uint8), None, *nothing, *middle]
    check("DynamicQuantizeLSTM", unsigned, outputs, **tolerance, **attrs)


def test_qembed_layer_normalization():
    def codes(*shape):
        return draw.codes(np.uint8, *shape)

    ids, segments, mask = draw.ints(0, 10, 2, 5), draw.ints(0, 2, 2, 5), draw.bits(2, 5)
    tables = [codes(10, 8), codes(6, 8), codes(2, 8), codes(8), codes(8)]
    steps = [scalar(s) for s in (0.02, 0.03, 0.01, 0.02, 0.02)]
    zeros = [scalar(z, np.uint8) for z in (120, 110, 100, 130, 125)]
    check("QEmbedLayerNormalization", [ids, segments, *tables, mask, *steps, *zeros], ["y", "m"], atol=1e-4)


# -- few-bit weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("inner", "outer", "block"), [(64, 24, 32), (80, 16, 32), (48, 8, 16)])
def test_matmul_nbits(bits, inner, outer, block):
    blocks = -(-inner // block)
    codes, steps = draw.codes(np.uint8, outer, blocks, block * bits // 8), draw.steps(outer, blocks, top=0.1)
    zeros = draw.codes(np.uint8, outer, -(-blocks * bits // 8))
    attrs = {"K": inner, "N": outer, "bits": bits, "block_size": block, "rtol": 1e-3, "atol": 2e-3}
    x = draw.floats(3, 5, inner)
    check("MatMulNBits", [x, codes, steps], **attrs)
    check("MatMulNBits", [x, codes, steps, zeros], **attrs)
    check("MatMulNBits", [x, codes, steps.reshape(-1), zeros.reshape(-1), None, draw.floats(outer)], **attrs)
    if bits < 8:  # ONNX Runtime's CPU provider has no 8-bit kernel for real zero points
        check("MatMulNBits", [x, codes, steps, draw.steps(outer, blocks, top=4.0)], **attrs)
    if bits == 4:
        check("MatMulNBits", [x, codes, steps, None, draw.ints(0, blocks, blocks * block)], **attrs)


def stored(bits, *shape):
    """Codes and the bytes that hold them: one stream of bits along the last axis, the lowest first."""
    codes = draw.ints(0, 1 << bits, *shape).astype(np.uint8)
    each = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return codes, np.packbits(each.reshape(*shape[:-1], -1), axis=-1, bitorder="little")


@pytest.mark.parametrize("bits", [3, 5, 6])
@pytest.mark.parametrize(("inner", "outer", "block"), [(64, 24, 32), (80, 16, 32), (45, 7, 16), (9, 3, 8)])
def test_matmul_nbits_of_widths_that_fill_no_byte(bits, inner, outer, block):
    """ONNX Runtime defines these, and reads none of them."""
    blocks = -(-inner // block)
    (codes, raw), (whole, zeros) = stored(bits, outer, blocks, block), stored(bits, outer, blocks)
    steps, between = draw.steps(outer, blocks, top=0.1), draw.steps(outer, blocks, top=4.0)
    attrs = {"K": inner, "N": outer, "bits": bits, "block_size": block}
    group_of = draw.ints(0, blocks, blocks * block, dtype=np.int32)
    x = draw.floats(3, 5, inner)
    even = np.arange(inner) // block
    for given, zero, groups in (
        ([], np.full((outer, blocks), 1 << (bits - 1)), even),
        ([zeros], whole, even),
        ([between], between, even),
        ([zeros, group_of], whole, group_of[:inner]),
    ):
        weight = codes.reshape(outer, -1)[:, :inner].astype(np.float64) - zero.astype(np.float64)[:, groups]
        found = run("MatMulNBits", x, raw, steps, *given, **attrs)
        np.testing.assert_allclose(found, x @ (weight * steps[:, groups]).T, rtol=1e-4, atol=1e-4)
    check_rules("MatMulNBits", [x, raw, steps], [found], ["y"], attrs)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_rows_of_widths_that_fill_no_byte(bits):
    (codes, raw), (whole, zeros) = stored(bits, 20, 64), stored(bits, 20, 4)
    steps, rows = draw.steps(20, 4, top=0.1), draw.ints(-20, 20, 3, 4, dtype=np.int64)
    attrs = {"bits": bits, "block_size": 16, "quantize_axis": 1, "gather_axis": 0}
    for given, zero in (([], np.full((20, 4), 1 << (bits - 1))), ([zeros], whole)):
        table = (codes.astype(np.float64) - zero.repeat(16, 1)) * steps.repeat(16, 1)
        found = run("GatherBlockQuantized", raw, rows, steps, *given, **attrs)
        np.testing.assert_allclose(found, table[rows], rtol=1e-5)
        check_rules("GatherBlockQuantized", [raw, rows, steps, *given], [found], ["y"], attrs)


def test_matmul_nbits_rejects_what_does_not_fit():
    codes, steps = draw.codes(np.uint8, 4, 2, 16), draw.steps(4, 2)
    attrs = {"K": 64, "N": 4, "block_size": 32}
    with pytest.raises(ShapeMismatch, match="MatMulNBits: A"):
        run("MatMulNBits", draw.floats(3, 63), codes, steps, **attrs)
    with pytest.raises(ShapeMismatch, match="need 4 x 2 blocks"):
        run("MatMulNBits", draw.floats(3, 64), codes[:, :1], steps, **attrs)
    with pytest.raises(InvalidValue, match="7 bits in blocks of 32"):
        run("MatMulNBits", draw.floats(3, 64), codes, steps, bits=7, **attrs)
    with pytest.raises(NotSupported, match="weight_prepacked"):
        run("MatMulNBits", draw.floats(3, 64), codes, steps, weight_prepacked=1, **attrs)
    with pytest.raises(ShapeMismatch, match="bias of \\[3\\] for 4 columns"):
        run("MatMulNBits", draw.floats(3, 64), codes, steps, None, None, draw.floats(3), **attrs)
    with pytest.raises(InvalidValue, match="4 x 0 codes"):
        run("MatMulNBits", draw.floats(3, 0), codes[:, :0], steps[:, :0], **(attrs | {"K": 0}))
    with pytest.raises(InvalidValue, match="blocks of 0"):
        attrs = {"K": 4, "N": 2, "block_size": 0, "quant_type": 1}
        run("MatMulBnb4", draw.floats(3, 4), draw.codes(np.uint8, 4), draw.steps(1), **attrs)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("inner", "outer", "block"), [(64, 24, 32), (80, 16, 16), (128, 64, 64)])
def test_matmul_bnb4(kind, inner, outer, block):
    codes, largest = draw.codes(np.uint8, outer * inner // 2), draw.steps(outer * inner // block, top=0.1)
    attrs = {"K": inner, "N": outer, "block_size": block, "quant_type": kind}
    check("MatMulBnb4", [draw.floats(3, 5, inner), codes, largest], atol=1e-4, **attrs)


def test_matmul_with_float_codes():
    weight = draw.floats(6, 48)
    step = draw.steps(6, 3, top=1.0)
    stored = (weight / step.repeat(16, axis=1)).astype(ml_dtypes.float8_e4m3fn)
    x, bias = draw.floats(2, 48).astype(np.float16), draw.floats(6).astype(np.float16)
    found = run("MatMulBlockQuantizedFp8Weight", x, stored, step, None, bias, block_size=16)
    expected = x.astype(np.float64) @ (stored.astype(np.float64) * step.repeat(16, axis=1)).T + bias
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)

    codes = draw.codes(np.uint8, 6, 24)
    scale = draw.steps(6, 3, top=1.0).astype(ml_dtypes.float8_e4m3fn)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(6, 48).view(ml_dtypes.float4_e2m1fn)
    whole = pairs.astype(np.float64) * scale.astype(np.float64).repeat(16, axis=1) * 0.5
    found = run("MatMulBlockQuantizedFp4Weight", x, codes, scale.view(np.uint8), scalar(0.5), None, bias)
    np.testing.assert_allclose(found, x.astype(np.float64) @ whole.T + bias, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gather_block_quantized_bytes(bits):
    table, steps = draw.codes(np.uint8, 20, 64 * bits // 8), draw.steps(20, 4, top=0.1)
    rows = draw.ints(-20, 20, 3, 4, dtype=np.int64)
    attrs = {"bits": bits, "block_size": 16, "quantize_axis": 1, "gather_axis": 0}
    check("GatherBlockQuantized", [table, rows, steps], **attrs)
    check("GatherBlockQuantized", [table, rows, steps, draw.codes(np.uint8, 20, -(-4 * bits // 8))], **attrs)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize(("gather", "block"), [(0, 1), (1, 0), (1, 1)])
def test_gather_block_quantized_nibbles(dtype, gather, block):
    limits = ml_dtypes.iinfo(dtype)
    shape = (40, 40)
    table = draw.ints(limits.min, limits.max + 1, *shape).astype(dtype)
    scaled = tuple(3 if axis == block else 40 for axis in range(2))
    steps, zeros = draw.steps(*scaled), draw.ints(limits.min, limits.max + 1, *scaled).astype(dtype)
    rows = draw.ints(-40, 40, 2, 3)
    attrs = {"block_size": 16, "gather_axis": gather, "quantize_axis": block}
    real = table.astype(np.float64) - zeros.astype(np.float64).repeat(16, block).take(range(40), block)
    real = real * steps.repeat(16, block).take(range(40), block)
    found = run("GatherBlockQuantized", table, rows, steps, zeros, **attrs)
    np.testing.assert_allclose(found, real.take(rows, axis=gather, mode="wrap"), rtol=1e-5)
    check_rules("GatherBlockQuantized", [table, rows, steps, zeros], [found], ["y"], attrs)
    beyond = run("GatherBlockQuantized", table, np.array([3, 40, -41]), steps, zeros, **attrs)
    assert not beyond.take([1, 2], axis=gather).any()
    assert beyond.take([0], axis=gather).any()
