"""Ranvier: load a model, optimize it, run it, and know where everything ran.

    import ranvier as rv

    session = rv.load("model.onnx")
    outputs = session.run({"x": array})
    print(session.report)

``import ranvier as ort`` runs scripts written for ONNX Runtime. A name is imported when it is first used, so that
``import ranvier`` itself costs next to nothing.
"""

from __future__ import annotations

import gc
import importlib

TYPE_CHECKING = False  # known to type checkers by its name; importing typing for it would double the time
if TYPE_CHECKING:
    from typing import Any

    from ranvier import capi, errors, nn, numpy, optim, quantization, training
    from ranvier.config import Limits, MemoryConfig, ProviderConfig, SessionConfig
    from ranvier.devices import Device, DeviceConfig, DeviceInfo, detect_devices
    from ranvier.dlpack import from_dlpack, to_dlpack
    from ranvier.dtypes import DType
    from ranvier.memory import MemoryTracker, estimate_attention, estimate_tensor
    from ranvier.ops.custom import register_op, unregister_op
    from ranvier.runtime.backend import Backend
    from ranvier.runtime.choice import select_backend
    from ranvier.runtime.control import RunOptions
    from ranvier.runtime.estimates import estimate_model
    from ranvier.runtime.manager import SessionManager
    from ranvier.runtime.ort.binding import IOBinding
    from ranvier.runtime.ort.errors import (
        EPFail,
        Fail,
        InvalidArgument,
        InvalidGraph,
        InvalidProtobuf,
        ModelLoadCanceled,
        ModelLoaded,
        NoModel,
        NoSuchFile,
        RuntimeException,
    )
    from ranvier.runtime.ort.errors import NotImplemented as NotImplemented  # noqa: A004
    from ranvier.runtime.ort.functions import (
        disable_telemetry_events,
        enable_telemetry_events,
        get_build_info,
        get_device,
        get_version_string,
        has_collective_ops,
        preload_dlls,
        print_debug_info,
        set_default_logger_severity,
        set_default_logger_verbosity,
        set_seed,
    )
    from ranvier.runtime.ort.inference_session import InferenceSession
    from ranvier.runtime.ort.meta import ModelMetadata, NodeArg
    from ranvier.runtime.ort.options import ExecutionMode, ExecutionOrder, GraphOptimizationLevel, SessionOptions
    from ranvier.runtime.ort.providers import get_all_providers, get_available_providers
    from ranvier.runtime.ort.value import OrtDevice, OrtValue
    from ranvier.runtime.preferred import backend, set_backend, set_backend_priority
    from ranvier.runtime.session import Session, load
    from ranvier.tensor import (
        Tensor,
        checkpoint,
        custom_gradient,
        grad,
        jit,
        jvp,
        no_grad,
        realise,
        stop_gradient,
        value_and_grad,
        vjp,
    )
    from ranvier.tensor.nn.exporting import export
    from ranvier.tensor.training.imported import trainable

    __version__: str

_SUBMODULES = ("capi", "errors", "nn", "numpy", "optim", "quantization", "training")

