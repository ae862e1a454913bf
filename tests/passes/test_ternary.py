"""Layers that become BitLinear, and what checkpoints hold of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, WeightError
from ranvier.formats import onnx
from ranvier.graph.ir import Graph
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, TensorType
from ranvier.graph.verify import verify
from ranvier.ops import annotate, complete, evaluate
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.contrib.weight_only import packed
from ranvier.ops.own.bitlinear import DOMAIN, pack_codes, quantized_tokens, unpack_codes
from ranvier.passes.ternary import convert_to_bitnet, ternary_linear
from ranvier.quantize.base import Quantized
from ranvier.quantize.packing import pack_ternary
from ranvier.weights import WeightLoader, save_safetensors
from ranvier.weights.quantized import quantized_layers
from ranvier.weights.ternary import decoded, gguf_ternary, i2s

RNG = np.random.default_rng(3)


def start(k, dtype=DType.float32):
    graph = Graph(opsets={"": 21})
    x = graph.add_input("x", TensorType(dtype, (Symbol("rows"), k)))
    return graph, x, GraphOps(graph, None, "test", complete)


def ternary(n, k):
    return RNG.integers(-1, 2, (n, k)).astype(np.int8)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def only_node(graph):
    (node,) = list(graph)
    return node


@pytest.mark.parametrize("form", ["MatMul", "Gemm", "Gemm transposed", "Gemm with bias"])
def test_float_layers_by_the_mean_of_magnitudes(form):
    k, n = 24, 10
    w, bias = numbers(k, n), numbers(n)
    graph, x, ops = start(k)
    if form == "MatMul":
        y = ops.MatMul(x, w)
    elif form == "Gemm transposed":
        y = ops.Gemm(x, w.T.copy(), transB=1)
    else:
        y = ops.Gemm(x, w, *([bias] if "bias" in form else []))
    graph.outputs = [y]
    y.producer.name = "layer"
    assert convert_to_bitnet(graph) == ["layer"]
    verify(graph)
    annotate(graph)
    node = only_node(graph)
    assert (node.domain, node.op, node.name) == (DOMAIN, "BitLinear", "layer")
    assert graph.outputs[0].type == TensorType(DType.float32, (Symbol("rows"), n))
    scale = max(np.abs(w).mean(dtype=np.float64), 1e-5)
    expected = np.clip(np.rint(w.T / np.float32(scale)), -1, 1)
    np.testing.assert_array_equal(unpack_codes(node.inputs[1].const.numpy(), k), expected)
    np.testing.assert_allclose(node.inputs[2].const.numpy(), scale, rtol=1e-6)
    if "bias" in form:
        np.testing.assert_array_equal(node.inputs[3].const.numpy(), bias)


def test_what_stays_as_it_is():
    k = 16
    graph, x, ops = start(k)
    kept = ops.MatMul(x, numbers(k, k), _name="head")
    scaled = ops.Gemm(kept, numbers(k, k), alpha=2.0)
    by_data = ops.MatMul(scaled, ops.Transpose(scaled, perm=[1, 0]))
    graph.outputs = [by_data]
    assert convert_to_bitnet(graph, ["he*"]) == []
    assert [n.op for n in graph] == ["MatMul", "Gemm", "Transpose", "MatMul"]
    assert convert_to_bitnet(graph, wanted=lambda layer: layer.coded) == []
    assert convert_to_bitnet(graph) == ["head"]


def two_bits(w, scales, size, *, zero=1):
    """Operands of MatMulNBits for weights [N, K]."""
    n, k = w.shape
    codes = (w + zero).astype(np.uint8).reshape(n, k // size, size // 4, 4)
    packed = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(axis=-1, dtype=np.uint8)
    blocks = k // size
    zeros = [np.full((n, -(-blocks // 4)), 0b01010101 * zero, np.uint8)] if zero != 2 else []
    return [packed, scales.astype(np.float32), *zeros], {"K": k, "N": n, "bits": 2, "block_size": size}


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("each", [False, True])
def test_two_bit_layers_that_are_ternary(zero, each):
    n, k, size = 6, 64, 32
    w = ternary(n, k)
    rows = np.float32(RNG.random((n, 1)) + 0.5) if each else np.float32([[0.25]])
    graph, x, ops = start(k)
    operands, attrs = two_bits(w, np.broadcast_to(rows, (n, k // size)), size, zero=zero)
    graph.outputs = [ops.node("MatMulNBits", [x, *operands], attrs, domain=MICROSOFT, version=1, name="a").output]
    assert convert_to_bitnet(graph) == ["a"]
    node = only_node(graph)
    np.testing.assert_array_equal(unpack_codes(node.inputs[1].const.numpy(), k), w)
    np.testing.assert_array_equal(node.inputs[2].const.numpy().reshape(-1), rows.reshape(-1))


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1)])
def test_two_bit_layers_with_a_bias(shape):
    """MatMulNBits takes a number for every column in whatever shape, BitLinear in a row."""
    n, k, size = 6, 64, 32
    operands, attrs = two_bits(ternary(n, k), np.full((n, k // size), 0.5, np.float32), size, zero=1)
    bias = numbers(*shape)
    graph, x, ops = start(k)
    given = [x, *operands, None, bias]
    graph.outputs = [ops.node("MatMulNBits", given, attrs, domain=MICROSOFT, version=1, name="a").output]
    assert convert_to_bitnet(graph) == ["a"]
    np.testing.assert_array_equal(only_node(graph).inputs[3].const.numpy(), bias.reshape(n))
    graph, x, ops = start(k)
    given[0], given[5] = x, graph.add_input("bias", TensorType(DType.float32, shape))
    graph.outputs = [ops.node("MatMulNBits", given, attrs, domain=MICROSOFT, version=1, name="a").output]
    assert convert_to_bitnet(graph) == (["a"] if len(shape) == 1 else [])


@pytest.mark.parametrize("k", [64, 61, 30])
def test_two_bit_layers_with_zero_points_of_every_block(k):
    """Any zero point, each block with its own; what stands behind the last column is not looked at."""
    n, size = 9, 32
    blocks = -(-k // size)
    zero = RNG.integers(0, 4, (n, blocks))
    by_column = np.repeat(zero, size, axis=1)[:, :k]
    w = np.clip(RNG.integers(-1, 2, (n, k)), -by_column, 3 - by_column).astype(np.int8)
    codes = np.full((n, blocks * size), 3)
    codes[:, :k] = w + by_column
    operands = [packed(codes.reshape(n, blocks, size), 2), np.full((n, blocks), 0.5, np.float32), packed(zero, 2)]
    graph, x, ops = start(k)
    attrs = {"K": k, "N": n, "bits": 2, "block_size": size}
    graph.outputs = [ops.node("MatMulNBits", [x, *operands], attrs, domain=MICROSOFT, version=1, name="a").output]
    assert convert_to_bitnet(graph) == ["a"]
    node = only_node(graph)
    assert (node.attrs["K"], node.attrs["N"]) == (k, n)
    np.testing.assert_array_equal(unpack_codes(node.inputs[1].const.numpy(), k), w)
    for column in range(k):  # a single code that is not ternary, anywhere, and it is no such layer
        spoiled = codes.copy()
        spoiled[4, column] = (spoiled[4, column] + 2) % 4 if w[4, column] else (by_column[4, column] + 2) % 4
        if abs(spoiled[4, column] - by_column[4, column]) < 2:
            continue
        graph, x, ops = start(k)
        operands[0] = packed(spoiled.reshape(n, blocks, size), 2)
        graph.outputs = [ops.node("MatMulNBits", [x, *operands], attrs, domain=MICROSOFT, version=1).output]
        assert convert_to_bitnet(graph) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_scales_of_blocks_of_zeros_say_nothing(sign):
    n, k, size = 5, 64, 32
    w = ternary(n, k)
    w[1, :size], w[3] = 0, 0
    scales = np.full((n, 2), sign * 0.5, np.float32)
    scales[1, 0], scales[3] = 7, (3, 4)
    graph, x, ops = start(k)
    operands, attrs = two_bits(w, scales, size)
    graph.outputs = [ops.node("MatMulNBits", [x, *operands], attrs, domain=MICROSOFT, version=1, name="a").output]
    assert convert_to_bitnet(graph) == ["a"]
    scale = only_node(graph).inputs[2].const.numpy()
    np.testing.assert_array_equal(np.broadcast_to(scale, n)[[0, 1, 2, 4]], np.full(4, sign * 0.5))


def test_two_bit_layers_that_are_not():
    n, k, size = 6, 64, 32
    w = ternary(n, k)
    differing = np.float32(RNG.random((n, k // size)))
    wide = w.copy()
    wide[0, 0] = 2
    for weights, scales in ((w, differing), (wide, np.ones((n, k // size)))):
        graph, x, ops = start(k)
        operands, attrs = two_bits(weights, scales, size)
        graph.outputs = [ops.node("MatMulNBits", [x, *operands], attrs, domain=MICROSOFT, version=1).output]
        assert convert_to_bitnet(graph) == []


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_hugging_face_layout(tmp_path: Path, kind):
    n, k = 8, 20
    w, scale = ternary(n, k), np.float32(0.37)
    tensors = {"a.weight": pack_ternary(w), "a.weight_scale": scale.reshape(1)}
    save_safetensors(tmp_path / "m.safetensors", tensors)
    layers = quantized_layers(WeightLoader().open(tmp_path / "m.safetensors"), {"linear_class": kind})
    graph, x, ops = start(k)
    graph.outputs = [ternary_linear(ops, x, layers["a"]())]
    node = only_node(graph)
    np.testing.assert_array_equal(unpack_codes(node.inputs[1].const.numpy(), k), w)
    factor = scale if kind == "autobitlinear" else np.float32(1) / scale
    assert node.inputs[2].const.numpy() == factor
    given = numbers(3, k)
    codes, by = quantized_tokens(given)
    found = evaluate(*("BitLinear", given, *(v.const.numpy() for v in node.inputs[1:])), domain=DOMAIN, K=k, N=n)
    np.testing.assert_array_equal(found, (codes.astype(np.int64) @ w.T).astype(np.float32) * (factor / by))


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_gguf_blocks(tmp_path: Path, kind):
    n, k = 6, 512
    w = ternary(n, k)
    w[2, :256] = 0  # a block of zeros has a scale of zero, which says nothing
    packed = gguf.quants.quantize(w.astype(np.float32) * np.float32(0.5), gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bitnet")
    writer.add_tensor("a", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf_ternary(WeightLoader().open(tmp_path / "m.gguf")["a"])
    np.testing.assert_array_equal(found.codes, w)
    graph, x, ops = start(k)
    graph.outputs = [ternary_linear(ops, x, found)]
    node = only_node(graph)
    assert node.op == "BitLinear"
    assert node.inputs[2].const.numpy() == np.float32(0.5)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_decoding_against_the_package(kind):
    n, k = 4, 768
    data = numbers(n, k) * np.repeat(RNG.random((n, 3)).astype(np.float32) + 0.1, 256, axis=1)
    packed = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
    found = decoded(packed, kind, (n, k))
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found.dequantize(), expected)
    # scales that differ from block to block cannot be taken out of one integer sum
    graph, x, ops = start(k)
    bias = graph.add_input("bias", TensorType(DType.float32, (n,)))
    graph.outputs = [ternary_linear(ops, x, found, bias)]
    node = only_node(graph)
    assert node.op == "MatMulNBits"
    given, added = numbers(2, k), numbers(n)
    operands = [given, *(v.const.numpy() for v in node.inputs[1:4]), None, added]
    y = evaluate("MatMulNBits", *operands, domain=MICROSOFT, **node.attrs)
    np.testing.assert_allclose(y, given @ expected.T + added, rtol=1e-4, atol=1e-4)


def test_i2s():
    n, k, scale = 3, 256, np.float32(1.5)
    w = ternary(n, k)
    flat = w.reshape(-1)
    data = np.zeros(n * k // 4 + 32, np.uint8)
    for i, code in enumerate(flat + 1):
        block, j = divmod(i, 128)
        data[block * 32 + j % 32] |= int(code) << (6 - 2 * (j // 32))
    data[n * k // 4 :][:4] = np.frombuffer(scale.tobytes(), np.uint8)
    for given in (data, data.tobytes()):
        found = i2s(given, (n, k))
        np.testing.assert_array_equal(found.codes, w)
        assert found.scales == scale


def test_bytes_that_do_not_fit():
    with pytest.raises(WeightError, match="do not fit"):
        decoded(np.zeros(65, np.uint8), "TQ2_0", (1, 256))
    with pytest.raises(WeightError, match="3 was found"):
        decoded(np.full(66, 255, np.uint8), "TQ2_0", (1, 256))
    with pytest.raises(WeightError, match="do not fit"):
        i2s(np.zeros(32, np.uint8), (1, 128))
    _, x, ops = start(16)
    with pytest.raises(InvalidValue, match="-1, 0 and 1"):
        ternary_linear(ops, x, Quantized("int8", np.full((2, 16), 3, np.int8), np.ones((1, 1)), (2, 16), 8))
    for scales in (np.float32(1), np.ones(2, np.float32), np.ones((2, 2), np.float32)):
        with pytest.raises(InvalidValue, match="scales"):
            ternary_linear(ops, x, Quantized("ternary", ternary(2, 16), np.asarray(scales), (1, 16), 2))


def test_models_of_blocks_agree_with_their_rows():
    """One scale, one for each row, or equal ones for each block: the same layer."""
    n, k = 5, 512
    w = ternary(n, k)
    results = []
    for scales, block in (
        (np.full((1, 1), 0.5), (n, k)),
        (np.full((n, 1), 0.5), (1, k)),
        (np.full((n, 2), 0.5), (1, 256)),
    ):
        graph, x, ops = start(k)
        graph.outputs = [ternary_linear(ops, x, Quantized("ternary", w, scales.astype(np.float32), block, 2))]
        node = only_node(graph)
        assert node.op == "BitLinear"
        np.testing.assert_array_equal(node.inputs[1].const.numpy(), pack_codes(w))
        results.append(node.inputs[2].const.numpy())
    assert all(r.shape == () and r == np.float32(0.5) for r in results)


def test_weights_that_became_codes_are_not_saved_beside_them(tmp_path):
    """Those that another node reads stay."""
    graph, x, ops = start(32)
    alone, shared = (graph.add_constant(ConstTensor.of(numbers(32, 32)), name) for name in ("alone", "shared"))
    graph.outputs = [ops.Add(ops.MatMul(ops.MatMul(x, alone), shared), ops.Neg(shared))]
    convert_to_bitnet(graph)
    verify(graph)
    assert "alone" not in graph.constants and "shared" in graph.constants
    onnx.save(graph, tmp_path / "ternary.onnx")
    assert (tmp_path / "ternary.onnx").stat().st_size < 32 * 32 * 4 + 3000
