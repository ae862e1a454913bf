"""Which form ternary weights are packed in, by the number of tokens and what the processor has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.fives import pack_fives, suits_fives
from ranvier.codegen.llvm.ternary.fours import pack_fours, suits_fours
from ranvier.codegen.llvm.ternary.pack import Packed, pack_ternary
from ranvier.codegen.llvm.ternary.triples import pack_triples, suits_triples
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Form:
    """``pack`` takes bytes [N, ceil(K / 4)], the code of k in byte k // 4 at bit 2 · (k mod 4), and K; ``bits``: of a
    weight."""

    name: str
    bits: float
    pack: Callable[[Array, int], Packed]


_FIVES = Form("ternary fives", 8 / 5, pack_fives)
_FOURS = Form("ternary fours", 2.0, pack_fours)
_TRIPLES = Form("ternary triples", 16 / 9, pack_triples)


def form_of(isa: Isa, rows: int, k: int, n: int, together: int) -> Form:
    """``together``: ternary weights of all layers that run after each other, this one's among them."""
    if suits_fives(isa, rows, k, n, together):
        return _FIVES
    if suits_fours(isa, k):
        return _FOURS
    if suits_triples(isa):
        return _TRIPLES
    return Form("ternary", 2.0, partial(pack_ternary, isa=isa))
