"""OpenVINO is given quantized operators only where its codes are those of the standard."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ranvier as rv
from ranvier.codegen.llvm.isa import architecture
from ranvier.errors import ProviderUnavailable
from ranvier.providers.registry import REGISTRY

HALVES = (np.arange(-64, 64, dtype=np.float32) + 0.5) / 2  # between two codes, of steps of 1/2
CODES = np.random.default_rng(3).integers(0, 256, (16, 16))


def step(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def outcome(op: str, given: dict[str, Any], fixed: str = "", domain: str = "", **attrs: Any) -> tuple[str, Any, Any]:
    """Why OpenVINO declined it, nothing where it took it; what came out, and what the reference makes of it.

    ``fixed`` names the operands that are constants of the model.
    """
    try:
        REGISTRY.get("openvino")
    except ProviderUnavailable as error:
        pytest.skip(str(error))
    constants = [name for name in given if name in fixed.split()]
    free = {name: x for name, x in given.items() if name not in constants}
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(op, list(given), ["y"], domain=domain, **attrs)],
            "one",
            [
                helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
                for k, x in free.items()
            ],
            [onnx.ValueInfoProto(name="y")],
            [numpy_helper.from_array(given[name], name) for name in constants],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    with rv.load(model, providers=["reference"], optimization="none") as session:
        wanted = session.run(free)["y"]
    with rv.load(model, providers=["openvino", "reference"], optimization="none") as session:
        (node,) = session.report.nodes
        found = session.run(free)["y"]
        assert not session.report.fallbacks
        return "; ".join(reason for who, reason in node.declined if who == "openvino"), found, wanted


def quantize(zero: Any, x: Any = HALVES) -> dict[str, Any]:
    return {"x": x, "s": step(0.5, x.dtype), "z": zero}


def product(zero: Any, scale: Any = np.float32) -> dict[str, Any]:
    codes = CODES.astype(zero.dtype)
    return {
        "a": codes, "as": step(0.02, scale), "az": zero.dtype.type(3),
        "b": codes, "bs": step(0.03, scale), "bz": zero.dtype.type(4),
        "s": step(1.5, scale), "z": zero,
    }  # fmt: skip


def convolution() -> dict[str, Any]:
    codes = CODES.astype(np.int8)
    return {
        "x": codes.reshape(1, 1, 16, 16), "xs": step(0.02), "xz": np.int8(3),
        "w": codes[:3, :4].reshape(3, 1, 2, 2).copy(), "ws": step(0.03), "wz": np.int8(0),
        "s": step(1.5), "z": np.int8(0), "bias": np.int32([-900, 7, 800]),
    }  # fmt: skip


def sums(length: int, dtype: Any = np.uint8) -> dict[str, Any]:
    return {"a": np.full((1, length), np.iinfo(dtype).max, dtype), "b": np.full((length, 1), 127, dtype)}


ADDED = {
    name: x for k in "ab" for name, x in zip((k, f"{k}s", f"{k}z"), (CODES.astype(np.int8), step(0.1), np.int8(1)))
}

DECLINED: dict[str, tuple[tuple[Any, ...], str]] = {
    "a scale that is not constant": (("QuantizeLinear", quantize(np.int8(0)), "z"), "cuts off the fractions of int8"),
    "16 bits": (("QuantizeLinear", quantize(np.int16(0)), ""), "last of 16 bits"),
    "half precision": (("QuantizeLinear", quantize(np.uint8(2), np.float16(HALVES)), "s z"), "another precision"),
    "a product": (("QLinearMatMul", product(np.int8(0)), "z"), "cuts off the fractions of int8"),
    "a product in half precision": (("QLinearMatMul", product(np.int8(0), np.float16), ""), "cuts off the fractions"),
    "a convolution": (("QLinearConv", convolution(), "w"), "cuts off the fractions of int8"),
    "wide codes of halves": (
        ("DequantizeLinear", {"x": np.int32([1 << 20]), "s": step(0.01, np.float16)}, "x s"),
        "into half precision before",
    ),
    "long sums": (("MatMulInteger", sums(600)), "adds int32 as floats"),
    "sums with zero points": (("MatMulInteger", {**sums(600, np.int8), "az": np.int8(-128)}), "adds int32 as floats"),
    "sums of a convolution": (
        ("ConvInteger", {"x": np.full((1, 600, 1, 1), 255, np.uint8), "w": np.full((1, 600, 1, 1), 127, np.uint8)}),
        "adds int32 as floats",
    ),
    "an addition": (("QLinearAdd", {**ADDED, "s": step(0.1), "z": np.int8(2)}, "s z", "com.microsoft"), "largest code"),
    "activations rounded on the way": (
        ("DynamicQuantizeMatMul", {"x": HALVES.reshape(8, 16), "w": CODES.astype(np.int8), "s": step(0.1)}, "w s",
         "com.microsoft"),
        "does not round",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DECLINED)
def test_it_is_not_given_what_it_quantizes_otherwise(what: str) -> None:
    case, why = DECLINED[what]
    reason, found, wanted = outcome(*case)
    assert why in reason
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


TAKEN: dict[str, tuple[Any, ...]] = {
    "unsigned": ("QuantizeLinear", quantize(np.uint8(92)), "z"),
    "signed": ("QuantizeLinear", quantize(np.int8(-6)), "s z"),
    "no zero point": ("QuantizeLinear", {"x": HALVES, "s": step(0.5)}),
    "a product": ("QLinearMatMul", product(np.int8(4)), "s z"),
    "short sums": ("MatMulInteger", sums(258)),
    "longer sums of smaller codes": ("MatMulInteger", sums(1000, np.int8)),
    "codes of halves": ("DequantizeLinear", {"x": CODES.astype(np.uint8), "s": step(0.01, np.float16)}),
}


@pytest.mark.parametrize("what", TAKEN)
def test_it_is_given_what_it_quantizes_well(what: str) -> None:
    reason, found, wanted = outcome(*TAKEN[what])
    assert not reason
    np.testing.assert_array_equal(found, wanted)


def test_a_convolution_with_a_bias_is_not_compiled_on_arm() -> None:
    reason, found, wanted = outcome("QLinearConv", convolution(), "xs xz w ws wz s z bias")
    assert ("cannot compile" in reason) == (architecture() == "aarch64")
    np.testing.assert_array_equal(found, wanted)


def test_halves_go_the_other_way_where_the_zero_point_is_odd() -> None:
    reason, found, wanted = outcome("QuantizeLinear", quantize(np.uint8(93)), "s z")
    assert not reason
    assert np.abs(found.astype(int) - wanted.astype(int)).max() <= 1
    _, found, wanted = outcome("QuantizeLinear", quantize(np.uint8(93), HALVES + np.float32(0.1)), "s z")
    np.testing.assert_array_equal(found, wanted)
