"""Ranvier: load a model, optimize it, run it, and know where everything ran.

>>> import ranvier as rv                                     # doctest: +SKIP
>>> session = rv.load("model.onnx")                          # doctest: +SKIP
>>> outputs = session.run({"x": array})                      # doctest: +SKIP

``import ranvier as ort`` runs scripts written for ONNX Runtime. Names are imported when they are first used, so that
``import ranvier`` itself costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranvier import capi as capi
    from ranvier import errors as errors
    from ranvier.config import Limits as Limits
    from ranvier.config import SessionConfig as SessionConfig
    from ranvier.dlpack import from_dlpack as from_dlpack
    from ranvier.dlpack import to_dlpack as to_dlpack
    from ranvier.dtypes import DType as DType
    from ranvier.ops.custom import register_op as register_op
    from ranvier.ops.custom import unregister_op as unregister_op
    from ranvier.runtime.backend import Backend as Backend
    from ranvier.runtime.control import RunOptions as RunOptions
    from ranvier.runtime.inference_session import InferenceSession as InferenceSession
    from ranvier.runtime.manager import SessionManager as SessionManager
    from ranvier.runtime.ort_binding import IOBinding as IOBinding
    from ranvier.runtime.ort_errors import EPFail as EPFail
    from ranvier.runtime.ort_errors import Fail as Fail
    from ranvier.runtime.ort_errors import InvalidArgument as InvalidArgument
    from ranvier.runtime.ort_errors import InvalidGraph as InvalidGraph
    from ranvier.runtime.ort_errors import InvalidProtobuf as InvalidProtobuf
    from ranvier.runtime.ort_errors import ModelLoadCanceled as ModelLoadCanceled
    from ranvier.runtime.ort_errors import ModelLoaded as ModelLoaded
    from ranvier.runtime.ort_errors import NoModel as NoModel
    from ranvier.runtime.ort_errors import NoSuchFile as NoSuchFile
    from ranvier.runtime.ort_errors import NotImplemented as NotImplemented
    from ranvier.runtime.ort_errors import RuntimeException as RuntimeException
    from ranvier.runtime.ort_functions import disable_telemetry_events as disable_telemetry_events
    from ranvier.runtime.ort_functions import enable_telemetry_events as enable_telemetry_events
    from ranvier.runtime.ort_functions import get_build_info as get_build_info
    from ranvier.runtime.ort_functions import get_device as get_device
    from ranvier.runtime.ort_functions import get_version_string as get_version_string
    from ranvier.runtime.ort_functions import has_collective_ops as has_collective_ops
    from ranvier.runtime.ort_functions import preload_dlls as preload_dlls
    from ranvier.runtime.ort_functions import print_debug_info as print_debug_info
    from ranvier.runtime.ort_functions import set_default_logger_severity as set_default_logger_severity
    from ranvier.runtime.ort_functions import set_default_logger_verbosity as set_default_logger_verbosity
    from ranvier.runtime.ort_functions import set_seed as set_seed
    from ranvier.runtime.ort_meta import ModelMetadata as ModelMetadata
    from ranvier.runtime.ort_meta import NodeArg as NodeArg
    from ranvier.runtime.ort_options import ExecutionMode as ExecutionMode
    from ranvier.runtime.ort_options import ExecutionOrder as ExecutionOrder
    from ranvier.runtime.ort_options import GraphOptimizationLevel as GraphOptimizationLevel
    from ranvier.runtime.ort_options import SessionOptions as SessionOptions
    from ranvier.runtime.ort_providers import get_all_providers as get_all_providers
    from ranvier.runtime.ort_providers import get_available_providers as get_available_providers
    from ranvier.runtime.ort_value import OrtDevice as OrtDevice
    from ranvier.runtime.ort_value import OrtValue as OrtValue
    from ranvier.runtime.session import Session as Session
    from ranvier.runtime.session import load as load

    __version__: str
