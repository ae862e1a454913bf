"""What types and constants prove: the questions that fusion rules ask before they change anything.

Every function answers "yes" only where it is certain. A dim that is not known equals nothing, not even itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.patterns import Match
from ranvier.graph.types import Dim, Shape
from ranvier.passes.facts import dtype_of, integers_of, rank_of, shape_of, widens

FLOATS = frozenset({DType.float16, DType.bfloat16, DType.float32, DType.float64})
NARROW_FLOATS = frozenset({DType.float16, DType.bfloat16})


def same_dim(*dims: Dim) -> bool:
    return dims[0] is not None and all(dim == dims[0] for dim in dims)


def spreads_into(small: Shape | None, large: Shape | None) -> bool:
    """``small`` broadcasts into ``large`` without changing it."""
    if small is None or large is None or len(small) > len(large):
        return False
    return all(d == 1 or same_dim(d, e) for d, e in zip(reversed(small), reversed(large)))


def is_shape_of(value: Value | None, x: Value) -> bool:
    """``value`` is computed as the whole shape of ``x``, or is a constant equal to it."""
    node = value.producer if value is not None else None
    if node is not None:
        return node.op == "Shape" and node.input(0) is x and not {"start", "end"} & set(node.attrs)
    sizes = integers_of(value)
    return sizes is not None and sizes == shape_of(x)


def reshapes_to(result: Value, target: Value | None, x: Value) -> bool:
    """A Reshape or Expand to ``target`` with this ``result`` brings back the shape of ``x``."""
    shape = shape_of(x)
    return is_shape_of(target, x) or (shape is not None and None not in shape and shape_of(result) == shape)


def elementwise_reason(match: Match, x: Value) -> str | None:
    """Why a chain of elementwise operators and constants is not a function of ``x`` alone, of its type and shape."""
    if dtype_of(x) not in FLOATS:
        return "the operand is not known to be of a float type"
    for node in match.nodes:
        for value in node.inputs:
            if value is not None and value.const is not None and value is not x and widens(x, value.const.shape):
                return "a constant may widen the operand"
    return None


def reduced_axes(node: Node) -> tuple[int, ...] | None:
    """The axes that a reduction with kept dims runs over, by attribute or by input; None where they are not certain.

    GlobalAveragePool, as which TensorFlow's converter writes a mean over all but two axes, counts as a reduction.
    """
    if node.op == "GlobalAveragePool":
        rank = rank_of(node.input(0))
        return None if rank is None or rank < 3 else tuple(range(2, rank))
    if not node.attrs.get("keepdims", 1):
        return None
    axes = node.attrs.get("axes") or integers_of(node.input(1))
    return tuple(axes) if axes else None


def trailing_count(axes: Sequence[int] | None, rank: int | None) -> int | None:
    """How many of the last axes ``axes`` are, where they are just these."""
    if not axes:
        return None
    if rank is not None:
        axes = [a - rank if a >= 0 else a for a in axes]
    return len(axes) if sorted(axes) == list(range(-len(axes), 0)) else None


def is_last_axis(axis: int | None, value: Value | None) -> bool:
    rank = rank_of(value)
    return axis == -1 or (rank is not None and axis == rank - 1)
