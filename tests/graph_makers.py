"""The operators of random graphs: each maker adds one, or one idiom of exporters, where there are operands for it.

Versions are mixed in one graph, since a node carries its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph import Graph, TensorType
from tests.graph_builder import Builder, Known

MAKERS: list[Callable[[Builder], Any]] = []


def maker(function: Callable[[Builder], Any]) -> Callable[[Builder], Any]:
    MAKERS.append(function)
    return function


@maker
def unary(b: Builder) -> None:
    x = b.floats()
    if x is not None:
        op, version = b.tape.pick(
            [("Relu", 6), ("Relu", 14), ("Neg", 13), ("Abs", 13), ("Identity", 1), ("Identity", 19), ("Tanh", 6)]
            + [
                ("Sigmoid", 13),
                ("Erf", 9),
                ("Softplus", 1),
                ("LeakyRelu", 6),
                ("Elu", 6),
                ("HardSigmoid", 6),
                ("Cos", 7),
            ]
        )
        b.add(op, x, version=version)


@maker
def jump(b: Builder) -> None:
    x = b.floats(exact=True)
    if x is not None:
        b.add(b.tape.pick(["Floor", "Ceil", "Round", "Sign"]), x)


@maker
def with_constant(b: Builder) -> None:
    """Neutral numbers are frequent, and both zeros."""
    x = b.floats()
    if x is None:
        return
    number = b.tape.pick([0.0, -0.0, 1.0, 2.0, -0.5, 0.25])
    shape = b.tape.pick([(), (1,), x.array.shape[-1:], x.array.shape, (1,) * (x.array.ndim + 1)])
    c = b.constant(np.full(shape, number, np.float32))
    op = b.tape.pick(["Add", "Mul", "Sub"] + (["Div"] if number else []))
    left = op in ("Add", "Mul") and b.tape.chance(3)
    b.add(op, *((c, x) if left else (x, c)), version=14, rounds=op in ("Div", "Mul", "Add", "Sub"))


@maker
def binary(b: Builder) -> None:
    x = b.floats()
    y = b.floats()
    if x is not None and y is not None:
        b.add(b.tape.pick(["Add", "Sub", "Mul", "Max", "Min", "Sum"]), x, y, version=b.tape.pick([8, 13]), rounds=True)


@maker
def aligned_by_attribute(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype == np.float32 and k.array.ndim >= 2)
    if x is not None:
        axis = b.tape.below(x.array.ndim)
        c = b.weights(x.array.shape[axis])
        b.add(b.tape.pick(["Add", "Mul", "Sub"]), x, c, version=6, broadcast=1, axis=axis, rounds=True)


@maker
def compare(b: Builder) -> None:
    x, y = b.floats(exact=True), b.floats(exact=True)
    if x is not None and y is not None:
        b.add(b.tape.pick(["Less", "Greater", "Equal", "LessOrEqual"]), x, y)


@maker
def logic(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype == np.bool_)
    if x is None:
        return
    if b.tape.chance(2):
        b.add("Not", x)
    else:
        b.add(b.tape.pick(["And", "Or", "Xor"]), x, b.constant(np.array(b.tape.chance(2))))


@maker
def where(b: Builder) -> None:
    x, y = b.floats(), b.floats()
    if x is None or y is None:
        return
    computed = b.choose(lambda k: k.array.dtype == np.bool_)
    condition = b.constant(np.array([b.tape.chance(2)])) if computed is None or b.tape.chance(3) else computed
    b.add("Where", condition, x, y, version=9)


@maker
def clip(b: Builder) -> None:
    x = b.floats()
    if x is None:
        return
    low, high = b.tape.pick([(-1.0, 1.0), (0.0, 6.0), (-2.0, 0.5)])
    if b.tape.chance(2):
        b.add("Clip", x, version=6, min=low, max=high)
    else:
        b.add("Clip", x, b.constant(np.float32(low)), b.constant(np.float32(high)), version=13)


@maker
def dropout(b: Builder) -> None:
    x = b.floats()
    if x is not None:
        version = b.tape.pick([7, 10, 13])
        b.add("Dropout", x, version=version, **({"ratio": 0.5} if version < 12 else {}))


@maker
def cast(b: Builder) -> None:
    x = b.choose(lambda k: k.exact or k.array.dtype == np.float32)
    if x is None:
        return
    jumps = [DType.int32, DType.int64, DType.bool] if x.exact else []
    target = b.tape.pick([DType.float32, DType.float64, DType.float16, *jumps])
    if b.tape.chance(5):
        b.add("CastLike", x, b.constant(np.zeros(1, target.numpy)))
    else:
        b.add("Cast", x, to=target.onnx, version=b.tape.pick([9, 13]))


@maker
def back_to_float(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype != np.float32)
    if x is not None:
        b.add("Cast", x, to=DType.float32.onnx)


@maker
def transpose(b: Builder) -> None:
    x = b.choose(lambda k: k.array.ndim >= 2)
    if x is None:
        return
    order = list(range(x.array.ndim))
    perm = b.tape.pick([order[::-1], order[1:] + order[:1], order[-1:] + order[:-1], order])
    b.add("Transpose", x, version=b.tape.pick([1, 13]), perm=tuple(perm))


@maker
def reshape(b: Builder) -> None:
    x = b.choose()
    if x is None:
        return
    size, first = x.array.size, x.array.shape[:1]
    targets: list[Any] = [[-1], list(x.array.shape), [size, 1], [1, -1], [0, -1] if first else [-1]]
    if size % 2 == 0:
        targets += [[2, -1], [-1, 2]]
    b.add("Reshape", x, b.constant(np.array(b.tape.pick(targets), np.int64)), version=b.tape.pick([5, 14]))


@maker
def reshape_by_shape(b: Builder) -> None:
    """The target is put together from the operand's own dimensions, as exporters do."""
    x = b.choose(lambda k: k.array.ndim >= 1)
    if x is None:
        return
    shape = b.add("Shape", x, version=b.tape.pick([1, 13, 15]))
    if not shape:
        return
    axis = b.tape.below(x.array.ndim)
    dim = b.add("Gather", shape[0], b.constant(np.array(axis)), version=13, axis=0)
    if b.tape.chance(2):
        part = b.add("Unsqueeze", dim[0], version=11, axes=(0,))
    else:
        part = b.add("Unsqueeze", dim[0], b.constant(np.array([0])), version=13)
    rest = b.constant(np.array([-1]))
    parts = [part[0], rest] if b.tape.chance(2) else [rest, part[0]]
    target = b.add("Concat", *parts, version=13, axis=0)
    b.add("Reshape", x, target[0], version=14)


