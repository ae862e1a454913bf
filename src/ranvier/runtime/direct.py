"""A program that is one bound kernel: how to call it without looking after anything between the call and the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.signature import Constant, Tensor
from ranvier.errors import OutOfMemory
from ranvier.providers.base import BoundKernel, Overwrites
from ranvier.records import dataclass
from ranvier.runtime.outputs import FROM_BYTES, blocks
from ranvier.runtime.program import Program

Array = np.ndarray[Any, Any]
Fresh = tuple[int, np.dtype[Any], Any]  # an output of known size: slot, type and shape
Making = tuple[Callable[..., Array], Any, np.dtype[Any]]  # how an output is made, its shape and type


@dataclass(frozen=True, slots=True)
class Direct:
    """``made`` are the outputs that are no constants of the model."""

    kernel: BoundKernel
    given: list[int]  # where the kernel's inputs stand among the values of a call
    made: list[Making]
    theirs: list[int]  # which of ``made`` each of the kernel's outputs is; empty where they are the same
    offset: int  # of its workspace in the arena

    def outputs(self, into: Sequence[Array | None] | None) -> list[Any]:
        """New arrays, or what is offered instead."""
        try:
            if into is None:
                return [make(shape, dtype) for make, shape, dtype in self.made]
            return [make(*how) if own is None else own for own, (make, *how) in zip(into, self.made)]
        except OutOfMemory:
            raise
        except MemoryError as error:
            raise OutOfMemory("cannot allocate the outputs", part="outputs") from error

    def with_shapes(self, kernel: BoundKernel, shapes: Sequence[Any]) -> Direct:
        """The same for another kernel, whose outputs have these shapes."""
        made = [(make, shape, dtype) for (make, _, dtype), shape in zip(self.made, shapes)]
        return Direct(kernel, self.given, made, self.theirs, self.offset)

    def signature(
        self, inputs: Sequence[Tensor], names: Sequence[str], constants: dict[int, Array]
    ) -> tuple[list[Tensor], list[Tensor | Constant]]:
        """Of a call with these inputs and names of outputs: each with its place among the kernel's own."""
        places = {given: k for k, given in enumerate(self.given)}
        taken = [replace(x, place=places.get(k)) for k, x in enumerate(inputs)]
        made = iter(enumerate(self.made))
        handed_out: list[Tensor | Constant] = []
        for k, name in enumerate(names):
            if k in constants:
                handed_out.append(Constant(name, np.asarray(constants[k], order="C")))
            else:
                own, (_, shape, dtype) = next(made)
                handed_out.append(Tensor(name, dtype, tuple(shape), self._place(own)))
        return taken, handed_out

    def may_overwrite(self, output: int, given: int) -> bool:
        """Whether the kernel may write an output over an input, by their places among the program's."""
        if given not in self.given or not isinstance(self.kernel, Overwrites):
            return False
        return self.kernel.may_overwrite(self._place(output), self.given.index(given))

    def _place(self, made: int) -> int:
        return self.theirs.index(made) if self.theirs else made


def direct_call(
    program: Program,
    kernel: BoundKernel,
    fresh: Sequence[Fresh],
    sizes: Sequence[int],
    offset: int,
    operands: Sequence[int] | None = None,
) -> Direct | None:
    """Where ``fresh``, with their ``sizes`` in bytes, are all that the only step makes and it needs nothing but inputs
    and constants; None elsewhere. ``operands``: slots of the values that a call gives, where those are not the inputs
    alone."""
    (step,) = program.steps
    outputs = [slot for slot, _, _ in fresh]
    where = {slot: k for k, slot in enumerate(program.input_slots if operands is None else operands)}
    needed = [slot for slot in step.inputs if program.template[slot] is None]
    if sorted(step.outputs) != sorted(outputs) or any(slot not in where for slot in needed):
        return None
    theirs = [outputs.index(slot) for slot in step.outputs]
    # what is small is made without a look for memory to use again, which would take as long as all the rest
    makers: list[Callable[..., Array]] = [np.empty if n < FROM_BYTES else new_output for n in sizes]
    made = [(make, shape, dtype) for make, (_, dtype, shape) in zip(makers, fresh)]
    return Direct(kernel, [where[slot] for slot in needed], made, [] if theirs == sorted(theirs) else theirs, offset)


def new_output(shape: Any, dtype: np.dtype[Any]) -> Array:
    """In memory that was used before, where there is some."""
    try:
        return blocks.empty(tuple(shape), dtype)
    except OutOfMemory:
        raise
    except (MemoryError, ValueError) as error:
        raise OutOfMemory(f"cannot allocate an output of shape {list(shape)} of {dtype}") from error


__all__ = ["Direct", "Fresh", "direct_call", "new_output"]
