"""Tensors given by codes are moved as codes.

Exporters put DequantizeLinear before every operator and QuantizeLinear after it, also where the operator only moves
elements, or picks the largest: those do the same to codes. So dequantizing goes below them; where it meets a
QuantizeLinear with the same scale and zero point, both go. All of this is exact: dequantizing does not change the order
of numbers, and a code that was dequantized is quantized to itself.

Quantizing does not change their order either. So where the largest of numbers become codes, the codes of all of them
are made first, by the layer that the numbers come from, and the largest of those found: a quarter of the bytes, and
what is outside the image is the least code, as minus infinity would be. Only a NaN, for which there is no code, is lost
among other numbers.
"""

from __future__ import annotations

import contextlib
import math
from typing import ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.graph.attributes import text_of
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps, remove_dead, substitute
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, bypass, prune, sharpen
from ranvier.passes.facts import array_of, dtype_of, only_use, scalar_of
from ranvier.passes.fuse.codes import Left, Quantized, code_type, dequantized, parameters, result_of
from ranvier.passes.transposes import perm_of

_MOVING = frozenset(
    {
        *("DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "MaxPool", "Pad"),
        *("Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    }
)


class CodeMoves:
    name: ClassVar[str] = "move_codes"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            for node in list(each):
                if node.graph is None or node.domain:
                    continue
                try:
                    done = self._step(node)
                except Left as reason:
                    ctx.left(node.op, str(reason))
                    continue
                if done:
                    ctx.changed(node.op)
        return ctx.changes > 0

    def _step(self, node: Node) -> bool:
        if node.op in _MOVING:
            return self._below(node)
        if node.op == "Concat":
            return self._joined(node)
        if node.op != "QuantizeLinear":
            return False
        return self._again(node) or self._bounded(node) or self._parts(node) or self._largest(node)

    def _below(self, node: Node) -> bool:
        """Dequantize after the node."""
        given = dequantized(node.input(0))
        if given is None or not _ordinary(given):
            return False
        axis = given.axis
        if axis is not None:
            perm = perm_of(node) if node.op == "Transpose" else None
            if perm is None:
                return False
            axis = perm.index(axis)
        op = builder(node, self.name)
        operands = _operands(node, given, op)
        if operands is None:
            return False
        moved = op.node(node.op, operands, dict(node.attrs), outputs=len(node.outputs), version=_version(node))
        before = list(node.inputs)
        attrs = {} if axis is None else {"axis": axis}
        for old, codes in zip(node.outputs, moved.outputs):
            if old.uses or old.is_graph_output:
                number = op.node("DequantizeLinear", [codes, *_two(given, op)], attrs).output
                sharpen(number, old)
                substitute(old, number, op)
        assert node.graph is not None
        remove_dead(node.graph, [node])
        prune(before)
        return True

    def _joined(self, node: Node) -> bool:
        """Tensors with the same scale and zero point are joined as codes."""
        given = [dequantized(v) for v in node.inputs]
        first = given[0] if given else None
        if first is None or not first.is_single or not _ordinary(first):
            return False
        codes = []
        for each in given:
            if each is None or not each.same_codes(first) or dtype_of(each.codes) is not dtype_of(first.codes):
                return False
            codes.append(each.codes)
        op = builder(node, self.name)
        joined = op.node("Concat", codes, dict(node.attrs), version=node.version).output
        return self._replace(node, op.DequantizeLinear(joined, *_two(first, op)))

    def _parts(self, last: Node) -> bool:
        """What is joined and then quantized is quantized and then joined, where the parts were codes before."""
        node = _only(last, "Concat")
        if node is None or not all(_is_dequantized(v) for v in node.inputs):
            return False
        target, result = code_type(last), parameters(last)
        if not result.is_single:
            return False
        op = builder(last, self.name)
        parts = []
        for value in node.inputs:
            given = dequantized(value)
            assert given is not None and value is not None
            if _cancels(given, result) and dtype_of(given.codes) is target:
                parts.append(given.codes)
            else:
                parts.append(op.QuantizeLinear(value, *result_of(result, target, op)))
        return self._replace(last, op.node("Concat", parts, dict(node.attrs), version=node.version).output)

    def _largest(self, last: Node) -> bool:
        """What is pooled and then quantized is quantized and then pooled, where nobody needs the numbers."""
        node = _only(last, "MaxPool")
        if node is None or _wants_places(node):
            return False
        numbers = node.inputs[0]
        assert numbers is not None
        if only_use(numbers) is not node:
            raise Left("what is pooled is read elsewhere too")
        target, result = code_type(last), parameters(last)
        if not result.is_single:
            return False
        op = builder(last, self.name)
        codes = op.QuantizeLinear(numbers, *result_of(result, target, op))
        found = op.node("MaxPool", [codes], dict(node.attrs), version=_version(node)).output
        if not self._replace(last, found):
            return False
        assert codes.producer is not None
        with contextlib.suppress(Left):
            self._step(codes.producer)  # it may go further
        return True

    def _again(self, node: Node) -> bool:
        """Codes that were dequantized are quantized to themselves."""
        given = dequantized(node.input(0))
        if given is None:
            return False
        target, result = code_type(node), parameters(node)
        if target is not dtype_of(given.codes) or not _cancels(given, result):
            return False
        return self._replace(node, given.codes)

    def _bounded(self, last: Node) -> bool:
        """Relu and Clip between the same scales bound the codes."""
        node = _only(last, "Relu", "Clip")
        given = dequantized(node.input(0)) if node is not None else None
        if node is None or given is None:
            return False
        target, result = code_type(last), parameters(last)
        if not result.is_single or target is not dtype_of(given.codes) or not _cancels(given, result):
            return False
        bounds = bounds_of(node)
        if bounds is None:
            return False
        op = builder(last, self.name)
        return self._replace(last, clipped(given.codes, bounds, result, op))

    def _replace(self, node: Node, value: Value) -> bool:
        before = list(node.inputs)
        done = bypass(node, value, self.name)
        if done:
            prune(before)
        return done


def bounds_of(node: Node) -> tuple[float, float] | None:
    """What a Relu or Clip keeps numbers between; None where that is not constant."""
    if node.op == "Relu":
        return 0.0, math.inf
    ends = [node.input(k) for k in (1, 2)]
    numbers = [None if v is None else scalar_of(v) for v in ends]
    if any(v is not None and not isinstance(x, int | float) for v, x in zip(ends, numbers)):
        return None
    low, high = numbers
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def clipped(codes: Value, bounds: tuple[float, float], result: Quantized, op: GraphOps) -> Value:
    """Codes between those of the bounds; as they are where saturation sees to it."""
    target = dtype_of(codes)
    assert target is not None
    limits = np.iinfo(target.numpy)
    zero = 0 if result.zero is None else int(result.zero)
    ends = [limits.min, limits.max]
    for k, bound in enumerate(bounds):
        if math.isfinite(bound):
            code = float(np.rint(np.float32(bound) / result.scale)) + zero
            ends[k] = int(min(max(code, limits.min), limits.max))
    if ends == [limits.min, limits.max]:
        return codes
    return op.Clip(codes, *(op.constant(np.array(end, target.numpy)) for end in ends))


# -- what operands look like ------------------------------------------------------------------------------------------


def _operands(node: Node, given: Quantized, op: GraphOps) -> list[Value | None] | None:
    """The operands of the node on codes; None where it does more than move or compare elements."""
    operands: list[Value | None] = [given.codes, *node.inputs[1:]]
    if node.op == "MaxPool" and _wants_places(node):
        return None
    if node.op == "Resize" and text_of(node.attrs.get("mode", "nearest")) != "nearest":
        return None
    if node.op == "Resize" and text_of(node.attrs.get("coordinate_transformation_mode", "")) == "tf_crop_and_resize":
        return None
    if node.op == "Pad" and text_of(node.attrs.get("mode", "constant")) == "constant":
        filled = node.input(2)
        if (filled is not None and scalar_of(filled) != 0) or len(node.inputs) < 2:
            return None
        kind = dtype_of(given.codes)
        assert kind is not None
        zero = np.zeros((), kind.numpy) if given.zero is None else given.zero
        operands[2:3] = [op.constant(zero)]
    return operands


def _wants_places(node: Node) -> bool:
    """Whether somebody asks a MaxPool where it found the largest."""
    return any(v.uses or v.is_graph_output for v in node.outputs[1:])


def _version(node: Node) -> int:
    """Windows over integers came with a version of their own, which changed nothing else."""
    return 0 if node.op == "MaxPool" else node.version


def _two(given: Quantized, op: GraphOps) -> list[Value]:
    kind = dtype_of(given.codes)
    assert kind is not None
    return result_of(given, kind, op)


def _ordinary(given: Quantized) -> bool:
    """Scales that neither turn the order of codes round nor lose any of them."""
    return bool(np.all((given.scale > 2.0**-60) & (given.scale < 2.0**60)))


def _cancels(given: Quantized, result: Quantized) -> bool:
    return _ordinary(given) and given.same_codes(result)


def _is_dequantized(value: Value | None) -> bool:
    try:
        found = dequantized(value)
    except Left:
        return False
    return found is not None and found.is_single and array_of(found.codes) is None


def _only(last: Node, *ops: str) -> Node | None:
    """The node before ``last``, if it is one of these and nobody else reads its result."""
    value = last.input(0)
    node = value.producer if value is not None else None
    if value is None or node is None or node.domain or node.op not in ops or only_use(value) is not last:
        return None
    return node
