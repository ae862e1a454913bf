"""The inputs of a call, from what the command line says: files, images, random values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.cli import images
from ranvier.cli.samples import RandomSource
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput, nearest
from ranvier.graph.ir import Graph
from ranvier.graph.types import OptionalType, SequenceType, Symbol, TensorType, Type

Array = np.ndarray[Any, Any]
_RANDOM = re.compile(r"random(?::(\d*(?:x\d+)*))?")


@dataclass(frozen=True)
class InputRequest:
    """What was asked for: ``-i`` texts, an ``--inputs`` bundle, whether to fill the rest, and how."""

    given: tuple[str, ...] = ()
    bundle: str | None = None
    fill: bool = False
    seed: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass
class Collected:
    """Values by input name, where each came from, and the sizes that were chosen for symbolic dims."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)

    @property
    def random(self) -> list[str]:
        return [name for name, source in self.sources.items() if source == "random"]

    def note(self) -> str:
        """What was made up, for people; empty when nothing was."""
        if not self.random:
            return ""
        sizes = ", ".join(f"{name}={size}" for name, size in self.chosen.items())
        chosen = f", with {sizes} (--set changes that)" if sizes else ""
        return f"random values for {', '.join(self.random)}{chosen}"


def collect(graph: Graph, request: InputRequest, sizes: Mapping[str, int]) -> Collected:
    """Everything the request gives, then random values for what is missing where that is allowed.

    With no input given at all every required one is random; otherwise only ``--random`` fills gaps, and a missing
    input stays missing for the session to complain about.
    """
    declared = {value.name: value.type for value in graph.inputs}
    required = [value.name for value in graph.required_inputs()]
    found = Collected()
    if request.bundle is not None:
        _load_bundle(Path(request.bundle), declared, required, found)
    wanted_random: dict[str, tuple[int, ...] | None] = {}
    for text in request.given:
        name, source = _split(text, declared, required)
        match = _RANDOM.fullmatch(source)
        if match is not None:
            shape = match[1]
            wanted_random[name] = None if shape is None else tuple(int(d) for d in shape.split("x") if d)
            continue
        found.values[name] = _load(Path(source), name, declared[name], request, sizes)
        found.sources[name] = source
    nothing = not request.given and request.bundle is None
    if request.fill or nothing:
        for name in required:
            if name not in found.values and not isinstance(declared[name], OptionalType):
                wanted_random.setdefault(name, None)
    known = {**sizes, **_bound_sizes(declared, found.values)}
    source_of_values = RandomSource(request.seed, known)
    # inputs with most dims first: lengths and masks come after what they measure
    for name in sorted(wanted_random, key=lambda n: -_rank(declared[n])):
        found.values[name] = source_of_values.value(name, declared[name], wanted_random[name])
        found.sources[name] = "random"
    found.chosen = source_of_values.chosen
    order = list(declared)
    found.values = {name: found.values[name] for name in sorted(found.values, key=order.index)}
    return found


def _rank(declared: Type | None) -> int:
    return len(declared.shape or ()) if isinstance(declared, TensorType) else 0


def _split(text: str, declared: Mapping[str, Any], required: list[str]) -> tuple[str, str]:
    """``name=source``; the name may be left out where the model has one input."""
    fitting = [name for name in declared if text.startswith(f"{name}=")]
    if fitting:
        name = max(fitting, key=len)
        return name, text[len(name) + 1 :]
    if len(required) == 1 and ("=" not in text or Path(text).exists()):
        return required[0], text
    if "=" not in text:
        raise InvalidInput(f"-i {text!r}: say which input it is for: {', '.join(f'{n}=…' for n in required)}")
    name = text.split("=", 1)[0]
    raise InvalidInput(f"-i: the model has no input {name!r}{nearest(name, declared)}")


