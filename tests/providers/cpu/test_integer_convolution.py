"""Convolutions of quantized tensors on the CPU provider against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.codegen.llvm import isa
from ranvier.codegen.llvm.conv import ConvShape, pixels_in_vectors
from ranvier.codegen.llvm.integer import suits_squares
from tests.providers.cpu.compare import Array, agree, check, one_node

RNG = np.random.default_rng(17)
KINDS = [np.uint8, np.int8]
CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 3, 9, 11), (8, 3, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ((2, 16, 5, 6), (24, 16, 1, 1), {}),
    ((1, 16, 6, 6), (12, 16, 1, 1), {"strides": [2, 2]}),
    ((1, 8, 7, 7), (12, 4, 3, 3), {"group": 2, "pads": [0, 1, 2, 1], "dilations": [1, 2]}),
    ((2, 20, 7, 9), (20, 1, 3, 3), {"group": 20, "pads": [1, 1, 1, 1]}),
    ((1, 6, 8, 8), (12, 1, 3, 3), {"group": 6, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 5, 17), (6, 5, 4), {"pads": [2, 1]}),
    ((1, 3, 4, 5, 6), (4, 3, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 1]}),
    # few outputs: neighbouring pixels are taken as one
    ((2, 8, 7, 20), (3, 8, 5, 9), {"pads": [2, 4, 2, 4]}),
    ((1, 5, 9, 24), (2, 5, 3, 5), {"pads": [1, 2, 1, 2], "strides": [1, 2]}),
    ((1, 1, 96), (1, 1, 33), {"pads": [16, 16]}),
]


def codes(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return np.asarray(RNG.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype))


def scale(*shape: int) -> Array:
    return np.asarray(RNG.uniform(0.001, 0.01, size=shape).astype(np.float32))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("left", "right"), list(itertools.product(KINDS, KINDS)))
def test_conv_integer(case: tuple[Any, ...], left: type, right: type) -> None:
    size, filters, attrs = case
    x, w = codes(left, *size), codes(right, *filters)
    check("ConvInteger", [x, w], attrs, constant=[1])
    check("ConvInteger", [x, w, codes(left), codes(right)], attrs, constant=[1, 3])
    if left is np.uint8:
        check("ConvInteger", [x, w, codes(left), codes(right, filters[0])], attrs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("left", KINDS)
def test_qlinear_conv(case: tuple[Any, ...], left: type) -> None:
    size, filters, attrs = case
    x, w, count = codes(left, *size), codes(np.int8, *filters), filters[0]
    bias = RNG.integers(-5000, 5000, count).astype(np.int32)
    for per in ((), (count,)):
        zero = np.zeros(per, np.int8) if per else codes(np.int8)
        given = [x, scale(), codes(left), w, scale(*per), zero, scale() * 100, codes(left), bias]
        check("QLinearConv", given, attrs, constant=range(1, 9))
    check("QLinearConv", given[:8], attrs, constant=[3])


@pytest.mark.parametrize("strides", [(3, 1), (1, 3)])
@pytest.mark.parametrize("height", [2, 7])
def test_layers_that_share_filters(strides: tuple[int, int], height: int) -> None:
    """Filters of single channels are packed in another way where code is not unrolled for their windows."""
    stored = {"w": codes(np.int8, 16, 1, 3, 3), "zero": codes(np.uint8)}
    nodes = [
        helper.make_node("ConvInteger", ["x", "w", "zero"], [f"y{k}"], group=16, pads=[1] * 4, strides=[1, stride])
        for k, stride in enumerate(strides)
    ]
    x = codes(np.uint8, 1, 16, height, 12)
    given = [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, x.shape)]
    results = [onnx.ValueInfoProto(name=f"y{k}") for k in range(2)]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "shared", given, results, constants)
    agree(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), {"x": x})


def test_channels_last() -> None:
    x, w = codes(np.uint8, 2, 6, 7, 12), codes(np.int8, 10, 12, 3, 3)
    given = [x, scale(), codes(np.uint8), w, scale(10), np.zeros(10, np.int8), scale() * 100, codes(np.uint8)]
    attrs = {"channels_last": 1, "pads": [1, 1, 1, 1]}
    check("QLinearConv", given, attrs, domain="com.microsoft", constant=range(1, 8))


def test_pixels_that_are_taken_as_one() -> None:
    """They are where few outputs would leave most of a vector empty."""
    wide = isa.named("avx512", "x86_64")
    for size, filters, attrs in CASES[-3:]:
        assert pixels_in_vectors(ConvShape.conv(size, filters, **attrs), wide) > 1
    assert pixels_in_vectors(ConvShape.conv((1, 8, 7, 20), (16, 8, 5, 9)), wide) == 1


def test_squares_of_outputs() -> None:
    """3x3 layers with many channels are computed so where the processor is faster that way: the same codes come out,
    and sums that are the result stay exact."""
    pads = {"pads": [1, 1, 1, 1]}
    for left, filters in itertools.product(KINDS, (np.int8, np.uint8)):
        x, w = codes(left, 1, 64, 19, 22), codes(filters, 64, 64, 3, 3)
        zero = np.full((), 0 if filters is np.int8 else 128, filters)
        bias = RNG.integers(-5000, 5000, 64).astype(np.int32)
        given = [x, scale(), codes(left), w, scale(64) * 0.1, np.full(64, zero, filters), scale() * 100, codes(left)]
        check("QLinearConv", [*given, bias], pads, constant=range(1, 9))
        check("ConvInteger", [x, w, codes(left), zero], pads, constant=[1, 2, 3])


def test_squares_are_an_option() -> None:
    """Where neighbouring outputs may not be mixed, layers are computed by their taps."""
    x, w = codes(np.uint8, 1, 64, 24, 24), codes(np.int8, 64, 64, 3, 3)
    given = [x, scale(), codes(np.uint8), w, scale(), np.int8(0), scale() * 100, codes(np.uint8)]
    model = one_node("QLinearConv", [np.asarray(each) for each in given], {"pads": [1] * 4}, constant=range(1, 8))
    names = {}
    for mixes in (True, False):
        with rv.load(model, provider_options={"cpu": {"winograd": mixes}}) as session:
            with session.profile() as profile:
                session.run({"x0": x})
            names[mixes] = " ".join(record.kernel for record in profile.kernels)
    assert "winograd" not in names[False]
    shape = ConvShape.conv(x.shape, w.shape, pads=(1, 1, 1, 1))
    assert ("winograd" in names[True]) == suits_squares(shape, isa.host())
