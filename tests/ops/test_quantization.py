"""Laws of linear quantization, and exactness of integer contractions."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from onnx import helper

from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType
from ranvier.ops import registry
from ranvier.ops.contrib.weight_only import WIDTHS, packed, unpacked

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2]
FLOAT8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz]

quick = settings(max_examples=30, deadline=None)
numbers = arrays(np.float32, array_shapes(min_dims=1, max_dims=4, max_side=6), elements=st.floats(-1e3, 1e3, width=32))
rng = np.random.default_rng(11)


def run(name, *inputs, **attrs):
    with np.errstate(all="ignore"):
        return registry.evaluate(name, *inputs, **attrs)


def number(value, dtype=np.float32):
    return np.array(value, dtype)


# -- quantize, dequantize ---------------------------------------------------------------------------------------------


@quick
@given(x=numbers, step=st.floats(2**-10, 10, width=32), which=st.sampled_from(INTEGERS), shift=st.floats(0, 1))
def test_error_is_at_most_half_a_step(x, step, which, shift):
    limits = ml_dtypes.iinfo(which)
    zero = number(round(int(limits.min) + shift * (int(limits.max) - int(limits.min))), np.int32).astype(which)
    scale = number(step)
    codes = run("QuantizeLinear", x, scale, zero)
    assert codes.dtype == which
    low, high = ((int(limit) - int(zero)) * float(scale) for limit in (limits.min, limits.max))
    back = run("DequantizeLinear", codes, scale, zero)
    assert back.dtype == np.float32
    representable = np.clip(x.astype(np.float64), low, high)
    # a little more than half: x / scale is rounded to float32 before it is rounded to an integer
    bound = float(scale) * 0.5 + np.abs(x).max(initial=0) * 3e-7
    assert np.abs(back - representable).max(initial=0) <= bound * 1.0001


@quick
@given(codes=arrays(np.int8, array_shapes(max_dims=3, max_side=6)), step=st.floats(2**-10, 10, width=32))
def test_codes_survive_a_round_trip(codes, step):
    scale, zero = number(step), number(7, np.int8)
    again = run("QuantizeLinear", run("DequantizeLinear", codes, scale, zero), scale, zero)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("which", INTEGERS)
def test_ties_go_to_even_and_the_rest_saturates(which):
    limits = ml_dtypes.iinfo(which)
    x = np.array([0.5, 1.5, -0.5, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    codes = run("QuantizeLinear", x, number(1), np.zeros((), which)).astype(np.int64)
    top, low = int(limits.max), int(limits.min)
    assert codes.tolist() == [0, min(2, top), 0, top, low, top, low, low]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_per_axis_is_per_tensor_slice_by_slice(axis):
    x = rng.standard_normal((3, 4, 5)).astype(np.float32) * 4
    size = x.shape[axis]
    scales, zeros = rng.random(size).astype(np.float32) + 0.05, rng.integers(-9, 9, size).astype(np.int8)
    codes = run("QuantizeLinear", x, scales, zeros, axis=axis)
    back = run("DequantizeLinear", codes, scales, zeros, axis=axis)
    for k in range(size):
        part = run("QuantizeLinear", x.take(k, axis), scales[k : k + 1], zeros[k : k + 1])
        np.testing.assert_array_equal(codes.take(k, axis), part)
        plain = run("DequantizeLinear", part, scales[k : k + 1], zeros[k : k + 1])
        np.testing.assert_array_equal(back.take(k, axis), plain)


def test_one_block_per_row_is_per_axis():
    x = rng.standard_normal((4, 10)).astype(np.float32)
    scales, zeros = rng.random(4).astype(np.float32) + 0.05, rng.integers(0, 255, 4).astype(np.uint8)
    per_axis = run("QuantizeLinear", x, scales, zeros, axis=0)
    blocked = run("QuantizeLinear", x, scales[:, None], zeros[:, None], axis=1, block_size=10)
    np.testing.assert_array_equal(per_axis, blocked)
    np.testing.assert_array_equal(
        run("DequantizeLinear", per_axis, scales, zeros, axis=0),
        run("DequantizeLinear", per_axis, scales[:, None], zeros[:, None], axis=1, block_size=10),
    )


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("block", [1, 3, 4, 7])
def test_blocks_share_their_scale(axis, block):
    x = rng.standard_normal((6, 7, 5)).astype(np.float32)
    shape = list(x.shape)
    shape[axis] = -(-shape[axis] // block)
    scales = rng.random(shape).astype(np.float32) + 0.05
    wide = scales.repeat(block, axis).take(range(x.shape[axis]), axis)
    codes = run("QuantizeLinear", x, scales, np.zeros(shape, np.int16), axis=axis, block_size=block)
    np.testing.assert_array_equal(codes, np.rint(x / wide).astype(np.int16))
    back = run("DequantizeLinear", codes, scales, axis=axis, block_size=block)
    np.testing.assert_array_equal(back, codes.astype(np.float32) * wide)


def test_result_types():
    x, scale = np.ones((2, 3), np.float32), number(0.5)
    assert run("QuantizeLinear", x, scale).dtype == np.uint8
    assert run("QuantizeLinear", x, scale, output_dtype=DType.int4.onnx).dtype == ml_dtypes.int4
    assert run("QuantizeLinear", x, scale, number(0, np.int16)).dtype == np.int16
    half = run("QuantizeLinear", x.astype(np.float16), number(0.5, np.float16), number(1, np.int8))
    assert half.tolist() == [[3, 3, 3], [3, 3, 3]]
    codes = np.ones((2, 3), np.int8)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert run("DequantizeLinear", codes, number(0.5, dtype)).dtype == dtype
    assert run("DequantizeLinear", codes, scale, output_dtype=DType.float16.onnx).dtype == np.float16
    power = number(0.25, ml_dtypes.float8_e8m0fnu)
    assert run("DequantizeLinear", codes, power, output_dtype=DType.float32.onnx).tolist() == [[0.25] * 3] * 2
    with pytest.raises(DTypeMismatch, match="zero point is int8"):
        run("QuantizeLinear", x, scale, number(0, np.int8), output_dtype=DType.uint8.onnx)
    with pytest.raises(DTypeMismatch, match="x is int8"):
        run("DequantizeLinear", codes, scale, number(0, np.uint8))


def test_precision_is_that_of_the_scale_unless_told():
    x = np.array([1000.5], np.float32)
    fine = run("QuantizeLinear", x, number(1), number(0, np.int16))
    coarse = run("QuantizeLinear", x, number(1), number(0, np.int16), precision=DType.bfloat16.onnx)
    assert fine.tolist() == [1000]
    assert coarse.tolist() == [int(ml_dtypes.bfloat16(1000.5))]


@pytest.mark.parametrize("which", FLOAT8)
def test_float8_saturates_only_where_asked(which):
    top = float(ml_dtypes.finfo(which).max)
    x = np.array([top * 4, -top * 4, 1.0, np.nan], np.float32)
    kept = run("QuantizeLinear", x, number(1), np.zeros((), which)).astype(np.float32)
    assert kept[:3].tolist() == [top, -top, 1.0]
    assert np.isnan(kept[3])
    lost = run("QuantizeLinear", x, number(1), np.zeros((), which), saturate=0).astype(np.float32)
    assert not np.isfinite(lost[:2]).any()


def test_float4_rounds_to_its_levels():
    x = np.array([0.2, 0.3, 5.1, -9, 2.6], np.float32)
    codes = run("QuantizeLinear", x, number(1), np.zeros((), ml_dtypes.float4_e2m1fn))
    assert codes.astype(np.float32).tolist() == [0, 0.5, 6, -6, 3]
    assert run("DequantizeLinear", codes, number(2)).tolist() == [0, 1, 12, -12, 6]


def test_int32_keeps_its_bits_until_the_end():
    x, zero = np.array([2**31 - 1, -(2**31)], np.int32), number(2**31 - 1, np.int32)
    found = run("DequantizeLinear", x, number(1), zero)
    assert found.tolist() == [0, float(np.float32(-(2**32 - 1)))]


@pytest.mark.parametrize(
    ("error", "message", "attrs", "scale"),
    [
        (InvalidValue, "axis 3 is out of range for rank 2", {"axis": 3}, np.ones(3, np.float32)),
        (ShapeMismatch, r"needs a scale of shape \[3\], got \[2\]", {"axis": 1}, np.ones(2, np.float32)),
        (ShapeMismatch, r"scale of shape \[2, 2\]", {"axis": 1, "block_size": 2}, np.ones((2, 3), np.float32)),
        (InvalidValue, "block_size must not be negative", {"block_size": -1}, np.ones((2, 3), np.float32)),
    ],
)
def test_scales_that_do_not_fit(error, message, attrs, scale):
    x = np.ones((2, 3), np.float32)
    with pytest.raises(error, match=f"QuantizeLinear: .*{message}"):
        run("QuantizeLinear", x, scale, **attrs)


@pytest.mark.parametrize("version", [10, 13, 19, 21])
def test_every_opset_agrees_with_onnxruntime(version):
    ort = pytest.importorskip("onnxruntime")
    x = rng.standard_normal((3, 4, 5)).astype(np.float32) * 3
    cases = [(number(0.05), number(100, np.uint8), {})]
    if version > 10:
        cases.append((rng.random(4).astype(np.float32) + 0.01, rng.integers(-5, 5, 4).astype(np.int8), {"axis": 1}))
        cases.append((rng.random(5).astype(np.float32) + 0.01, rng.integers(0, 50, 5).astype(np.uint8), {"axis": -1}))
    for scale, zero, attrs in cases:
        codes = run("QuantizeLinear", x, scale, zero, version=version, **attrs)
        for name, data in (("QuantizeLinear", x), ("DequantizeLinear", codes)):
            operands = {"x": data, "scale": scale, "zero": zero}
            graph = helper.make_graph(
                [helper.make_node(name, list(operands), ["y"], **attrs)],
                name,
                [
                    helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                    for k, v in operands.items()
                ],
                [onnx.ValueInfoProto(name="y")],
            )
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
            session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            (expected,) = session.run(None, operands)
            found = run(name, data, scale, zero, version=version, **attrs)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


# -- dynamic quantization ---------------------------------------------------------------------------------------------


@quick
@given(x=numbers)
def test_dynamic_range_covers_the_data_and_zero(x):
    codes, scale, zero = run("DynamicQuantizeLinear", x, outputs=3)
    assert (codes.dtype, scale.dtype, zero.dtype) == (np.uint8, np.float32, np.uint8)
    assert scale.shape == zero.shape == ()
    back = (codes.astype(np.float64) - int(zero)) * float(scale)
    assert np.abs(back - x).max(initial=0) <= float(scale) * 1.01  # half a step for the code, half for the zero point
    assert run("DynamicQuantizeLinear", np.zeros_like(x), outputs=3)[0].any() == 0


def test_dynamic_range_of_odd_data():
    for x in (np.zeros(0, np.float32), np.zeros(3, np.float32)):
        codes, scale, zero = run("DynamicQuantizeLinear", x, outputs=3)
        assert (codes == 0).all()
        assert (float(scale), int(zero)) == (1.0, 0)
    _, scale, zero = run("DynamicQuantizeLinear", np.array([np.nan, 1], np.float32), outputs=3)
    assert (float(scale), int(zero)) == (np.float32(1 / 255), 0)


# -- exact contractions -----------------------------------------------------------------------------------------------


def wrapped(total):
    return total.astype(np.int64).astype(np.int32)


@quick
@given(data=st.data(), rows=st.integers(0, 5), inner=st.integers(0, 40), columns=st.integers(0, 5))
def test_matmul_integer_is_exact(data, rows, inner, columns):
    kinds = st.sampled_from([np.uint8, np.int8])
    a = data.draw(arrays(data.draw(kinds), (rows, inner)))
    b = data.draw(arrays(data.draw(kinds), (inner, columns)))
    za, zb = data.draw(arrays(a.dtype, (rows,))), data.draw(arrays(b.dtype, (columns,)))
    found = run("MatMulInteger", a, b, za, zb)
    expected = (a.astype(np.int64) - za[:, None]) @ (b.astype(np.int64) - zb)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("inner", [256, 300, 70_000])
def test_matmul_integer_where_sums_outgrow_float32_and_int32(inner):
    a, b = np.full((3, inner), 255, np.uint8), np.full((inner, 2), 255, np.uint8)
    b[::7] = 3
    expected = a.astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(run("MatMulInteger", a, b), wrapped(expected))


def test_matmul_integer_broadcasts_batches():
    a = rng.integers(0, 256, (2, 1, 3, 4)).astype(np.uint8)
    b = rng.integers(-128, 128, (5, 4, 6)).astype(np.int8)
    za = rng.integers(0, 256, (2, 1, 3, 1)).astype(np.uint8)
    expected = (a.astype(np.int64) - za) @ b.astype(np.int64)
    np.testing.assert_array_equal(run("MatMulInteger", a, b, za), expected)
    with pytest.raises(ShapeMismatch, match="MatMulInteger: matrices"):
        run("MatMulInteger", a, b[:, :3])
    with pytest.raises(ShapeMismatch, match="MatMulInteger: matrices"):
        run("MatMulInteger", a.repeat(3, 1), b)


def test_qlinear_matmul_rounds_the_exact_product():
    a, b = rng.integers(0, 256, (2, 5, 30)).astype(np.uint8), rng.integers(-128, 128, (30, 6)).astype(np.int8)
    za, zb = number(120, np.uint8), rng.integers(-9, 9, 6).astype(np.int8)
    sa, sb, sy = number(0.02), rng.random(6).astype(np.float32) * 0.02, number(0.3)
    total = (a.astype(np.int64) - 120) @ (b.astype(np.int64) - zb)
    real = total * (float(sa) * sb.astype(np.float64) / float(sy))
    expected = np.clip(np.rint(real) + 100, 0, 255)
    found = run("QLinearMatMul", a, sa, za, b, sb, zb, sy, number(100, np.uint8))
    between_codes = np.abs(real - np.floor(real) - 0.5) < 1e-4
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found[~between_codes], expected[~between_codes])


def direct_convolution(x, w, strides, dilations, pads, group):
    """Integer convolution by its definition."""
    n, (m, per_group, kh, kw) = len(x), w.shape
    x = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    rows = (x.shape[2] - (kh - 1) * dilations[0] - 1) // strides[0] + 1
    columns = (x.shape[3] - (kw - 1) * dilations[1] - 1) // strides[1] + 1
    y = np.zeros((n, m, rows, columns), np.int64)
    for out, i, j in itertools.product(range(m), range(rows), range(columns)):
        first = out // (m // group) * per_group
        top, left = i * strides[0], j * strides[1]
        window = x[
            :,
            first : first + per_group,
            top : top + (kh - 1) * dilations[0] + 1 : dilations[0],
            left : left + (kw - 1) * dilations[1] + 1 : dilations[1],
        ]
        y[:, out, i, j] = (window * w[out].astype(np.int64)).sum(axis=(1, 2, 3))
    return y


CONVOLUTIONS = [
    {"strides": (1, 1), "dilations": (1, 1), "pads": (0, 0, 0, 0), "group": 1},
    {"strides": (2, 1), "dilations": (1, 2), "pads": (1, 0, 2, 1), "group": 2},
    {"strides": (1, 3), "dilations": (1, 1), "pads": (1, 1, 1, 1), "group": 4},
]


@pytest.mark.parametrize("attrs", CONVOLUTIONS, ids=str)
def test_conv_integer_is_exact_and_pads_with_the_zero_point(attrs):
    x, w = rng.integers(0, 256, (2, 4, 7, 8)).astype(np.uint8), rng.integers(0, 256, (8, 4 // attrs["group"], 3, 2))
    w = w.astype(np.uint8)
    zx, zw = number(77, np.uint8), rng.integers(0, 256, 8).astype(np.uint8)
    expected = direct_convolution(
        x.astype(np.int64) - 77, w.astype(np.int64) - zw.reshape(-1, 1, 1, 1).astype(np.int64), **attrs
    )
    found = run("ConvInteger", x, w, zx, zw, **attrs)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("attrs", CONVOLUTIONS, ids=str)
def test_qlinear_conv_rounds_the_exact_sum(attrs):
    x = rng.integers(0, 256, (2, 4, 7, 8)).astype(np.uint8)
    w = rng.integers(-128, 128, (8, 4 // attrs["group"], 3, 2)).astype(np.int8)
    bias, steps = rng.integers(-1000, 1000, 8).astype(np.int32), rng.random(8).astype(np.float32) * 0.02
    total = direct_convolution(x.astype(np.int64) - 77, w, **attrs) + bias.reshape(-1, 1, 1)
    real = total * (0.03 * steps.astype(np.float64).reshape(-1, 1, 1) / 0.5)
    expected = np.clip(np.rint(real) - 3, -128, 127)
    weights = [w, steps, np.zeros(8, np.int8)]
    found = run(
        "QLinearConv", x, number(0.03), number(77, np.uint8), *weights, number(0.5), number(-3, np.int8), bias, **attrs
    )
    between_codes = np.abs(real - np.floor(real) - 0.5) < 1e-3
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found[~between_codes], expected[~between_codes])


def test_convolution_that_does_not_fit():
    x, w = np.zeros((1, 3, 5, 5), np.uint8), np.zeros((2, 3, 3, 3), np.uint8)
    with pytest.raises(ShapeMismatch, match="ConvInteger: kernel_shape"):
        run("ConvInteger", x, w, kernel_shape=(2, 2))
    with pytest.raises(ShapeMismatch, match="ConvInteger: expected a scalar or 2 values"):
        run("ConvInteger", x, w, None, np.zeros(3, np.uint8))


def test_costs_count_the_multiplications():
    def cost(name, *shapes, result):
        types = [None if s is None else TensorType(DType.int8, s) for s in shapes]
        call = registry.TypeCall(types, (), {}, 1, 10, result_types=[TensorType(DType.int32, result)])
        return registry.get("", name).cost_rule(call)

    assert cost("MatMulInteger", (2, 5, 8), (8, 6), result=(2, 5, 6)).flops == 2 * 2 * 5 * 8 * 6
    found = cost("QLinearMatMul", (5, 8), (), (), (8, 6), (), (), (), (), result=(5, 6))
    assert found.flops == 2 * 5 * 8 * 6
    assert cost("ConvInteger", (1, 4, 7, 7), (8, 4, 3, 3), result=(1, 8, 5, 5)).flops == 2 * 8 * 25 * 4 * 9


# -- packing ----------------------------------------------------------------------------------------------------------


@quick
@given(data=st.data(), bits=st.sampled_from(WIDTHS), shape=array_shapes(min_side=0, max_dims=3, max_side=33))
def test_packing_round_trip(data, bits, shape):
    codes = data.draw(arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    stored = packed(codes, bits)
    assert stored.shape == (*shape[:-1], -(-shape[-1] * bits // 8))
    found = unpacked(stored, bits)
    assert found.shape == (*shape[:-1], stored.shape[-1] * 8 // bits)
    np.testing.assert_array_equal(found[..., : shape[-1]], codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_packed_codes_are_one_stream_of_bits(bits):
    """The lowest ones first, of one code after the other; also where more are packed than are taken at a time."""
    codes = rng.integers(0, 2**bits, (70, 4001)).astype(np.uint8)
    each = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = np.packbits(each.reshape(70, -1), axis=-1, bitorder="little")
    np.testing.assert_array_equal(packed(codes, bits), stream)
    np.testing.assert_array_equal(unpacked(stream, bits)[:, :4001], codes)


@pytest.mark.parametrize(("which", "bits"), [(ml_dtypes.uint4, 4), (ml_dtypes.uint2, 2)])
def test_packing_is_that_of_onnx_tensors(which, bits):
    codes = rng.integers(0, 2**bits, 24).astype(which)
    stored = np.frombuffer(onnx.numpy_helper.from_array(codes).raw_data, np.uint8)
    np.testing.assert_array_equal(packed(codes.astype(np.uint8), bits), stored)
    assert of(onnx.numpy_helper.to_array(onnx.numpy_helper.from_array(codes))) is of(codes)