@maker
def expand_by_shape(b: Builder) -> None:
    x, y = b.floats(), b.choose()
    if x is None or y is None:
        return
    shape = b.add("Shape", y, version=13)
    if shape:
        b.add("Expand", x, shape[0], version=8)


@maker
def filled(b: Builder) -> None:
    x = b.choose()
    shape = b.add("Shape", x, version=15) if x is not None else []
    if shape:
        b.add("ConstantOfShape", shape[0], version=9, value=np.array([b.tape.pick([0.0, 1.0, -2.0])], np.float32))


@maker
def counted(b: Builder) -> None:
    x = b.choose()
    size = b.add("Size", x, version=13) if x is not None else []
    if size:
        b.add("Range", b.constant(np.array(0)), size[0], b.constant(np.array(2)), version=11)


@maker
def view(b: Builder) -> None:
    x = b.choose()
    if x is None:
        return
    rank = x.array.ndim
    axis = b.tape.below(rank + 1)
    kind = b.tape.below(5)
    if kind == 0:
        b.add("Flatten", x, version=b.tape.pick([9, 13]), axis=min(axis, rank))
    elif kind == 1:
        b.add("Unsqueeze", x, version=11, axes=(axis,))
    elif kind == 2:
        b.add("Unsqueeze", x, b.constant(np.array([axis])), version=13)
    else:
        ones = [k for k, size in enumerate(x.array.shape) if size == 1]
        if ones and kind == 3:
            b.add("Squeeze", x, version=11, axes=(b.tape.pick(ones),))
        elif ones:
            b.add("Squeeze", x, b.constant(np.array([b.tape.pick(ones)])), version=13)


@maker
def cut(b: Builder) -> None:
    x = b.choose(lambda k: k.array.ndim >= 1)
    if x is None:
        return
    axis = b.tape.below(x.array.ndim)
    start, end = b.tape.pick([(0, 2**63 - 1), (0, x.array.shape[axis]), (1, -1), (0, 2), (-2, 2**63 - 1)])
    if b.tape.chance(2):
        b.add("Slice", x, version=1, starts=(start,), ends=(end,), axes=(axis,))
    else:
        bounds = [b.constant(np.array([n])) for n in (start, end, axis)]
        b.add("Slice", x, *bounds, version=13)


