"""Types of all values of a graph, from the types of its inputs.

The standard's own inference (``onnx.shape_inference``) is asked node by node; a rule declared with the operator
(``@relu.infer``) wins over it. Beside types the walk follows *shape data*: small integer tensors that are computed
from shapes, exactly where everything is known and as symbolic dims where it is not. So ``Reshape(x, Concat(Shape
…))`` has a rank, and with all dims bound it has a shape.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import OperatorSetIdProto, TensorProto, TypeProto
from onnx.shape_inference import infer_node_outputs

from ranvier.dtypes import DType, from_onnx
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Dim, OptionalType, SequenceType, TensorType, Type
from ranvier.ops import registry
from ranvier.ops.infer_guard import check_question
from ranvier.ops.infer_memo import Memo, contents, question
from ranvier.ops.infer_plain import quick_answer
from ranvier.ops.proto import array_tensor, node_to_proto, schema_of, type_from_proto, type_to_proto
from ranvier.ops.shape_data import SMALL, propagate_dims, takes_part, type_from_dims

NEWEST = onnx.defs.onnx_opset_version()
_ATTEMPTS = 4  # walks through a loop's body in search of types that stay the same
_TRIED_DEPTH = 2  # loops inside this many others are walked once, with unknown shapes

# Cheap operators that shape computations are made of; only these are evaluated during inference.
SHAPE_MATH = frozenset(
    """Shape Size Gather GatherElements GatherND Slice Concat Split Squeeze Unsqueeze Reshape Flatten Cast CastLike
    Identity Add Sub Mul Div Mod Pow Neg Abs Sign Floor Ceil Round Sqrt Min Max Sum ReduceProd ReduceSum ReduceMax
    ReduceMin Equal Greater Less GreaterOrEqual LessOrEqual Not And Or Xor Where Range ConstantOfShape Expand Tile
    Transpose ScatterND ScatterElements Constant OneHot Clip Relu CumSum""".split()  # noqa: SIM905
)


def annotate(graph: Graph) -> list[str]:
    """Infer and write ``value.type`` everywhere in the graph and its subgraphs; returns the problems met."""
    inference = TypeInference()
    inference.run(graph)
    for value, found in inference.types.items():
        if found is not None:
            value.type = found
    return inference.problems


def infer_outputs(node: Node) -> None:
    """Set the output types of a freshly made node from its operands' types."""
    inference = TypeInference()
    for value in node.dependencies():
        inference.know(value)
    inference.visit(node)
    for value in node.outputs:
        found = inference.types.get(value)
        if found is not None:
            value.type = found


def complete(node: Node) -> None:
    """Finish a node made by a rewrite: the newest version of its operator where none is set, and result types."""
    if node.version == 0:
        schema = schema_of(node.domain, node.op, NEWEST)
        definition = registry.find(node.domain, node.op)
        node.version = schema.since_version if schema is not None else definition.since if definition else 1
    infer_outputs(node)


