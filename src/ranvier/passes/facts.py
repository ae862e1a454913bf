"""Small questions that passes ask about values and nodes: shapes, constants, uses, purity."""

from __future__ import annotations

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.patterns import scalar_of
from ranvier.graph.types import Shape, TensorType
from ranvier.ops import registry
from ranvier.ops.registry import Array

SMALL = 4096  # elements; reading a larger constant to decide on a rewrite does not pay

__all__ = [
    "all_known",
    "array_of",
    "dtype_of",
    "integers_of",
    "is_elementwise",
    "is_pure",
    "is_removable",
    "is_wanted",
    "only_use",
    "rank_of",
    "same_shape",
    "scalar_of",
    "shape_of",
    "widens",
]


def dtype_of(value: Value | None) -> DType | None:
    return value.type.dtype if value is not None and isinstance(value.type, TensorType) else None


def shape_of(value: Value | None) -> Shape | None:
    return value.type.shape if value is not None and isinstance(value.type, TensorType) else None


def rank_of(value: Value | None) -> int | None:
    shape = shape_of(value)
    return None if shape is None else len(shape)


def all_known(shape: Shape | None) -> bool:
    """Every dimension is a number or a symbol."""
    return shape is not None and None not in shape


def same_shape(a: Value | None, b: Value | None) -> bool:
    """Both shapes are known, dimension by dimension, and equal."""
    shape = shape_of(a)
    return all_known(shape) and shape == shape_of(b)


def array_of(value: Value | None) -> Array | None:
    """The data of a small constant, or None."""
    if value is None or value.const is None or value.const.size > SMALL:
        return None
    return value.const.numpy()


def integers_of(value: Value | None) -> tuple[int, ...] | None:
    """The elements of a small integer constant, or None."""
    array = array_of(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return tuple(array.ravel().tolist())


def widens(operand: Value, shape: tuple[int, ...]) -> bool:
    """False when something of ``shape`` broadcasts into ``operand`` without changing its shape."""
    if not shape:
        return False
    own = shape_of(operand)
    if own is None or len(shape) > len(own):
        return True
    return any(size != 1 and size != dim for size, dim in zip(reversed(shape), reversed(own)))


def only_use(value: Value) -> Node | None:
    """The one node that reads ``value``, or None where there are more uses or it leaves the graph."""
    if len(value.uses) != 1 or value.is_graph_output:
        return None
    return next(iter(value.uses))[0]


def is_wanted(node: Node, k: int) -> bool:
    """Somebody reads the node's result ``k``, or it leaves the graph."""
    return k < len(node.outputs) and (bool(node.outputs[k].uses) or node.outputs[k].is_graph_output)


def is_pure(node: Node) -> bool:
    """Two calls on equal operands give equal results, and nothing else happens."""
    definition = registry.find(node.domain, node.op, node.version)
    return definition is not None and not definition.traits & {"random", "impure"}


def is_removable(node: Node) -> bool:
    """Nothing happens but its results; what is not declared counts as such a node."""
    definition = registry.find(node.domain, node.op, node.version)
    return definition is None or "impure" not in definition.traits


def is_elementwise(node: Node) -> bool:
    definition = registry.find(node.domain, node.op, node.version)
    return definition is not None and "elementwise" in definition.traits
