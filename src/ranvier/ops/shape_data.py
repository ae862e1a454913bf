"""Shape computations on symbolic dims: what ``Concat(Gather(Shape(x), 0), 12, 64)`` is while a batch has no size.

Each handled operator maps tuples of dims to a tuple of dims; anything else loses the information, never guesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.dtypes import of as dtype_of
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Dim, TensorType

if TYPE_CHECKING:
    from ranvier.ops.infer import TypeInference

Dims = tuple[Dim, ...]
_COUNTING = frozenset({DType.int64, DType.int32, DType.bool})
SMALL = 1024  # tensors of up to this many elements take part in the propagation of values
_FEW = 64  # likewise, of types that no shape is made of: scales of a Resize, bounds of a Range


def takes_part(tensor: ConstTensor) -> bool:
    """May a shape follow from this constant? Most are weights, and reading them all would take long."""
    if tensor.dtype in _COUNTING:
        return tensor.size <= SMALL
    return tensor.size <= _FEW and tensor.dtype is not DType.string


def known_dims(inference: TypeInference, value: Value | None) -> Dims | None:
    """A small integer tensor (rank 0 or 1) as dims, or None."""
    if value is None:
        return None
    found = inference.dims.get(value)
    if found is not None:
        return found
    exact = inference.values.get(value)
    if exact is not None and exact.ndim <= 1 and exact.dtype.kind in "iu":
        return tuple(int(x) for x in np.atleast_1d(exact))
    return None


def propagate_dims(inference: TypeInference, node: Node) -> None:
    """Record the dims of the node's result where its operands' dims determine them."""
    rule = _RULES.get(node.op)
    if rule is None:
        return
    found = rule(inference, node)
    if found is None:
        return
    out = inference.types.get(node.outputs[0])
    if isinstance(out, TensorType) and out.rank in (0, 1) and all(isinstance(d, int) for d in found):
        dtype = (out.dtype or DType.int64).numpy
        inference.values[node.outputs[0]] = np.array(found, dtype).reshape(() if out.rank == 0 else (-1,))
    else:
        inference.dims[node.outputs[0]] = found


def type_from_dims(inference: TypeInference, node: Node) -> TensorType | None:
    """The result type of a node whose target shape is known as dims; None leaves it to the standard's rule."""
    rule = _SHAPED_BY_DIMS.get(node.op)
    return rule(inference, node) if rule is not None else None


def _constant_of_shape(inference: TypeInference, node: Node) -> TensorType | None:
    target = node.input(0)
    dims = inference.dims.get(target) if target is not None else None
    if dims is None:
        return None
    value = node.attrs.get("value")
    return TensorType(DType.float32 if value is None else dtype_of(value), tuple(_size(d) for d in dims))


