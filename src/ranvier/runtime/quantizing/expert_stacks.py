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


def stacked(experts: Iterable[Quantized], count: int) -> Stack:
    """One expert after the other, each as ``in_groups`` has it: weights are most of a model, and coding takes several
    times as much memory."""
    return stack_of(map(packed_expert, experts), count)


def packed_expert(coded: Quantized) -> Stack:
    """A stack of one, without the axis of experts."""
    assert coded.zeros is not None
    codes, scales = packed(coded.codes, coded.bits), coded.scales.astype(np.float32)
    return Stack(codes, scales, coded.zeros, coded.bits, coded.block[1])


def stack_of(experts: Iterable[Stack], count: int) -> Stack:
    """All of them, each as :func:`packed_expert` makes it. Codes go to their place as they come, so that most of them
    are in memory once."""
    scales: list[Array] = []
    zeros: list[Array] = []
    for k, each in enumerate(experts):
        if not k:
            form, codes = (each.bits, each.group), np.empty((count, *each.codes.shape), each.codes.dtype)
        elif (each.bits, each.group) != form:
            raise Unfit("groups or bits differ between experts")
        codes[k] = each.codes
        scales.append(each.scales)
        zeros.append(each.zeros)
    if not scales:
        raise Unfit("there are no experts")
    return Stack(codes, np.stack(scales), np.stack(zeros), *form)  # zeros are all floats where those of one are


def in_turns(arrays: Sequence[Array]) -> Array:
    """The rows of several arrays [experts, outputs, ...] one after another: the first of each, then the second."""
    if len(arrays) == 1:
        return arrays[0]
    turns: Array = np.stack(arrays, axis=2)
    return turns.reshape(len(turns), -1, *turns.shape[3:])
