"""Changes to the graph of a loaded model before it is trained: adapters of low rank, and another head.

They are nodes of the graph like those that came with the file, so a model with adapters can be exported as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ranvier.errors import InvalidConfig, NotSupported
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops.proto import schema_of
from ranvier.passes import DeadCode, PassManager
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_ORIGIN = "lora"
_FINAL = ("Softmax", "LogSoftmax", "Sigmoid")
_BEHIND_HEAD = frozenset((*_FINAL, "Identity", "Flatten", "Reshape", "Squeeze", "GlobalAveragePool", "Add"))


@dataclass(frozen=True)
class Adapter:
    """Two thin weights beside one: their product, times ``scale``, is added to it."""

    weight: str
    first: str
    second: str
    scale: float
    op: str
    transposed: bool  # the weight is stored with its outputs first, as Gemm may
    gain: float = 1.0  # what the operator multiplies the weight by

    def delta(self, first: Array, second: Array) -> Array:
        """What the adapter adds to the weight."""
        a, b = first.astype(np.float64), second.astype(np.float64)
        if self.op == "Conv":
            product = np.tensordot(b.reshape(b.shape[:2]), a, 1)
        else:
            product = a @ b
        product = product * (self.scale / self.gain)
        return product.T if self.transposed else product


def places(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[tuple[Node, Value]]:
    """Products with a constant weight that an adapter fits beside, by the name of the weight or of the node."""
    for node in list(graph):
        weight = node.input(1)
        if node.domain or node.origin == _ORIGIN or weight is None or weight.const is None:
            continue
        fits = (
            (node.op == "MatMul" and len(weight.const.shape) == 2)
            or (node.op == "Gemm" and not node.attrs.get("transA", 0))
            or (node.op == "Conv" and int(node.attrs.get("group", 1)) == 1)
        )
        if fits and (wanted(weight.name) or (node.name and wanted(node.name))):
            yield node, weight


def adapt(graph: Graph, node: Node, weight: Value, rank: int, scale: float, draw: Callable[..., Array]) -> Adapter:
    """Put an adapter beside a product. ``draw(shape, bound)`` gives numbers for the first of its weights; the second
    is zero, so nothing changes yet."""
    const = weight.const
    assert const is not None
    kind = const.dtype.numpy
    shape = const.shape
    transposed = node.op == "Gemm" and bool(node.attrs.get("transB", 0))
    outputs, inputs = (shape[1], shape[0]) if node.op != "Conv" and not transposed else (shape[0], shape[1])
    if node.op == "Conv":
        sizes: tuple[tuple[int, ...], tuple[int, ...]] = (rank, *shape[1:]), (outputs, rank, *[1] * (len(shape) - 2))
        fan = int(np.prod(shape[1:]))
    else:
        sizes = (inputs, rank), (rank, outputs)
        fan = inputs
    first = graph.add_constant(ConstTensor.of(draw(sizes[0], 1.0 / np.sqrt(fan)).astype(kind)), f"{weight.name}.lora_A")
    second = graph.add_constant(ConstTensor.of(np.zeros(sizes[1], kind)), f"{weight.name}.lora_B")
    following = node._next
    x = node.input(0)
    assert x is not None
    if node.op == "Conv":
        attrs = {k: v for k, v in node.attrs.items() if k != "kernel_shape"}
        narrow = _add(graph, "Conv", [x, first], following, attrs)
        wide = _add(graph, "Conv", [narrow, second], following)
    else:
        wide = _add(graph, "MatMul", [_add(graph, "MatMul", [x, first], following), second], following)
    if scale != 1.0:
        factor = graph.add_constant(ConstTensor.of(np.array(scale, kind)), f"{weight.name}.lora_scale")
        wide = _add(graph, "Mul", [wide, factor], following)
    _beside(graph, node.output, wide, following)
    gain = float(node.attrs.get("alpha", 1.0)) if node.op == "Gemm" else 1.0
    return Adapter(weight.name, first.name, second.name, scale, node.op, transposed, gain)


def _beside(graph: Graph, plain: Value, wide: Value, following: Node | None) -> None:
    """The sum takes the name, so that an output of the graph keeps its own."""
    total = graph.add("Add", [], outputs=1, version=_version(graph, "Add"), origin=_ORIGIN, before=following)
    plain.replace_by(total.output)
    total.set_inputs([plain, wide])
    total.output.type = plain.type
    total.output.name, plain.name = plain.name, f"{plain.name}.plain"


def without_adapters(graph: Graph) -> None:
    """Take all adapters out; weights that are to keep what was learned have it added before."""
    for node in list(graph):
        if node.origin == _ORIGIN and node.op == "Add":
            plain = node.inputs[0]
            assert plain is not None
            node.output.replace_by(plain)
            plain.name = node.output.name
    PassManager([DeadCode()]).run(graph)


def _add(
    graph: Graph, op: str, inputs: list[Value], before: Node | None, attrs: Mapping[str, Any] | None = None
) -> Value:
    return graph.add(op, inputs, attrs, version=_version(graph, op), origin=_ORIGIN, before=before).output


def _version(graph: Graph, op: str) -> int:
    """The operator as the model's own opset has it."""
    schema = schema_of("", op, graph.opsets.get("", 1))
    if schema is None:
        raise NotSupported(f"opset {graph.opsets.get('', 1)} has no {op}")
    return int(schema.since_version)


