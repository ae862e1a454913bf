"""Gradient rules: how the gradients of a node's operands follow from those of its results, as nodes of the graph.

A rule is a function of (b, node, grads): ``b`` makes nodes, ``grads`` has the gradient of each result (None: nobody
depends on it); it gives the gradient of each operand, None where there is none. Rules never look at values, so
gradients of gradients come by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.attributes import text_of
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import Dim, TensorType
from ranvier.ops import registry
from ranvier.ops.infer import complete

Grads = Sequence[Value | None]
Rule = Callable[["Backward", Node, list[Value | None]], Grads]
_LARGEST_KNOWN = 4096  # elements of a tensor that is worked out
_RULES: dict[tuple[str, str], Rule] = {}


def gradient(*names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Declare the rule of these operators."""

    def register(rule: Rule) -> Rule:
        for name in names:
            _RULES[domain, name] = rule
        return rule

    return register


def rule_of(domain: str, name: str) -> Rule | None:
    return _RULES.get((domain, name))


def known_gradients() -> list[tuple[str, str]]:
    return sorted(_RULES)


class Backward(GraphOps):
    """Makes nodes at the end of a graph, and knows what rules keep asking for."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, None, "gradient", complete)

    # -- facts ----------------------------------------------------------------------------------------------------

    def dtype(self, value: Value) -> DType:
        kind = value.type.dtype if isinstance(value.type, TensorType) else None
        if kind is None:
            raise NotSupported(f"the gradient of {value.name!r} needs its element type, which is not known")
        return kind

    def dims(self, value: Value) -> tuple[Dim, ...]:
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        if shape is None:
            raise NotSupported(f"the gradient of {value.name!r} needs its number of dimensions, which is not known")
        return shape

    def rank(self, value: Value) -> int:
        return len(self.dims(value))

    def sizes(self, value: Value) -> tuple[int, ...]:
        """The shape in numbers; NotSupported where a size is open."""
        found = self.dims(value)
        if not all(isinstance(d, int) for d in found):
            raise NotSupported(f"the gradient of {value.name!r} needs its shape in numbers, it is {list(found)}")
        return tuple(int(d) for d in found)  # type: ignore[arg-type]

    def axis(self, node: Node, default: int, value: Value) -> int:
        axis = int(node.attrs.get("axis", default))
        return axis + self.rank(value) if axis < 0 else axis

    # -- numbers ----------------------------------------------------------------------------------------------------

    def number(self, value: float, like: Value) -> Value:
        return self.constant(np.asarray(value).astype(self.dtype(like).numpy))

    def whole(self, *numbers: int) -> Value:
        return self.constant(np.array(numbers, np.int64))

    def zeros(self, like: Value) -> Value:
        return self.filled(0.0, like)

    def filled(self, number: float, like: Value) -> Value:
        """A tensor of the shape and type of another, all of one number."""
        dims = self.dims(like) if isinstance(like.type, TensorType) and like.type.shape is not None else (None,)
        if all(isinstance(d, int) for d in dims) and int(np.prod(dims, dtype=np.int64)) <= 64:  # type: ignore[arg-type]
            return self.constant(np.full(dims, number, self.dtype(like).numpy))
        return self.Expand(self.number(number, like), self.shape(like))

    def shape(self, value: Value) -> Value:
        """The shape as a tensor: a constant where it is known."""
        dims = value.type.shape if isinstance(value.type, TensorType) else None
        if dims is not None and all(isinstance(d, int) for d in dims):
            return self.constant(np.array(dims, np.int64))
        return self.Shape(value)

    def like(self, grad: Value, value: Value) -> Value:
        """A gradient in the shape of a value with as many elements."""
        return self.Reshape(grad, self.shape(value))

    # -- broadcasting -----------------------------------------------------------------------------------------------

    def sum_to(self, grad: Value, value: Value, own: int = 0) -> Value:
        """The gradient of a value that was broadcast: summed over what it was repeated along. Its last ``own`` axes are
        known to be those of the gradient."""
        have, want = self.dims(grad), self.dims(value)
        if have == want:
            return grad
        extra = len(have) - len(want)
        axes = list(range(extra))
        shared = zip(have[extra : len(have) - own], want[: len(want) - own])
        for k, (a, b) in enumerate(shared, extra):
            if b == 1 and a != 1:
                axes.append(k)
            elif a != b and not (isinstance(a, int) and isinstance(b, int)):
                raise NotSupported(f"whether {value.name!r} of shape {list(want)} was broadcast is not known")
        if not axes:
            return grad
        summed = self.ReduceSum(grad, self.whole(*axes), keepdims=1)
        return self.Squeeze(summed, self.whole(*range(extra))) if extra else summed

    def add_all(self, grads: Sequence[Value]) -> Value:
        total = grads[0]
        for each in grads[1:]:
            total = self.Add(total, each)
        return total

    def cast(self, value: Value, dtype: DType) -> Value:
        return value if self.dtype(value) is dtype else self.Cast(value, to=dtype.onnx)

    def where(self, condition: Value, grad: Value) -> Value:
        """The gradient where a condition holds, else zero."""
        return self.Where(condition, grad, self.number(0.0, grad))


def needs(value: Value | None) -> bool:
    """Whether a value can have a gradient at all: floating-point numbers can, and what is not known might be some.
    Codes can where they stand for such numbers, which is how models learn to be quantized."""
    if value is None:
        return False
    if not isinstance(value.type, TensorType):
        return value.type is None
    return value.type.dtype is None or value.type.dtype.is_float or stands_for_numbers(value)


def stands_for_numbers(value: Value) -> bool:
    """Whether a value is codes of floating-point numbers. Their gradient is one of floating-point numbers, too."""
    return value.producer is not None and value.producer.op == "QuantizeLinear"


def first(node: Node) -> Value:
    found = node.inputs[0]
    assert found is not None
    return found


def operand(node: Node, k: int) -> Value | None:
    return node.inputs[k] if k < len(node.inputs) else None


def constant_ints(value: Value | None, what: str) -> tuple[int, ...]:
    """The content of a constant of integers."""
    return () if value is None else tuple(int(x) for x in constant_array(value, what).reshape(-1))


def constant_array(value: Value | None, what: str) -> np.ndarray[Any, Any]:
    """The content of a constant, or of what follows from constants and known shapes alone."""
    found = None if value is None else _known(value, {})
    if found is None:
        raise NotSupported(f"{what} must be constant for a gradient")
    return found


def _known(value: Value, met: dict[Value, np.ndarray[Any, Any] | None]) -> np.ndarray[Any, Any] | None:
    if value.const is not None:
        return np.asarray(value.const.numpy())
    if value not in met:
        met[value] = None if value.producer is None else _computed(value.producer, value, met)
    return met[value]


def _computed(node: Node, value: Value, met: dict[Value, np.ndarray[Any, Any] | None]) -> np.ndarray[Any, Any] | None:
    """By the reference. Definitions compute shapes in many small steps; whatever is larger is not one of those."""
    kind = first(node).type if node.inputs and node.inputs[0] is not None else None
    if node.op in ("Shape", "Size") and isinstance(kind, TensorType) and not kind.is_static:
        return None
    size = value.type.size if isinstance(value.type, TensorType) else None
    if node.has_subgraphs or (size is not None and size > _LARGEST_KNOWN):
        return None
    operands: list[np.ndarray[Any, Any] | None] = []
    for each in node.inputs:
        if each is None:
            operands.append(None)
        elif node.op in ("Shape", "Size") and isinstance(each.type, TensorType):
            operands.append(np.broadcast_to(np.zeros((), np.bool_), each.type.shape))  # type: ignore[arg-type]
        else:
            known = _known(each, met)
            if known is None:
                return None
            operands.append(known)
    definition = registry.find(node.domain, node.op, node.version)
    if definition is None or definition.traits & {"random", "impure"}:
        return None
    call = registry.Call((True,) * len(node.outputs), node.version, node=node)
    found: np.ndarray[Any, Any] = definition.run(operands, node.attrs, call)[list(node.outputs).index(value)]
    return found


def attribute(node: Node, name: str, default: Any) -> Any:
    return node.attrs.get(name, default)


def text(node: Node, name: str, default: str = "") -> str:
    return text_of(attribute(node, name, default))
