"""Which transforms go by passes, in which passes, and the launch that does them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, Launch
from ranvier.codegen.llvm.attention.micro import ELEMENTS
from ranvier.codegen.llvm.builder import size_of
from ranvier.codegen.llvm.control import number_bits
from ranvier.codegen.llvm.fourier.butterflies import PRIMES
from ranvier.codegen.llvm.fourier.passes import Form, Kind, Work, passes_spec
from ranvier.codegen.llvm.fourier.transform import Array, Transform
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.records import dataclass

# What a pass costs for every point, in multiply-adds of a product in float64; bringing signals in, unfolding and taking
# results out cost as much as three more. Below that a product is quicker.
_PASS = 8
_ROUND_ABOUT = 3
_NEAR = 512 << 10  # bytes of scratch that the second-level cache keeps beside the signals
_MOST = 5 << 20  # bytes of scratch of a thread, and every thread has as many: 65536 complex points
_NARROWEST = 16  # bytes of a vector: less is no quicker
_NUMPY: dict[Work, Any] = {"double": np.float64, "float": np.float32}
# Of a product's operations: additions that are not fused, and as many loads and stores
_RATE: dict[Work, float] = {"double": 0.15, "float": 0.3}


@dataclass(frozen=True)
class Passes:
    """How transforms are done: of so many complex points each, several side by side, by passes of these radices."""

    work: Work
    kind: Kind
    points: int
    radices: tuple[int, ...]
    block: int  # points of one of the two blocks in scratch memory
    lanes: int

    @property
    def scratch(self) -> int:
        """Bytes of a thread."""
        return 2 * self.block * 2 * self.lanes * size_of(self.work)


def passes(t: Transform, count: int, item: int, isa: Isa, work: Work) -> Passes | None:
    """For ``count`` signals with elements of ``item`` bytes; None where products are to do it."""
    kind: Kind = "complex"
    if t.mirrored or (t.parts == 1 and not t.inverse):
        if t.length % 2 == 0:
            kind = "folded" if t.mirrored else "halved"
        elif t.mirrored:
            return None
    points = t.length if kind == "complex" else t.length // 2
    radices = _radices(points, isa)
    wide = size_of(work)
    if radices is None or _PASS * points * (len(radices) + _ROUND_ABOUT) * (wide // item) > t.elements:
        return None
    block = (t.length if kind == "halved" and t.bins == t.length else points) + 1
    lanes = isa.lanes(wide)
    # no more side by side than there are, nor than stay near
    while lanes * wide > _NARROWEST and (2 * count <= lanes or 4 * block * lanes * wide > _NEAR):
        lanes //= 2
    found = Passes(work, kind, points, radices, block, lanes)
    return found if found.scratch <= _MOST else None


def _radices(points: int, isa: Isa) -> tuple[int, ...] | None:
    """Few passes, the largest one last, for it turns nothing; None where a prime factor is too large.

    A pass over eight points keeps 16 vectors and what becomes of them, more than small register files hold.
    """
    found = _factors(points)
    if found is None:
        return None
    twos = found.count(2)
    eights = 0
    if isa.registers >= 32 and twos > 1:
        eights = twos // 3 - (twos % 3 == 1)  # two passes over four rather than one over eight and one over two
    fours, left = divmod(twos - 3 * eights, 2)
    return (*found[twos:], *(2,) * left, *(4,) * fours, *(8,) * eights)


def _factors(points: int) -> list[int] | None:
    """Prime factors, the smallest first; None where one is too large."""
    found: list[int] = []
    for prime in PRIMES:
        while points % prime == 0:
            found.append(prime)
            points //= prime
    return found if points == 1 else None


def launch(t: Transform, p: Passes, x: View, window: View | None, out: View) -> Launch:
    """``out`` [..., bins, numbers]; one number of a bin that has two is its power."""
    made, given = out.shape[-1], x.shape[-2]
    count = out.size // (t.bins * made)
    axes_in, axes_out = _axes(x), _axes(out)
    flat = _flat(x, p.lanes) and (t.parts == 2 or p.kind == "halved")
    form = Form(
        ELEMENTS[x.dtype],
        out.dtype,
        p.work,
        p.lanes,
        p.kind,
        t.inverse,
        t.parts,
        made,
        windowed=window is not None,
        flat_window=flat and t.parts == 1 and window is not None and window.strides[0] == 1,
        flat_in=flat,
        flat_out=_flat(out, p.lanes),
        axes_in=len(axes_in) // 2,
        axes_out=len(axes_out) // 2,
        both_sides=p.kind == "halved" and t.bins == t.length,
        radices=tuple(sorted(set(p.radices))),
        power=made < t.made,
    )
    plan, turns = _tables(t, p)
    table = Storage.packed(turns)
    return Launch(
        passes_spec(form),
        (
            *(At.of(x), At(table) if window is None else At.of(window), At.of(out)),
            *(At(Storage.packed(plan)), At(table)),
        ),
        (
            *(*axes_in, *axes_out, count),
            *(given, *x.strides[-2:], 0 if window is None else window.strides[0]),
            *(t.bins, *out.strides[-2:]),
            *(p.points, len(p.radices), p.block, number_bits(1 / t.length, size_of(p.work))),
        ),
        tiles=-(-count // p.lanes),
        writes=(out.storage,),
        scratch=p.scratch,
        flops=5.0 * count * p.points * math.log2(2 * p.points),
        traffic=1.0 * count * given * t.parts * x.dtype.numpy.itemsize + out.nbytes,
        label="transform",
        rate=_RATE[p.work],
    )


def _flat(view: View, lanes: int) -> bool:
    """Numbers of a signal lie one after the other, and there are enough for a vector."""
    points, parts = view.shape[-2:]
    steps = view.strides[-2:] == (parts, 1) if parts > 1 else view.strides[-2] == 1
    return steps and points * parts >= lanes


def _axes(view: View) -> tuple[int, ...]:
    """Extents, then strides, of axes other than the signal's, as few as there can be."""
    found: list[tuple[int, int]] = []
    for extent, stride in zip(view.shape[:-2], view.strides[:-2]):
        if extent == 1:
            continue
        if found and found[-1][1] == extent * stride:
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    return (*(extent for extent, _ in found), *(stride for _, stride in found))


def _tables(t: Transform, p: Passes) -> tuple[Array, Array]:
    """Radix, groups and points that go together of every pass; then cosines and sines in the order of their use, those
    that fold already scaled and those that unfold by -1/2."""
    plan, turns = [], []
    left, together = p.points, 1
    for radix in p.radices:
        groups = left // radix
        plan.append((radix, groups, together))
        turns.append(_pairs(np.outer(np.arange(groups), np.arange(1, radix)), left))
        left, together = groups, together * radix
    mirrors = _pairs(np.arange(p.points // 2 + 1), t.length)
    if p.kind == "folded":
        turns.insert(0, mirrors / t.length)
    elif p.kind == "halved":
        turns.append(mirrors / -2)
    return np.array(plan, np.int64), np.concatenate(turns).astype(_NUMPY[p.work])


def _pairs(turns: Array, whole: int) -> Array:
    """Cosines and sines of so many parts of a circle, ``[…, 2]`` in float64."""
    angles = turns.reshape(-1) % whole * (2 * np.pi / whole)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)
