"""The provider ``onnxruntime``: parts of a graph run by an installed ONNX Runtime, on any of its own providers.

This is how TensorRT, CoreML, DirectML and the others are reached: ``provider_options={"onnxruntime": {"ep":
"TensorrtExecutionProvider"}}``. What it takes is what its own list of kernels says.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

from ranvier.devices import CPU, Device
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, KernelError, OutOfMemory, nearest
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.logs import logger
from ranvier.ops.proto import schema_of
from ranvier.providers.base import (
    Array,
    CompileContext,
    ProviderCapability,
    Subgraph,
)
from ranvier.providers.foreign import ForeignKernel, ForeignProvider
from ranvier.providers.part_model import PartModel, check_results, part_model
from ranvier.records import dataclass

_DEFAULT = "CPUExecutionProvider"
_NO_END = 2**31 - 1  # where the range of versions of a kernel is open
_ODD_NAMES = {DType.float32: "float", DType.float64: "double"}  # elsewhere the names are ours


@dataclass(frozen=True)
class OnnxRuntimeOptions:
    """``ep``: the execution provider inside ONNX Runtime, with options of its own; its CPU provider takes what that one
    leaves. ``optimize``: let it optimize each part once more."""

    ep: str = _DEFAULT
    ep_options: Mapping[str, str] = field(default_factory=dict)
    optimize: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.ep, str) or not isinstance(self.ep_options, Mapping):
            raise InvalidConfig("OnnxRuntimeOptions: ep is a name and ep_options is a mapping")


class OnnxRuntimeProvider(ForeignProvider):
    name: ClassVar[str] = "onnxruntime"
    aliases: ClassVar[tuple[str, ...]] = ("ort",)
    Options: ClassVar[type] = OnnxRuntimeOptions
    library: ClassVar[str] = "onnxruntime"  # which knows what it takes, and is imported when somebody asks

    def __init__(self, options: OnnxRuntimeOptions | None = None) -> None:
        super().__init__()
        self.options = options or OnnxRuntimeOptions()
        self.device: Device = CPU  # operands and results are on the host, whatever happens between

    def configure(self, options: Any) -> OnnxRuntimeProvider:
        made = OnnxRuntimeProvider(options)
        here, every = _library().get_available_providers(), _library().get_all_providers()
        if options.ep not in here:
            hint = f" (it has {', '.join(here)})" if options.ep in every else nearest(options.ep, every)
            raise InvalidConfig(f"onnxruntime {_library().__version__} here has no {options.ep!r}{hint}")
        return made

    def available(self) -> str | None:
        # only looked for: importing it takes a tenth of a second
        return None if importlib.util.find_spec("onnxruntime") is not None else "onnxruntime is not installed"

    def capability(self) -> ProviderCapability:
        ops = frozenset(op for _, op in _kernels())
        notes = f"ONNX Runtime {_library().__version__}, {self.options.ep}"
        return ProviderCapability(ops=ops, notes=notes, threads="given" if self.options.ep == _DEFAULT else "")

    def _refuses(self, node: Node) -> str | None:
        return _refusal(node)

    def compile(self, part: Subgraph, ctx: CompileContext) -> OnnxRuntimeKernel:
        return OnnxRuntimeKernel(part_model(part), self.options, ctx)


class OnnxRuntimeKernel(ForeignKernel):
    """A part inside an ``InferenceSession``."""

    holds_constants = True

    def __init__(self, model: PartModel, options: OnnxRuntimeOptions, ctx: CompileContext) -> None:
        library = _library()
        settings = library.SessionOptions()
        settings.log_severity_level = 4
        if ctx.config.threads is not None:
            settings.intra_op_num_threads = ctx.config.threads
        if not options.optimize:
            settings.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
        chain: list[Any] = [(options.ep, dict(options.ep_options))]
        if options.ep != _DEFAULT:
            chain.append(_DEFAULT)
        try:
            self._session = library.InferenceSession(model.data, settings, providers=chain)
        except Exception as error:
            raise KernelError(f"ONNX Runtime cannot load it: {error}", provider="onnxruntime") from error
        super().__init__(model.constant_bytes)
        self._model = model
        self.source = model.text

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        given = {name: inputs[k] for name, k in zip(self._model.inputs, self._model.positions)}
        try:
            found = self._session.run(self._model.outputs, given)
        except Exception as error:
            text = str(error)
            if "allocat" in text.lower():
                raise OutOfMemory(f"ONNX Runtime: {text}") from error
            raise KernelError(f"ONNX Runtime: {text}", provider="onnxruntime") from error
        check_results(self._model.types, found, dims, "onnxruntime")
        outputs[:] = found
        self._count(started)


@functools.cache
def _library() -> Any:
    import onnxruntime

    return onnxruntime


@functools.cache
def _kernels() -> dict[tuple[str, str], list[tuple[int, int, dict[str, frozenset[str]]]]]:
    """By domain and operator: the ranges of versions it has kernels for, with the types they take."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    found: dict[tuple[str, str], list[tuple[int, int, dict[str, frozenset[str]]]]] = {}
    for kernel in native.get_all_opkernel_def():
        if kernel.provider == _DEFAULT:
            types = {name: frozenset(kinds) for name, kinds in kernel.type_constraints.items()}
            found.setdefault((kernel.domain, kernel.op_name), []).append((*kernel.version_range, types))
    return found


