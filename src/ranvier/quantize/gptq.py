"""GPTQ: weights that make up for what those before them lost (Frantar et al., "GPTQ", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import Array
from ranvier.quantize.feedback import feed_back, upper_factor
from ranvier.quantize.integers import FITS, Integers
from ranvier.quantize.moments import Damping, GroupOrRow, InputMoments, sampled
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Flag, Rule, Whole

_MOST = float(np.finfo(np.float32).max)
_BLOCK = 128  # channels after which errors are spread over all that are still to come


@dataclass(frozen=True)
class Gptq(Checked):
    """Rounds one input channel after the other and lets those still to come make up for the error.

    ``reorder``: channels with the largest inputs come first (``desc_act``). Groups are neighbours all the same, with
    scales that are found beforehand (``static_groups``), or else the channels that are rounded together, and then the
    result says in its ``order`` which group a channel is in.
    """

    bits: int = 4
    group: int = 128  # -1: one scale for each output channel
    symmetric: bool = True
    reorder: bool = False
    static_groups: bool = True
    damping: float | None = None  # of the mean of the diagonal; None: what samples leave in doubt, 0.01 at least
    fit: str = "mse"

    RULES: ClassVar[Mapping[str, Rule]] = {
        "bits": Whole(2, 8),
        "group": GroupOrRow(1),
        "symmetric": Flag(),
        "reorder": Flag(),
        "static_groups": Flag(),
        "damping": Damping(),
        "fit": Choice(FITS),
    }
    name: ClassVar[str] = "gptq"

    def nearest(self, inputs: int) -> Integers:
        """What rounds each weight of rows of so many by itself, to codes of the same kind."""
        group = inputs if self.group == -1 else self.group
        return Integers(self.bits, self.symmetric, "group", group, signed=False, fit=self.fit)

    def quantize(self, weights: Array, moments: InputMoments) -> Quantized:
        original, dtype = sampled(moments, "Gptq").weights(weights)
        inputs = original.shape[1]
        scheme = self.nearest(inputs)
        group = scheme.group
        plain = replace(scheme.quantize(original), scheme=self.name, dtype=dtype)
        moments = moments.damped(self.damping)
        order = np.argsort(-np.diag(moments.second), kind="stable") if self.reorder else np.arange(inputs)
        sorted_second = moments.second[np.ix_(order, order)]
        if self.reorder and self.static_groups:
            found = _rounded(original, sorted_second, order, scheme, order // group, plain)
        else:
            members = np.empty_like(order)
            members[order] = np.arange(inputs) // group
            found = _rounded(original, sorted_second, order, scheme, members[order], None)
            found = replace(found, order=members) if self.reorder else found
        found = replace(found, scheme=self.name, dtype=dtype)
        # it nearly always is; where a layer's inputs say nothing the plain one stays
        errors = [moments.error(each.dequantize() - original) for each in (found, plain)]
        return found if errors[0] < errors[1] else plain


def _rounded(
    weights: Array, second: Array, order: Array, scheme: Integers, members: Array, fixed: Quantized | None
) -> Quantized:
    """Weights [out, in] rounded by the ``order`` of their channels, which second moments and the groups they are
    ``members`` of have too. A group's scale is the ``fixed`` one, or what fits it when its first channel comes."""
    outputs, inputs = weights.shape
    group = scheme.group
    left = weights[:, order]
    scales = np.zeros((outputs, -(-inputs // group)), scheme.scale_dtype.numpy)
    zeros = np.zeros(scales.shape, np.uint8)
    if fixed is not None and fixed.zeros is not None:
        scales, zeros = fixed.scales, fixed.zeros
    codes = np.zeros(weights.shape, np.uint8)

    def nearest(k: int) -> Array:
        member = int(members[k])
        if fixed is None and k % group == 0:
            # what others lost may bring weights near the largest number beyond it
            span = scheme.quantize(np.clip(left[:, k : k + group], -_MOST, _MOST))
            assert span.zeros is not None
            scales[:, member], zeros[:, member] = span.scales[:, 0], span.zeros[:, 0]
        scale, zero = scales[:, member].astype(np.float64), zeros[:, member]
        codes[:, order[k]] = found = scheme.codes(left[:, k], scale, zero)
        return (found.astype(np.float64) - zero) * scale

    # a group's first channel must see all errors before it: groups do not end within a block
    feed_back(left, upper_factor(second), nearest, max(1, _BLOCK // group) * group if group <= _BLOCK else _BLOCK)
    return Quantized(scheme.name, codes, scales, (1, group), scheme.bits, zeros, axis=1)
