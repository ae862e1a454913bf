"""Weights rounded so that results move least: what one of them loses, others of the same sum make up for.

The inputs of a sum are far from independent: neighbouring pixels are alike, and channels go together. What is known of
them is their second moments, from samples of what single sums read. Weights are rounded one after the other, and each
error is spread over those still to come (as GPTQ does), to the grid at hand: codes of 8 bits, or bfloat16. Errors that
rounded weights alone cause are half to a third of those of the nearest numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.quantize import Integers, Quantized
from ranvier.quantize.feedback import feed_back, upper_factor
from ranvier.quantize.observers import ChannelMean
from ranvier.runtime.quantizing.sites import Site, named_in_errors

Array = np.ndarray[Any, Any]
Rounded = tuple[Array, Array, Array]
Weights = tuple[str, int, int]
_MOST = 2048  # terms of a sum: the work grows with their cube
_ROWS, _TIMES = 1024, 4  # sums that are looked at: at least, and for every term
LOOKED = 16  # samples that serve
_DAMPING = 0.01  # of the diagonal
_BLOCK = 64
SUM_OF_WORDS = (1 << 16) - 1  # of weights' codes, times any code of 16 bits, that 32 bits hold
_MOST_CODE = (1 << 15) - 1
_FINER = 3.0  # times the steps of 8 bits, from which on codes of 16 are worth their bytes
_NO_WEIGHTS = 2.0**-16  # the step of weights that are all zero


class SumMoments:
    """Second moments of what the sums of a layer read, [groups, terms, terms], from some of its places."""

    def __init__(self, site: Site) -> None:
        self.site = site
        groups, terms = groups_of(site), terms_of(site)
        self.second = np.zeros((groups, terms, terms))
        self.count = 0
        self._wanted = max(_ROWS, _TIMES * terms)
        self._rng = np.random.default_rng(0)

    def update(self, x: Array) -> None:
        if self.count < self._wanted:
            some = windows(self.site, x, -(-self._wanted // LOOKED), self._rng).astype(np.float64)
            if np.isfinite(some).all():
                self.second += some.transpose(0, 2, 1) @ some
                self.count += some.shape[1]


def mean_of(site: Site) -> ChannelMean:
    return ChannelMean(1 if site.inner is None else -1)


def weights_of(site: Site) -> Weights:
    """What says whether two layers have the same weights in the same places."""
    return site.weight.name, site.outputs, groups_of(site)


def groups_of(site: Site) -> int:
    return int(site.node.attrs.get("group", 1)) if site.inner is None else 1


def terms_of(site: Site) -> int:
    """Of a sum: how many weights it has."""
    return int(site.numbers.size // site.numbers.shape[site.outputs])


def can_be_spread(site: Site) -> bool:
    """Whether errors of weights have others to make up for them, few enough to say how."""
    return 1 < terms_of(site) <= _MOST and site.node.attrs.get("auto_pad", "NOTSET") in ("NOTSET", "VALID", "")


def windows(site: Site, x: Array, count: int, rng: np.random.Generator) -> Array:
    """What some sums read, [groups, sums, terms]; places are drawn."""
    if site.inner is not None:
        rows = x.reshape(-1, x.shape[-1])
        return rows[rng.permutation(len(rows))[:count]][None]
    attrs, kernel = site.node.attrs, site.numbers.shape[2:]
    rank = len(kernel)
    strides, dilations = ([int(k) for k in attrs.get(name) or [1] * rank] for name in ("strides", "dilations"))
    pads = [int(k) for k in attrs.get("pads") or [0] * 2 * rank]
    size = x.shape[2:]
    reach = [dilations[i] * (kernel[i] - 1) for i in range(rank)]
    places = [(size[i] + pads[i] + pads[i + rank] - reach[i] - 1) // strides[i] + 1 for i in range(rank)]
    total = len(x) * int(np.prod(places))
    batch, *at = np.unravel_index(rng.permutation(total)[:count], [len(x), *places])
    found = np.zeros((len(batch), x.shape[1], *kernel), np.float32)
    for tap in np.ndindex(*kernel):
        where = [at[i] * strides[i] + tap[i] * dilations[i] - pads[i] for i in range(rank)]
        inside = np.logical_and.reduce([(w >= 0) & (w < n) for w, n in zip(where, size)])
        found[(inside, slice(None), *tap)] = x[(batch[inside], slice(None), *(w[inside] for w in where))]
    return found.reshape(len(batch), groups_of(site), -1).transpose(1, 0, 2)


def spread(weights: Array, second: Array, nearest: Callable[[Array], Array]) -> Array:
    """Weights [groups, outputs, terms] on a grid, by moments [groups, terms, terms]; ``nearest`` rounds one term of all
    sums [groups, outputs]. The plain nearest where that is no worse."""
    plain = np.stack([nearest(weights[..., k]) for k in range(weights.shape[2])], axis=2)
    diagonal = np.einsum("gkk->gk", second)
    # what matters most is rounded while most is left to make up for it
    order = np.argsort(-diagonal * np.square(plain - weights).mean(axis=1), axis=1, kind="stable")
    made = _spread(weights, second, order, nearest)
    errors = [
        np.einsum("gok,gkl,gol->go", lost, second, lost, optimize=True) for lost in (made - weights, plain - weights)
    ]
    return np.where((errors[0] < errors[1])[..., None], made, plain)


def _spread(weights: Array, second: Array, order: Array, nearest: Callable[[Array], Array]) -> Array:
    terms = weights.shape[2]
    factors = np.empty_like(second)
    for k, matrix in enumerate(second):
        damped = matrix[np.ix_(order[k], order[k])]
        own = np.diag(damped)  # of each by itself, so that powers of two between channels change nothing
        damped[np.diag_indices(terms)] += np.where(own > 0, _DAMPING * own, float(own.mean()) or 1.0)
        factors[k] = upper_factor(damped)
    left = np.take_along_axis(weights, order[:, None, :], axis=2)
    made = feed_back(left, factors, lambda k: nearest(left[..., k]), _BLOCK)
    found = np.empty_like(made)
    np.put_along_axis(found, order[:, None, :], made, axis=2)
    return found


def to_bfloat(values: Array) -> Array:
    """The nearest numbers that bfloat16 has, halves to even."""
    return values.astype(np.float32).astype(DType.bfloat16.numpy).astype(np.float32)


class Rounding:
    """Rounded weights, each found once, also where layers share them. ``moments`` by names of layers; without any, the
    nearest numbers."""

    def __init__(self, moments: Mapping[str, SumMoments] | None = None, fit: str = "minmax") -> None:
        self._moments: dict[Weights, list[SumMoments]] = {}
        for each in (moments or {}).values():
            self._moments.setdefault(weights_of(each.site), []).append(each)
        self._fit = fit
        self._codes: dict[Weights, Rounded] = {}
        self._words: dict[Weights, Rounded] = {}
        self._bfloat: dict[Weights, Array] = {}

    def codes(self, site: Site) -> Rounded:
        """Codes, the step of each output channel, and what the weights lost; the axis of outputs is in front."""
        key = weights_of(site)
        if key not in self._codes:
            moved = np.moveaxis(site.numbers, site.outputs, 0)
            with named_in_errors(site.name):
                coded = Integers(8, True, "channel", fit=self._fit).quantize(moved.reshape(len(moved), -1))
            steps = steps_of(coded)
            fine = steps.astype(np.float64).reshape(groups_of(site), -1)
            codes = self._rounded(site, moved, lambda w: np.clip(np.rint(w / fine), -127, 127) * fine)
            wide = steps.reshape(-1, *[1] * (moved.ndim - 1))
            whole = coded.codes.reshape(moved.shape) if codes is None else np.rint(codes / wide).astype(np.int8)
            self._codes[key] = whole, steps, moved - whole.astype(np.float32) * wide
        return self._codes[key]

    def words(self, site: Site) -> Rounded:
        """As :meth:`codes`, for data of 16 bits: of as many bits as leave sums of any such data in 32, where that is
        much finer; else the same codes of 8."""
        key = weights_of(site)
        if key not in self._words:
            moved = np.moveaxis(site.numbers, site.outputs, 0)
            sizes = np.abs(moved.reshape(len(moved), -1).astype(np.float64))
            room = SUM_OF_WORDS - sizes.shape[1] / 2  # each code may be rounded up by half of one
            least = np.maximum(sizes.sum(axis=1) / room, sizes.max(axis=1) / _MOST_CODE)
            made = self.codes(site)
            steps = made[1]
            if np.median(least / steps) * _FINER <= 1:
                made = _nearest_codes(moved, np.where(sizes.any(axis=1), least, steps), np.int16)
            elif np.abs(made[0].reshape(sizes.shape).astype(np.int32)).sum(axis=1).max() > SUM_OF_WORDS:
                made = _nearest_codes(moved, steps, np.int8)  # what made up for others was too much
            self._words[key] = made
        return self._words[key]

    def bfloat(self, site: Site) -> Array:
        """Weights as a layer that multiplies in bfloat16 has them; the axis of outputs is in front."""
        key = weights_of(site)
        if key not in self._bfloat:
            moved = np.moveaxis(site.numbers, site.outputs, 0)
            made = self._rounded(site, moved, to_bfloat)
            self._bfloat[key] = to_bfloat(moved if made is None else made)
        return self._bfloat[key]

    def _rounded(self, site: Site, moved: Array, nearest: Callable[[Array], Array]) -> Array | None:
        parts = self._moments.get(weights_of(site), [])
        count = sum(each.count for each in parts)
        if not count:
            return None
        groups = groups_of(site)
        weights = moved.astype(np.float64).reshape(groups, len(moved) // groups, -1)
        second = sum(each.second for each in parts[1:]) + parts[0].second
        return spread(weights, second / count, nearest).reshape(moved.shape)


def _nearest_codes(numbers: Array, steps: Array, dtype: type) -> Rounded:
    """Of weights whose outputs are in front."""
    steps = steps.astype(np.float32)
    wide = steps.reshape(-1, *[1] * (numbers.ndim - 1))
    whole = np.rint(numbers / wide).astype(dtype)
    return whole, steps, numbers - whole.astype(np.float32) * wide


def steps_of(coded: Quantized) -> Array:
    """The step of each output channel, or the one of all. Any would do where all weights are zero, but biases are
    rounded to it too, times that of the data: so it is like the others'."""
    steps = coded.scales.reshape(-1).astype(np.float32)
    something = coded.codes.reshape(len(steps), -1).any(axis=1)
    usual = np.median(steps[something]) if something.any() else _NO_WEIGHTS
    return np.where(something, steps, np.float32(usual))


def moments_of(sites: Sequence[Site]) -> dict[str, SumMoments]:
    return {site.name: SumMoments(site) for site in sites if can_be_spread(site)}
