"""Providers by ONNX Runtime's names: the lists scripts pass, and the names they get back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.errors import InvalidConfig, ProviderUnavailable
from ranvier.logs import logger
from ranvier.providers.base import ExecutionProvider
from ranvier.providers.registry import FOREIGN, REGISTRY
from ranvier.runtime.program import provider_options

ProviderList = Sequence[str | tuple[str, Mapping[str, Any]]]


def ort_name(provider: ExecutionProvider) -> str:
    """ONNX Runtime's name where it has one, else Ranvier's."""
    return next((alias for alias in provider.aliases if alias.endswith("ExecutionProvider")), provider.name)


def get_available_providers() -> list[str]:
    """Providers that can be used here, in the order a session would ask them."""
    return [ort_name(REGISTRY.get(name)) for name in REGISTRY.available()]


def get_all_providers() -> list[str]:
    """Every provider whose name is understood, here or not."""
    found: list[str] = []
    for name in REGISTRY.names():
        try:
            found.append(ort_name(REGISTRY.get(name)))
        except ProviderUnavailable:
            found.append(name)
    return [*found, *(name for name in FOREIGN if name not in found)]


def parse_providers(
    providers: ProviderList, options: Sequence[Mapping[str, Any]] | None
) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Names in order, and options by Ranvier's name of the provider."""
    entries = [providers] if isinstance(providers, str) else list(providers)
    if options is not None and len(options) != len(entries):
        raise InvalidConfig(f"{len(entries)} providers and {len(options)} provider_options: give one for each")
    names: list[str] = []
    given: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(entries):
        name, own = _entry(entry)
        if own is not None and options is not None:
            raise InvalidConfig(f"provider {name!r}: options are given both beside its name and as provider_options")
        chosen = own if own is not None else options[position] if options is not None else {}
        chosen = _translated(name, chosen)
        names.append(name)
        if name != "auto":
            given.setdefault(REGISTRY.resolve(name), {}).update(_checked(name, chosen))
        elif chosen:
            raise InvalidConfig("provider 'auto' stands for several and takes no options")
    return tuple(names), {name: chosen for name, chosen in given.items() if chosen}


def _entry(entry: Any) -> tuple[str, Mapping[str, Any] | None]:
    if isinstance(entry, str):
        return entry, None
    if isinstance(entry, tuple | list) and len(entry) == 2:
        name, own = entry
        if isinstance(name, str) and isinstance(own, Mapping):
            return name, own
    raise InvalidConfig(f"a provider is a name or a pair of a name and its options, got {entry!r}")


# options of ONNX Runtime's CUDA provider: those that have a name here, and those that say how, not what, it computes
_CUDA_NAMES = {"device_id": "device", "gpu_mem_limit": "memory_limit", "enable_cuda_graph": "cuda_graphs"}
_CUDA_IDLE = {
    *("arena_extend_strategy", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d"),
    *("do_copy_in_default_stream", "prefer_nhwc", "tunable_op_enable", "tunable_op_tuning_enable"),
    *("tunable_op_max_tuning_duration_ms", "enable_skip_layer_norm_strict_mode", "fuse_conv_bias", "sdpa_kernel"),
}
_NO_LIMIT = str(2**64 - 1)


# the same of its CPU provider, and of OpenVINO's
_CPU_IDLE = {"arena_extend_strategy", "use_arena"}
_OPENVINO_NAMES = {"device_type": "plugin"}
_OPENVINO_IDLE = {"cache_dir", "enable_opencl_throttling", "model_priority", "num_of_threads", "num_streams"}
_OPENVINO_PRECISIONS = {"accuracy": "f32", "fp16": "f16", "fp32": "f32"}

_NAMES = {"cuda": _CUDA_NAMES, "openvino": _OPENVINO_NAMES}
_IDLE = {"cpu": _CPU_IDLE, "cuda": _CUDA_IDLE, "openvino": _OPENVINO_IDLE}


def _translated(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options as the provider here calls them."""
    kind = REGISTRY.resolve(name).partition(":")[0] if options and name != "auto" else ""
    if kind not in _IDLE:
        return options
    found: dict[str, Any] = {}
    for key, value in options.items():
        if key in _IDLE[kind]:
            logger.info("provider %r: the option %r changes nothing here", name, key)
        elif kind == "cuda" and key == "use_tf32":
            found["precision"] = "tf32" if str(value).lower() in ("1", "true") else "f32"
        elif kind == "openvino" and key == "precision":
            found[key] = _OPENVINO_PRECISIONS.get(str(value).lower(), value)
        elif key != "gpu_mem_limit" or str(value) != _NO_LIMIT:
            found[_NAMES.get(kind, {}).get(key, key)] = value
    return found


def _checked(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, if the provider has them; those of a provider that is absent are nobody's business."""
    try:
        provider = REGISTRY.get(name, options)
    except ProviderUnavailable:
        return {}
    provider_options(provider, options)
    return options


__all__ = ["ProviderList", "get_all_providers", "get_available_providers", "ort_name", "parse_providers"]
