"""AutoRound: tensors as GPTQ or AWQ have them, by the packing that the settings name."""

from __future__ import annotations

from typing import Any

from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.weights.quantized.packed import read_awq, read_gptq
from ranvier.weights.quantized.patterns import matches
from ranvier.weights.quantized.tensors import Config, Tensors

METHOD = "auto-round"
_LESS_ONE = ("auto", "auto_round:auto_gptq", "auto_round:gptq")  # zero points, as GPTQ's first format stores them
_AS_THEY_ARE = ("auto_round",)
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_INPUTS = ("rotation_config", "spinquant_config")  # of layers whose inputs are turned before they are multiplied
_PATTERN = set("*+?^$()[]{}|\\")  # what no name of a layer has


def read_auto_round(layer: str, tensors: Tensors, config: Config) -> Quantized:
    """``auto_round:gptqmodel`` is not read: releases before 0.6 stored its zero points less one, later ones do not."""
    packing = _packing(layer, config)
    settings = {**config, **_own(layer, config)}
    kind, rounded = settings.get("data_type") or "int", int(settings.get("act_bits") or 16)
    if kind != "int" or rounded <= 8:
        raise WeightError(f"layer {layer!r}: unknown data_type of {METHOD} {kind!r}, with inputs of {rounded} bits")
    for turned in _INPUTS:
        if settings.get(turned):
            raise WeightError(f"layer {layer!r}: {METHOD} turns its inputs ({turned}), which weights alone do not tell")
    known = {name: settings[name] for name in ("bits", "group_size") if settings.get(name) is not None}
    if packing in _AWQ:
        return read_awq(layer, tensors, known)
    form = "gptq_v2" if packing in _AS_THEY_ARE else "gptq"
    return read_gptq(layer, tensors, {**known, "checkpoint_format": form})


def _packing(layer: str, config: Config) -> str:
    """Before there was ``packing_format``, ``backend`` had other words for it; where neither is told, it is GPTQ's."""
    packing = str(config.get("packing_format") or "auto")
    if packing not in (*_LESS_ONE, *_AS_THEY_ARE, *_AWQ):
        raise WeightError(f"layer {layer!r}: unknown packing_format of {METHOD} {packing!r}")
    if not config.get("packing_format") and config.get("backend", "auto") != "auto":
        raise WeightError(f"layer {layer!r}: unknown packing of {METHOD}: backend {config['backend']!r}")
    return packing


def _own(layer: str, config: Config) -> dict[str, Any]:
    """Settings of a layer that differ, by its name or else by a pattern that is found in it."""
    named = config.get("extra_config") or {}
    if layer in named:
        return dict(named[layer])
    for pattern, settings in named.items():
        if settings and _PATTERN.intersection(pattern) and matches(f".*(?:{pattern})", layer):
            return dict(settings)
    return {}
