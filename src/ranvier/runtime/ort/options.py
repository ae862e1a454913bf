"""ONNX Runtime's options, mutable as scripts expect, and how they become a frozen :class:`SessionConfig`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ranvier.config import SessionConfig, resolve
from ranvier.errors import InvalidConfig, NotSupported, nearest
from ranvier.logs import logger
from ranvier.runtime.ort.errors import UnknownOption, lacking, raises_ort, raises_runtime_error
from ranvier.runtime.ort.value import unwrap


class _Named(enum.IntEnum):
    """Shown by its name, as ONNX Runtime's are."""

    __str__ = enum.Enum.__str__


class GraphOptimizationLevel(_Named):
    """How much the graph is optimized. Above basic, Ranvier has one level: aggressive."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(_Named):
    """Kept for scripts that set it: a provider decides by itself what runs side by side."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(_Named):
    """Kept for scripts that set it: nodes are always ordered for low memory."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


_LEVELS = {
    GraphOptimizationLevel.ORT_DISABLE_ALL: "none",
    GraphOptimizationLevel.ORT_ENABLE_BASIC: "basic",
    GraphOptimizationLevel.ORT_ENABLE_EXTENDED: "aggressive",
    GraphOptimizationLevel.ORT_ENABLE_LAYOUT: "aggressive",
    GraphOptimizationLevel.ORT_ENABLE_ALL: "aggressive",
}

BASE_DIR_ENTRY = "session.model_external_initializers_file_folder_path"
EXTERNAL_NAME_ENTRY = "session.optimized_model_external_initializers_file_name"
FOLD_LIMIT_ENTRY = "optimization.constant_folding_max_output_size_in_bytes"
NO_FALLBACK_ENTRY = "session.disable_cpu_ep_fallback"
SUBNORMALS_ENTRY = "session.set_denormal_as_zero"
_HONOURED = (BASE_DIR_ENTRY, EXTERNAL_NAME_ENTRY, FOLD_LIMIT_ENTRY, NO_FALLBACK_ENTRY, SUBNORMALS_ENTRY)

# Entries that change what a model computes or how it is stored, with the one value that is the same here.
_FIXED = {
    "session.load_model_format": "ONNX",
    "session.save_model_format": "ONNX",
    "optimization.enable_gelu_approximation": "0",
    "optimization.disable_specified_optimizers": "",
    "ep.context_enable": "0",
}

# Entries that tune ONNX Runtime's own machinery; results are the same with and without them.
_TUNING = (
    "session.allow_released_opsets_only",
    "session.disable_aot_function_inlining",
    "session.disable_double_qdq_remover",
    "session.disable_prepacking",
    "session.disable_qdq_constant_folding",
    "session.disable_quant_qdq",
    "session.dynamic_block_base",
    "session.enable_quant_qdq_cleanup",
    "session.force_spinning_stop",
    "session.graph_optimizations_loop_level",
    "session.inter_op.allow_spinning",
    "session.intra_op.allow_spinning",
    "session.intra_op_thread_affinities",
    "session.optimized_model_external_initializers_min_size_in_bytes",
    "session.qdq_matmulnbits_accuracy_level",
    "session.qdqisint8allowed",
    "session.strict_shape_type_inference",
    "session.use_device_allocator_for_initializers",
    "session.use_env_allocators",
    "session.use_ort_model_bytes_directly",
    "session.use_ort_model_bytes_for_initializers",
    "session.x64quantprecision",
    "ep.context_embed_mode",
    "ep.context_file_path",
    "mlas.disable_kleidiai",
    "mlas.enable_gemm_fastmath_arm64_bfloat16",
)

_OWN = tuple(f.name for f in fields(SessionConfig) if f.name not in ("providers", "provider_options"))


class SessionOptions:
    """Options of an :class:`InferenceSession`, by ONNX Runtime's names and by Ranvier's.

    Every option of :class:`~ranvier.config.SessionConfig` (``precision``, ``limits``, ``optimization``,
    ``disabled_passes`` …) is an attribute here too and wins over ONNX Runtime's word for the same thing. ``preset``
    names a set of defaults. A name that neither has raises InvalidConfig.
    """

    intra_op_num_threads: int = 0  # 0: as many as the machine has to offer
    inter_op_num_threads: int = 0  # no effect: there is one pool of threads
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    execution_order: ExecutionOrder = ExecutionOrder.DEFAULT
    enable_profiling: bool = False
    profile_file_prefix: str = "ranvier_profile_"
    optimized_model_filepath: str = ""  # the optimized model is written there
    log_severity_level: int = -1  # no effect: the log belongs to the process, see set_default_logger_severity
    log_verbosity_level: int = 0
    logid: str = ""  # the session's name in its report and trace
    enable_mem_pattern: bool = True  # these three have no effect: memory is planned per shape, always
    enable_mem_reuse: bool = True
    enable_cpu_mem_arena: bool = True
    use_deterministic_compute: bool = False  # no effect: runs are deterministic
    use_per_session_threads: bool = True
    preset: str = ""  # Ranvier's: options for a kind of machine, used where no other source sets them

    def __init__(self) -> None:
        put = object.__setattr__
        put(self, "_own", {})  # options of SessionConfig that were set
        put(self, "_entries", {})
        put(self, "_initializers", {})
        put(self, "_dims_by_name", {})
        put(self, "_dims_by_denotation", {})

    _own: dict[str, Any]
    _entries: dict[str, str]
    _initializers: dict[str, Any]
    _dims_by_name: dict[str, int]
    _dims_by_denotation: dict[str, int]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            return self._own[name] if name in self._own else getattr(self.config(), name)
        raise lacking("SessionOptions", name, _LACKING)

    @raises_ort
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            SessionConfig().updated(**{name: value})  # a bad value is told where it is set
            self._own[name] = value
        elif name in _ORT_NAMES:
            object.__setattr__(self, name, _checked(name, value))
        else:
            raise UnknownOption(f"SessionOptions: unknown option {name!r}{nearest(name, _names())}")

    # -- entries ------------------------------------------------------------------------------------------------------

    @raises_ort
    def add_session_config_entry(self, key: str, value: str) -> None:
        """One of ONNX Runtime's string options. Those that would change results and are not supported raise."""
        if key in _FIXED and str(value) != _FIXED[key]:
            raise NotSupported(f"session config entry {key!r} = {value!r} is not supported")
        if key in _TUNING:
            logger.info("session config entry %r has no effect", key)
        elif key not in _HONOURED and key not in _FIXED:
            known = [*_HONOURED, *_FIXED, *_TUNING]
            raise InvalidConfig(f"unknown session config entry {key!r}{_close(key, known)}")
        self._entries[key] = str(value)

    @raises_runtime_error
    def get_session_config_entry(self, key: str) -> str:
        if key not in self._entries:
            raise InvalidConfig(f"session config entry {key!r} was not set{_close(key, self._entries)}")
        return self._entries[key]

    # -- what is changed in the model ---------------------------------------------------------------------------------

    @raises_ort
    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """Fix a symbolic dimension of the model's inputs to one size."""
        self._dims_by_name[dim_name] = _size(dim_name, dim_value)

    @raises_ort
    def add_free_dimension_override_by_denotation(self, dim_denotation: str, dim_value: int) -> None:
        """Fix all dimensions that carry a denotation (``DATA_BATCH`` …) to one size."""
        self._dims_by_denotation[dim_denotation] = _size(dim_denotation, dim_value)

    def add_initializer(self, name: str, ortvalue: Any) -> None:
        """Use this tensor in place of the model's initializer of that name."""
        self._initializers[name] = unwrap(ortvalue)

    @raises_ort
    def add_external_initializers(self, names: Sequence[str], ortvalues: Sequence[Any]) -> None:
        """Use these tensors in place of initializers; the external files are then not read."""
        if len(names) != len(ortvalues):
            raise InvalidConfig(f"add_external_initializers: {len(names)} names, {len(ortvalues)} values")
        for name, value in zip(names, ortvalues):
            self.add_initializer(name, value)

    @raises_ort
    def register_custom_ops_library(self, library_path: str) -> None:
        raise NotSupported(
            f"custom operator library {library_path!r}: compiled libraries for ONNX Runtime cannot be loaded; "
            "write the operator in Python and register it with ranvier.register_op"
        )

    # -- what a session reads -----------------------------------------------------------------------------------------

    @property
    def initializers(self) -> Mapping[str, Any]:
        return self._initializers

    @property
    def free_dimensions(self) -> Mapping[str, int]:
        return self._dims_by_name

    @property
    def free_denotations(self) -> Mapping[str, int]:
        return self._dims_by_denotation

    def entry(self, key: str) -> str | None:
        return self._entries.get(key)

    def config(self, more: Mapping[str, Any] | None = None) -> SessionConfig:
        """The session's configuration: ``more``, then what was set here, then every other source of options."""
        changes: dict[str, Any] = {}
        if self.intra_op_num_threads > 0:
            changes["threads"] = self.intra_op_num_threads
        if "graph_optimization_level" in self.__dict__:  # unset: Ranvier's own default
            changes["optimization"] = _LEVELS[self.graph_optimization_level]
        if self.logid:
            changes["name"] = self.logid
        if self.entry(NO_FALLBACK_ENTRY) == "1":
            changes["fallback"] = "off"
        fold_limit = self.entry(FOLD_LIMIT_ENTRY)
        if fold_limit is not None:
            changes["fold_limit"] = _number(FOLD_LIMIT_ENTRY, fold_limit)
        changes = {"preset": self.preset or None, **changes, **self._own, **(more or {})}
        if self.entry(SUBNORMALS_ENTRY) == "1":
            given = dict(changes.get("provider_options") or {})
            changes["provider_options"] = {**given, "cpu": {"flush_subnormals": True, **given.get("cpu", {})}}
        return SessionConfig.default(**changes)

    def __repr__(self) -> str:
        given = {**{k: v for k, v in self.__dict__.items() if k in _ORT_NAMES}, **self._own}
        return f"SessionOptions({', '.join(f'{k}={v!r}' for k, v in given.items())})"


