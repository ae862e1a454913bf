"""Rotary embedding of values that are already in registers: both orders of pairs, whole or part of a head."""

from __future__ import annotations

import triton.language as tl

from ranvier.providers.cuda.kernels.jit import kernel


@kernel
def partner(d: tl.tensor, rotary: tl.tensor, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """Which element of the head an element is turned with; past the rotary part, itself."""
    if INTERLEAVED:
        other = d ^ 1
    else:
        other = tl.where(d < rotary // 2, d + rotary // 2, d - rotary // 2)
    return tl.where(d < rotary, other, d)


@kernel
def turned(
    value: tl.tensor,
    other: tl.tensor,
    d: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rotary: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """``value`` [.., d] turned with its partner; ``cos`` and ``sin`` point to the position's rotary / 2 angles."""
    half = rotary // 2
    inside = d < rotary
    if INTERLEAVED:
        angle = d // 2
        first = (d % 2) == 0
    else:
        angle = d % half
        first = d < half
    c = tl.load(cos + angle, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    return value * c + other * tl.where(first, -s, s)