def _expand(inference: TypeInference, node: Node) -> TensorType | None:
    target = node.input(1)
    dims = inference.dims.get(target) if target is not None else None
    source = inference.types.get(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None or not isinstance(source, TensorType) or source.shape is None:
        return None
    rank = max(len(dims), len(source.shape))
    left = (1,) * (rank - len(source.shape)) + source.shape
    right = (1,) * (rank - len(dims)) + dims
    return TensorType(source.dtype, tuple(_broadcast(a, _size(b)) for a, b in zip(left, right)))


def _broadcast(a: Dim, b: Dim) -> Dim:
    if a == 1 or a == b:
        return b
    if b == 1 or (isinstance(a, int) and a > 1):
        return a
    return b if isinstance(b, int) and b > 1 else None


def _size(dim: Dim) -> Dim:
    """A computed number is a size only when it is not negative."""
    return None if isinstance(dim, int) and dim < 0 else dim


def _reshape_type(inference: TypeInference, node: Node) -> TensorType | None:
    """The result type of a Reshape whose target is known as dims, or None to let the standard's rule decide."""
    target = node.input(1)
    if target is None or target in inference.values:
        return None
    dims = inference.dims.get(target)
    source = inference.types.get(node.inputs[0]) if node.inputs[0] is not None else None
    if dims is None or not isinstance(source, TensorType):
        return None
    allow_zero = bool(node.attrs.get("allowzero", 0))
    shape: list[Dim] = []
    for k, dim in enumerate(dims):
        if dim == 0 and not allow_zero:
            shape.append(source.shape[k] if source.shape is not None and k < len(source.shape) else None)
        elif dim == -1:
            shape.append(_rest(source, dims))
        else:
            shape.append(dim)
    return TensorType(source.dtype, tuple(shape))


def _rest(source: TensorType, dims: Dims) -> Dim:
    """The size a -1 stands for: cancels equal symbols on both sides, then divides the numbers."""
    if source.shape is None or any(d is None for d in source.shape):
        return None
    left = list(source.shape)
    right = [d for d in dims if d != -1]
    if any(d is None or d == 0 for d in right):
        return None
    for dim in list(right):
        if not isinstance(dim, int) and dim in left:
            left.remove(dim)
            right.remove(dim)
    if any(not isinstance(d, int) for d in left + right):
        symbols = [d for d in left if not isinstance(d, int)]
        numbers = [d for d in left if isinstance(d, int)]
        plain = all(isinstance(d, int) for d in right)
        return symbols[0] if plain and len(symbols) == 1 and _product(numbers) == _product(right) else None
    below = _product(right)
    above = _product(left)
    return above // below if below and above % below == 0 else None


def _product(dims: list[Any]) -> int:
    total = 1
    for dim in dims:
        total *= int(dim)
    return total


def _shape(inference: TypeInference, node: Node) -> Dims | None:
    operand = inference.types.get(node.inputs[0]) if node.inputs[0] is not None else None
    if not isinstance(operand, TensorType) or operand.shape is None:
        return None
    return operand.shape[slice(node.attrs.get("start", 0), node.attrs.get("end"))]


def _gather(inference: TypeInference, node: Node) -> Dims | None:
    dims = known_dims(inference, node.input(0))
    at = node.input(1)
    index = inference.values.get(at) if at is not None else None
    if dims is None or index is None or index.ndim > 1:
        return None
    where = [int(i) for i in np.atleast_1d(index)]
    return tuple(dims[i] for i in where) if all(-len(dims) <= i < len(dims) for i in where) else None


def _slice(inference: TypeInference, node: Node) -> Dims | None:
    dims = known_dims(inference, node.input(0))
    if dims is None:
        return None
    if node.version < 10:
        bounds = [node.attrs.get("starts"), node.attrs.get("ends"), node.attrs.get("axes"), None]
    else:
        bounds = []
        for k in range(1, 5):
            operand = node.input(k)
            known = inference.values.get(operand) if operand is not None else None
            if operand is not None and known is None:
                return None
            bounds.append(None if known is None else tuple(int(x) for x in known.ravel()))
    starts, ends, _, steps = bounds
    if starts is None or ends is None or len(starts) != 1:
        return None
    return dims[slice(starts[0], ends[0], steps[0] if steps else None)]


def _concat(inference: TypeInference, node: Node) -> Dims | None:
    parts = [known_dims(inference, v) for v in node.inputs]
    if any(p is None for p in parts) or sum(len(p or ()) for p in parts) > SMALL:
        return None
    return tuple(d for p in parts for d in p or ())


def _same(inference: TypeInference, node: Node) -> Dims | None:
    dims = known_dims(inference, node.input(0))
    if dims is not None and node.op == "Cast":
        out = inference.types.get(node.outputs[0])
        return dims if isinstance(out, TensorType) and out.dtype in (DType.int64, DType.int32) else None
    return dims


def _reshape(inference: TypeInference, node: Node) -> Dims | None:
    out = inference.types.get(node.outputs[0])
    return known_dims(inference, node.input(0)) if isinstance(out, TensorType) and out.rank in (0, 1) else None


def _arithmetic(inference: TypeInference, node: Node) -> Dims | None:
    a, b = known_dims(inference, node.input(0)), known_dims(inference, node.input(1))
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    count = max(len(a), len(b))
    a, b = (a * count if len(a) == 1 else a), (b * count if len(b) == 1 else b)
    return tuple(_combine(node.op, x, y) for x, y in zip(a, b))


def _combine(op: str, x: Dim, y: Dim) -> Dim:
    if op == "Mul" and 1 in (x, y):
        return y if x == 1 else x
    if op == "Div" and y == 1:
        return x
    if op in ("Add", "Sub") and y == 0:
        return x
    if not isinstance(x, int) or not isinstance(y, int):
        return None
    if op == "Div":
        return int(x / y) if y else None
    result = {"Add": x + y, "Sub": x - y, "Mul": x * y}[op]
    return result


_SHAPED_BY_DIMS = {"Reshape": _reshape_type, "Expand": _expand, "ConstantOfShape": _constant_of_shape}
_RULES = {
    "Shape": _shape,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Identity": _same,
    "Cast": _same,
    "Squeeze": _same,
    "Unsqueeze": _reshape,
    "Reshape": _reshape,
    "Add": _arithmetic,
    "Sub": _arithmetic,
    "Mul": _arithmetic,
    "Div": _arithmetic,
}
