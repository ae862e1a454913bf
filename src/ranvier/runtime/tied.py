"""A run tied to tensors on a device: the same memory every time, so a call is nothing but the launch of what is to do.

Whoever feeds a model from the device again and again (a decoder with its cache, a server with its buffers) writes into
the tensors and calls; results lie where they lay before. A result that takes the place of an input, as a cache does
that grows by a row, is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranvier.errors import InvalidConfig, InvalidInput, nearest
from ranvier.providers.own_memory import DeviceArray, Ties
from ranvier.runtime.program import Program, Step
from ranvier.runtime.residence import adopted
from ranvier.runtime.transfer import TransferKernel

if TYPE_CHECKING:
    from ranvier.runtime.session import Session


class TiedRun:
    """Call it for the outputs by name: tensors of the device, which the next call overwrites.

    ``shaped_by``: inputs whose content was looked at, because sizes follow from it; what is written to them later has
    no effect.
    """

    def __init__(
        self,
        call: Callable[[], Sequence[Any]],
        names: Sequence[str],
        positions: Sequence[int],
        shaped_by: Sequence[str] = (),
    ) -> None:
        self._call = call
        self._places = list(zip(names, positions))
        self.shaped_by = tuple(shaped_by)

    def __call__(self) -> dict[str, Any]:
        results = self._call()
        return {name: results[k] for name, k in self._places}

    def in_order(self) -> list[Any]:
        """As a call, with the outputs in the order of the model's."""
        results = self._call()
        return [results[k] for _, k in self._places]


def tie(session: Session, inputs: Mapping[str, Any], in_place: Mapping[str, str]) -> TiedRun:
    """``in_place``: outputs by name that take the place of these inputs. The whole model must be one part of a provider
    that can do this; InvalidConfig says what stands in the way."""
    names = session.output_names
    for output, source in in_place.items():
        if output not in names:
            raise InvalidInput(f"the model has no output {output!r}{nearest(output, names)}")
        if source not in session.inputs:
            raise InvalidInput(f"the model has no input {source!r}{nearest(source, list(session.inputs))}")
    values, dims = session.signature.bind(adopted(inputs, session.providers))
    program = session._plan(session._compiled, values, dims, names, stay=True).program
    step, brought = _only_step(program)
    kernel, provider = step.kernel, _provider(program)
    assert isinstance(kernel, Ties)
    given = dict(zip(program.input_slots, values))
    tensors: list[Any] = []
    for slot in step.inputs:
        found = given.get(brought.get(slot, slot))
        if found is None:
            tensors.append(program.template[slot])
        else:
            tensors.append(found.tensor if isinstance(found, DeviceArray) else provider.upload([found])[0])
    slots = dict(zip(session.signature.by_name, program.input_slots))
    back = {host: slot for slot, host in brought.items()}
    for name, slot in zip(names, program.output_slots):
        if slot not in step.outputs:
            raise InvalidConfig(f"the output {name!r} is an input or a constant")
    positions = [step.outputs.index(slot) for slot in program.output_slots]
    replaced = {
        positions[names.index(output)]: step.inputs.index(back.get(slots[source], slots[source]))
        for output, source in in_place.items()
    }
    named = {back.get(slot, slot): name for name, slot in slots.items()}
    shaping = [named[step.inputs[k]] for k in kernel.shaped_by() if step.inputs[k] in named]
    return TiedRun(kernel.tied(tensors, replaced), names, positions, shaping)


def _only_step(program: Program) -> tuple[Step, dict[int, int]]:
    """The step that does everything, and for slots that transfers fill those that they are filled from."""
    work = [step for step in program.steps if not isinstance(step.kernel, TransferKernel)]
    if len(work) != 1 or not isinstance(work[0].kernel, Ties):
        others = [f"{step.label} on {step.provider}" for step in work if not isinstance(step.kernel, Ties)]
        why = ", ".join(others[:5]) if others else f"there are {len(work)} parts"
        raise InvalidConfig(f"only a model that is one part of a device can be tied to its tensors: {why}")
    step = work[0]
    brought: dict[int, int] = {}
    for each in program.steps:
        if isinstance(each.kernel, TransferKernel):
            if any(slot in step.outputs for slot in each.inputs):
                raise InvalidConfig("an output is wanted on the host")
            brought.update(zip(each.outputs, each.inputs))
    return step, brought


def _provider(program: Program) -> Any:
    return program.parts[0].part.provider


__all__ = ["TiedRun", "tie"]
