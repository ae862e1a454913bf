"""Products with a constant weight behind DequantizeLinear on the CPU provider: it stays coded, and results agree."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from tests.providers.cpu.compare import Array, agree

K, N = 96, 80
KINDS = {
    "int8": np.int8,
    "uint8": np.uint8,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def codes(kind: Any, shape: tuple[int, ...], seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if "float8" in np.dtype(kind).name:
        return np.asarray(rng.standard_normal(shape).astype(np.float32).astype(kind))
    low, high = (int(f(kind)) for f in (lambda t: ml_dtypes.iinfo(t).min, lambda t: ml_dtypes.iinfo(t).max))
    return np.asarray(rng.integers(low, high + 1, shape).astype(np.int16).astype(kind))


def model(
    weight: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    op: str = "MatMul",
    also: bool = False,
    bias: Array | None = None,
    dequantizing: dict[str, int] | None = None,
    **attrs: Any,
) -> onnx.ModelProto:
    stored = {"w": weight, "s": scales, "z": zeros, "c": bias}
    kept = {name: x for name, x in stored.items() if x is not None}
    names = ["w", "s", *(["z"] if zeros is not None else [])]
    nodes = [
        helper.make_node("DequantizeLinear", names, ["d"], **(dequantizing or {})),
        helper.make_node(op, ["x", "d", *(["c"] if bias is not None else [])], ["p"], **attrs),
        helper.make_node("Relu", ["p"], ["y"]),
    ]
    outputs = ["y"]
    if also:
        nodes.append(helper.make_node("Neg", ["d"], ["other"]))
        outputs.append("other")
    kind = helper.np_dtype_to_tensor_dtype(scales.dtype)
    graph = helper.make_graph(
        nodes,
        "weights",
        [helper.make_tensor_value_info("x", kind, ["m", K])],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onnx.numpy_helper.from_array(x, name) for name, x in kept.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def rows(m: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(m).standard_normal((m, K)).astype(dtype)


def scale(*shape: int) -> Array:
    return np.random.default_rng(9).uniform(0.01, 0.1, shape).astype(np.float32)


def packed_bytes(made: onnx.ModelProto) -> int:
    """What weights take in the form that kernels want them in."""
    with rv.load(made, providers=["cpu"]) as session:
        session.run({"x": rows(1)})
        return session.memory().packed


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("turned", [False, True])
def test_one_scale_columns_and_blocks(kind: Any, turned: bool) -> None:
    shape = (N, K) if turned else (K, N)
    along_k = 1 if turned else 0
    weight = codes(kind, shape)
    blocked = [*shape]
    blocked[along_k] = K // 32
    forms: list[tuple[tuple[int, ...], dict[str, int]]] = [
        ((), {}),
        ((N,), {"axis": 1 - along_k}),
        (tuple(blocked), {"axis": along_k, "block_size": 32}),
    ]
    for (given, attrs), zeros, m in itertools.product(forms, [False, True], [1, 5, 40]):
        if zeros and "float8" in np.dtype(kind).name:
            continue
        zero = codes(kind, given, 3) if zeros else None
        op, more = ("Gemm", {"transB": 1, "bias": rows(N)[:, 0].copy()}) if turned else ("MatMul", {})
        made = model(weight, scale(*given), zero, op=op, dequantizing=attrs, **more)
        agree(made, {"x": rows(m)}, rtol=1e-4, atol=1e-3)


def test_in_16_bits() -> None:
    made = model(codes(np.int8, (K, N)), scale(N).astype(np.float16), dequantizing={"axis": 1})
    for m in (1, 40):
        agree(made, {"x": rows(m, np.float16)}, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize(("kind", "bits"), [(np.int8, 8), (ml_dtypes.int4, 4), (ml_dtypes.float8_e4m3fn, 8)])
def test_weights_stay_coded(kind: Any, bits: int) -> None:
    made = model(codes(kind, (K, N)), scale(N), dequantizing={"axis": 1})
    assert 0 < packed_bytes(made) < K * N * bits // 8 + 8 * N


def test_weights_that_others_use_too_are_dequantized() -> None:
    made = model(codes(np.int8, (K, N)), scale(N), also=True, dequantizing={"axis": 1})
    assert packed_bytes(made) >= 4 * K * N
    agree(made, {"x": rows(3)}, rtol=1e-4, atol=1e-3)


def test_scales_along_k_are_dequantized() -> None:
    made = model(codes(np.int8, (K, N)), scale(K), dequantizing={"axis": 0})
    agree(made, {"x": rows(3)}, rtol=1e-4, atol=1e-3)


def test_infinite_weights_are_dequantized() -> None:
    weight = codes(ml_dtypes.float8_e5m2, (K, N))
    weight[3, 5] = np.inf
    agree(model(weight, scale(N), dequantizing={"axis": 1}), {"x": rows(2)}, rtol=1e-4, atol=1e-3)