# module -> the public names that live there
_HOMES = {
    "config": ("Limits", "MemoryConfig", "ProviderConfig", "SessionConfig"),
    "devices": ("Device", "DeviceConfig", "DeviceInfo", "detect_devices"),
    "dlpack": ("from_dlpack", "to_dlpack"),
    "dtypes": ("DType",),
    "memory": ("MemoryTracker", "estimate_attention", "estimate_tensor"),
    "ops.custom": ("register_op", "unregister_op"),
    "runtime.backend": ("Backend",),
    "runtime.choice": ("select_backend",),
    "runtime.control": ("RunOptions",),
    "runtime.estimates": ("estimate_model",),
    "runtime.ort.inference_session": ("InferenceSession",),
    "runtime.manager": ("SessionManager",),
    "runtime.ort.binding": ("IOBinding",),
    "runtime.ort.errors": (
        "EPFail",
        "Fail",
        "InvalidArgument",
        "InvalidGraph",
        "InvalidProtobuf",
        "ModelLoadCanceled",
        "ModelLoaded",
        "NoModel",
        "NoSuchFile",
        "NotImplemented",
        "RuntimeException",
    ),
    "runtime.ort.functions": (
        "disable_telemetry_events",
        "enable_telemetry_events",
        "get_build_info",
        "get_device",
        "get_version_string",
        "has_collective_ops",
        "preload_dlls",
        "print_debug_info",
        "set_default_logger_severity",
        "set_default_logger_verbosity",
        "set_seed",
    ),
    "runtime.ort.meta": ("ModelMetadata", "NodeArg"),
    "runtime.ort.options": ("ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "SessionOptions"),
    "runtime.ort.providers": ("get_all_providers", "get_available_providers"),
    "runtime.ort.value": ("OrtDevice", "OrtValue"),
    "runtime.preferred": ("backend", "set_backend", "set_backend_priority"),
    "runtime.session": ("Session", "load"),
    "tensor.nn.exporting": ("export",),
    "tensor.training.imported": ("trainable",),
    "tensor": (
        "Tensor",
        "checkpoint",
        "custom_gradient",
        "grad",
        "jit",
        "jvp",
        "no_grad",
        "realise",
        "stop_gradient",
        "value_and_grad",
        "vjp",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

# Names ONNX Runtime has and Ranvier does not, with what to use instead.
_LACKING = {
    "AdapterFormat": "merge LoRA adapters into the model",
    "LoraAdapter": "merge LoRA adapters into the model",
    "ModelCompiler": "a session compiles its model",
    "OrtAllocatorType": "memory is limited by Limits",
    "OrtArenaCfg": "memory is limited by Limits",
    "OrtMemType": "values live in host memory",
    "OrtMemoryInfo": "values live in host memory",
    "OrtSparseFormat": "sparse tensors are held dense",
    "SparseTensor": "sparse tensors are held dense",
    "copy_tensors": "values live in host memory",
    "create_and_register_allocator": "memory is limited by Limits",
    "create_and_register_allocator_v2": "memory is limited by Limits",
    "get_ep_devices": "see get_available_providers",
    "register_execution_provider_library": "providers are Python packages with an entry point",
    "set_global_thread_pool_sizes": "set SessionOptions.intra_op_num_threads",
    "unregister_execution_provider_library": "providers are Python packages with an entry point",
}


def _imported(name: str) -> Any:
    """A module, imported without searches for garbage in between: they find none, and take a tenth of the time.

    What a module is made of stays, so it is put with what is old at once: else the next two searches look through it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collecting:
            # who froze something keeps it frozen; Python 3.12 begins with some hundred of its own
            if hasattr(gc, "freeze") and gc.get_freeze_count() < 1000:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(_imported(f"ranvier.{_HOME[name]}"), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"ranvier.{name}")
    elif name == "__version__":
        from ranvier.runtime.ort.functions import get_version_string

        value = get_version_string()
    else:
        if name.startswith("_"):
            raise AttributeError(f"module 'ranvier' has no attribute {name!r}")
        from ranvier.runtime.ort.errors import lacking

        raise lacking("ranvier", name, _LACKING)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES, "__version__"})


# NotImplemented is left out: a star import must not hide Python's own.
__all__ = [
    "Backend",
    "DType",
    "Device",
    "DeviceConfig",
    "DeviceInfo",
    "EPFail",
    "ExecutionMode",
    "ExecutionOrder",
    "Fail",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "Limits",
    "MemoryConfig",
    "MemoryTracker",
    "ModelLoadCanceled",
    "ModelLoaded",
    "ModelMetadata",
    "NoModel",
    "NoSuchFile",
    "NodeArg",
    "OrtDevice",
    "OrtValue",
    "ProviderConfig",
    "RunOptions",
    "RuntimeException",
    "Session",
    "SessionConfig",
    "SessionManager",
    "SessionOptions",
    "Tensor",
    "__version__",
    "backend",
    "capi",
    "checkpoint",
    "custom_gradient",
    "detect_devices",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "errors",
    "estimate_attention",
    "estimate_model",
    "estimate_tensor",
    "export",
    "from_dlpack",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_version_string",
    "grad",
    "has_collective_ops",
    "jit",
    "jvp",
    "load",
    "nn",
    "no_grad",
    "numpy",
    "optim",
    "preload_dlls",
    "print_debug_info",
    "quantization",
    "realise",
    "register_op",
    "select_backend",
    "set_backend",
    "set_backend_priority",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_seed",
    "stop_gradient",
    "to_dlpack",
    "trainable",
    "training",
    "unregister_op",
    "value_and_grad",
    "vjp",
]
