"""``InferenceSession``: a session behind ONNX Runtime's interface, so that its scripts run as they are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.devices import usable_cores
from ranvier.errors import DimensionMismatch, InvalidConfig, NotSupported, RanvierError, nearest
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.graph.types import Type
from ranvier.logs import logger
from ranvier.providers.base import ExecutionProvider
from ranvier.providers.registry import COMPLETE, REGISTRY
from ranvier.runtime.control import SHRINK_ENTRY, UNSYNCHRONIZED_ENTRY, RunOptions
from ranvier.runtime.ort.binding import IOBinding
from ranvier.runtime.ort.errors import lacking, raises_ort, raises_runtime_error
from ranvier.runtime.ort.meta import ModelMetadata, NodeArg
from ranvier.runtime.ort.optimizers import passes_of
from ranvier.runtime.ort.options import BASE_DIR_ENTRY, EXTERNAL_NAME_ENTRY, SessionOptions
from ranvier.runtime.ort.overrides import fix_denoted, fix_dims, replace_initializers
from ranvier.runtime.ort.places import memory_among
from ranvier.runtime.ort.providers import ProviderList, ort_name, parse_providers
from ranvier.runtime.ort.trace import save_ort_trace
from ranvier.runtime.ort.value import OrtValue, unwrap
from ranvier.runtime.profile import Profiler
from ranvier.runtime.report import Report
from ranvier.runtime.session import Session

Callback = Callable[[list[Any], Any, str], Any]

_LACKING = {
    "get_input_epdevices": "all inputs are in host memory",
    "get_input_memory_infos": "all inputs are in host memory",
    "get_output_memory_infos": "all outputs are in host memory",
    "get_provider_graph_assignment_info": "see .report",
    "get_tuning_results": "",
    "set_tuning_results": "",
    "set_ep_dynamic_options": "options are fixed when a session is made",
    "release_captured_graph": "",
    "run_with_ortvaluevector": "use run_with_ort_values",
}


class InferenceSession:
    """Runs one model; see ONNX Runtime's documentation, and :class:`~ranvier.runtime.session.Session` underneath.

    ``providers`` are names, or pairs of a name and its options, in order of preference; ONNX Runtime's names and
    Ranvier's are both understood. Without them, everything the machine has is used. Keyword arguments are options of
    :class:`~ranvier.config.SessionConfig`, ``preset``, and ONNX Runtime's ``disabled_optimizers`` and
    ``enable_fallback``.
    """

    @raises_ort
    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: SessionOptions | None = None,
        providers: ProviderList | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if sess_options is not None and not isinstance(sess_options, SessionOptions):
            raise InvalidConfig(f"sess_options must be a SessionOptions, got {type(sess_options).__name__}")
        if isinstance(path_or_bytes, Graph):
            raise NotSupported("InferenceSession takes a model file, its bytes or a message; for a Graph use Session")
        self._model = path_or_bytes.read() if hasattr(path_or_bytes, "read") else path_or_bytes
        self._options = SessionOptions() if sess_options is None else sess_options
        self._changes = _changes(kwargs)  # to the configuration that the options make
        self._lock = threading.Lock()
        self._apart: _AdaptedSession | None = None  # with ``dims_apart``, where a call gave sizes that differ
        self._pool: ThreadPoolExecutor | None = None
        self._profiler: Profiler | None = None
        self._profiling_since = 0
        _check_save(self._options)
        self._choose(providers, provider_options)
        self._session = self._load()
        if self._options.enable_profiling:
            self._profiler = Profiler(self._session)
            self._profiling_since = time.time_ns()
            self._session._attach(self._profiler)
        if self._options.optimized_model_filepath:
            _save(self._session.optimized(), self._options)

    def _choose(self, providers: ProviderList | None, options: Sequence[Mapping[str, Any]] | None) -> None:
        if providers:
            names, given = parse_providers(providers, options)
            self._changes.update(providers=names, provider_options=given)
        elif options:
            raise InvalidConfig("provider_options are given, but no providers they belong to")
        else:
            self._changes.pop("providers", None)
            self._changes.pop("provider_options", None)

    def _load(self, **changes: Any) -> _AdaptedSession:
        return _AdaptedSession(self._model, self._options.config({**self._changes, **changes}), self._options)

    def _reload(self) -> None:
        old = self._session
        self._take(self._load())
        old.close()

    def _take(self, session: _AdaptedSession) -> None:
        """Let it be the one that runs, in the place of the one before."""
        if self._profiler is not None:
            session._attach(self._profiler)
        self._session, self._apart = session, None

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session underneath, for what ONNX Runtime has no word for."""
        return self._session

    @property
    def report(self) -> Report:
        """Where every node runs, and why."""
        return self._session.report

    def get_inputs(self) -> list[NodeArg]:
        return [NodeArg.of(name, self._session.given[name]) for name in self._session.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [NodeArg.of(name, self._session.declared(name, found)) for name, found in self._session.outputs.items()]

    def get_overridable_initializers(self) -> list[NodeArg]:
        return [NodeArg.of(name, found) for name, found in self._session.optional_inputs.items()]

    def get_modelmeta(self) -> ModelMetadata:
        return ModelMetadata.of(self._session.graph)

    def get_session_options(self) -> SessionOptions:
        return self._options

    # -- providers ----------------------------------------------------------------------------------------------------

    def get_providers(self) -> list[str]:
        """The providers in use, by ONNX Runtime's names where it has them.

        A provider that is there only because another's name promises every operator is not told of.
        """
        return [ort_name(provider) for provider in self._listed()]

    def get_provider_options(self) -> dict[str, dict[str, Any]]:
        given = self._session.config.provider_options
        return {ort_name(p): dict(given.get(p.name, {})) for p in self._listed()}

    def _listed(self) -> list[ExecutionProvider]:
        used = self._session.providers
        completing = {COMPLETE[name] for name in map(ort_name, used) if name in COMPLETE}
        asked = {REGISTRY.resolve(name) for name in self._session.config.providers if name != "auto"}
        return [p for p in used if p.name not in completing - asked]

    @raises_runtime_error
    def set_providers(
        self, providers: ProviderList | None = None, provider_options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Load the model again, with other providers."""
        self._choose(providers, provider_options)
        self._reload()

    @raises_ort
    def disable_fallback(self) -> None:
        """From now on a provider that fails is an error, whoever else could do its work."""
        self._set_fallback("off")

    @raises_ort
    def enable_fallback(self) -> None:
        """Let the session's other providers take over when one fails."""
        self._set_fallback("on")

    def _set_fallback(self, wanted: str) -> None:
        self._changes["fallback"] = wanted
        now = self._session.config.fallback
        if now != wanted and (now == "off" or len(self._session.providers) > 1):
            self._reload()

    # -- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Any]:
        """The outputs in the order asked for; None asks for all of them."""
        if output_names and tuple(output_names) == self._session.output_names:
            output_names = None
        if run_options is None and not output_names:
            found = self._session.run_again(input_feed)
            if found is not None:
                return list(found.values())
        return self._run(output_names, input_feed, run_options)

    @raises_ort
    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Like ``run``, with OrtValues on both sides."""
        session = self._session
        names = list(output_names or session.output_names)
        results = self._run(names, input_dict_ort_values, run_options)
        return [_wrapped(result, session.outputs[name]) for name, result in zip(names, results)]

    @raises_runtime_error
    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run from the bound inputs into the bound outputs, and wait for those on a GPU, unless the options have
        ``disable_synchronize_execution_providers``."""
        names = iobinding.output_names()
        given = iobinding.inputs()
        if not iobinding.stays():
            iobinding.receive(dict(zip(names, self._run(names, given, run_options, iobinding.buffers()))))
            return
        options, tensors = _checked(run_options), self._unwrapped(given)
        iobinding.receive(self._asked(lambda session: session.run_in_place(tensors, names, options)))
        if run_options is None or run_options.get_run_config_entry(UNSYNCHRONIZED_ENTRY) != "1":
            iobinding.synchronize_outputs()

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callback,
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Run in another thread, then call ``callback(results, user_data, error)``; ``error`` is empty on success."""

        def work() -> None:
            results: list[Any] = []
            problem = ""
            try:
                results = self._run(output_names, input_feed, run_options)
            except Exception as error:
                problem = str(error) or type(error).__name__
            try:
                callback(results, user_data, problem)
            except Exception:
                logger.exception("the callback of run_async failed")

        self._executor().submit(work)

    @raises_ort
    def _run(
        self,
        names: Sequence[str] | None,
        feed: Mapping[str, Any],
        options: RunOptions | None,
        into: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        _checked(options)
        given = self._unwrapped(feed) if isinstance(feed, Mapping) else feed
        wanted = list(dict.fromkeys(names)) if names else None
        results = self._asked(lambda session: session.run(given, wanted, options, into))
        if options is not None and options.get_run_config_entry(SHRINK_ENTRY):
            self._session.trim()
        return [results[name] for name in names] if names else list(results.values())

    def _asked(self, call: Callable[[Session], dict[str, Any]]) -> dict[str, Any]:
        """What the session answers. ONNX Runtime lets sizes differ that the model gives one name: where they do, and
        the model can be run so, that is how it is run from then on."""
        session = self._session
        try:
            return call(session)
        except DimensionMismatch as error:
            with self._lock:
                if self._apart is None:
                    self._apart = self._load(dims_apart=True)  # kept: who gives wrong sizes may do it again
                other = self._apart
            try:
                found = call(other)
            except RanvierError:
                raise error from None
            with self._lock:
                if self._session is session:  # which is not closed: other threads may be in it
                    self._take(other)
            return found

    def _unwrapped(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """What the session takes: tensors of a GPU that none of its providers uses come by way of the host."""
        providers = self._session.providers
        found: dict[str, Any] = {}
        for name, x in feed.items():
            foreign = isinstance(x, OrtValue) and x.memory is not None and memory_among(x.device, providers) is None
            found[name] = x.numpy() if foreign else unwrap(x)
        return found

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                workers = self._session.config.threads or usable_cores()
                self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ranvier-async")
            return self._pool

    def io_binding(self) -> IOBinding:
        return IOBinding(self)

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """A tensor of zeros, to be bound."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)

    # -- profiling ----------------------------------------------------------------------------------------------------

    def end_profiling(self) -> str:
        """Write the trace, as ONNX Runtime writes it, and return the name of its file; an empty name when nothing was
        recorded."""
        with self._lock:
            profiler, self._profiler = self._profiler, None
        if profiler is None:
            return ""
        self._session._detach(profiler)
        name = f"{self._options.profile_file_prefix}{datetime.now():%Y-%m-%d_%H-%M-%S_%f}.json"
        save_ort_trace(profiler, name)
        return name

    def get_profiling_start_time_ns(self) -> int:
        """When profiling began, in nanoseconds since the epoch; 0 when it did not."""
        return self._profiling_since

    def __getattr__(self, name: str) -> Any:
        raise lacking("InferenceSession", name, _LACKING)

    def __repr__(self) -> str:
        return f"<InferenceSession {self._session.report.model!r} on {', '.join(self.get_providers())}>"


class _AdaptedSession(Session):
    """A session whose graph is changed, between loading and optimization, as the options ask."""

    def __init__(self, model: Any, config: SessionConfig, options: SessionOptions) -> None:
        self._adapt = options
        self._declared: dict[str, Type | None] = {}
        self.given: dict[str, Type | None] = {}  # types of the inputs, with the names of dims that the model has
        super().__init__(model, config, base_dir=options.entry(BASE_DIR_ENTRY))

    def _load(self, model: Any, base_dir: str | os.PathLike[str] | None) -> Graph:
        graph = super()._load(model, base_dir)
        options = self._adapt
        fixed = dict(options.free_dimensions)
        if options.initializers:
            replace_initializers(graph, options.initializers)
        if options.free_denotations:
            fixed.update(fix_denoted(graph, options.free_denotations))
        if options.free_dimensions:
            fix_dims(graph, options.free_dimensions)
        declared: Mapping[str, Type | None] = graph.metadata["declared_outputs"]
        self._declared = {n: t.bind(fixed) for n, t in declared.items() if t is not None}
        self.given = {value.name: value.type for value in graph.inputs}
        return graph

    def declared(self, name: str, found: Type | None) -> Type | None:
        """An output's type with the names of dims that the model itself uses, sharpened by what was inferred."""
        declared = self._declared.get(name)
        return found if declared is None else declared.merge(found)


def _checked(options: RunOptions | None) -> RunOptions | None:
    if options is not None and not isinstance(options, RunOptions):
        raise InvalidConfig(f"run_options must be a RunOptions, got {type(options).__name__}")
    return options


def _wrapped(result: Any, declared: Type | None) -> OrtValue:
    """A tensor tells its type; an empty list or an empty optional does not, so the model's word is kept."""
    return OrtValue(result, None if isinstance(result, np.ndarray) else declared)


def _changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a session as options of SessionConfig."""
    known = [f.name for f in fields(SessionConfig) if f.name not in ("providers", "provider_options")] + ["preset"]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "disabled_optimizers":
            found["disabled_passes"] = passes_of((value,) if isinstance(value, str) else tuple(value or ()))
        elif name == "enable_fallback":
            found["fallback"] = "on" if value else "off"
        elif name in known:
            found[name] = value
        else:
            hint = nearest(name, [*known, "disabled_optimizers", "enable_fallback"])
            raise InvalidConfig(f"InferenceSession: unknown option {name!r}{hint}")
    return found


def _check_save(options: SessionOptions) -> None:
    """Refuse before loading what could not be saved afterwards."""
    path, data = options.optimized_model_filepath, options.entry(EXTERNAL_NAME_ENTRY)
    if not path:
        return
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InvalidConfig(f"optimized_model_filepath: {str(folder)!r} is not a folder")
    if data and data != f"{Path(path).name}.data":
        raise NotSupported(f"{EXTERNAL_NAME_ENTRY}: weights are written to '{Path(path).name}.data', not to {data!r}")


def _save(graph: Graph, options: SessionOptions) -> None:
    external = True if options.entry(EXTERNAL_NAME_ENTRY) else None
    onnx_format.save(graph, options.optimized_model_filepath, external_data=external)


__all__ = ["InferenceSession"]
