"""A provider for ternary models, built on the CPU provider: its lowerings, its kernels, its memory.

The CPU provider runs ``BitLinear`` too. What this one adds is a policy: in a model that has ternary layers it takes all
that the CPU provider can do, so that nothing is cut between the two, and lets BitLinear stand for other layers where
its options say so. In a model without ternary layers it takes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ranvier.errors import InvalidConfig
from ranvier.graph.extract import extract
from ranvier.graph.ir import Graph, Value
from ranvier.graph.types import Type
from ranvier.ops import TypeInference
from ranvier.ops.own.bitlinear import DOMAIN
from ranvier.passes.ternary import convert_to_bitnet, two_bit_layer
from ranvier.providers.base import Claim, CompileContext, Decline, GraphView, ProviderCapability, Subgraph
from ranvier.providers.bitnet.cache import TernaryCache
from ranvier.providers.cpu.kernel import Bound, BoundSpan, CpuKernel
from ranvier.providers.cpu.provider import CpuOptions, CpuProvider, reason_against
from ranvier.records import dataclass
from ranvier.varying import Span

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class BitNetOptions(CpuOptions):
    """``matmul_nbits``: BitLinear stands for MatMulNBits of 2 bits whose codes are ternary. That rounds tokens to 8
    bits, as ternary models are trained with, and so changes results."""

    matmul_nbits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.matmul_nbits, bool):
            raise InvalidConfig(f"BitNetOptions: matmul_nbits must be True or False, got {self.matmul_nbits!r}")


class BitNetProvider(CpuProvider):
    name: ClassVar[str] = "bitnet"
    aliases: ClassVar[tuple[str, ...]] = ("BitNetExecutionProvider",)
    Options: ClassVar[type] = BitNetOptions

    def __init__(self) -> None:
        super().__init__()
        self.cache = TernaryCache()

    def capability(self) -> ProviderCapability:
        found = super().capability()
        return replace(found, notes=f"ternary weights in 2 bits, {found.notes}")

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        ternary = self._has_ternary_layers(view.graph.root())
        for node in view:
            reason = reason_against(node) if ternary else "the model has no ternary layers"
            yield Claim((node,)) if reason is None else Decline(node, reason)

    def compile(self, part: Subgraph, ctx: CompileContext) -> CpuKernel:
        options: BitNetOptions = ctx.options
        if not options.matmul_nbits:
            return super().compile(part, ctx)
        copy = extract(part.nodes, part.inputs, part.outputs, name=part.label, opsets=part.graph.opsets)
        copy.metadata.update(part.graph.metadata)
        inputs = _in_order(part, copy)

        for each in list(copy.all_graphs()):  # branches that the part decides about by itself are inside of it
            convert_to_bitnet(each, wanted=lambda layer: layer.coded, quantize=self.cache.weights)
        given = set(inputs)
        constants = [v for v in copy.constants.values() if v not in given]
        standing = Subgraph(tuple(copy), (*inputs, *constants), tuple(copy.outputs), copy)
        return StandIn(self, ctx, super().compile(standing, ctx), part)

    def _has_ternary_layers(self, graph: Graph) -> bool:
        """Is there a BitLinear, or a layer that is one in another form, also in a body of control flow?"""
        nodes = [node for each in graph.all_graphs() for node in each]
        if any((node.domain, node.op) == (DOMAIN, "BitLinear") for node in nodes):
            return True
        layers = map(two_bit_layer, nodes)
        return any(layer is not None and self.cache.weights(layer) is not None for layer in layers)

    def close(self) -> None:
        self.cache.clear()
        super().close()


class StandIn(CpuKernel):
    """A part in whose place another stands, with operands, nodes and results in the same order: what is known of values
    of the one is known of those of the other."""

    def __init__(self, provider: BitNetProvider, ctx: CompileContext, plain: CpuKernel, part: Subgraph) -> None:
        super().__init__(plain.part, ctx, plain.target, ctx.allocator or provider.allocator())
        self._provider = provider
        self._own: dict[Value, Value] = dict(zip(part.inputs, self.part.inputs))
        for node, own in zip(part.nodes, self.part.nodes, strict=True):
            self._own.update(zip(node.outputs, own.outputs))

    def narrowed(self, part: Subgraph) -> CpuKernel:
        return self._provider.compile(part, self._ctx)

    def bind(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array]) -> Bound | None:
        found = self._found(types, known)
        return super().bind(found.types, found.values)

    def grow(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array], span: Span) -> BoundSpan:
        found = self._found(types, known)
        return super().grow(found.types, found.values, span)

    def _found(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array]) -> TypeInference:
        """What is known of the part, about the values of the one that stands there."""
        found = TypeInference()
        found.types.update((own, types[value]) for value, own in self._own.items() if value in types)
        found.values.update((own, known[value]) for value, own in self._own.items() if value in known)
        for value in self.part.inputs:
            if value.const is not None:
                found.know(value)
        for node in self.part.nodes:
            if node.has_subgraphs:  # of what is in there nothing is known yet
                found.visit(node)
        return found


def _in_order(part: Subgraph, copy: Graph) -> list[Value]:
    """The copy's values for the part's inputs."""
    constants, others = iter(list(copy.constants.values())), iter(copy.inputs)
    return [next(constants if v.const is not None and v.producer is None else others) for v in part.inputs]