@maker
def split(b: Builder) -> None:
    x = b.choose(lambda k: k.array.ndim >= 1)
    if x is None:
        return
    axis = b.tape.below(x.array.ndim)
    size = x.array.shape[axis]
    if size >= 2:
        sizes = (1, size - 1)
        if b.tape.chance(2):
            b.add("Split", x, version=b.tape.pick([2, 11]), axis=axis, split=sizes, outputs=2)
        else:
            b.add("Split", x, b.constant(np.array(sizes)), version=18, axis=axis, outputs=2)
    else:
        b.add("Split", x, version=13, axis=axis)


@maker
def concat(b: Builder) -> None:
    x = b.choose(lambda k: k.array.ndim >= 1)
    if x is None:
        return
    others = [x, *([x] if b.tape.chance(2) else [])]
    if b.tape.chance(3):
        shape = list(x.array.shape)
        shape[-1] = 0
        others.append(b.constant(np.zeros(shape, x.array.dtype)))
    b.add("Concat", *others, version=b.tape.pick([4, 13]), axis=-1 if len(others) > 1 else 0)


@maker
def pad(b: Builder) -> None:
    x = b.floats()
    if x is None:
        return
    amounts = [0] * (2 * x.array.ndim)
    if amounts and b.tape.chance(2):
        amounts[b.tape.below(len(amounts))] = 1
    if b.tape.chance(2):
        b.add("Pad", x, version=2, pads=tuple(amounts), value=0.5)
    else:
        b.add("Pad", x, b.constant(np.array(amounts, np.int64)), version=13)


@maker
def tile(b: Builder) -> None:
    x = b.choose(lambda k: k.array.ndim >= 1)
    if x is not None:
        repeats = [1] * x.array.ndim
        repeats[b.tape.below(x.array.ndim)] = 1 + b.tape.below(2)
        b.add("Tile", x, b.constant(np.array(repeats)), version=6)


@maker
def gather(b: Builder) -> None:
    x = b.choose(lambda k: k.array.ndim >= 1 and k.array.shape[0] > 0)
    if x is not None:
        size = x.array.shape[0]
        indices = b.tape.pick([np.arange(size), np.array([0]), np.array(size - 1), np.array([[-1, 0]])])
        b.add("Gather", x, b.constant(indices), version=b.tape.pick([1, 13]), axis=0)


