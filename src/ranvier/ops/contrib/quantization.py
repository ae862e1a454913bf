"""com.microsoft products of quantized operands with real results, dynamic quantization, and early QDQ forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Shape, TensorType, Type
from ranvier.ops.accumulate import exact_carrier, widened
from ranvier.ops.contrib.normalization import layer_norm, mask_lengths, summed_embeddings
from ranvier.ops.contrib.qlinear import coded, real
from ranvier.ops.contrib.rules import (
    MICROSOFT,
    at,
    broadcast,
    matmul_shape,
    rounded,
    tensor,
    typed_as,
)
from ranvier.ops.costs import dims, traffic
from ranvier.ops.nn.quantization import (
    by_column,
    by_row,
    dequantize_linear,
    integer_matmul,
    matmul_flops,
    quantize_dynamically,
    quantize_linear,
    shifted,
)
from ranvier.ops.nn.recurrent import gate_functions, limiter
from ranvier.ops.operands import common_shape, normal_axes
from ranvier.ops.registry import Array, Call, Cost, TypeCall, op

_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)  # sums that become floats never wrap


# -- QuantizeLinear, DequantizeLinear ---------------------------------------------------------------------------------


@op("QuantizeLinear", domain=MICROSOFT)
def contrib_quantize_linear(x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int = 1) -> Array:
    result: Array = quantize_linear(x, y_scale, y_zero_point, axis=axis)
    return result


@op("DequantizeLinear", domain=MICROSOFT)
def contrib_dequantize_linear(x: Array, x_scale: Array, x_zero_point: Array | None = None, *, axis: int = 1) -> Array:
    result: Array = dequantize_linear(x, x_scale, x_zero_point, axis=axis)
    return result


# -- matrix products --------------------------------------------------------------------------------------------------


class QuantizedWeight:
    """A matrix of codes, to be multiplied by activations that are quantized as they come."""

    def __init__(self, name: str, codes: Array, scale: Array, zero_point: Array | None) -> None:
        differences = codes if zero_point is None else shifted(codes, by_column(zero_point))
        # activations are uint8 less a zero point: at most 255 in magnitude
        carrier = exact_carrier(np.array([255], np.int16), differences, codes.shape[-2] if codes.ndim > 1 else 1)
        self.name = name
        self.codes: Array = differences.astype(carrier)
        self.scale: Array = by_column(scale)

    def product(self, x: Array) -> Array:
        """``x`` times the matrix, by way of uint8 codes that span the range of ``x``."""
        if self.codes.ndim < 2 or not x.ndim or x.shape[-1] != self.codes.shape[-2]:
            raise ShapeMismatch(f"{self.name}: {list(x.shape)} does not multiply {list(self.codes.shape)}")
        codes, scale, zero_point = quantize_dynamically(x)
        left = codes.astype(self.codes.dtype) - self.codes.dtype.type(zero_point)
        return np.asarray(np.matmul(left, self.codes).astype(np.float32) * (scale * self.scale))


@op("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(
    a: Array, b: Array, b_scale: Array, b_zero_point: Array | None = None, bias: Array | None = None
) -> Array:
    y = QuantizedWeight("DynamicQuantizeMatMul", b, b_scale, b_zero_point).product(a)
    return y if bias is None else y + bias


@op("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    a_zero_point: Array | None = None,
    b_zero_point: Array | None = None,
    bias: Array | None = None,
) -> Array:
    left = a if a_zero_point is None else shifted(a, by_row(a_zero_point, a.ndim))
    right = b if b_zero_point is None else shifted(b, by_column(b_zero_point))
    product = integer_matmul(left, right, _INT64, "MatMulIntegerToFloat").astype(np.float32)
    y = product * (by_row(widened(a_scale), a.ndim) * by_column(widened(b_scale)))
    return rounded(y if bias is None else y + widened(bias), a_scale.dtype)


@op("MatMulInteger16", domain=MICROSOFT)
def matmul_integer16(a: Array, b: Array) -> Array:
    unsigned = a.dtype.kind == "u" and b.dtype.kind == "u"
    return integer_matmul(a, b, np.dtype(np.uint32) if unsigned else _INT32, "MatMulInteger16")


@op("QGemm", domain=MICROSOFT)
def qgemm(
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    c: Array | None = None,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    if a.ndim != 2 or b.ndim != 2:
        raise ShapeMismatch(f"QGemm: A and B must be matrices, got {list(a.shape)} and {list(b.shape)}")
    left, right = a.T if transA else a, b.T if transB else b
    left, right = shifted(left, a_zero_point.reshape(())), shifted(right, by_column(b_zero_point))
    total = integer_matmul(left, right, _INT64, "QGemm")
    if c is not None:
        if common_shape("QGemm", total, c) != total.shape:
            raise ShapeMismatch(f"QGemm: C {list(c.shape)} does not broadcast to {list(total.shape)}")
        total = total + c
    y = total.astype(np.float32) * (np.float32(alpha) * a_scale.reshape(()) * by_column(b_scale))
    if y_scale is None or y_zero_point is None:
        return np.asarray(y)
    return coded(y, y_scale, y_zero_point, y_zero_point.dtype)


@op("MulInteger", domain=MICROSOFT)
def mul_integer(a: Array, a_zero_point: Array | None, b: Array, b_zero_point: Array | None = None) -> Array:
    common_shape("MulInteger", a, b)
    left = a if a_zero_point is None else shifted(a, a_zero_point.reshape(()))
    right = b if b_zero_point is None else shifted(b, b_zero_point.reshape(()))
    return np.multiply(left, right, dtype=np.int32)


@op("ReduceSumInteger", domain=MICROSOFT)
def reduce_sum_integer(data: Array, *, axes: Sequence[int] = (), keepdims: int = 1) -> Array:
    over = normal_axes("ReduceSumInteger", axes, data.ndim) if axes else None
    wide = np.uint32 if data.dtype.kind == "u" else np.int32
    return np.asarray(data.sum(axis=over, keepdims=bool(keepdims), dtype=wide))


# -- DynamicQuantizeLSTM ----------------------------------------------------------------------------------------------


@op("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(
    x: Array,
    w: Array,
    r: Array,
    b: Array | None,
    sequence_lens: Array | None,
    initial_h: Array | None,
    initial_c: Array | None,
    p: Array | None,
    w_scale: Array,
    w_zero_point: Array,
    r_scale: Array,
    r_zero_point: Array,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[Array, Array, Array]:
    """An LSTM with 8-bit weights ``[directions, input, 4 * hidden]``; every product quantizes its inputs or states."""
    name = "DynamicQuantizeLSTM"
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction)
    if backwards is None:
        raise InvalidValue(f"{name}: direction must be forward, reverse or bidirectional, got {direction!r}", op=name)
    hidden = r.shape[1] if r.ndim == 3 else 0
    _check_lstm_shapes(name, len(backwards), hidden, hidden_size, x, w, r, b, sequence_lens, initial_h, initial_c, p)
    steps, batch, width = x.shape
    lengths = np.full(batch, steps) if sequence_lens is None else sequence_lens
    if batch and not (lengths.min() >= 0 and lengths.max() <= steps):
        raise InvalidValue(f"{name}: sequence_lens must lie in 0 to {steps}, got {lengths.tolist()}", op=name)
    longest = int(lengths.max(initial=0))
    functions = gate_functions(
        name, activations, ("Sigmoid", "Tanh", "Tanh"), activation_alpha, activation_beta, len(backwards)
    )
    limit = limiter(clip)
    outputs = np.zeros((steps, len(backwards), batch, hidden), np.float32)
    final_h, final_c = (np.zeros((len(backwards), batch, hidden), np.float32) for _ in range(2))
    times = np.arange(longest)[:, None, None]
    for d, reverse in enumerate(backwards):
        # a reversed sequence is read from its own end, and written back in the same order
        order = np.where(reverse & (times < lengths[:, None]), lengths[:, None] - 1 - times, times)
        inputs = np.take_along_axis(x, order, axis=0).reshape(longest * batch, width)
        input_weight = QuantizedWeight(name, w[d], _of_direction(w_scale, d), _of_direction(w_zero_point, d))
        state_weight = QuantizedWeight(name, r[d], _of_direction(r_scale, d), _of_direction(r_zero_point, d))
        projected = input_weight.product(inputs).reshape(longest, batch, 4 * hidden)
        if b is not None:
            projected = projected + (b[d, : 4 * hidden] + b[d, 4 * hidden :])
        peephole = np.zeros((3, hidden), np.float32) if p is None else p[d].reshape(3, hidden)
        f, g, h = functions[d]
        state = np.zeros((batch, hidden), np.float32) if initial_h is None else initial_h[d]
        memory = np.zeros((batch, hidden), np.float32) if initial_c is None else initial_c[d]
        for t in range(longest):
            gates = projected[t] + state_weight.product(state)
            into, out, forget, fresh = np.split(gates, 4, axis=-1)
            opened = f(limit(into + peephole[0] * memory))
            kept = 1 - opened if input_forget else f(limit(forget + peephole[2] * memory))
            following = kept * memory + opened * g(limit(fresh))
            result = f(limit(out + peephole[1] * following)) * h(following)
            running = (t < lengths)[:, None]
            # a sequence that has ended yields zeros, also to the range that the others are quantized with
            state, memory = np.where(running, result, 0), np.where(running, following, memory)
            final_h[d] = np.where(running, result, final_h[d])
            np.put_along_axis(outputs[:longest, d], order[t][None], state[None], axis=0)
        final_c[d] = np.where((lengths > 0)[:, None], memory, 0)
    return outputs, final_h, final_c


def _of_direction(parameter: Array, direction: int) -> Array:
    """A scale or zero point of one direction: a scalar or one value per column."""
    return parameter[direction] if parameter.ndim > 1 else parameter.reshape(-1)[direction : direction + 1]


def _check_lstm_shapes(
    name: str, directions: int, hidden: int, declared: int | None, x: Array, w: Array, r: Array, *others: Array | None
) -> None:
    batch, width = (x.shape[1], x.shape[2]) if x.ndim == 3 else (0, 0)
    states = (directions, batch, hidden)
    expected = {
        "W": (w, (directions, width, 4 * hidden)),
        "R": (r, (directions, hidden, 4 * hidden)),
        "B": (others[0], (directions, 8 * hidden)),
        "sequence_lens": (others[1], (batch,)),
        "initial_h": (others[2], states),
        "initial_c": (others[3], states),
        "P": (others[4], (directions, 3 * hidden)),
    }
    if x.ndim != 3 or (declared is not None and declared != hidden):
        raise ShapeMismatch(f"{name}: X {list(x.shape)} and R {list(r.shape)} do not fit hidden_size {declared}")
    for what, (given, shape) in expected.items():
        if given is not None and given.shape != shape:
            raise ShapeMismatch(f"{name}: {what} must be {list(shape)}, got {list(given.shape)}")


# -- QEmbedLayerNormalization -----------------------------------------------------------------------------------------


@op("QEmbedLayerNormalization", domain=MICROSOFT)
def qembed_layer_normalization(
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    gamma: Array,
    beta: Array,
    mask: Array | None,
    word_scale: Array,
    position_scale: Array,
    segment_scale: Array | None,
    gamma_scale: Array,
    beta_scale: Array,
    word_zero_point: Array,
    position_zero_point: Array,
    segment_zero_point: Array | None,
    gamma_zero_point: Array,
    beta_zero_point: Array,
    *,
    epsilon: float = 1e-12,
    ctx: Call,
) -> tuple[Array, Array | None]:
    segments = None
    if segment_embedding is not None and segment_scale is not None:
        segments = real(segment_embedding, segment_scale, segment_zero_point)
    total = summed_embeddings(
        "QEmbedLayerNormalization",
        input_ids,
        segment_ids,
        real(word_embedding, word_scale, word_zero_point),
        real(position_embedding, position_scale, position_zero_point),
        segments,
        None,
    )
    scale, shift = real(gamma, gamma_scale, gamma_zero_point), real(beta, beta_scale, beta_zero_point)
    y, _, _ = layer_norm(total, scale, shift, epsilon)
    return y, mask_lengths(mask, input_ids.shape[0]) if ctx.wants(1) else None


# -- types and costs --------------------------------------------------------------------------------------------------

contrib_dequantize_linear.infer(typed_as(1, shape_of=0))


@contrib_quantize_linear.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    dtype = DType.uint8 if call.type(2) is None else tensor(call, 2).dtype
    return [TensorType(dtype, tensor(call, 0).shape)]


@dynamic_quantize_matmul.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [TensorType(DType.float32, matmul_shape(tensor(call, 0).shape, tensor(call, 1).shape))]


@matmul_integer_to_float.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [TensorType(tensor(call, 2).dtype, matmul_shape(tensor(call, 0).shape, tensor(call, 1).shape))]


@matmul_integer16.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    a, b = tensor(call, 0), tensor(call, 1)
    unsigned = a.dtype is b.dtype is DType.uint16
    return [TensorType(DType.uint32 if unsigned else DType.int32, matmul_shape(a.shape, b.shape))]


@dynamic_quantize_matmul.cost
@matmul_integer_to_float.cost
@matmul_integer16.cost
def _(call: TypeCall) -> Cost:
    return Cost(matmul_flops(dims(call.type(0)), dims(call.type(1))), traffic(call))


@qgemm.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    a, b = tensor(call, 0).shape, tensor(call, 3).shape
    shape: Shape = (at(a, 1 if call.attr("transA", 0) else 0), at(b, 0 if call.attr("transB", 0) else 1))
    quantizes = call.type(7) is not None and call.type(8) is not None
    return [TensorType(tensor(call, 8).dtype if quantizes else DType.float32, shape)]


@qgemm.cost
def _(call: TypeCall) -> Cost:
    a, b = dims(call.type(0)), dims(call.type(3))
    columns = b[0 if call.attr("transB", 0) else 1] if len(b) == 2 else 1
    return Cost(2.0 * math.prod(a) * columns, traffic(call))


@mul_integer.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [TensorType(DType.int32, broadcast(tensor(call, 0).shape, tensor(call, 2).shape))]


@reduce_sum_integer.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    data, axes, keep = tensor(call, 0), call.attr("axes") or (), bool(call.attr("keepdims", 1))
    dtype = DType.uint32 if data.dtype is DType.uint8 else DType.int32
    if data.shape is None:
        return [TensorType(dtype, None)]
    rank = len(data.shape)
    over = {a % rank for a in axes} if axes else set(range(rank))
    return [TensorType(dtype, tuple(1 if k in over else d for k, d in enumerate(data.shape) if keep or k not in over))]


@dynamic_quantize_lstm.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, r = tensor(call, 0), tensor(call, 2).shape
    directions = 2 if call.attr("direction", "forward") == "bidirectional" else 1
    hidden = call.attr("hidden_size") or at(r, 1)
    state = TensorType(x.dtype, (directions, at(x.shape, 1), hidden))
    return [TensorType(x.dtype, (at(x.shape, 0), directions, at(x.shape, 1), hidden)), state, state]


@dynamic_quantize_lstm.cost
def _(call: TypeCall) -> Cost:
    """Both weights meet every step of every sequence once."""
    weights = math.prod(dims(call.type(1))) + math.prod(dims(call.type(2)))
    return Cost(2.0 * weights * math.prod(dims(call.type(0))[:2]), traffic(call))


@qembed_layer_normalization.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    ids, words = tensor(call, 0).shape, tensor(call, 2).shape
    result = TensorType(DType.float32, (at(ids, 0), at(ids, 1), at(words, 1)))
    return [result, TensorType(DType.int32, (at(ids, 0),))]
