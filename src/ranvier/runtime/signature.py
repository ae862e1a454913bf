"""The inputs of a session: names, types, and how values handed to ``run`` are checked and bind the dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.errors import DimensionMismatch, DTypeMismatch, InvalidInput, ShapeMismatch, nearest
from ranvier.graph.ir import Graph, Value
from ranvier.graph.types import MapType, OptionalType, SequenceType, Symbol, TensorType, Type
from ranvier.interop import to_array

Array = np.ndarray[Any, Any]
Inputs = Mapping[str, Any] | Sequence[Any]  # of a call: by name, or in order


class Signature:
    """Inputs by name, with defaults for those a call may leave out."""

    def __init__(self, graph: Graph) -> None:
        self.inputs: tuple[Value, ...] = tuple(graph.inputs)
        self.by_name = {v.name: v for v in self.inputs}
        self.defaults = dict(graph.defaults)
        self.required = [v.name for v in graph.required_inputs()]

    def named(self, given: Any) -> dict[str, Any]:
        """The inputs by name, from a mapping or from values in order of the required inputs."""
        if isinstance(given, Mapping):
            return dict(given)
        if isinstance(given, Sequence) and not isinstance(given, str | bytes):
            if len(given) != len(self.required):
                names = ", ".join(map(repr, self.required))
                raise InvalidInput(f"{len(given)} inputs given, the model takes {len(self.required)}: {names}")
            return dict(zip(self.required, given))
        raise InvalidInput(f"inputs must be a mapping from name to array, got {type(given).__name__}")

    def bind(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, int]]:
        """Checked values in the order of the inputs, and the size of every symbolic dim."""
        unknown = [name for name in given if name not in self.by_name]
        if unknown:
            raise InvalidInput(f"unknown input {unknown[0]!r}{nearest(str(unknown[0]), self.by_name)}")
        dims: dict[str, int] = {}
        origin: dict[str, str] = {}
        values: list[Any] = []
        for value in self.inputs:
            name = value.name
            if name in given:
                values.append(self._check(given[name], value.type, name, dims, origin))
            elif name in self.defaults:
                values.append(self._check(self.defaults[name].numpy(), value.type, name, dims, origin))
            elif isinstance(value.type, OptionalType):
                values.append(None)
            else:
                raise InvalidInput(f"input {name!r} is missing: expected {value.type}")
        return values, dims

    def _check(self, x: Any, declared: Type | None, name: str, dims: dict[str, int], origin: dict[str, str]) -> Any:
        if isinstance(declared, SequenceType):
            if not isinstance(x, list | tuple):
                raise InvalidInput(f"input {name!r}: expected {declared}, got {type(x).__name__}")
            return [self._check(item, declared.elem, f"{name}[{k}]", {}, {}) for k, item in enumerate(x)]
        if isinstance(declared, OptionalType):
            return None if x is None else self._check(x, declared.elem, name, dims, origin)
        if isinstance(declared, MapType):
            if not isinstance(x, Mapping):
                raise InvalidInput(f"input {name!r}: expected {declared}, got {type(x).__name__}")
            return dict(x)
        if x is None:
            raise InvalidInput(f"input {name!r} is None: expected {declared}")
        tensor = declared if isinstance(declared, TensorType) else None
        try:
            array = to_array(x, tensor.dtype if tensor else None)
            dtypes.of(array)
        except DTypeMismatch as error:
            raise DTypeMismatch(f"input {name!r}: {error}") from None
        except InvalidInput as error:
            raise InvalidInput(f"input {name!r}: {error}") from None
        if tensor is not None:
            self._check_tensor(array, tensor, name, dims, origin)
        return array

    def _check_tensor(
        self, array: Array, declared: TensorType, name: str, dims: dict[str, int], origin: dict[str, str]
    ) -> None:
        got = dtypes.of(array)
        if declared.dtype is not None and got is not declared.dtype:
            raise DTypeMismatch(f"input {name!r}: expected {declared}, got {TensorType(got, array.shape)}")
        if declared.shape is None:
            return
        if len(declared.shape) != array.ndim:
            raise ShapeMismatch(f"input {name!r}: expected {declared}, got {TensorType(got, array.shape)}")
        for axis, (want, have) in enumerate(zip(declared.shape, array.shape)):
            if isinstance(want, Symbol):
                first = dims.setdefault(want.name, have)
                origin.setdefault(want.name, name)
                if first != have:
                    raise DimensionMismatch(
                        f"input {name!r}: dimension {want.name!r} (axis {axis}) is {have}, "
                        f"but {first} in input {origin[want.name]!r}; dims_apart=True takes them for different sizes"
                    )
                if not want.admits(have):
                    raise ShapeMismatch(
                        f"input {name!r}: dimension {want.name!r} is {have}, outside its bounds [{want.lo}, {want.hi}]"
                    )
            elif want is not None and want != have:
                raise ShapeMismatch(f"input {name!r}: expected {declared}, got {TensorType(got, array.shape)}")
