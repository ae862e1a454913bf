"""Planes of channels woven together."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val


def interleaved(f: Fn, planes: list[Val]) -> Val:
    """One to four vectors of a channel each as one long vector of pixels."""
    lanes, count = planes[0].lanes, len(planes)
    if count == 1:
        return planes[0]
    pairs = [f.shuffle(planes[0], planes[1], range(2 * lanes))]
    if count > 2:
        pairs.append(f.shuffle(planes[2], planes[-1], range(2 * lanes)))
    order = [(k % count) * lanes + k // count for k in range(count * lanes)]
    return f.shuffle(pairs[0], pairs[-1] if len(pairs) > 1 else None, order)
