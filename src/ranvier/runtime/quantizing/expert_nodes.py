"""Layers of experts with codes: com.microsoft QMoE, in the form that ONNX Runtime's CPU provider reads.

That reads the two parts of swiglu only as rows of one layer that take turns. Weights are constants, so parts that come
as halves or as two layers are brought into that order, and silu times a third layer is swiglu. Other activations times
a third layer it does not read, with or without codes.

QMoE adds experts up by the softmax of the chosen ones, unless it is given shares. Where those of MoE are of all
experts, a Softmax before it gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.graph.ir import Value
from ranvier.graph.rewrite import GraphOps
from ranvier.ops.contrib.quantized_moe import NAME, PLACES, ROUTER_WEIGHTS
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.contrib.weight_only import packed
from ranvier.passes.edit import builder
from ranvier.records import dataclass
from ranvier.runtime.quantizing.expert_stacks import Stack, in_turns
from ranvier.runtime.quantizing.experts import Experts
from ranvier.runtime.quantizing.weight_only import ORIGIN, put_instead

Array = np.ndarray[Any, Any]
Shared = dict[tuple[object, ...], tuple[Value, Value, Value | None]]  # constants, by the weights they are made of
_IN_TURNS = 1  # swiglu_fusion of rows that do


def put_codes(layer: Experts, stacks: Mapping[str, Stack], shared: Shared) -> None:
    """QMoE in place of a layer; ``stacks`` by the names of its linear layers, all of the same bits and groups."""
    node, (bits, group) = layer.node, (stacks["fc1"].bits, stacks["fc1"].group)
    ops = builder(node, ORIGIN)
    moved = any((stack.zeros != 1 << (bits - 1)).any() for stack in stacks.values())  # not the operator's own
    form = _Form.of(layer)
    operands: list[Value | None] = [layer.data, layer.router, *[None] * (ROUTER_WEIGHTS - 1)]
    for name, sources in form.sources.items():
        weights, scales, bias, zeros, _ = PLACES[name]
        key = (*(layer.linear[each].weight.name for each in sources), form.halves and name == "fc1", moved)
        if key not in shared:
            stem, parts = layer.linear[name].weight.name, [stacks[each] for each in sources]
            zero = form.arranged(name, [part.zeros for part in parts])
            shared[key] = (
                ops.constant(form.arranged(name, [part.codes for part in parts]), f"{stem}.codes"),
                ops.constant(form.arranged(name, [part.scales for part in parts]), f"{stem}.scale"),
                ops.constant(packed(zero, bits), f"{stem}.zero") if moved else None,
            )
        operands[weights], operands[scales], operands[zeros] = shared[key]
        operands[bias] = _bias(layer, name, form, ops)
    if not layer.normalizes and layer.chosen < layer.count:
        operands[ROUTER_WEIGHTS] = ops.Softmax(layer.router, axis=-1, _name=f"{layer.name}.shares")
    while operands[-1] is None:
        operands.pop()
    attrs = {**form.attrs, "expert_weight_bits": bits, "block_size": group}
    put_instead(node, ops.node(NAME, operands, attrs, domain=MICROSOFT, version=1))


@dataclass(frozen=True)
class _Form:
    """How a layer is written: ``sources`` of each linear layer, two where their rows take turns; ``halves``: those of
    fc1 do."""

    attrs: dict[str, Any]
    sources: dict[str, tuple[str, ...]]
    halves: bool = False

    @classmethod
    def of(cls, layer: Experts) -> _Form:
        attrs, hidden = dict(layer.node.attrs), layer.hidden
        plain: dict[str, tuple[str, ...]] = {name: (name,) for name in layer.linear}
        if hidden.activation == "swiglu" and hidden.fusion == 2:
            return cls({**attrs, "swiglu_fusion": _IN_TURNS}, plain, halves=True)
        if hidden.activation not in ("swiglu", "silu") or "fc3" not in layer.linear:
            return cls(attrs, plain)
        if hidden.activation == "silu":  # whatever parameters it has are not read
            attrs |= {"activation_type": "swiglu", "activation_alpha": 1.0, "activation_beta": 0.0}
            attrs.pop("swiglu_limit", None)
        return cls({**attrs, "swiglu_fusion": _IN_TURNS}, {"fc1": ("fc1", "fc3"), "fc2": ("fc2",)})

    def arranged(self, name: str, arrays: Sequence[Array]) -> Array:
        """Arrays [experts, outputs, ...] of the sources of a layer as its own."""
        if name == "fc1" and self.halves:
            arrays = np.split(arrays[0], 2, axis=1)
        return in_turns(arrays)


def _bias(layer: Experts, name: str, form: _Form, ops: GraphOps) -> Value | None:
    given = [layer.linear[each] for each in form.sources[name]]
    if all(each.bias is None for each in given):
        return None
    if len(given) == 1 and not (name == "fc1" and form.halves):
        return given[0].bias
    rows = [np.zeros(each.shape[:2], np.float32) if each.added is None else each.added for each in given]
    return ops.constant(form.arranged(name, rows), f"{given[0].weight.name}.bias")
