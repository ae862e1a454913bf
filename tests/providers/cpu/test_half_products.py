"""Products of graphs whose own type is float16 or bfloat16: sums in float32, rounded to the type once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

import ranvier as rv

TYPES = {"bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16), "float16": (TensorProto.FLOAT16, np.float16)}
kinds = pytest.mark.parametrize("kind", TYPES)


def tensor(name: str, array: np.ndarray[Any, Any], code: int) -> Any:
    return helper.make_tensor(name, code, array.shape, array.tobytes(), raw=True)


def results(
    nodes: list[Any], code: int, inputs: dict[str, Any], shape: tuple[int, ...], weights: dict[str, Any]
) -> Any:
    def value(name: str, shape: tuple[int, ...]) -> Any:
        return helper.make_tensor_value_info(name, code, shape)

    graph = helper.make_graph(
        nodes,
        "g",
        [value(name, x.shape) for name, x in inputs.items()],
        [value("y", shape)],
        [tensor(name, x, code) for name, x in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with rv.load(model, providers=["cpu"]) as session:
        assert {n.provider for n in session.report.nodes} == {"cpu"}
        return np.asarray(session.run(inputs)["y"])


def close(got: Any, expected: Any, dtype: Any, size: Any) -> None:
    """One rounding to the type, and what float32 sums of numbers of this size may be off."""
    assert got.dtype == dtype
    step = float(ml_dtypes.finfo(dtype).eps)
    limit = np.abs(expected) * step * 0.51 + size * 3e-6 + float(ml_dtypes.finfo(dtype).smallest_normal)
    assert np.all(np.abs(got.astype(np.float64) - expected) <= limit)


def random(rng: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return rng.standard_normal(shape).astype(dtype)


@kinds
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("constant", [True, False])
def test_matmul(kind: str, rows: int, constant: bool) -> None:
    code, dtype = TYPES[kind]
    rng = np.random.default_rng(rows)
    x, w = random(rng, (2, rows, 75), dtype), random(rng, (75, 70), dtype)
    given = {"x": x} if constant else {"x": x, "w": w}
    kept = {"w": w} if constant else {}
    got = results([helper.make_node("MatMul", ["x", "w"], ["y"])], code, given, (2, rows, 70), kept)
    wide = x.astype(np.float64), w.astype(np.float64)
    close(got, wide[0] @ wide[1], dtype, np.abs(wide[0]) @ np.abs(wide[1]))


@kinds
def test_gemm_with_all_its_parts(kind: str) -> None:
    code, dtype = TYPES[kind]
    rng = np.random.default_rng(3)
    x, w, c = random(rng, (50, 33), dtype), random(rng, (64, 50), dtype), random(rng, (64,), dtype)
    node = helper.make_node("Gemm", ["x", "w", "c"], ["y"], transA=1, transB=1, alpha=0.5, beta=2.0)
    got = results([node], code, {"x": x}, (33, 64), {"w": w, "c": c})
    wide = x.astype(np.float64).T, w.astype(np.float64).T
    expected = 0.5 * wide[0] @ wide[1] + 2.0 * c.astype(np.float64)
    # the type's own arithmetic may round the product and the addend before they meet
    step = float(ml_dtypes.finfo(dtype).eps)
    size = np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(c.astype(np.float64))
    assert np.all(np.abs(got.astype(np.float64) - expected) <= 2 * step * np.abs(size) + 1e-6)


@kinds
def test_batches_of_transposed_operands(kind: str) -> None:
    code, dtype = TYPES[kind]
    rng = np.random.default_rng(4)
    q, k = random(rng, (2, 30, 3, 16), dtype), random(rng, (2, 41, 3, 16), dtype)
    nodes = [
        helper.make_node("Transpose", ["q"], ["a"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["k"], ["b"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["a", "b"], ["y"]),
    ]
    got = results(nodes, code, {"q": q, "k": k}, (2, 3, 30, 41), {})
    a, b = q.astype(np.float64).transpose(0, 2, 1, 3), k.astype(np.float64).transpose(0, 2, 3, 1)
    close(got, a @ b, dtype, np.abs(a) @ np.abs(b))


@kinds
def test_a_product_that_threads_share(kind: str) -> None:
    code, dtype = TYPES[kind]
    rng = np.random.default_rng(5)
    x, w = random(rng, (300, 700), dtype), random(rng, (700, 520), dtype)
    got = results([helper.make_node("MatMul", ["x", "w"], ["y"])], code, {"x": x}, (300, 520), {"w": w})
    wide = x.astype(np.float64), w.astype(np.float64)
    close(got, wide[0] @ wide[1], dtype, np.abs(wide[0]) @ np.abs(wide[1]))


@kinds
@pytest.mark.parametrize("rows", [1, 40])
def test_what_follows_a_product_sees_it_rounded(kind: str, rows: int) -> None:
    """The sum lies half-way between two numbers of the type; the fused subtraction would show what was left of it."""
    code, dtype = TYPES[kind]
    even = 2.0 / float(ml_dtypes.finfo(dtype).eps)
    x = np.tile(np.array([even, 1.0], dtype), (rows, 1))
    w, c = np.ones((2, 70), dtype), np.full(70, even, dtype)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Sub", ["p", "c"], ["y"])]
    got = results(nodes, code, {"x": x}, (rows, 70), {"w": w, "c": c})
    np.testing.assert_array_equal(got.astype(np.float64), np.zeros((rows, 70)))
