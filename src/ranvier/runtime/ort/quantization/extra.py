"""``extra_options``: what scripts say by names in a dictionary. Nothing of it is dropped without a word.

An option is honoured; or it has one value that is the same here, and others are refused; or it says nothing about
results, and is let be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ranvier.errors import InvalidConfig, nearest
from ranvier.logs import logger
from ranvier.records import dataclass

_BODIES_OPTION = "EnableSubgraph"
_INSTEAD = "`ranvier quantize` evens out channels by itself"
# options with the one value that is the same here, and what there is instead of others
_FIXED: dict[str, tuple[Any, str]] = {
    "ActivationRestrictedAsymmetric": (False, "a zero point lies where the range puts it; see ActivationSymmetric"),
    "AddQDQPairToWeight": (False, "weights are stored as codes"),
    "BlockSize": (0, "for weights in blocks see MatMulNBitsQuantizer"),
    "OpTypesToExcludeOutputQuantization": ([], "leave nodes out by nodes_to_exclude"),
    "QuantizeBias": (True, "biases are whole numbers of the sums' own scale"),
    "SmoothQuant": (False, _INSTEAD),
    "TensorQuantOverrides": ({}, "leave nodes out by nodes_to_exclude"),
    "UseQDQContribOps": (False, "the standard's operators are written"),
    "WeightSymmetric": (True, "codes of weights lie evenly about zero"),
}
_STATIC_FIXED: dict[str, tuple[Any, str]] = {
    _BODIES_OPTION: (
        False,
        "layers in bodies of If and Loop stay in float; `ranvier quantize` codes them",
    ),
}
_DYNAMIC_FIXED: dict[str, tuple[Any, str]] = {
    "ActivationSymmetric": (False, "DynamicQuantizeLinear finds a zero point"),
    "MatMulConstBOnly": (True, "products of two activations stay in float"),
}
# axes of output channels, which weights have scales along
_AXES = {"Conv": (0,), "MatMul": (1, -1), "Gemm": (0, 1, -1)}
# what has no bearing on results here
_IDLE = {
    *("DedicatedQDQPair", "DefaultTensorType", "ForceQuantizeNoInputCheck", "QDQDisableWeightAdjustForInt32Bias"),
    *("QDQKeepRemovableActivations", "SmoothQuantAlpha", "SmoothQuantFolding", "extra.Sigmoid.nnapi"),
}
_STATIC_IDLE = {"CalibMaxIntermediateOutputs", "MatMulConstBOnly"}  # the second is so in any case
_OF_SAMPLES = {
    *("CalibMovingAverage", "CalibMovingAverageConstant", "CalibPercentile", "CalibStridedMinMax"),
    *("CalibTensorRangeSymmetric", "MinimumRealRange"),
}
_AXES_OPTION = "QDQOpTypePerChannelSupportToAxis"


@dataclass(frozen=True)
class StaticExtra:
    """The options that are honoured where ranges come from samples."""

    symmetric: bool = False  # codes of activations
    symmetric_ranges: bool = False
    averaged: bool = False  # ranges of runs, instead of the widest
    averaging: float = 0.01  # weight of a part of the samples in the average of parts
    part: int = 0  # samples of a part; 0: all
    percentile: float = 99.999
    least_range: float = 0.0


def static_extra(given: Mapping[str, Any] | None) -> StaticExtra:
    options = _checked(given, {**_FIXED, **_STATIC_FIXED}, _IDLE | _STATIC_IDLE, {"ActivationSymmetric", *_OF_SAMPLES})
    defaults = StaticExtra()
    return StaticExtra(
        bool(options.get("ActivationSymmetric", False)),
        bool(options.get("CalibTensorRangeSymmetric", False)),
        bool(options.get("CalibMovingAverage", False)),
        _number(options, "CalibMovingAverageConstant", defaults.averaging, 0, 1) or 0.0,
        int(_number(options, "CalibStridedMinMax", None, 1, whole=True) or 0),
        _number(options, "CalibPercentile", defaults.percentile, 50, 100) or 0.0,
        _number(options, "MinimumRealRange", None, 0) or 0.0,
    )


def with_bodies(given: Mapping[str, Any] | None) -> bool:
    """Whether layers in bodies of branches and loops are meant too: the one option that is honoured where ranges come
    with the data; what asks for something else is refused."""
    idle = _IDLE | _OF_SAMPLES | {"CalibMaxIntermediateOutputs"}
    options = _checked(given, {**_FIXED, **_DYNAMIC_FIXED}, idle, {_BODIES_OPTION})
    return bool(options.get(_BODIES_OPTION, False))


def _checked(
    given: Mapping[str, Any] | None, fixed: Mapping[str, tuple[Any, str]], idle: set[str], honoured: set[str]
) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise InvalidConfig(f"extra_options must be a dict, got {type(given).__name__}")
    for name, value in (given or {}).items():
        if name in fixed:
            same, instead = fixed[name]
            if value is not None and value != same and not (not value and not same):
                raise InvalidConfig(f"extra_options: {name} = {value!r} is not supported: {instead}")
        elif name == _AXES_OPTION:
            _check_axes(value)
        elif name in idle:
            logger.info("extra_options: %s changes nothing here", name)
        elif name not in honoured:
            hint = nearest(str(name), [*fixed, *idle, *honoured, _AXES_OPTION])
            raise InvalidConfig(f"extra_options: unknown option {name!r}{hint}")
    return given or {}


def _check_axes(value: Any) -> None:
    for op, axis in (value or {}).items():
        if axis not in _AXES.get(op, ()):
            raise InvalidConfig(
                f"extra_options: {_AXES_OPTION} = {value!r} is not supported: weights have a scale for each output"
            )


def _number(
    options: Mapping[str, Any],
    name: str,
    default: float | None,
    low: float,
    high: float = math.inf,
    *,
    whole: bool = False,
) -> float | None:
    value = options.get(name)
    if value is None:
        return default
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high or not math.isfinite(value):
        span = f"from {low:g} to {high:g}" if high < math.inf else f"of {low:g} or more"
        raise InvalidConfig(f"extra_options: {name} must be a {'whole ' * whole}number {span}, got {value!r}")
    return value  # type: ignore[no-any-return]


__all__ = ["StaticExtra", "static_extra", "with_bodies"]
