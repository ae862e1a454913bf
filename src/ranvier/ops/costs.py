"""What cost rules share: sizes of operands that may be only partly known, and the bytes a node must move."""

from __future__ import annotations

from ranvier.graph.types import TensorType, Type
from ranvier.ops.registry import TypeCall


def dims(kind: Type | None) -> tuple[int, ...]:
    """The sizes of a tensor; a dimension that is not known counts as 1, an unknown tensor as a scalar."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return ()
    return tuple(d if isinstance(d, int) else 1 for d in kind.shape)


def nbytes(kind: Type | None) -> int:
    """Bytes of a tensor, with unknown dimensions as 1 and an unknown element type as float32."""
    if not isinstance(kind, TensorType):
        return 0
    count = 1
    for size in dims(kind):
        count *= size
    return 4 * count if kind.dtype is None else kind.dtype.nbytes(count)


def traffic(call: TypeCall) -> int:
    """Bytes that go in and out once, whatever happens in between."""
    return sum(map(nbytes, call.types)) + sum(map(nbytes, call.result_types))
