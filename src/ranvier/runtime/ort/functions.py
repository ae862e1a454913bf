"""The functions of ONNX Runtime's module: logging, seeds, versions."""

from __future__ import annotations

import logging
import platform
from typing import overload

from ranvier import devices
from ranvier.devices import Device, DeviceConfig
from ranvier.errors import InvalidConfig
from ranvier.logs import logger
from ranvier.ops import seed as op_seed
from ranvier.runtime.ort.errors import raises_runtime_error

_SEVERITIES = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


@raises_runtime_error
def set_default_logger_severity(severity: int) -> None:
    """0 verbose, 1 info, 2 warning, 3 error, 4 fatal."""
    if severity not in range(len(_SEVERITIES)):
        raise InvalidConfig(f"the severity of the log is 0 (verbose) to 4 (fatal), got {severity!r}")
    logger.setLevel(_SEVERITIES[severity])


@raises_runtime_error
def set_default_logger_verbosity(verbosity: int) -> None:
    """How much the log tells at severity 0: each step opens one level below Python's DEBUG."""
    if isinstance(verbosity, bool) or not isinstance(verbosity, int) or verbosity < 0:
        raise InvalidConfig(f"the verbosity of the log is 0 or more, got {verbosity!r}")
    if logger.level != logging.NOTSET and logger.level <= logging.DEBUG:
        logger.setLevel(max(1, logging.DEBUG - verbosity))


@raises_runtime_error
def set_seed(seed: int) -> None:
    """Make random operators without a seed of their own draw a repeatable series."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidConfig(f"a seed is a whole number of 0 or more, got {seed!r}")
    op_seed.set_seed(seed)


@overload
def get_device() -> str: ...
@overload
def get_device(config: DeviceConfig) -> Device: ...
def get_device(config: DeviceConfig | None = None) -> str | Device:
    """With a configuration, the device it leads to: CUDA where that can be used, else the CPU.

    Without one, ONNX Runtime's question where values live: always in the host's memory, ``"CPU"``.
    """
    return "CPU" if config is None else devices.get_device(config)


def get_version_string() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ranvier")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


def get_build_info() -> str:
    """What runs here, for bug reports."""
    import numpy
    import onnx

    parts = {
        "ranvier": get_version_string(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "onnx": onnx.__version__,
        "platform": platform.platform(),
    }
    return "Ranvier Build Info: " + ", ".join(f"{name}={text}" for name, text in parts.items())


def print_debug_info() -> None:
    """Versions and providers on standard output."""
    from ranvier.runtime.ort.providers import get_available_providers

    print(get_build_info())
    print("Available providers:", ", ".join(get_available_providers()))


def enable_telemetry_events() -> None:
    """Nothing: there is no telemetry."""


def disable_telemetry_events() -> None:
    """Nothing: there is no telemetry."""


def has_collective_ops() -> bool:
    return False


def preload_dlls(*args: object, **kwargs: object) -> None:
    """Nothing: no libraries wait to be loaded."""


__all__ = [
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
]