class TypeInference:
    """One walk over a graph; results by value, the graph itself is not changed.

    ``annotated``: types in the graph are what an earlier walk found, so that results whose types it knows completely
    are not inferred again where the operands are as they were.
    """

    def __init__(self, dims: Mapping[str, int] | None = None, *, annotated: bool = False) -> None:
        self.bound = dict(dims or {})
        self._annotated = annotated
        self.types: dict[Value, Type | None] = {}
        self.values: dict[Value, np.ndarray[Any, Any]] = {}  # exactly known small tensors
        self.dims: dict[Value, tuple[Dim, ...]] = {}  # 0-d and 1-d integer tensors known as dims
        self.problems: list[str] = []
        self._loops = 0  # loop bodies around the graph that is being walked

    def run(self, graph: Graph, inputs: Sequence[Type | None] | None = None) -> list[Type | None]:
        """Infer through ``graph``; ``inputs`` overrides its declared input types. Returns the output types."""
        for k, value in enumerate(graph.inputs):
            given = inputs[k] if inputs is not None and k < len(inputs) else value.type
            self.types[value] = given.bind(self.bound) if given is not None else None
        for value in graph.constants.values():
            self.know(value)
        for node in graph:
            self.visit(node)
        return [self.types.get(v) for v in graph.outputs]

    def know(self, value: Value) -> None:
        """Take a value as it stands: its type and, for a small constant, its data."""
        if value in self.types:
            return
        self.types[value] = value.type.bind(self.bound) if value.type is not None else None
        tensor = value.const
        if tensor is not None and takes_part(tensor):
            self.values[value] = tensor.numpy()

    def visit(self, node: Node) -> None:
        types = self.types
        nested = bool(node.attrs) and node.has_subgraphs
        for value in node.dependencies() if nested else node._inputs:
            if value is not None and value not in types:
                self.know(value)
        if self._annotated and not nested and self._settled_already(node):
            for value in node.outputs:
                types[value] = value.type
        else:
            found: Sequence[Type | None] = []
            try:
                found = self._infer(node)
            except Exception as error:  # types are predictions: where a rule fails, the run will say what is wrong
                self._problem(node, error)
            count = len(found)
            for k, value in enumerate(node.outputs):
                inferred = found[k] if k < count else None
                declared = value.type.bind(self.bound) if value.type is not None else None
                types[value] = declared if inferred is None else inferred.merge(declared)
        if node.op in SHAPE_MATH and not node.domain:
            try:
                self._propagate(node)
            except Exception as error:
                self._problem(node, error)

    def _settled_already(self, node: Node) -> bool:
        """Are the operands exactly what the graph says, and does it know the results?"""
        for value in node._inputs:
            if value is not None:
                here, there = self.types[value], value.type
                if here is not there and here != there:
                    return False
        return all(type(v.type) is TensorType and v.type.dtype is not None and v.type.is_static for v in node.outputs)

    def _problem(self, node: Node, error: Exception) -> None:
        self.problems.append(f"{node.op} {node.name!r}: {error}")

    # -- types ------------------------------------------------------------------------------------------------------

    def _infer(self, node: Node) -> Sequence[Type | None]:
        if node.op == "FlexAttention" and node.has_subgraphs:
            self._score_graphs(node)
        control = _CONTROL.get(node.op) if node.domain == "" else None
        if control is not None:
            return control(self, node)
        if node.domain == "":
            found = type_from_dims(self, node)
            if found is not None:
                return [found]
        definition = registry.find(node.domain, node.op, node.version)
        operands = [None if v is None else self.types.get(v) for v in node.inputs]
        if definition is not None and definition.infer_rule is not None:
            values = [None if v is None else self.values.get(v) for v in node.inputs]
            return definition.infer_rule(
                registry.TypeCall(operands, values, node.attrs, len(node.outputs), node.version, node)
            )
        schema = schema_of(node.domain, node.op, node.version) if node.version else None
        if schema is None:
            return []
        quick = quick_answer(node, operands, self.values)
        if quick is not None:
            return quick
        known = contents(node, self.values)
        check_question(node, operands, known)
        asked = question(node, operands, known)
        answer = None if asked is None else _MEMO.find(asked)
        if answer is None:
            answer = _ask_standard(schema, node, operands, known)
            if asked is not None:
                _MEMO.keep(asked, answer)
        return [_bound(t, self.bound) for t in answer] if self.bound else answer

    # -- shape data -------------------------------------------------------------------------------------------------

    def _propagate(self, node: Node) -> None:
        if not node.outputs:
            return
        if node.op in ("Shape", "Size"):
            operand = self.types.get(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
            if isinstance(operand, TensorType) and operand.is_static and node.inputs[0] is not None:
                shape = np.array(operand.shape, np.int64)
                if node.op == "Shape":
                    start, end = node.attrs.get("start", 0), node.attrs.get("end")
                    self.values[node.outputs[0]] = shape[slice(start, end)]
                else:
                    self.values[node.outputs[0]] = np.array(shape.prod(), np.int64)
                return
        operands = [None if v is None else self.values.get(v) for v in node.inputs]
        known = all(v is None or x is not None for v, x in zip(node.inputs, operands))
        if known and self._evaluate(node, operands):
            return
        propagate_dims(self, node)

    def _evaluate(self, node: Node, operands: Sequence[Any]) -> bool:
        out = self.types.get(node.outputs[0])
        size = out.size if isinstance(out, TensorType) else None
        if size is None or size > SMALL:
            return False
        definition = registry.find("", node.op, node.version)
        if definition is None:
            return False
        call = registry.Call(wanted=(True,) * len(node.outputs), version=node.version)
        try:
            with np.errstate(all="ignore"):
                results = definition.run(operands, node.attrs, call)
        except Exception:  # the run itself will report it, with the real operands
            return False
        for value, result in zip(node.outputs, results):
            if isinstance(result, np.ndarray) and result.size <= SMALL:
                self.values[value] = result
        return True

    # -- control flow -----------------------------------------------------------------------------------------------

    def _if(self, node: Node) -> list[Type | None]:
        branches = [self.run(node.attrs[name]) for name in ("then_branch", "else_branch")]
        condition = None if node.inputs[0] is None else self.values.get(node.inputs[0])
        if condition is not None and condition.size == 1:
            return branches[0 if condition.reshape(()) else 1]
        return [generalise(a, b) for a, b in zip(*branches)]

    def _score_graphs(self, node: Node) -> None:
        """Graphs that change the scores of an attention: what they get is one tensor of scores."""
        q, k = (self.types.get(v) if v is not None else None for v in node.inputs[:2])
        if not isinstance(q, TensorType) or not isinstance(k, TensorType) or q.shape is None or k.shape is None:
            return
        asked = node.attrs.get("softmax_precision") or 0
        kind = from_onnx(asked) if asked else DType.float64 if q.dtype is DType.float64 else DType.float32
        if len(q.shape) == len(k.shape) == 4:
            for body in node.subgraphs():
                self.run(body, [TensorType(kind, (*q.shape[:3], k.shape[2]))])

    def _loop(self, node: Node) -> list[Type | None]:
        body: Graph = node.attrs["body"]
        carried = [None if v is None else self.types.get(v) for v in node.inputs[2:]]
        scalars: list[Type | None] = [TensorType(DType.int64, ()), TensorType(DType.bool, ())]
        count = len(carried)
        outputs = self._settle(body, scalars, carried, [], 1)
        return [*outputs[1 : 1 + count], *(_stacked(t) for t in outputs[1 + count :])]

    def _scan(self, node: Node) -> list[Type | None]:
        body: Graph = node.attrs["body"]
        scans = node.attrs["num_scan_inputs"]
        old = node.version < 9  # Scan-8 has a sequence_lens operand and a batch dimension
        operands = [None if v is None else self.types.get(v) for v in node.inputs[1 if old else 0 :]]
        if old:
            return [_unknown_shape(t) for t in operands[: len(operands) - scans]] + [None] * len(node.outputs)
        count = len(operands) - scans
        axes = node.attrs.get("scan_input_axes") or (0,) * scans
        slices = [_without_axis(t, a) for t, a in zip(operands[count:], axes)]
        outputs = self._settle(body, [], operands[:count], slices, 0)
        stack_axes = node.attrs.get("scan_output_axes") or (0,) * (len(outputs) - count)
        stacked = [_stacked(t, a, _size_at(operands[count], axes[0])) for t, a in zip(outputs[count:], stack_axes)]
        return [*outputs[:count], *stacked]

    def _sequence_map(self, node: Node) -> list[Type | None]:
        body: Graph = node.attrs["body"]
        operands = [None if v is None else self.types.get(v) for v in node.inputs]
        given = [t.elem if isinstance(t, SequenceType) else t for t in operands]
        return [SequenceType(_unknown_shape(t)) for t in self.run(body, given)]

    def _settle(
        self, body: Graph, fixed: list[Type | None], carried: list[Type | None], scans: list[Type | None], skip: int
    ) -> list[Type | None]:
        """Infer a body until the types of the carried values are the same before and after a step."""
        # each attempt walks the loops inside once more: with depth, attempts multiply
        attempts = _ATTEMPTS if self._loops < _TRIED_DEPTH else 0
        self._loops += 1
        try:
            return self._settled(body, fixed, list(carried), scans, skip, attempts)
        finally:
            self._loops -= 1

    def _settled(
        self,
        body: Graph,
        fixed: list[Type | None],
        now: list[Type | None],
        scans: list[Type | None],
        skip: int,
        attempts: int,
    ) -> list[Type | None]:
        for _ in range(attempts):
            outputs = self.run(body, [*fixed, *now, *scans])
            after = [generalise(a, b) for a, b in zip(now, outputs[skip : skip + len(now)])]
            if after == now:
                return [*outputs[:skip], *now, *outputs[skip + len(now) :]]
            now = after
        now = [_unknown_shape(t) for t in now]
        outputs = self.run(body, [*fixed, *now, *scans])
        return [*outputs[:skip], *now, *outputs[skip + len(now) :]]


_CONTROL = {
    "If": TypeInference._if,
    "Loop": TypeInference._loop,
    "Scan": TypeInference._scan,
    "SequenceMap": TypeInference._sequence_map,
}


def generalise(a: Type | None, b: Type | None) -> Type | None:
    """The most precise type that covers both."""
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        dtype = a.dtype if a.dtype is b.dtype else None
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            return TensorType(dtype, None)
        return TensorType(dtype, tuple(x if x == y else None for x, y in zip(a.shape, b.shape)))
    if isinstance(a, SequenceType) and isinstance(b, SequenceType):
        return SequenceType(generalise(a.elem, b.elem))
    if isinstance(a, OptionalType) and isinstance(b, OptionalType):
        return OptionalType(generalise(a.elem, b.elem))
    return a if a == b else None


def _unknown_shape(t: Type | None) -> Type | None:
    return TensorType(t.dtype, None) if isinstance(t, TensorType) else t


def _stacked(t: Type | None, axis: int = 0, size: Dim = None) -> Type | None:
    if not isinstance(t, TensorType) or t.shape is None:
        return t
    at = axis if axis >= 0 else axis + len(t.shape) + 1
    return TensorType(t.dtype, (*t.shape[:at], size, *t.shape[at:]))


def _without_axis(t: Type | None, axis: int) -> Type | None:
    if not isinstance(t, TensorType) or t.shape is None:
        return t
    at = axis % len(t.shape) if t.shape else 0
    return TensorType(t.dtype, (*t.shape[:at], *t.shape[at + 1 :]))


def _size_at(t: Type | None, axis: int) -> Dim:
    return t.shape[axis] if isinstance(t, TensorType) and t.shape else None


def _bound(t: Type | None, dims: Mapping[str, int]) -> Type | None:
    return t.bind(dims) if t is not None and dims else t


_MEMO = Memo()


def _ask_standard(
    schema: Any, node: Node, operands: Sequence[Type | None], known: Mapping[int, np.ndarray[Any, Any]]
) -> list[Type | None]:
    names = ["" if v is None else f"i{k}" for k, v in enumerate(node._inputs)]
    results = [f"o{k}" for k in range(len(node.outputs))]
    message = node_to_proto(node, names, results, _no_graph)
    given = {
        name: TypeProto() if operand is None else _type_proto(operand) for name, operand in zip(names, operands) if name
    }
    data: dict[str, TensorProto] = {names[k]: array_tensor(array, names[k]) for k, array in known.items()}
    opset = [OperatorSetIdProto(domain=node.domain, version=node.version)]
    found = infer_node_outputs(schema, message, given, data, opset_imports=opset, ir_version=onnx.IR_VERSION)
    return [type_from_proto(found[r]) if r in found else None for r in results]


@functools.lru_cache(maxsize=4096)
def _type_proto(value_type: Type) -> TypeProto:
    return type_to_proto(value_type)


def _no_graph(graph: Graph) -> Any:
    raise ValueError(f"subgraph {graph.name!r} outside control flow")


__all__ = ["NEWEST", "SMALL", "TypeInference", "annotate", "complete", "generalise", "infer_outputs"]
