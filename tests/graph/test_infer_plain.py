"""Types found without asking the standard are those it would have given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Dim, Shape, Symbol, TensorType
from ranvier.ops import infer
from ranvier.ops.infer_plain import LIKE_FIRST, quick_answer
from ranvier.ops.proto import schema_of

Question = tuple[list[TensorType], dict[str, Any], dict[int, np.ndarray]]  # operand types, attributes, contents
ROUNDS = 150


def versions(op: str) -> list[int]:
    found = {s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.domain == "" and s.name == op}
    return sorted(found)


class Dice:
    """Operands and attributes, most of them valid."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def chance(self, part: float) -> bool:
        return bool(self.rng.random() < part)

    def dim(self) -> Dim:
        return (0, 1, 1, 2, 3, 5, 7, 12, Symbol("n"), Symbol("m"), None)[self.number(0, 11)]

    def shape(self, low: int = 0, high: int = 5) -> Shape | None:
        return None if self.chance(0.05) else tuple(self.dim() for _ in range(self.number(low, high)))

    def sizes(self, low: int = 1, high: int = 5) -> tuple[int, ...]:
        return tuple(self.number(1, 9) for _ in range(self.number(low, high)))

    def tensor(self, low: int = 0, high: int = 5, dtype: DType = DType.float32) -> TensorType:
        return TensorType(dtype, self.shape(low, high))


def _pair(dice: Dice, version: int) -> Question:
    a = dice.shape()
    b = a if a is not None and dice.chance(0.5) else dice.shape()
    if a and b and dice.chance(0.5):
        b = tuple(1 if dice.chance(0.3) else d for d in b[dice.number(0, len(b)) :])
    return [TensorType(DType.float32, a), TensorType(DType.float32, b)], {}, {}


def _single(dice: Dice, version: int) -> Question:
    return [dice.tensor()], {}, {}


def _axis(dice: Dice, version: int) -> Question:
    return [dice.tensor()], {"axis": dice.number(-5, 5)} if dice.chance(0.8) else {}, {}


def _cast(dice: Dice, version: int) -> Question:
    return [dice.tensor()], {"to": "INT32" if version < 6 else (1, 2, 3, 6, 7, 9, 10, 11)[dice.number(0, 8)]}, {}


def _quantize(dice: Dice, version: int) -> Question:
    real = (DType.float32, DType.float16)[dice.number(0, 2) if version >= 19 else 0]
    types = [dice.tensor(dtype=real), TensorType(real, ())]
    if dice.chance(0.8):
        types.append(TensorType((DType.int8, DType.uint8)[dice.number(0, 2)], ()))
    return types, {}, {}


def _dequantize(dice: Dice, version: int) -> Question:
    types, attrs, known = _quantize(dice, version)
    types[0] = TensorType(types[2].dtype if len(types) > 2 else DType.uint8, types[0].shape)
    return types, attrs, known


def _shape(dice: Dice, version: int) -> Question:
    bounds = {k: dice.number(-6, 6) for k in ("start", "end") if version >= 15 and dice.chance(0.5)}
    return [dice.tensor()], bounds, {}


def _transpose(dice: Dice, version: int) -> Question:
    x = dice.tensor(1)
    rank = len(x.shape or (1, 2))
    return [x], {"perm": tuple(int(p) for p in dice.rng.permutation(rank))} if dice.chance(0.8) else {}, {}


def _concat(dice: Dice, version: int) -> Question:
    shape = dice.shape(1)
    axis = dice.number(-4, 4)
    parts = []
    for _ in range(dice.number(1, 4)):
        part = shape
        if shape is not None and -len(shape) <= axis < len(shape):
            grown = list(shape)
            grown[axis] = dice.dim()
            part = tuple(grown)
        parts.append(TensorType(DType.float32, part if dice.chance(0.9) else dice.shape(1)))
    return parts, {"axis": axis}, {}


