"""Codes of the weights of experts, by the schemes for weights alone that make integers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.graph.ir import Graph
from ranvier.quantize import Quantized
from ranvier.quantize.schemes import added_names
from ranvier.runtime.quantizing.dynamic import DYNAMIC
from ranvier.runtime.quantizing.expert_nodes import Shared, put_codes
from ranvier.runtime.quantizing.expert_rows import ExpertRows
from ranvier.runtime.quantizing.expert_stacks import Stack, Unfit, stacked
from ranvier.runtime.quantizing.experts import Experts, Linear, find_experts
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, at_most
from ranvier.runtime.quantizing.sites import named_in_errors
from ranvier.runtime.quantizing.weight_only import codes_of

Array = np.ndarray[Any, Any]
_BY_SAMPLES = "gptq"
_FACTORS = "awq"  # divides what a layer reads
_NO_INTEGERS = ("nf4", "fp8", "fp8_e5m2")


class ExpertCoder:
    """Codes the layers of experts of one model by a scheme. Weights are coded once, however many models are made, and
    layers that share them share their codes. ``unfit``: why layers stay as they are, by name, once they are checked."""

    def __init__(self, graph: Graph, scheme: str, group: int, bits: int = 4) -> None:
        self._scheme, self._group, self._bits = scheme, group, bits
        self._nearest = f"uint{bits}"  # what schemes that look at samples are without them
        self._by_others = scheme in added_names()
        self._rows: ExpertRows | None = None
        self._known: dict[tuple[str, int], Stack] = {}
        self.layers = find_experts(graph)
        self.unfit: dict[str, str] = {}

    def check(self, kept: Collection[str]) -> None:
        """Find out which layers are unfit, but for those that are kept anyway."""
        asked = [layer for layer in self.layers if layer.name not in kept]
        self.unfit = {layer.name: why for layer in asked if (why := self._why_not(layer))}

    def rows(self, left: Collection[str]) -> ExpertRows:
        """What is to be looked at on samples before any layer but those left is coded."""
        sampled = self._scheme == _BY_SAMPLES and not self._by_others
        self._rows = ExpertRows(self._codable(self.layers, left) if sampled else [])
        return self._rows

    def write(self, graph: Graph, left: Collection[str]) -> None:
        """Put codes into a copy of the graph, in all layers but those left."""
        shared: Shared = {}
        for layer in self._codable(find_experts(graph), left):
            put_codes(layer, self._stacks(layer), shared)

    def told(self, layer: Experts) -> tuple[str, str]:
        """The scheme by which a layer is coded, and what is to be said of that."""
        if self._scheme == _FACTORS and not self._by_others:
            return self._nearest, f"rounded to the nearest: {_FACTORS} scales what all experts read"
        unseen = max(stack.unseen for stack in self._stacks(layer).values())
        said = f"no sample visits {unseen} of {layer.count} experts: these are rounded to the nearest"
        return self._scheme, said if unseen else ""

    def _codable(self, layers: Iterable[Experts], left: Collection[str]) -> list[Experts]:
        return [layer for layer in layers if layer.name not in left and layer.name not in self.unfit]

    def _why_not(self, layer: Experts) -> str:
        if self._scheme in ("int8", DYNAMIC):
            return "only schemes for weights alone code experts"
        if self._scheme in _NO_INTEGERS and not self._by_others:
            return f"experts have codes of integers, not of {self._scheme}"
        if why := _undivided(layer, self._group_of(layer)):
            return why
        if not self._by_others:
            return ""
        try:  # what it makes is not known before
            stacks = self._stacks(layer).values()
        except Unfit as error:
            return f"what {self._scheme} makes has no form for experts: {error}"
        if len({(stack.bits, stack.group) for stack in stacks}) > 1:
            return f"what {self._scheme} makes has no form for experts: groups or bits differ between layers"
        return _undivided(layer, next(iter(stacks)).group)

    def _group_of(self, layer: Experts) -> int:
        return at_most(self._group, min(layer.inputs))

    def _stacks(self, layer: Experts) -> dict[str, Stack]:
        """Codes by the names of linear layers."""
        group, found = self._group_of(layer), {}
        for name, linear in layer.linear.items():
            key = linear.weight.name, group
            if key not in self._known:
                with named_in_errors(layer.name):
                    self._known[key] = self._stack(linear, group)
            found[name] = self._known[key]
        return found

    def _stack(self, linear: Linear, group: int) -> Stack:
        unseen = 0

        def coded() -> Iterator[Quantized]:
            nonlocal unseen
            for expert, matrix in enumerate(linear.numbers):
                found, sampled = self._coded(matrix, linear.weight.name, expert, group)
                unseen += not sampled
                if found.table is not None or found.codes.dtype.kind != "u" or found.zeros is None:
                    raise Unfit("its codes are no integers with a scale and a zero each")
                if found.zeros.dtype.kind != "u":
                    raise Unfit("its zeros lie between codes")
                yield found

        made = stacked(coded(), len(linear.numbers))
        return replace(made, unseen=unseen)

    def _coded(self, matrix: Array, weight: str, expert: int, group: int) -> tuple[Quantized, bool]:
        """The weights [out, in] of an expert, and whether all that a scheme looks at was there."""
        name = self._scheme
        if self._by_others or name not in (_BY_SAMPLES, _FACTORS):
            return codes_of(matrix, name, group).codes, True
        moments = self._rows.moments(weight, expert) if self._rows is not None else []
        if name == _BY_SAMPLES and moments:
            return codes_of(matrix, name, group, moments, self._bits).codes, True
        return codes_of(matrix, self._nearest, group).codes, name == _FACTORS


def _undivided(layer: Experts, group: int) -> str:
    """What is to be said where groups end inside of rows: QMoE has no groups that are filled up."""
    odd = next((inputs for inputs in layer.inputs if inputs % group), None)
    if odd is None:
        return ""
    fitting = min(inputs & -inputs for inputs in layer.inputs)
    others = f", groups of {fitting} would" if fitting >= LEAST_GROUP else ""
    return f"groups of {group} do not divide its {odd} features{others}"
