"""What ``ranvier bench`` can measure: this runtime, and others that may be installed, behind one small interface.

A runner is made inside a process of its own; nothing here imports a peer before its runner is made.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors that the model will be given
SELF = "ranvier"

# name -> (module that must be installed, "module:class" of the runner)
KNOWN: dict[str, tuple[str, str]] = {
    SELF: ("ranvier", "ranvier.cli.peers:RanvierRunner"),
    "onnxruntime": ("onnxruntime", "ranvier.cli.peers:OnnxRuntimeRunner"),
    "openvino": ("openvino", "ranvier.cli.peers:OpenVinoRunner"),
}


class Runner(Protocol):
    """One runtime with one model loaded on the CPU."""

    @property
    def version(self) -> str: ...

    def __init__(self, model: str, threads: int, options: Mapping[str, Any], shapes: Shapes) -> None: ...

    @staticmethod
    def prepare() -> None:
        """Import what the runtime is made of, so that loading a model can be timed without that."""
        ...

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name."""
        ...

    def facts(self) -> dict[str, Any]:
        """What else is worth reporting, as plain data."""
        ...


def installed(name: str) -> bool:
    return importlib.util.find_spec(KNOWN[name][0]) is not None


class RanvierRunner:
    """This runtime. ``options`` are those of a session, one by one, as plain data."""

    def __init__(self, model: str, threads: int, options: Mapping[str, Any], shapes: Shapes) -> None:
        from ranvier.config import SessionConfig
        from ranvier.runtime.session import Session

        self._session = Session(model, SessionConfig.default(**{**options, "threads": threads}))

    @property
    def version(self) -> str:
        from ranvier.cli.versions import ranvier_version

        return ranvier_version()

    @staticmethod
    def prepare() -> None:
        importlib.import_module("ranvier.runtime.session")  # what ``ranvier.load`` imports when it is first used
        registry = importlib.import_module("ranvier.providers.registry").REGISTRY
        for name in registry.available(auto=True):
            registry.get(name).capability()
        importlib.import_module(
            "ranvier.providers.cpu.lower.index"
        ).LOWERINGS.table()  # else each is imported when needed

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self._session.run(inputs)

    def facts(self) -> dict[str, Any]:
        report = self._session.report
        return {"nodes": dict(report.by_provider()), "precisions": dict(report.by_precision())}


class OnnxRuntimeRunner:
    """ONNX Runtime's CPU provider with its default optimizations."""

    def __init__(self, model: str, threads: int, options: Mapping[str, Any], shapes: Shapes) -> None:
        import onnxruntime

        choices = onnxruntime.SessionOptions()
        choices.intra_op_num_threads = threads
        choices.log_severity_level = 3
        self.version = onnxruntime.__version__
        self._session = onnxruntime.InferenceSession(model, choices, providers=["CPUExecutionProvider"])
        self._names = [each.name for each in self._session.get_outputs()]

    @staticmethod
    def prepare() -> None:
        importlib.import_module("onnxruntime")

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, self._session.run(None, dict(inputs))))

    def facts(self) -> dict[str, Any]:
        return {}


class OpenVinoRunner:
    """OpenVINO on the CPU, tuned for latency, in float32: on some processors it would choose bfloat16 by itself.

    ``options`` may name another precision, which is then asked for as it is of ours. It is told the shapes
    beforehand, as its users are advised to: with symbolic sizes it is slower, by up to twice.
    """

    def __init__(self, model: str, threads: int, options: Mapping[str, Any], shapes: Shapes) -> None:
        import openvino  # type: ignore[import-not-found,unused-ignore]

        hint = {"bf16": "bf16", "fp16": "f16"}.get(options.get("precision", ""), "f32")
        choices = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
        core = openvino.Core()
        try:
            network = core.read_model(model)
            network.reshape({name: list(shape) for name, shape in shapes.items()})
            compiled = core.compile_model(network, "CPU", choices)
            self._sizes = "fixed"
        except RuntimeError:  # some models do not allow that
            compiled = core.compile_model(model, "CPU", choices)
            self._sizes = "symbolic"
        self.version = openvino.__version__.partition("-")[0]  # the rest names a commit
        self._precision = str(compiled.get_property("INFERENCE_PRECISION_HINT").to_string())
        self._request = compiled.create_infer_request()
        # an output may have gone by several names in the file, of which the model's interface is one
        self._names = [sorted(each.get_names()) for each in compiled.outputs]

    @staticmethod
    def prepare() -> None:
        importlib.import_module("openvino")

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self._request.infer(dict(inputs))
        found: dict[str, Any] = {}
        for k, names in enumerate(self._names):
            found |= dict.fromkeys(names, self._request.get_output_tensor(k).data.copy())
        return found

    def facts(self) -> dict[str, Any]:
        return {"sizes": self._sizes, "precision": self._precision}
