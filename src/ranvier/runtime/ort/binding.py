"""``IOBinding``: inputs and outputs tied to memory once, for many runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.errors import InvalidInput, nearest
from ranvier.interop import to_array
from ranvier.runtime.ort.errors import raises_ort
from ranvier.runtime.ort.value import OrtValue, array_at, check_cpu, copy_into, unwrap

if TYPE_CHECKING:
    from ranvier.runtime.ort.inference_session import InferenceSession

Array = np.ndarray[Any, Any]


class IOBinding:
    """Made by ``session.io_binding()``, used by ``session.run_with_iobinding(binding)``."""

    def __init__(self, session: InferenceSession) -> None:
        self._input_names = [arg.name for arg in [*session.get_inputs(), *session.get_overridable_initializers()]]
        self._output_names = [arg.name for arg in session.get_outputs()]
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, OrtValue | None] = {}  # None: memory of its own at every run
        self._results: dict[str, OrtValue] = {}

    # -- inputs -------------------------------------------------------------------------------------------------------

    @raises_ort
    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Read an input from an array, at every run anew: changes to the array count."""
        self._bind_input(name, to_array(unwrap(arr_on_cpu)))

    @raises_ort
    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Read an input from memory at an address; it must stay alive as long as the binding is used."""
        check_cpu(device_type, device_id)
        self._bind_input(name, array_at(buffer_ptr, element_type, shape, f"input {name!r}"))

    @raises_ort
    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        self._bind_input(name, unwrap(ortvalue))

    def _bind_input(self, name: str, value: Any) -> None:
        if name not in self._input_names:
            raise InvalidInput(f"the model has no input {name!r}{nearest(name, self._input_names)}")
        self._inputs[name] = value

    # -- outputs ------------------------------------------------------------------------------------------------------

    @raises_ort
    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Ask for an output: in memory at an address, or, without one, in new memory at every run."""
        check_cpu(device_type, device_id)
        target: OrtValue | None = None
        if buffer_ptr is not None:
            if element_type is None or shape is None:
                raise InvalidInput(f"output {name!r}: a buffer needs its element_type and shape")
            target = OrtValue(array_at(buffer_ptr, element_type, shape, f"output {name!r}"))
        self._bind_output(name, target)

    @raises_ort
    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Write an output into the tensor of a value."""
        ortvalue.numpy()  # raises where it holds no tensor
        self._bind_output(name, ortvalue)

    def _bind_output(self, name: str, target: OrtValue | None) -> None:
        if name not in self._output_names:
            raise InvalidInput(f"the model has no output {name!r}{nearest(name, self._output_names)}")
        self._outputs[name] = target

    # -- running, by the session --------------------------------------------------------------------------------------

    def inputs(self) -> Mapping[str, Any]:
        return self._inputs

    def output_names(self) -> list[str]:
        if not self._outputs:
            raise InvalidInput("the binding asks for no output; call bind_output first")
        return list(self._outputs)

    def buffers(self) -> dict[str, Array]:
        """Memory that outputs are bound to, by name."""
        return {name: target.numpy() for name, target in self._outputs.items() if target is not None}

    def receive(self, results: Mapping[str, Any]) -> None:
        """Put what a run gave where the outputs are bound to."""
        received: dict[str, OrtValue] = {}
        for name, target in self._outputs.items():
            if target is None:
                received[name] = OrtValue(results[name])
            else:
                if results[name] is not target.numpy():  # the run could not write there itself
                    copy_into(target.numpy(), results[name], f"output {name!r}")
                received[name] = target
        self._results = received

    # -- results ------------------------------------------------------------------------------------------------------

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run, in the order they were bound."""
        return list(self._results.values())

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The outputs of the last run as copies."""
        return [v.numpy().copy() if v.is_tensor() else v.value for v in self._results.values()]

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._results = {}

    def synchronize_inputs(self) -> None:
        """Nothing to wait for: inputs are read in place."""

    def synchronize_outputs(self) -> None:
        """Nothing to wait for: a run has finished when it returns."""


__all__ = ["IOBinding"]
