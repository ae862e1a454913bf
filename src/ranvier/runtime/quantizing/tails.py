"""What follows a layer entry by entry: its activation, however many nodes spell it.

Exporters write a hard swish as five nodes and a Gelu as up to eight. Codes belong behind the last of them: between
them they would lose bits, and a kernel that has the sums in registers does all of it before it rounds once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.passes.edit import builder, bypass
from ranvier.records import dataclass

_POINTWISE = frozenset(
    {
        *("Relu", "LeakyRelu", "PRelu", "ThresholdedRelu", "Elu", "Selu", "Celu", "Clip", "Sigmoid"),
        *("HardSigmoid", "HardSwish", "Swish", "Tanh", "Softplus", "Softsign", "Mish", "Gelu"),
        *("Erf", "Exp", "Sqrt", "Pow", "Neg", "Abs", "Add", "Sub", "Mul", "Div", "Min", "Max", "Identity"),
    }
)
_MOST = 12  # nodes of an activation


@dataclass(frozen=True)
class Tail:
    """The nodes behind a layer, and the value they end with: all that others read of it."""

    nodes: tuple[Node, ...]
    value: Value


def tail(node: Node) -> Tail:
    """What depends on a node's result alone, entry by entry, as far as one value stands for all of it."""
    found = Tail((), node.output)
    inside: dict[int, Value] = {id(node.output): node.output}
    nodes: list[Node] = []
    while len(nodes) < _MOST:
        reader = _next_reader(inside, nodes)
        if reader is None:
            break
        nodes.append(reader)
        inside[id(reader.output)] = reader.output
        leaving = [value for value in inside.values() if _leaves(value, nodes)]
        if len(leaving) == 1:
            found = Tail(tuple(nodes), leaving[0])
    return found


def multiply_instead(node: Node, origin: str) -> None:
    """A division by a constant as a product, which takes a tenth of the time; the last bit may differ.

    That bit is lost anyway where the result is rounded to 8 bits next.
    """
    divisor = node.inputs[1] if node.op == "Div" else None
    if divisor is None or divisor.const is None or divisor.const.dtype is not DType.float32:
        return
    numbers = divisor.const.numpy()
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / numbers
    if np.isfinite(inverse).all() and (inverse != 0).all():
        ops = builder(node, origin)
        name = node.output.name
        made = ops.Mul(node.inputs[0], ops.constant(inverse, f"{divisor.name}.inverse"))
        if bypass(node, made, origin):
            made.name = name


def _next_reader(inside: Mapping[int, Value], region: Sequence[Node]) -> Node | None:
    for value in inside.values():
        for node, _ in value.uses:
            if any(node is each for each in region) or node.domain or node.op not in _POINTWISE:
                continue
            if node.graph is not value.owner:  # a body may be computed never, or often
                continue
            if all(v is None or v.const is not None or id(v) in inside for v in node.inputs):
                return node
    return None


def _leaves(value: Value, region: Sequence[Node]) -> bool:
    return value.is_graph_output or any(all(node is not each for each in region) for node, _ in value.uses)
