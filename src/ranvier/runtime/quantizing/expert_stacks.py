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
    """One expert after the other, each as ``in_groups`` has it. Codes go to their place as they come: weights are most
    of a model, and coding takes several times as much memory."""
    scales: list[Array] = []
    zeros: list[Array] = []
    for k, each in enumerate(experts):
        assert each.zeros is not None
        found = packed(each.codes, each.bits)
        if not k:
            form, codes = (each.bits, each.block[1]), np.empty((count, *found.shape), found.dtype)
        elif (each.bits, each.block[1]) != form:
            raise Unfit("groups or bits differ between experts")
        codes[k] = found
        scales.append(each.scales.astype(np.float32))
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