@functools.cache
def _versions() -> dict[tuple[str, str], set[int]]:
    """By domain and operator: the versions whose definition it has. A kernel's range is open towards the future."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    found: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
    for schema in native.get_all_operator_schema():
        found[schema.domain, schema.name].add(schema.since_version)
    return found


@functools.cache
def _newest_opset() -> int:
    """The newest opset that it loads: definitions it has may belong to one that it calls unreleased, and refuses."""
    newest = max(version for (domain, _), found in _versions().items() if not domain for version in found)
    for opset in range(newest, 1, -1):
        graph = Graph("probe", opsets={"": opset})
        x = graph.add_input("x", TensorType(DType.float32, (1,)))
        node = graph.add("Identity", [x], version=schema_of("", "Identity", opset).since_version)
        node.output.type = x.type
        graph.outputs = [node.output]
        try:
            _library().InferenceSession(onnx_format.to_proto(graph).SerializeToString(), providers=[_DEFAULT])
        except Exception as error:
            logger.debug("onnxruntime does not load opset %d: %s", opset, error)
        else:
            return opset
    return 1


def _refusal(node: Node) -> str | None:
    """Why ONNX Runtime would not run the node: it has no kernel, or none for this version or these types."""
    if node.has_subgraphs:
        return "bodies of control flow stay with the outer runtime"
    for value in [*node.inputs, *node.outputs]:
        kind = value.type if value is not None else None
        if isinstance(kind, TensorType) and kind.dtype is not None and kind.dtype.numpy.kind not in "fiub":
            return f"{kind.dtype} does not cross over as a NumPy array"
    kernels = _kernels().get((node.domain, node.op))
    if kernels is None:
        return "ONNX Runtime has no kernel for it"
    fitting = [types for first, last, types in kernels if _covers(first, last, node.version)]
    known = node.version in _versions()[node.domain, node.op]
    if not fitting or not known or (not node.domain and node.version > _newest_opset()):
        return f"ONNX Runtime has no kernel for version {node.version}"
    used = _types_by_parameter(node)
    for types in fitting:
        if all(name not in types or kinds <= types[name] for name, kinds in used.items()):
            return _fails(node)
    return f"ONNX Runtime has no kernel for {', '.join(sorted(k for kinds in used.values() for k in kinds))}"


def _covers(first: int, last: int, version: int) -> bool:
    """Does ONNX Runtime take the kernel for this version? One without an end is for the version it begins with only:
    nobody knew the later ones when it was written."""
    return first == version or (last != _NO_END and first <= version <= last)


def _fails(node: Node) -> str | None:
    """What its kernels for the CPU say no to once they are made, or run."""
    if node.op in ("GRU", "LSTM", "RNN") and node.attrs.get("layout", 0):
        return "ONNX Runtime has no recurrences with the batch first"
    if node.op == "ConvInteger" and not _is_one_number(node.input(3)):
        return "ONNX Runtime wants one zero point for all weights"
    if node.op == "Attention" and node.input(3) is not None and node.input(6) is not None:
        return "ONNX Runtime wants a mask as long as the keys, where only some of these count"
    if node.op in ("ReduceMax", "ReduceMin") and not _is_filled_or_number(node.inputs[0]):
        return "ONNX Runtime has no extreme of no booleans"
    return None


def _is_one_number(value: Value | None) -> bool:
    """Is there nothing, or one element?"""
    if value is None:
        return True
    return isinstance(value.type, TensorType) and value.type.shape in ((), (1,))


def _is_filled_or_number(value: Value | None) -> bool:
    """Is it of another type than bool, or has it elements whatever the sizes are?"""
    kind = value.type if value is not None else None
    if not isinstance(kind, TensorType) or kind.dtype is not DType.bool:
        return True
    return kind.shape is not None and all(isinstance(size, int) and size > 0 for size in kind.shape)


def _types_by_parameter(node: Node) -> dict[str, set[str]]:
    """The types of the operands and results, by the name the operator's schema has for them."""
    schema = schema_of(node.domain, node.op, node.version)
    found: dict[str, set[str]] = {}
    if schema is None:
        return found
    for values, parameters in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for k, value in enumerate(values):
            if value is None or not parameters or not isinstance(value.type, TensorType) or value.type.dtype is None:
                continue
            parameter = parameters[min(k, len(parameters) - 1)]
            dtype = value.type.dtype
            found.setdefault(parameter.type_str, set()).add(f"tensor({_ODD_NAMES.get(dtype, dtype.name)})")
    return found