def _load_bundle(path: Path, declared: Mapping[str, Type | None], required: list[str], found: Collected) -> None:
    if path.is_dir():
        files = sorted(path.glob("input_*.pb"), key=lambda p: (len(p.name), p.name))
        if not files:
            raise InvalidInput(f"--inputs: folder {str(path)!r} holds no input_0.pb")
        if len(files) > len(declared):
            raise InvalidInput(f"--inputs: {str(path)!r} holds {len(files)} inputs, the model takes {len(declared)}")
        for name, file in zip(declared, files):
            found.values[name] = _load_message(file, name, declared[name])
            found.sources[name] = str(file)
        return
    for name, array in _open_npz(path, "--inputs").items():
        if name not in declared:
            raise InvalidInput(f"--inputs: {str(path)!r} holds {name!r}, no input{nearest(name, declared)}")
        found.values[name] = _as_declared(array, declared[name])
        found.sources[name] = str(path)


def _load(path: Path, name: str, declared: Type | None, request: InputRequest, sizes: Mapping[str, int]) -> Any:
    if not path.is_file():
        raise InvalidInput(f"input {name!r}: there is no file {str(path)!r}")
    suffix = path.suffix.lower()
    if suffix == ".npy":
        try:
            return _as_declared(np.load(path, allow_pickle=False), declared)
        except (OSError, ValueError, EOFError) as error:
            raise InvalidInput(f"input {name!r}: cannot read {str(path)!r}: {error}") from None
    if suffix == ".npz":
        arrays = _open_npz(path, f"input {name!r}")
        if name not in arrays and len(arrays) != 1:
            raise InvalidInput(f"input {name!r}: {str(path)!r} holds {', '.join(map(repr, arrays))}, none of that name")
        return _as_declared(arrays.get(name, next(iter(arrays.values()))), declared)
    if suffix == ".pb":
        return _load_message(path, name, declared)
    if suffix in images.SUFFIXES:
        return images.load_image(path, name, declared, sizes, request.mean, request.std)
    known = ", ".join(sorted({".npy", ".npz", ".pb"} | images.SUFFIXES))
    raise InvalidInput(f"input {name!r}: unknown kind of file {path.name!r} (known: {known}; or random)")


def _open_npz(path: Path, what: str) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if isinstance(file, np.ndarray):
                raise InvalidInput(f"{what}: {str(path)!r} holds one array without a name; give it with -i name={path}")
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError) as error:
        raise InvalidInput(f"{what}: cannot read {str(path)!r}: {error}") from None


def _load_message(path: Path, name: str, declared: Type | None) -> Any:
    """A TensorProto, SequenceProto or OptionalProto, whichever the input takes."""
    from google.protobuf.message import DecodeError
    from onnx import OptionalProto, SequenceProto, TensorProto, numpy_helper

    kind = SequenceProto if isinstance(declared, SequenceType) else TensorProto
    if isinstance(declared, OptionalType):
        kind = OptionalProto
    try:
        message = kind.FromString(path.read_bytes())
        if kind is SequenceProto:
            return numpy_helper.to_list(message)
        if kind is OptionalProto:
            return numpy_helper.to_optional(message)
        from ranvier.ops.proto import tensor_array

        return tensor_array(message)
    except (OSError, DecodeError, ValueError, TypeError, KeyError, DTypeMismatch) as error:
        raise InvalidInput(f"input {name!r}: cannot read {path.name!r} as {kind.__name__}: {error}") from None


def _as_declared(array: Array, declared: Type | None) -> Array:
    """NumPy files keep element types it does not know (bfloat16 …) as bytes; the declaration says what they are."""
    dtype = declared.dtype if isinstance(declared, TensorType) else None
    if dtype is None or dtype is DType.string or array.dtype.kind != "V" or array.dtype.names is not None:
        return array
    return array.view(dtype.numpy) if array.dtype.itemsize == dtype.numpy.itemsize else array


def _bound_sizes(declared: Mapping[str, Type | None], values: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of symbolic dims as the given values have them."""
    found: dict[str, int] = {}
    for name, value in values.items():
        kind = declared[name]
        if isinstance(kind, TensorType) and kind.shape is not None and isinstance(value, np.ndarray):
            for dim, size in zip(kind.shape, value.shape):
                if isinstance(dim, Symbol):
                    found.setdefault(dim.name, size)
    return found
