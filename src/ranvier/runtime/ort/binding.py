"""``IOBinding``: inputs and outputs tied to memory once, for many runs: the host's, or that of a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.devices import CPU, Device
from ranvier.errors import InvalidInput, NotSupported, nearest
from ranvier.interop import to_array
from ranvier.providers.own_memory import LendsMemory
from ranvier.runtime.ort.errors import raises_runtime_error
from ranvier.runtime.ort.places import device_of, memory_among
from ranvier.runtime.ort.value import OrtValue, array_at, described_at, unwrap

if TYPE_CHECKING:
    from ranvier.runtime.ort.inference_session import InferenceSession

Array = np.ndarray[Any, Any]


class IOBinding:
    """Made by ``session.io_binding()``, used by ``session.run_with_iobinding(binding)``."""

    def __init__(self, session: InferenceSession) -> None:
        self._input_names = [arg.name for arg in [*session.get_inputs(), *session.get_overridable_initializers()]]
        self._output_names = [arg.name for arg in session.get_outputs()]
        self._session = weakref.ref(session)
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, OrtValue | Device] = {}  # a device: in new memory there at every run
        self._results: dict[str, OrtValue] = {}

    # -- inputs -------------------------------------------------------------------------------------------------------

    @raises_runtime_error
    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Read an input from an array, at every run anew: changes to the array count."""
        self._bind_input(name, to_array(unwrap(arr_on_cpu)))

    @raises_runtime_error
    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Read an input from memory at an address; it must stay alive as long as the binding is used."""
        device = device_of(device_type, device_id)
        self._bind_input(name, self._at(device, buffer_ptr, element_type, shape, f"input {name!r}").value)

    @raises_runtime_error
    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        memory = ortvalue.memory if isinstance(ortvalue, OrtValue) else None
        if memory is not None and memory_among(ortvalue.device, self._memories()) is None:
            self._bind_input(name, ortvalue)  # which the session reads from the host, as it is when it runs
            return
        self._bind_input(name, unwrap(ortvalue))

    def _bind_input(self, name: str, value: Any) -> None:
        if name not in self._input_names:
            raise InvalidInput(f"the model has no input {name!r}{nearest(name, self._input_names)}")
        self._inputs[name] = value

    # -- outputs ------------------------------------------------------------------------------------------------------

    @raises_runtime_error
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
        device = device_of(device_type, device_id)
        if buffer_ptr is None:
            if device != CPU:
                self._memory(device)
            self._bind_output(name, device)
            return
        if element_type is None or shape is None:
            raise InvalidInput(f"output {name!r}: a buffer needs its element_type and shape")
        self._bind_output(name, self._at(device, buffer_ptr, element_type, shape, f"output {name!r}"))

    @raises_runtime_error
    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Write an output into the tensor of a value."""
        ortvalue.shape()  # raises where it holds no tensor
        if ortvalue.memory is not None:
            self._memory(ortvalue.device)
        self._bind_output(name, ortvalue)

    def _at(self, device: Device, pointer: int, element_type: Any, shape: Sequence[int], what: str) -> OrtValue:
        """A value over memory that the caller keeps alive."""
        if device == CPU:
            return OrtValue(array_at(pointer, element_type, shape, what))
        memory = self._memory(device)
        return OrtValue.of_device(memory.at(pointer, *described_at(pointer, element_type, shape, what)), memory)

    def _memory(self, device: Device) -> LendsMemory:
        found = memory_among(device, self._memories())
        if found is None:
            raise NotSupported(f"device '{device}': no provider of this session has its memory")
        return found

    def _bind_output(self, name: str, target: OrtValue | Device) -> None:
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
        """Memory of the host that outputs are bound to, by name."""
        bound = {name: to for name, to in self._outputs.items() if isinstance(to, OrtValue) and to.memory is None}
        return {name: target.numpy() for name, target in bound.items()}

    def stays(self) -> bool:
        """Is any output wanted in the memory of a GPU?"""
        return any(_device(target) != CPU for target in self._outputs.values())

    def receive(self, results: Mapping[str, Any]) -> None:
        """Put what a run gave where the outputs are bound to."""
        received: dict[str, OrtValue] = {}
        for name, target in self._outputs.items():
            found = self._wrapped(results[name])
            if isinstance(target, OrtValue):
                if found.value is not target.value:  # the run could not write there itself
                    target.receive(found, f"output {name!r}")
                received[name] = target
            elif found.device == target:
                received[name] = found
            elif target == CPU:
                received[name] = OrtValue(found.numpy())
            else:
                memory = self._memory(target)
                received[name] = OrtValue.of_device(memory.bring(found.numpy()), memory)
        self._results = received

    def _wrapped(self, result: Any) -> OrtValue:
        """A result as a value, wherever it is."""
        if hasattr(result, "__dlpack_device__") and not isinstance(result, np.ndarray):
            for memory in self._memories():
                if memory.adopt(result) is not None:
                    return OrtValue.of_device(result, memory)
        return OrtValue(result)

    def _memories(self) -> list[LendsMemory]:
        """Those of the session, whose life does not depend on its bindings."""
        session = self._session()
        return [] if session is None else [p for p in session.session.providers if isinstance(p, LendsMemory)]

    # -- results ------------------------------------------------------------------------------------------------------

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run, in the order they were bound."""
        return list(self._results.values())

    def get_outputs_as_ortvaluevector(self) -> list[OrtValue]:
        """The same: a list is all the vector there is."""
        return self.get_outputs()

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The outputs of the last run as copies."""
        return [_copied(v) if v.is_tensor() else v.value for v in self._results.values()]

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._results = {}

    def synchronize_inputs(self) -> None:
        """Wait until what was launched to make inputs on a GPU is done; those of the host are read in place."""
        self._wait(any(not isinstance(x, np.ndarray) for x in self._inputs.values()))

    def synchronize_outputs(self) -> None:
        """Wait until outputs on a GPU are there; a run with outputs on the host has finished when it returns."""
        self._wait(self.stays())

    def _wait(self, needed: bool) -> None:
        for memory in self._memories() if needed else ():
            memory.wait()


def _copied(value: OrtValue) -> Array:
    return value.numpy().copy() if value.memory is None else value.numpy()


def _device(target: OrtValue | Device) -> Device:
    return target.device if isinstance(target, OrtValue) else target


__all__ = ["IOBinding"]