@maker
def reduce(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype == np.float32 and k.array.size > 0)
    if x is None:
        return
    op = b.tape.pick(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"])
    keep = b.tape.below(2)
    axis = b.tape.below(x.array.ndim) if x.array.ndim else None
    if axis is None or b.tape.chance(4):
        b.add(op, x, version=11, keepdims=keep, rounds=True)
    elif b.tape.chance(2):
        b.add(op, x, version=11, axes=(axis,), keepdims=keep, rounds=True)
    else:
        b.add(op, x, b.constant(np.array([axis])), version=18, keepdims=keep, rounds=True)


@maker
def softmax(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype == np.float32 and k.array.ndim >= 1 and k.array.size > 0)
    if x is not None:
        axis = b.tape.below(x.array.ndim)
        op = b.tape.pick(["Softmax", "LogSoftmax"])
        b.add(op, x, version=b.tape.pick([11, 13]), axis=axis, rounds=True)


@maker
def matmul(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype == np.float32 and k.array.ndim >= 2)
    if x is not None:
        made = b.add("MatMul", x, b.weights(x.array.shape[-1], 1 + b.tape.below(4)), version=9, rounds=True)
        if made and b.tape.chance(2):
            b.add("Add", made[0], b.weights(made[0].array.shape[-1]), version=13, rounds=True)


@maker
def gemm(b: Builder) -> None:
    x = b.floats(rank=2)
    if x is None:
        return
    columns = 1 + b.tape.below(4)
    w, c = b.weights(x.array.shape[1], columns), b.weights(columns)
    if b.tape.chance(2):
        b.add("Gemm", x, w, c, version=6, broadcast=1, rounds=True)
    else:
        b.add("Gemm", x, w, c if b.tape.chance(2) else None, version=13, alpha=0.5, rounds=True)


@maker
def convolution(b: Builder) -> None:
    """With a BatchNormalization behind it, or a scale, or a bias."""
    x = b.choose(lambda k: k.array.dtype == np.float32 and k.array.ndim in (3, 4) and k.array.size > 0)
    if x is None:
        return
    channels, rank = x.array.shape[1], x.array.ndim
    if b.tape.chance(3):
        made = b.add("ConvTranspose", x, b.weights(channels, 2, *(1,) * (rank - 2)), version=1, rounds=True)
    else:
        bias = b.weights(2) if b.tape.chance(2) else None
        made = b.add("Conv", x, b.weights(2, channels, *(1,) * (rank - 2)), bias, version=11, rounds=True)
    if not made:
        return
    follow = b.tape.below(4)
    if follow == 0:
        parameters = [b.weights(2), b.weights(2), b.weights(2), b.constant(np.abs(b.weights(2).array) + 0.5)]
        b.add("BatchNormalization", made[0], *parameters, version=b.tape.pick([7, 9, 15]), rounds=True)
    elif follow == 1:
        b.add(b.tape.pick(["Mul", "Add", "Sub"]), made[0], b.weights(2, *(1,) * (rank - 2)), version=14, rounds=True)


@maker
def top_k(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype == np.float32 and k.array.ndim >= 1 and k.array.shape[-1] >= 2 and k.exact)
    if x is None:
        return
    if b.tape.chance(2):
        b.add("TopK", x, version=1, k=2, outputs=2)
    else:
        b.add("TopK", x, b.constant(np.array([1])), version=11, outputs=2)


@maker
def find(b: Builder) -> None:
    x = b.choose(lambda k: k.array.ndim >= 1 and k.array.size > 0 and k.exact and k.array.dtype == np.float32)
    if x is not None:
        b.add(
            b.tape.pick(["ArgMax", "ArgMin"]), x, version=13, axis=b.tape.below(x.array.ndim), keepdims=b.tape.below(2)
        )


@maker
def integers(b: Builder) -> None:
    x = b.choose(lambda k: k.array.dtype == np.int64)
    if x is not None:
        made = b.add(b.tape.pick(["Add", "Mul", "Sub"]), x, b.constant(np.array(b.tape.below(3))), version=14)
        if made:
            b.add(b.tape.pick(["Add", "Mul", "Sub"]), made[0], b.constant(np.array(b.tape.below(3))), version=14)


@maker
def between_transposes(b: Builder) -> None:
    x = b.floats(rank=3)
    if x is None:
        return
    value = b.add("Transpose", x, version=13, perm=(0, 2, 1))[0]
    for _ in range(1 + b.tape.below(2)):
        if b.tape.chance(2):
            made = b.add("Mul", value, b.weights(value.array.shape[-1]), version=14, rounds=True)
        else:
            made = b.add(b.tape.pick(["Relu", "Neg", "Sigmoid"]), value)
        value = made[0] if made else value
    b.add("Transpose", value, version=13, perm=(0, 2, 1))


@maker
def quantized(b: Builder) -> None:
    x = b.floats(exact=True)
    if x is not None:
        scale, zero = b.constant(np.float32(0.5)), b.constant(np.array(3, np.uint8))
        made = b.add("QuantizeLinear", x, scale, zero, version=13)
        if made:
            b.add("DequantizeLinear", made[0], scale, zero, version=13)


@maker
def branch(b: Builder) -> None:
    """An If on a constant or a computed condition, whose branches use values from outside."""
    x = b.floats()
    if x is None:
        return
    condition: Known | None
    if b.tape.chance(2):
        condition = b.constant(np.array(b.tape.chance(2)))
    else:
        condition = b.choose(lambda k: k.array.dtype == np.bool_ and k.array.size == 1)
    if condition is None:
        return
    bodies = []
    for name in ("then", "else"):
        body = Builder(b.tape, Graph(name), list(b.known))
        value = x
        for _ in range(1 + b.tape.below(2)):
            op = b.tape.pick(["Relu", "Neg", "Tanh", "Abs", "Identity"])
            made = body.add(op, value)
            value = made[0] if made else value
        if value is x:
            return
        value.value.name = f"{name}_out"
        body.graph.outputs = [value.value]
        bodies.append(body.graph)
    b.add("If", condition, version=b.tape.pick([1, 11, 13]), then_branch=bodies[0], else_branch=bodies[1])


@maker
def loop(b: Builder) -> None:
    x = b.floats()
    if x is None:
        return
    body = Graph("body")
    body.add_input("step", TensorType(DType.int64, ()))
    going = body.add_input("going", TensorType(DType.bool, ()))
    carried = body.add_input("carried", None)
    inner = body.add("Neg", [x.value], version=13).output  # the same at every step
    half = body.add("Add", [carried, inner], version=14).output
    result = body.add("Tanh", [half], version=13).output
    on = body.add("Identity", [going], version=16).output
    seen = body.add("Identity", [carried], version=16).output
    body.outputs = [on, result, seen]
    count = b.constant(np.array(1 + b.tape.below(2)))  # of no step, the shape of what is collected is a guess
    b.add("Loop", count, b.constant(np.array(True)), x, version=13, body=body, outputs=2, rounds=True)
