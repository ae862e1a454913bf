"""Types of all values of a graph in a whole span of calls, each of which has some inputs a little larger.

An ordinary inference of the first call is there already. Nodes that see nothing of the growth have in all calls what
they have in it; for the others sizes are followed by plain rules, which work with numbers that vary
(:mod:`ranvier.varying`) as with any others. Where there is no rule, :class:`Unfollowed` says so: a guess about later
calls would be worse than to look at each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops import registry
from ranvier.ops.infer import TypeInference
from ranvier.ops.infer_plain import broadcast, quick_answer
from ranvier.ops.operands import clipped
from ranvier.varying import varies, whole

Array = np.ndarray[Any, Any]


class Unfollowed(Exception):
    """A node whose results in later calls are not known."""


def grown_types(graph: Graph, first: TypeInference, inputs: Sequence[Type | None]) -> TypeInference:
    """The inference of a span: ``first`` is that of its first call, ``inputs`` are the types that grow.

    Known contents with numbers that vary are arrays of objects.
    """
    found = TypeInference(first.bound)
    for value, given in zip(graph.inputs, inputs):
        found.types[value] = given
    for value in graph.constants.values():
        _take(found, first, value)
    follow_nodes(found, first, graph)
    return found


def follow_nodes(found: TypeInference, first: TypeInference, nodes: Iterable[Node]) -> None:
    """Go on with ``found``, which knows what grows, through nodes in order."""
    for node in nodes:
        for value in node.dependencies():
            if value not in found.types:
                _take(found, first, value)
        if any(_grows(found, v) for v in node.dependencies()):
            _follow(found, first, node)
        else:
            for value in node.outputs:
                _take(found, first, value)


def _take(found: TypeInference, first: TypeInference, value: Value) -> None:
    found.types[value] = first.types.get(value)
    if value in first.values:
        found.values[value] = first.values[value]


def _grows(found: TypeInference, value: Value) -> bool:
    known = found.types.get(value)
    if isinstance(known, TensorType) and known.shape is not None and any(varies(d) for d in known.shape):
        return True
    content = found.values.get(value)
    return content is not None and content.dtype == object


def _follow(found: TypeInference, first: TypeInference, node: Node) -> None:
    if node.has_subgraphs:
        raise Unfollowed(f"{node.op}: a graph inside")
    operands = [None if v is None else found.types.get(v) for v in node.inputs]
    types = _answer(found, first, node, operands)
    for k, value in enumerate(node.outputs):
        known = types[k] if k < len(types) else None
        before = first.types.get(value)
        if known is None and (value.uses or value.is_graph_output):
            raise Unfollowed(f"{node.op}: no rule for its types")
        found.types[value] = known if known is not None else before
    rule = _VALUES.get(node.op) if not node.domain and len(node.outputs) == 1 else None
    result = node.outputs[0]
    if rule is None or result not in first.values:
        return  # not known; whoever needs it will say so
    contents = [None if v is None else found.values.get(v) for v in node.inputs]
    if node.op in ("Shape", "Size") or all(c is not None or v is None for c, v in zip(contents, node.inputs)):
        made = rule(node, operands, contents)
        if made is not None:
            found.values[result] = _settled(made, first.values[result])


def _settled(made: Array, before: Array) -> Array:
    """As an ordinary array where nothing in it varies."""
    if made.dtype == object and not any(varies(x) for x in made.ravel()):
        return made.astype(before.dtype)
    return made


def _answer(
    found: TypeInference, first: TypeInference, node: Node, operands: Sequence[Type | None]
) -> Sequence[Type | None]:
    contents = [None if v is None else found.values.get(v) for v in node.inputs]
    definition = registry.find(node.domain, node.op, node.version)
    if definition is not None and definition.infer_rule is not None:
        call = registry.TypeCall(operands, contents, node.attrs, len(node.outputs), node.version, node)
        return definition.infer_rule(call)
    rule = _TYPES.get(node.op) if not node.domain else None
    if rule is not None:
        leading = operands[0] if operands else None
        if not isinstance(leading, TensorType) or leading.shape is None:
            return []
        return rule(node, operands, contents, [first.types.get(v) for v in node.outputs])
    return quick_answer(node, operands, found.values) or []


# -- types -----------------------------------------------------------------------------------------------------------

_Rule = Callable[[Node, Sequence[Any], Sequence[Any], Sequence[Any]], list[Type | None]]


def _like_first(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    return [TensorType(before[0].dtype, operands[0].shape)]


def _reduced(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    shape = operands[0].shape
    axes = node.attrs.get("axes")
    if axes is None and len(contents) > 1 and node.input(1) is not None:
        if contents[1] is None:
            return []
        axes = [int(a) for a in contents[1].ravel()]
    if not axes:
        if node.attrs.get("noop_with_empty_axes", 0):
            return [operands[0]]
        axes = range(len(shape))
    gone = {a % len(shape) for a in axes}
    if node.attrs.get("keepdims", 1):
        return [TensorType(before[0].dtype, tuple(1 if k in gone else d for k, d in enumerate(shape)))]
    return [TensorType(before[0].dtype, tuple(d for k, d in enumerate(shape) if k not in gone))]


def _where(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    shape: Any = ()
    for each in operands:
        shape = broadcast(shape, each.shape)
    return [] if shape is None else [TensorType(before[0].dtype, shape)]


def _expanded(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    if contents[1] is None:
        return []
    shape = broadcast(operands[0].shape, tuple(whole(d) for d in contents[1].ravel()))
    return [] if shape is None else [TensorType(before[0].dtype, shape)]


def _sliced(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    shape = list(operands[0].shape)
    if node.version < 10 or any(c is None for v, c in zip(node.inputs[1:], contents[1:]) if v is not None):
        return []
    begin, end = ([whole(x) for x in contents[k].ravel()] for k in (1, 2))
    axes = [int(x) for x in contents[3].ravel()] if node.input(3) is not None else range(len(begin))
    steps = [int(x) for x in contents[4].ravel()] if node.input(4) is not None else [1] * len(begin)
    for axis, low, high, by in zip(axes, begin, end, steps):
        if by != 1:
            return []
        size = shape[axis]
        low, high = clipped(low, size), clipped(high, size)
        shape[axis] = high - low if high > low else 0
    return [TensorType(before[0].dtype, tuple(shape))]


def _split(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    shape = operands[0].shape
    axis = node.attrs.get("axis", 0) % len(shape)
    if varies(shape[axis]):
        return []
    # along another axis than the one that grows: the pieces are those of the first call
    return [
        TensorType(each.dtype, (*shape[:axis], each.shape[axis], *shape[axis + 1 :]))
        if isinstance(each, TensorType) and each.shape is not None and len(each.shape) == len(shape)
        else None
        for each in before
    ]


def _range(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    if any(c is None for c in contents):
        return []
    start, limit, step = (c.reshape(-1)[0] for c in contents)
    if isinstance(step, float | np.floating) or varies(step) or step == 0:
        return []
    count = -(-(limit - start) // whole(step))
    return [TensorType(before[0].dtype, (count if count > 0 else 0,))]


def _normalised(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    shape = operands[0].shape
    axis = node.attrs.get("axis", -1) % len(shape)
    left = (*shape[:axis], *(1,) * (len(shape) - axis))
    return [operands[0], *(TensorType(DType.float32, left) for _ in node.outputs[1:])]


def _attended(node: Node, operands: Sequence[Any], contents: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    q, k, v = operands[:3]
    past = operands[4] if node.input(4) is not None else None
    packed = len(q.shape) == 3
    out: tuple[Any, ...]
    heads, groups = node.attrs.get("q_num_heads"), node.attrs.get("kv_num_heads")
    if packed:
        batch, time, width = q.shape
        keys, size = k.shape[1], v.shape[2] // groups
        out = (batch, time, heads * size)
        key_size = width // heads
    else:
        batch, heads, time, key_size = q.shape
        groups, keys, size = k.shape[1], k.shape[2], v.shape[3]
        out = (batch, heads, time, size)
    total = keys if past is None else past.shape[2] + keys
    shapes = [out, (batch, groups, total, key_size), (batch, groups, total, size), (batch, heads, time, total)]
    return [TensorType(q.dtype, shape) for shape in shapes[: len(node.outputs)]]


_TYPES: dict[str, _Rule] = {
    **dict.fromkeys(("And", "Or", "Xor", "Pow", "Where", "Max", "Min", "Sum", "Mod"), _where),
    **dict.fromkeys(("Not", "IsNaN", "IsInf", "Trilu", "CumSum"), _like_first),
    **dict.fromkeys((f"Reduce{x}" for x in ("Mean", "Sum", "Max", "Min", "SumSquare", "L2", "Prod")), _reduced),
    "Attention": _attended,
    "Expand": _expanded,
    "LayerNormalization": _normalised,
    "RMSNormalization": _like_first,
    "Range": _range,
    "RotaryEmbedding": _like_first,
    "Slice": _sliced,
    "Split": _split,
}

# -- contents --------------------------------------------------------------------------------------------------------


def _objects(items: Sequence[Any]) -> Array:
    made = np.empty(len(items), object)
    for k, item in enumerate(items):
        made[k] = item
    return made


def _shape(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    shape = operands[0].shape
    return None if shape is None else _objects(shape[node.attrs.get("start", 0) : node.attrs.get("end")])


def _gathered(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    source, at = contents
    return None if at.dtype == object or source.ndim != 1 else _array(source[at])


def _array(x: Any) -> Array:
    """An element of an array of objects is no array any more."""
    if isinstance(x, np.ndarray):
        return x
    made = np.empty((), object)
    made[()] = x
    return made


def _concatenated(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    return np.concatenate([c.astype(object) for c in contents], axis=node.attrs["axis"])


def _unsqueezed(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    axes: Any = node.attrs["axes"] if node.version < 13 else [int(a) for a in contents[1].ravel()]
    return np.expand_dims(contents[0], tuple(axes))


def _flat(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    """Squeeze, of a single number."""
    return np.reshape(contents[0], ()) if contents[0].size == 1 else None


def _same(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    found: Array = contents[0]
    return found


def _cast(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    counting = (DType.int64.onnx, DType.int32.onnx)
    return _same(node, operands, contents) if node.attrs.get("to") in counting else None


def _slice(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
    if contents[0].ndim != 1 or node.version < 10 or any(c is not None and c.dtype == object for c in contents[1:]):
        return None
    low, high = (int(contents[k].ravel()[0]) for k in (1, 2))
    step = int(contents[4].ravel()[0]) if len(contents) > 4 and contents[4] is not None else 1
    return _array(contents[0][low:high:step])


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[..., Array | None]:
    def rule(node: Node, operands: Sequence[Any], contents: Sequence[Any]) -> Array | None:
        if any(c.dtype.kind not in "iuO" for c in contents):
            return None
        a, b = np.broadcast_arrays(*(c.astype(object) for c in contents))
        items = [function(x, y) for x, y in zip(a.ravel(), b.ravel())]
        return _objects(items).reshape(a.shape)

    return rule


def _quotient(a: Any, b: Any) -> Any:
    """Rounded towards zero, as the standard has it."""
    return a // b if (a < 0) == (b < 0) else -(-a // b)


_VALUES: dict[str, Callable[[Node, Sequence[Any], Sequence[Any]], Array | None]] = {
    "Add": _arithmetic(lambda a, b: a + b),
    "Cast": _cast,
    "Concat": _concatenated,
    "Div": _arithmetic(_quotient),
    "Gather": _gathered,
    "Identity": _same,
    "Max": _arithmetic(max),
    "Min": _arithmetic(min),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _flat,
    "Sub": _arithmetic(lambda a, b: a - b),
    "Unsqueeze": _unsqueezed,
}
