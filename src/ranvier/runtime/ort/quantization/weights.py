"""Codes of weights as scripts ask for them: a scale for the tensor or for each output channel, 8 bits or 7."""

from __future__ import annotations

import contextlib

import numpy as np

from ranvier.quantize import Integers
from ranvier.runtime.quantizing.rounding import Rounded, Rounding, steps_of, weights_of
from ranvier.runtime.quantizing.sites import Site, noted_in_errors


def named(site: Site) -> contextlib.AbstractContextManager[None]:
    """Errors about numbers say which node has them, in words of scripts."""
    return noted_in_errors(f"weights of node {site.name!r}; nodes_to_exclude leaves a node as it is")


class NearestCodes(Rounding):
    def __init__(self, *, per_channel: bool, reduce_range: bool) -> None:
        super().__init__()
        self._scheme = Integers(7 if reduce_range else 8, True, "channel" if per_channel else "tensor")

    def codes(self, site: Site) -> Rounded:
        key = weights_of(site)
        if key not in self._codes:
            moved = np.moveaxis(site.numbers, site.outputs, 0)
            with named(site):
                coded = self._scheme.quantize(moved.reshape(len(moved), -1))
            steps = steps_of(coded).reshape(() if self._scheme.granularity == "tensor" else -1)
            lost = moved - coded.dequantize().reshape(moved.shape)
            self._codes[key] = coded.codes.reshape(moved.shape), steps, lost
        return self._codes[key]


__all__ = ["NearestCodes", "named"]
