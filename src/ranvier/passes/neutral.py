"""Cancelling arithmetic: operands that change nothing, functions that undo or repeat each other, casts."""

from __future__ import annotations

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops import NEWEST
from ranvier.ops.proto import schema_of
from ranvier.passes.base import PassContext
from ranvier.passes.cancel_rules import CHANGED, Outcome, cancels
from ranvier.passes.facts import array_of, dtype_of, same_shape, scalar_of, shape_of, widens

BROADCASTING = 7  # before this version operands were aligned by attributes


@cancels("Identity")
def passes_through(node: Node, ctx: PassContext) -> Outcome:
    return node.inputs[0]


@cancels("Dropout")
def drops_nothing(node: Node, ctx: PassContext) -> Outcome:
    if any(v.uses or v.is_graph_output for v in node.outputs[1:]):
        return "its mask is used"
    if node.version < BROADCASTING:
        return node.inputs[0] if node.attrs.get("is_test", 0) else "it drops at random"
    training = node.input(2)
    if training is not None and scalar_of(training) != 0 and scalar_of(node.input(1)) != 0:
        return "it may be training"
    return node.inputs[0]


@cancels("Sum", "Max", "Min", "Mean", "Concat")
def has_one_operand(node: Node, ctx: PassContext) -> Outcome:
    return node.inputs[0] if len(node.inputs) == 1 else None


# -- neutral operands -------------------------------------------------------------------------------------------------


def _unchanged(node: Node, number: float, positions: tuple[int, ...] = (0, 1)) -> tuple[Value, Value] | None:
    """The operand that remains when another, a constant full of ``number``, changes neither values nor shape."""
    if node.version < BROADCASTING:
        return None
    for position in positions:
        constant, other = node.inputs[position], node.inputs[1 - position]
        if constant is None or constant.const is None or other is None or other.const is not None:
            continue
        if scalar_of(constant) == number and not widens(other, constant.const.shape):
            return other, constant
    return None


@cancels("Mul")
def times_one(node: Node, ctx: PassContext) -> Outcome:
    found = _unchanged(node, 1)
    return found and found[0]


@cancels("Div", "Pow")
def by_one(node: Node, ctx: PassContext) -> Outcome:
    found = _unchanged(node, 1, (1,))
    return found and found[0]


@cancels("Add", "Sub")
def plus_zero(node: Node, ctx: PassContext) -> Outcome:
    """Adding +0.0 turns -0.0 into 0.0; adding -0.0, and subtracting +0.0, changes nothing."""
    found = _unchanged(node, 0, (0, 1) if node.op == "Add" else (1,))
    if found is None:
        return None
    kept, zero = found
    assert zero.const is not None
    if zero.const.dtype.is_float and ctx.config.optimization != "aggressive":
        negative = np.signbit(zero.const.numpy().astype(np.float64))
        if not (np.all(negative) if node.op == "Add" else not np.any(negative)):
            return "it turns -0.0 into 0.0"
    return kept


@cancels("And", "Or", "Xor")
def leaves_truth(node: Node, ctx: PassContext) -> Outcome:
    found = _unchanged(node, 1 if node.op == "And" else 0)
    return found and found[0]


@cancels("Where")
def chooses_one(node: Node, ctx: PassContext) -> Outcome:
    choice = scalar_of(node.inputs[0])
    if choice is None:
        return None
    chosen = node.inputs[1 if choice else 2]
    return chosen if same_shape(chosen, node.output) else "the other operand widens the result"


# -- repeated and undone ----------------------------------------------------------------------------------------------


def _same_call(a: Node, b: Node) -> bool:
    """Equal operator, attributes and operands after the first."""
    return (
        (a.op, a.domain, a.version, a.attrs) == (b.op, b.domain, b.version, b.attrs)
        and len(a.inputs) == len(b.inputs)
        and all(_same_operand(x, y) for x, y in zip(a.inputs[1:], b.inputs[1:]))
    )


def _same_operand(a: Value | None, b: Value | None) -> bool:
    if a is b:
        return True
    x, y = array_of(a), array_of(b)
    return x is not None and y is not None and x.dtype == y.dtype and x.shape == y.shape and bool(np.all(x == y))


def _inner(node: Node) -> Node | None:
    """The node that makes the first operand."""
    operand = node.inputs[0] if node.inputs else None
    return operand.producer if operand is not None and operand.index == 0 else None


@cancels("Relu", "Abs", "Ceil", "Floor", "Round", "Sign", "Clip")
def repeats(node: Node, ctx: PassContext) -> Outcome:
    inner = _inner(node)
    return node.inputs[0] if inner is not None and _same_call(node, inner) else None


@cancels("Neg", "Not", "BitwiseNot")
def undoes_itself(node: Node, ctx: PassContext) -> Outcome:
    inner = _inner(node)
    return inner.inputs[0] if inner is not None and _same_call(node, inner) else None


