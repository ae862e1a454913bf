"""What of a window lies inside an image."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val


def taps_inside(f: Fn, start: Val, size: Val, taps: Val, dilation: Val) -> tuple[Val, Val]:
    """The kernel taps from position ``start`` on that lie inside [0, size)."""
    low = f.div(f.max_(f.neg(start) + dilation - 1, 0), dilation)
    high = f.div(f.max_(size - start + dilation - 1, 0), dilation)
    return low, f.min_(high, taps)
