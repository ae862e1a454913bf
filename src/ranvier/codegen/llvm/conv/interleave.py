"""Planes of channels woven together, and pairs of them taken apart."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val, vector


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


def apart(count: int) -> list[int]:
    """The places of even numbers, then those of odd ones."""
    return [*range(0, count, 2), *range(1, count, 2)]


def together(count: int) -> list[int]:
    """The way back."""
    return [k // 2 + (k % 2) * (count // 2) for k in range(count)]


def even_then_odd(f: Fn, words: Val) -> Val:
    """Pairs of bfloat16 as floats: the first of each pair, then the second."""
    kind = vector("float", words.lanes)
    even, odd = f.shl(words, 16), f.and_(words, -65536)
    return f.shuffle(f.bitcast(even, kind), f.bitcast(odd, kind), range(2 * words.lanes))