@cancels("QuantizeLinear")
def requantizes(node: Node, ctx: PassContext) -> Outcome:
    """Quantizing with the parameters a value was dequantized with: (q - z) * s / s rounds back to q - z.

    That holds for up to 16 bits, as long as the products are normal numbers.
    """
    inner = _inner(node)
    if inner is None or inner.op != "DequantizeLinear" or inner.domain or len(node.inputs) != len(inner.inputs):
        return None
    source, scale = inner.inputs[0], array_of(node.inputs[1])
    stored = dtype_of(source)
    if stored is None or not stored.is_integer or stored.bits > 16 or dtype_of(node.output) is not stored:
        return None
    if scale is None or scale.dtype != np.float32 or not np.all(scale > np.finfo(np.float32).tiny * 2**17):
        return None
    if not np.all(scale < np.finfo(np.float32).max / 2**17) or node.attrs.get("precision", 0):
        return None
    attrs = [(n.attrs.get("axis", 1), n.attrs.get("block_size", 0)) for n in (node, inner)]
    same = all(_same_operand(x, y) for x, y in zip(node.inputs[1:], inner.inputs[1:]))
    return source if same and attrs[0] == attrs[1] and dtype_of(inner.output) is DType.float32 else None


# -- casts ------------------------------------------------------------------------------------------------------------

_FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
_SIGNED = (DType.int8, DType.int16, DType.int32, DType.int64)
_UNSIGNED = (DType.uint8, DType.uint16, DType.uint32, DType.uint64)
_MANTISSA = {DType.float16: 11, DType.bfloat16: 8, DType.float32: 24, DType.float64: 53}
_WHOLE = (DType.bool, *_SIGNED, *_UNSIGNED)


def holds(wide: DType, narrow: DType) -> bool:
    """Every value of ``narrow`` is a value of ``wide``."""
    if wide is narrow or (narrow is DType.bool and wide in (*_WHOLE, *_FLOATS)):
        return True
    if narrow in _UNSIGNED:
        return (
            (wide in _UNSIGNED and wide.bits >= narrow.bits)
            or (wide in _SIGNED and wide.bits > narrow.bits)
            or _MANTISSA.get(wide, 0) >= narrow.bits
        )
    if narrow in _SIGNED:
        return (wide in _SIGNED and wide.bits >= narrow.bits) or _MANTISSA.get(wide, 0) >= narrow.bits - 1
    if narrow in _FLOATS and wide in _FLOATS:
        return wide is DType.float64 or (wide is DType.float32 and narrow is not DType.float64)
    return False


@cancels("Cast")
def casts_to_own_type(node: Node, ctx: PassContext) -> Outcome:
    target = node.attrs.get("to")
    return node.inputs[0] if isinstance(target, int) and dtype_of(node.inputs[0]) is dtypes.of(target) else None


@cancels("Cast")
def casts_twice(node: Node, ctx: PassContext) -> Outcome:
    """A detour over a type that holds all values of the first one."""
    inner = _inner(node)
    target = node.attrs.get("to")
    if inner is None or inner.op != "Cast" or inner.domain or not isinstance(target, int):
        return None
    first, middle, last = dtype_of(inner.inputs[0]), dtype_of(node.inputs[0]), dtypes.of(target)
    if first is None or middle is None or not holds(middle, first):
        return None
    # out of range, a cast from a float is undefined and one from an integer wraps: kinds must not mix there
    alike = all(d in _WHOLE for d in (first, middle, last)) or all(d in _FLOATS for d in (first, middle, last))
    if not (alike or last is DType.bool or holds(last, first)):
        return None
    node.set_input(0, inner.inputs[0])
    return CHANGED


@cancels("CastLike")
def casts_to_known_type(node: Node, ctx: PassContext) -> Outcome:
    target = dtype_of(node.inputs[1])
    if target is None:
        return "type of its second operand is unknown"
    node.op = "Cast"
    node.version = schema_of("", "Cast", NEWEST).since_version
    node.attrs["to"] = target.onnx
    node.set_inputs(node.inputs[:1])
    return CHANGED


# -- containers -------------------------------------------------------------------------------------------------------


@cancels("OptionalGetElement")
def unwraps(node: Node, ctx: PassContext) -> Outcome:
    inner = _inner(node)
    return inner.inputs[0] if inner is not None and inner.op == "Optional" and inner.inputs else None


@cancels("SequenceAt")
def takes_from_list(node: Node, ctx: PassContext) -> Outcome:
    inner = _inner(node)
    index = scalar_of(node.inputs[1])
    if inner is None or inner.op != "SequenceConstruct" or inner.domain or index is None:
        return None
    position = int(index) + (len(inner.inputs) if index < 0 else 0)
    return inner.inputs[position] if 0 <= position < len(inner.inputs) else None


@cancels("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
def reduces_nothing(node: Node, ctx: PassContext) -> Outcome:
    """No axes, with the flag that says this means none instead of all."""
    if not node.attrs.get("noop_with_empty_axes", 0):
        return None
    axes = node.input(1)
    return node.inputs[0] if axes is None or shape_of(axes) == (0,) else None