def _axes(dice: Dice, version: int) -> Question:
    x = dice.tensor(0, 4)
    axes = [dice.number(-4, 4) for _ in range(dice.number(1, 3))]
    if version < 13:
        return [x], {"axes": tuple(axes)}, {}
    return [x, TensorType(DType.int64, (len(axes),))], {}, {1: np.array(axes, np.int64)}


def _gather(dice: Dice, version: int) -> Question:
    attrs = {"axis": dice.number(-4, 4)} if dice.chance(0.7) else {}
    return [dice.tensor(1), dice.tensor(0, 3, DType.int64)], attrs, {}


def _matmul(dice: Dice, version: int) -> Question:
    a, b = dice.shape(1), dice.shape(1)
    if a and b and len(b) > 1 and dice.chance(0.8):
        a, b = (*a[:-1], 4), (*(b[:-2] if dice.chance(0.5) else a[:-2]), 4, b[-1])
    return [TensorType(DType.float32, a), TensorType(DType.float32, b)], {}, {}


def _gemm(dice: Dice, version: int) -> Question:
    attrs = {k: dice.number(0, 2) for k in ("transA", "transB") if dice.chance(0.5)}
    inner = dice.dim()
    a, b = (dice.dim(), inner), (inner if dice.chance(0.9) else dice.dim(), dice.dim())
    a, b = (a[::-1] if attrs.get("transA") else a), (b[::-1] if attrs.get("transB") else b)
    return [TensorType(DType.float32, a), TensorType(DType.float32, b), TensorType(DType.float32, (1,))], attrs, {}


def _window(dice: Dice, rank: int) -> dict[str, Any]:
    attrs = {
        "strides": [dice.number(1, 4) for _ in range(rank)],
        "dilations": [dice.number(1, 3) for _ in range(rank)],
        "pads": [dice.number(0, 3) for _ in range(2 * rank)],
        "auto_pad": ("SAME_UPPER", "VALID", "NOTSET")[dice.number(0, 3)],
    }
    return {k: v for k, v in attrs.items() if dice.chance(0.2 if k == "auto_pad" else 0.5)}


def _conv(dice: Dice, version: int) -> Question:
    rank = dice.number(1, 4)
    image = (dice.dim(), 4, *(dice.number(1, 12) if dice.chance(0.95) else dice.dim() for _ in range(rank)))
    kernel = (6, 4, *(dice.number(1, 4) for _ in range(rank)))
    return [TensorType(DType.float32, image), TensorType(DType.float32, kernel)], _window(dice, rank), {}


def _quantized_conv(dice: Dice, version: int) -> Question:
    (x, w), attrs, _ = _conv(dice, version)
    codes = (DType.uint8, DType.int8)
    kinds = [codes[dice.number(0, 2)] for _ in range(3)]
    triples = [(kinds[0], x.shape), (kinds[1], w.shape), (kinds[2], None)]
    types: list[TensorType] = []
    for kind, shape in triples:
        types += [TensorType(kind, shape)] if shape is not None else []
        types += [TensorType(DType.float32, ()), TensorType(kind, ())]
    return types + [TensorType(DType.int32, (6,))] * dice.number(0, 2), attrs, {}


def _pool(dice: Dice, version: int) -> Question:
    rank = dice.number(1, 4)
    attrs = {**_window(dice, rank), "kernel_shape": [dice.number(1, 4) for _ in range(rank)]}
    if version >= 10 and dice.chance(0.2):
        attrs["ceil_mode"] = 1
    image = (dice.dim(), dice.dim(), *(dice.number(1, 12) if dice.chance(0.8) else dice.dim() for _ in range(rank)))
    return [TensorType(DType.float32, image)], attrs, {}


