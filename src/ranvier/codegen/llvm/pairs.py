"""bfloat16 as it lies, two in a word: the first of each, then the second.

Widening numbers in their order takes two instructions for a vector, one of them on the only port that moves numbers
between lanes. The words shifted are the even ones, and without their low half the odd ones: one for each vector. What
is computed of each by itself need not be in order, only what is stored.
"""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.elements import narrowed_pair


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


def rounded_in_order(f: Fn, value: Val) -> Val:
    """32 floats that are apart as bfloat16 (the bits of them) in their order."""
    even, odd = (f.shuffle(value, None, range(k, k + 16)) for k in (0, 16))
    return f.shuffle(narrowed_pair(f, even, odd), None, together(32))
