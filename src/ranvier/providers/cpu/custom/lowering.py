"""An operator of the user's own, compiled into the model by the CPU provider.

The function that writes its loops is the same as that of a loop kernel; the operator's NumPy body stays the reference,
and takes over for shapes or types that the function refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL, Lowering
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.storage import View
from ranvier.domains import normal_domain
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Node, Value
from ranvier.ops import registry as operators
from ranvier.providers.cpu.custom.builder import LoopBuilder, TensorTerm, check_nest
from ranvier.providers.cpu.lower.index import LOWERINGS
from ranvier.providers.cpu.realise import Realiser

LoopFunction = Callable[..., Nest]


def lower_op(domain: str, name: str, function: LoopFunction, *, dtypes: Iterable[DType] = ALL) -> None:
    """Let the CPU provider compile ``domain::name``, which ``rv.register_op`` declared with a type rule.

    ``function(loops, *inputs, *outputs, **attributes)`` returns the nest. Inputs are those of the operator's body,
    None for one that is left out; attributes that a node does not give have the function's own defaults. It holds for
    sessions made afterwards.
    """
    domain = normal_domain(domain)
    full = f"{domain}::{name}" if domain else name
    definition = operators.find(domain, name)
    if definition is None:
        raise InvalidConfig(f"operator {full} is not declared: register_op comes first")
    if (domain, name) in LOWERINGS.operators():
        raise InvalidConfig(f"operator {full} is compiled already")
    if definition.infer_rule is None:
        raise InvalidConfig(
            f"operator {full} has no type rule: sizes of results must be known before loops are written"
        )
    if not definition.traits.isdisjoint(("random", "impure")):
        raise InvalidConfig(f"operator {full} depends on more than its operands, loops do not")
    if not callable(function):
        raise InvalidConfig(f"operator {full}: expected a function, got {type(function).__name__}")

    def operands(inputs: Sequence[Value | None]) -> list[Value | None]:
        """All that the body names: nodes leave out optional ones at the end."""
        return [*inputs, *[None] * ((definition.most_inputs or 0) - len(inputs))]

    def check(node: Node) -> str | None:
        if operators.find(node.domain, node.op, node.version) is not definition:
            return "another function stands for this operator than its loops were written for"
        try:
            inspect.signature(function).bind(None, *operands(node.inputs), *node.outputs, **node.attrs)
        except TypeError as error:
            return f"its loops are written for other operands or attributes: {error}"
        return None

    def lower(n: NodeView, definitions: Definitions) -> None:
        if not all(n.wants(k) for k in range(len(n.outputs))):
            raise Declined(f"{full}: results that nobody wants")
        given = [v is not None for v in operands(n.inputs)]

        def realise(realiser: Realiser, views: Sequence[View], outs: Sequence[View]) -> Sequence[Launch]:
            nest = _written(full, function, given, views, outs, n.attrs)
            return nests.launches(nest, realiser.isa)

        outs = [(n.out_dtype(k), n.out_shape(k)) for k in range(len(n.outputs))]
        definitions.opaque([v for v in n.inputs if v is not None], realise, outs, n.outputs)

    LOWERINGS.users[domain, name] = Lowering(lower, dtypes=frozenset(dtypes), check=check, own=True)


def unlower_op(domain: str, name: str) -> None:
    """Leave the operator to its body again, in sessions made afterwards."""
    if LOWERINGS.users.pop((normal_domain(domain), name), None) is None:
        raise InvalidConfig(f"operator {domain}::{name} has no loops")


def _written(
    name: str,
    function: LoopFunction,
    given: Sequence[bool],
    views: Sequence[View],
    outs: Sequence[View],
    attributes: Any,
) -> Nest:
    loops = LoopBuilder(name, outs[0].shape)
    left = iter(views)
    inputs = [TensorTerm(loops, f"input {k}", next(left), "in") if present else None for k, present in enumerate(given)]
    results = [TensorTerm(loops, f"output {k}", view, "out") for k, view in enumerate(outs)]
    nest = function(loops, *inputs, *results, **attributes)
    check_nest(name, nest, [*(t for t in inputs if t is not None), *results], [])
    return nest


__all__ = ["lower_op", "unlower_op"]