@dataclass(frozen=True)
class Head:
    """The last product of a classifier."""

    node: Node
    weight: Value
    bias: Value | None
    axis: int  # of the weight, along which its outputs are
    after: tuple[Node, ...]  # between it and the model's output

    @property
    def classes(self) -> int:
        assert self.weight.const is not None
        return self.weight.const.shape[self.axis]


def head_of(graph: Graph, output: int = 0) -> Head:
    """The product that the scores of an output come from."""
    after: list[Node] = []
    value = graph.outputs[output]
    while (node := value.producer) is not None:
        weight = node.input(1)
        if node.op in ("Gemm", "MatMul", "Conv") and weight is not None and weight.const is not None:
            transposed = node.op == "Gemm" and bool(node.attrs.get("transB", 0))
            axis = 0 if transposed or node.op == "Conv" else len(weight.const.shape) - 1
            bias = node.input(2) if node.op != "MatMul" else _bias_behind(after)
            return Head(node, weight, bias, axis, tuple(after))
        if node.op not in _BEHIND_HEAD:
            raise NotSupported(f"the model ends in {node.op}, behind which no head of a classifier was found")
        after.append(node)
        value = next(v for v in node.inputs if v is not None and v.const is None)
    raise NotSupported("the model has no product with a constant weight that could be its head")


def _bias_behind(after: list[Node]) -> Value | None:
    if after and after[-1].op == "Add":
        return next((v for v in after[-1].inputs if v is not None and v.const is not None), None)
    return None


def before_final(value: Value) -> Value:
    """What goes into the softmax or sigmoid that an output is; the output itself where it is none."""
    node = value.producer
    inner = None if node is None or node.domain or node.op not in _FINAL else node.input(0)
    return value if inner is None else inner


def replace_head(graph: Graph, classes: int, draw: Callable[..., Array], keep_softmax: bool) -> list[str]:
    """Give a classifier another number of classes; the names of the new weights are returned."""
    if classes < 1:
        raise InvalidConfig(f"a head has at least one class, not {classes}")
    head = head_of(graph)
    before = head.classes
    shape = list(head.weight.const.shape)  # type: ignore[union-attr]
    shape[head.axis] = classes
    fan = int(np.prod(shape)) // classes
    fresh = [_put(graph, head.weight, draw(tuple(shape), 1.0 / np.sqrt(fan)))]
    if head.bias is not None:
        assert head.bias.const is not None
        sizes = tuple(classes if d == before else d for d in head.bias.const.shape)
        fresh.append(_put(graph, head.bias, np.zeros(sizes)))
    for node in head.after:
        target = node.input(1)
        if node.op == "Reshape" and target is not None and target.const is not None:
            numbers = target.const.numpy()
            new = graph.add_constant(
                ConstTensor.of(np.where(numbers == before, classes, numbers)), f"{target.name}.head"
            )
            node.set_input(1, new)
    output = graph.outputs[0]
    if not keep_softmax and head.after and head.after[0].op in _FINAL:
        last = head.after[0]
        inner = last.input(0)
        assert inner is not None
        inner.name, kept = output.name, output.type
        output.replace_by(inner)
        inner.type = kept
        graph.remove(last)
    for value in [*(v for n in (head.node, *head.after) for v in n.outputs), graph.outputs[0]]:
        if isinstance(value.type, TensorType) and value.type.shape is not None:
            value.type = TensorType(value.type.dtype, tuple(classes if d == before else d for d in value.type.shape))
    return fresh


def _put(graph: Graph, old: Value, array: Array) -> str:
    """Another constant in the place of one, under its name."""
    assert old.const is not None
    kind = old.const.dtype.numpy
    new = graph.add_constant(ConstTensor.of(np.ascontiguousarray(array, kind)), f"{old.name}.head")
    old.replace_by(new)
    graph.remove_constant(old)
    del graph.constants[new.name]
    new.name = old.name
    graph.constants[new.name] = new
    return new.name
