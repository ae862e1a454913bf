"""The provider ``openvino``: parts of a graph run by an installed OpenVINO, on its CPU, GPU or NPU plugin.

It has no list of what it takes, so it is asked by trying: a model of one node is read, once for every kind of node.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ranvier.codegen.storage import row_major
from ranvier.devices import CPU, Device
from ranvier.errors import InvalidConfig, KernelError, NotSupported, nearest
from ranvier.graph.ir import Node
from ranvier.graph.types import TensorType
from ranvier.providers.base import (
    Array,
    CompileContext,
    ProviderCapability,
    Subgraph,
)
from ranvier.providers.foreign import ForeignKernel, ForeignProvider
from ranvier.providers.openvino.otherwise import computes_otherwise
from ranvier.providers.part_model import PartModel, check_results, part_model
from ranvier.records import dataclass

_ELEMENTS = frozenset(
    ["float32", "float16", "bool"]  # doubles it computes as floats, bfloat16 comes out as float16
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


@dataclass(frozen=True)
class OpenVinoOptions:
    """``plugin``: OpenVINO's name of the device. ``precision``: what it may compute in; by itself it takes bfloat16 for
    float32 on processors that are quick at that."""

    plugin: str = "CPU"
    precision: str = "f32"

    def __post_init__(self) -> None:
        known = ("f32", "bf16", "f16")
        if self.precision not in known:
            raise InvalidConfig(
                f"OpenVinoOptions: precision cannot be {self.precision!r}{nearest(str(self.precision), known)}"
            )


class OpenVinoProvider(ForeignProvider):
    name: ClassVar[str] = "openvino"
    aliases: ClassVar[tuple[str, ...]] = ("OpenVINOExecutionProvider",)
    Options: ClassVar[type] = OpenVinoOptions
    library: ClassVar[str] = "openvino"  # which knows what it takes, and is imported when somebody asks

    def __init__(self, options: OpenVinoOptions | None = None) -> None:
        super().__init__()
        self.options = options or OpenVinoOptions()
        self.device: Device = CPU  # operands and results are on the host, whatever happens between

    def configure(self, options: Any) -> OpenVinoProvider:
        known = _core().available_devices
        if options.plugin not in known:
            raise InvalidConfig(f"OpenVINO has no device {options.plugin!r} here{nearest(options.plugin, known)}")
        return OpenVinoProvider(options)

    def available(self) -> str | None:
        return None if importlib.util.find_spec("openvino") is not None else "openvino is not installed"

    def capability(self) -> ProviderCapability:
        notes = f"OpenVINO {_version()}, {self.options.plugin}"
        threads = "given" if self.options.plugin == "CPU" else ""
        return ProviderCapability(notes=notes, dear_claims=True, threads=threads)

    def _refuses(self, node: Node) -> str | None:
        return _refusal(node)

    def compile(self, part: Subgraph, ctx: CompileContext) -> OpenVinoKernel:
        return OpenVinoKernel(part_model(part), self.options, ctx)


class OpenVinoKernel(ForeignKernel):
    """A part inside a compiled model. A request serves one thread at a time, so there are as many as were needed."""

    holds_constants = True

    def __init__(self, model: PartModel, options: OpenVinoOptions, ctx: CompileContext) -> None:
        choices: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": options.precision}
        if ctx.config.threads is not None and options.plugin == "CPU":
            choices["INFERENCE_NUM_THREADS"] = ctx.config.threads
        try:
            self._compiled = _compiled(model.data, options.plugin, choices)
        except RuntimeError as error:
            raise KernelError(f"OpenVINO cannot load it: {_short(error)}", provider="openvino") from error
        super().__init__(model.constant_bytes)
        self._model = model
        self.source = model.text
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @contextlib.contextmanager
    def _request(self) -> Iterator[Any]:
        try:
            found = self._idle.get_nowait()
        except queue.Empty:
            found = self._compiled.create_infer_request()
        try:
            yield found
        finally:
            self._idle.put(found)

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        given = {k: _taken(row_major(inputs[p])) for k, p in enumerate(self._model.positions)}
        with self._request() as request:
            try:
                request.infer(given, share_inputs=True)
            except RuntimeError as error:
                raise KernelError(f"OpenVINO: {_short(error)}", provider="openvino") from error
            # the request's own memory is used again
            found = [np.array(request.get_output_tensor(k).data) for k in range(len(outputs))]
        check_results(self._model.types, found, dims, "openvino")
        outputs[:] = found
        self._count(started)


def _compiled(model: bytes, plugin: str, choices: Mapping[str, Any]) -> Any:
    """With code made for chains of operators where that can be made: for some it fails, which its kernels can run."""
    try:
        return _core().compile_model(_core().read_model(model), plugin, dict(choices))
    except RuntimeError as error:
        if plugin != "CPU":
            raise
        try:
            return _core().compile_model(_core().read_model(model), plugin, {**choices, "SNIPPETS_MODE": "DISABLE"})
        except RuntimeError:
            raise error from None


def _taken(array: Array) -> Array:
    """An input as OpenVINO takes it: of single numbers it wants ones it could write to."""
    return array if array.ndim or array.flags.writeable else array.copy()


@functools.cache
def _version() -> str:
    return importlib.metadata.version("openvino")


@functools.cache
def _library() -> Any:
    import openvino  # type: ignore[import-not-found,unused-ignore]

    return openvino


@functools.cache
def _core() -> Any:
    return _library().Core()


_answers: dict[tuple[Any, ...], str | None] = {}


def _refusal(node: Node) -> str | None:
    """Why OpenVINO would not run the node; asked once for nodes that differ in names and weights only."""
    if node.has_subgraphs:
        return "bodies of control flow stay with the outer runtime"
    for value in [*node.inputs, *node.outputs]:
        if value is not None and isinstance(value.type, TensorType) and value.type.dtype is not None:
            if value.type.dtype.name not in _ELEMENTS:
                return f"OpenVINO has no tensors of {value.type.dtype}"
            if value.type.shape is None:
                return f"the rank of {value.name!r} is not known"
            if 0 in value.type.shape:
                return f"{value.name!r} is empty"
    otherwise = computes_otherwise(node)
    if otherwise is not None:
        return otherwise
    key = (
        node.domain,
        node.op,
        node.version,
        tuple((str(v.type), v.const is not None) if v is not None else None for v in node.inputs),
        tuple((name, str(attr)) for name, attr in sorted(node.attrs.items())),
    )
    if key not in _answers:
        _answers[key] = _tried(node)
    return _answers[key]


def _tried(node: Node) -> str | None:
    inputs = tuple(dict.fromkeys(v for v in node.inputs if v is not None))
    assert node.graph is not None
    try:
        model = part_model(Subgraph((node,), inputs, tuple(node.outputs), node.graph))
        read = _core().read_model(model.data)
    except (RuntimeError, NotSupported) as error:
        return f"OpenVINO does not take it: {_short(error)}"
    if any(result.partial_shape.rank.is_dynamic for result in read.outputs):
        return "OpenVINO cannot tell the rank of its result"
    return None


def _short(error: Exception) -> str:
    """The line of OpenVINO's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    return (telling or lines or [type(error).__name__])[0][:200]