_ORT_NAMES = {
    name: getattr(SessionOptions, name)
    for name in SessionOptions.__annotations__
    if not name.startswith("_") and hasattr(SessionOptions, name)
}

_LACKING = {
    "add_provider": "pass providers to InferenceSession",
    "add_provider_for_devices": "pass providers to InferenceSession",
    "has_providers": "pass providers to InferenceSession",
    "set_provider_selection_policy": "providers='auto' takes what the machine has",
    "set_provider_selection_policy_delegate": "providers='auto' takes what the machine has",
    "add_external_initializers_from_files_in_memory": "use add_external_initializers",
    "set_load_cancellation_flag": "loading cannot be cancelled",
}


def _names() -> list[str]:
    return [*_ORT_NAMES, *_OWN]


def _close(key: str, known: Any) -> str:
    """The nearest key, without the long list of all of them."""
    hint = nearest(key, known)
    return hint if "did you mean" in hint else ""


def _checked(name: str, value: Any) -> Any:
    """The value in the type of the option's default."""
    default = _ORT_NAMES[name]
    if isinstance(default, enum.IntEnum):
        try:
            return type(default)(value)
        except ValueError:
            known = ", ".join(member.name for member in type(default))
            raise InvalidConfig(f"SessionOptions: {name} must be one of {known}, got {value!r}") from None
    if isinstance(default, bool):
        if value not in (0, 1):
            raise InvalidConfig(f"SessionOptions: {name} must be True or False, got {value!r}")
        return bool(value)
    if isinstance(default, int):
        low = -1 if name == "log_severity_level" else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InvalidConfig(f"SessionOptions: {name} must be a whole number of {low} or more, got {value!r}")
        return value
    text = getattr(value, "__fspath__", lambda: value)()
    if not isinstance(text, str):
        raise InvalidConfig(f"SessionOptions: {name} must be text, got {type(value).__name__}")
    if name == "preset" and text:
        resolve(preset=text, environ={}, file="off")  # an unknown one is told where it is set
    return text


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidConfig(f"dimension {name!r}: a size is a whole number of 0 or more, got {value!r}")
    return value


def _number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidConfig(f"session config entry {key!r}: {text!r} is not a number") from None


__all__ = [
    "BASE_DIR_ENTRY",
    "EXTERNAL_NAME_ENTRY",
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "SessionOptions",
]
