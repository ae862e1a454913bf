"""Codes of one linear layer of all experts, side by side as QMoE has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.ops.contrib.weight_only import packed
from ranvier.quantize import Quantized
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]


class Unfit(Exception):
    """Codes that QMoE has no place for."""


@dataclass(frozen=True)
class Stack:
    """Packed codes, with scales and zeros [experts, outputs, groups]; zeros between codes are floats."""

    codes: Array
    scales: Array
    zeros: Array
    bits: int
    group: int
    unseen: int = 0  # experts that were to be coded by samples, and that none visits


def stacked(experts: Iterable[Quantized]) -> Stack:
    """One expert after the other, each as ``in_groups`` has it: weights are most of a model, and coding takes several
    times as much memory."""
    return stack_of(map(packed_expert, experts))


def packed_expert(coded: Quantized) -> Stack:
    """A stack of one, without the axis of experts."""
    assert coded.zeros is not None
    codes, scales = packed(coded.codes, coded.bits), coded.scales.astype(np.float32)
    return Stack(codes, scales, coded.zeros, coded.bits, coded.block[1])


def stack_of(experts: Iterable[Stack]) -> Stack:
    """All of them, each as :func:`packed_expert` makes it."""
    made = list(experts)
    forms = {(each.bits, each.group) for each in made}
    if len(forms) != 1:
        raise Unfit("groups or bits differ between experts" if forms else "there are no experts")
    codes, scales = (np.stack([getattr(each, part) for each in made]) for part in ("codes", "scales"))
    zeros = np.stack([each.zeros for each in made])  # all floats where those of one are
    return Stack(codes, scales, zeros, *forms.pop())


def in_turns(arrays: Sequence[Array]) -> Array:
    """The rows of several arrays [experts, outputs, ...] one after another: the first of each, then the second."""
    if len(arrays) == 1:
        return arrays[0]
    turns: Array = np.stack(arrays, axis=2)
    return turns.reshape(len(turns), -1, *turns.shape[3:])