def _reshape(dice: Dice, version: int) -> Question:
    sizes = dice.sizes()
    target = list(dice.rng.permutation(sizes).tolist())
    if len(target) > 1 and dice.chance(0.5):
        target[:2] = [target[0] * target[1]]
    for k in range(len(target)):
        if dice.chance(0.2):
            target[k] = (-1, 0)[dice.number(0, 2)]
    shape = sizes if dice.chance(0.9) else dice.shape()
    attrs = {"allowzero": dice.number(0, 2)} if version >= 14 and dice.chance(0.3) else {}
    x = TensorType(DType.float32, shape)
    return [x, TensorType(DType.int64, (len(target),))], attrs, {1: np.array(target, np.int64)}


CASES: dict[str, Callable[[Dice, int], Question]] = {
    **dict.fromkeys(["Add", "Div", "Less", "Equal"], _pair),
    **dict.fromkeys(["GlobalAveragePool", "GlobalMaxPool"], _single),
    **dict.fromkeys(["Softmax", "LogSoftmax"], _axis),
    **dict.fromkeys(["Squeeze", "Unsqueeze"], _axes),
    **dict.fromkeys(["MaxPool", "AveragePool"], _pool),
    "Cast": _cast,
    "Concat": _concat,
    "Conv": _conv,
    "DequantizeLinear": _dequantize,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "QLinearConv": _quantized_conv,
    "QuantizeLinear": _quantize,
    "Reshape": _reshape,
    "Shape": _shape,
    "Transpose": _transpose,
}


def made(op: str, version: int, types: list[TensorType], attrs: dict[str, Any]) -> Node:
    return Graph().add(op, [Value(f"x{k}", t) for k, t in enumerate(types)], attrs, version=version)


def refined(asked: list[Any], quick: list[Any]) -> list[Any]:
    """The standard's answer with what it leaves open (of the oldest versions, everything) as we have it."""
    return [quick[0] if a is None else a.merge(quick[0]) for a in asked]


def takes(op: str, version: int, types: list[TensorType]) -> bool:
    """Does the version take these element types? Where not, the standard has no answer, and the run says why."""
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema_of("", op, version).type_constraints}
    formal = schema_of("", op, version).inputs
    names = {DType.float32: "float", DType.float64: "double"}
    return all(
        f"tensor({names.get(t.dtype, t.dtype)})" in allowed.get(formal[min(k, len(formal) - 1)].type_str, [])  # type: ignore[arg-type]
        or formal[min(k, len(formal) - 1)].type_str.startswith("tensor(")
        for k, t in enumerate(types)
    )


@pytest.mark.parametrize("op", CASES)
def test_answers_are_those_of_the_standard(op: str) -> None:
    answered = 0
    for version in versions(op):
        dice = Dice(version)
        for _ in range(ROUNDS):
            types, attrs, known = CASES[op](dice, version)
            attrs = {name: attr for name, attr in attrs.items() if name in schema_of("", op, version).attributes}
            node = made(op, version, types, attrs)
            quick = quick_answer(node, types, {node.inputs[k]: x for k, x in known.items()})  # type: ignore[misc]
            if quick is not None and takes(op, version, types):
                answered += 1
                asked = infer._ask_standard(schema_of("", op, version), node, types, known)
                assert quick == refined(asked, quick), (version, types, attrs, known)
    assert answered >= ROUNDS // 5


@pytest.mark.parametrize("op", sorted(LIKE_FIRST))
def test_results_like_the_operand(op: str) -> None:
    dice = Dice(0)
    for version in versions(op):
        for _ in range(20):
            types = [dice.tensor()]
            node = made(op, version, types, {})
            asked = infer._ask_standard(schema_of("", op, version), node, types, {})
            quick = quick_answer(node, types, {})
            assert quick is not None and quick == refined(asked, quick)


def test_content_that_is_not_known_is_not_guessed() -> None:
    types = [TensorType(DType.float32, (2, 3)), TensorType(DType.int64, (1,))]
    for op in ("Reshape", "Unsqueeze", "Squeeze"):
        assert quick_answer(made(op, 13, types, {}), types, {}) is None
