"""Inputs and outputs in the memory of a device: who may take them as they are, and who needs a copy on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.providers.base import ExecutionProvider
from ranvier.providers.own_memory import DeviceArray, SharesTensors
from ranvier.runtime.program import Program
from ranvier.runtime.transfer import TransferKernel


def adopted(inputs: Mapping[str, Any], providers: Sequence[ExecutionProvider]) -> dict[str, Any]:
    """Inputs with stand-ins for the tensors that lie in the memory of one of the providers."""
    sharing = [p for p in providers if isinstance(p, SharesTensors)]
    return {name: _adopted(x, sharing) for name, x in inputs.items()}


def _adopted(x: Any, sharing: Sequence[SharesTensors]) -> Any:
    if sharing and hasattr(x, "__dlpack_device__"):
        for provider in sharing:
            found = provider.adopt(x)
            if found is not None:
                return found
    return x


def on_host_where_needed(values: Sequence[Any], program: Program) -> list[Any]:
    """The values of a run's inputs: what stands for a tensor stays where only its own provider reads it."""
    if not any(isinstance(x, DeviceArray) for x in values):
        return list(values)
    return [
        x.fetched() if isinstance(x, DeviceArray) and not _only_there(slot, x.space, program) else x
        for slot, x in zip(program.input_slots, values)
    ]


def _only_there(slot: int, space: str, program: Program) -> bool:
    readers = [step.kernel for step in program.steps if slot in step.inputs]
    moves = all(isinstance(kernel, TransferKernel) and kernel.way[1] == space for kernel in readers)
    return moves and slot not in program.output_slots


def handed_out(results: Sequence[Any], program: Program) -> list[Any]:
    """Results that stayed in a memory, as their provider gives them to others."""
    found = list(results)
    for provider in dict.fromkeys(program.staying):
        if not isinstance(provider, SharesTensors):
            continue
        at = [k for k, p in enumerate(program.staying) if p is provider]
        for k, tensor in zip(at, provider.hand_out([results[k] for k in at])):
            found[k] = tensor
    return found


__all__ = ["adopted", "handed_out", "on_host_where_needed"]
