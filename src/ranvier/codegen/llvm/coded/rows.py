"""Few rows times coded weights: how many rows and panels a pass takes, and how much of a group its code is for."""

from __future__ import annotations

import math

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.coded.adding import most_pairs
from ranvier.codegen.llvm.coded.driver import PassDriver
from ranvier.codegen.llvm.coded.pack import CodedB
from ranvier.codegen.llvm.coded.passes import Activations, Pass, pass_launch, stays_small
from ranvier.codegen.llvm.coded.prepare import Prepared
from ranvier.codegen.llvm.coded.shape import LINE
from ranvier.codegen.llvm.gemm.blocks import Cut
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.integer.dots import BYTES, SIGNED, WORDS, dot_of
from ranvier.codegen.llvm.isa import Isa

_GBPS = 10.0  # bytes of weights that one core takes, roughly
# most panels of a pass, by its rows: as many sums as registers hold beside their totals
_WIDE = {1: 2, 2: 4, 3: 2, 4: 2, 5: 2, 6: 2, 7: 1, 8: 1}
_NARROW = {1: 2, 2: 2, 3: 1, 4: 1}
MOST_ROWS = max(_WIDE)
_PAIRED = {1: 2, 2: 2, 3: 1, 4: 2}  # of codes that 16 registers add up in 16 bits: those take no part between groups
_COUPLED = {1: 4, 2: 4, 3: 2, 4: 2, 5: 2, 6: 2}  # of codes of two columns in a byte: two vectors or more
_INTEGER_PANELS = 4  # of one row: then there is little to compute, and more streams read faster
_DIGIT_PANELS = {True: 4, False: 2}  # by whether there are 32 registers


def _together(b: CodedB, isa: Isa, activations: Activations, rows: int) -> int:
    """Words that one turn takes: as many as a line of the cache holds, where a vector is a part of one and there is
    little to do for a word, so that counting and asking ahead would take as long. For a single row of codes there is
    the least to do: groups of two lines are one turn."""
    if activations == "floats" or dot_of(isa) is BYTES:
        return 1
    if dot_of(isa) is WORDS:  # as many as 16 bits hold products of
        return math.gcd(b.words, max(1, most_pairs(b.coding.reach) // b.coding.quads))
    line = max(1, LINE // (isa.vector_bytes * b.coding.parts))
    if activations == "codes" and rows == 1 and b.words == 2 * line:
        return b.words
    return math.gcd(b.words, line)


def few_rows(
    p: Problem, b: CodedB, prepared: Prepared, isa: Isa, threads: int, activations: Activations, most: int = MOST_ROWS
) -> Launch:  # fmt: skip
    """``most``: rows of a pass."""
    table = _WIDE if isa.registers >= 32 else _NARROW
    if activations == "codes" and (b.coupled or (dot_of(isa) is WORDS and table is _NARROW)):
        table = _COUPLED if b.coupled else _PAIRED
    rows = Cut.of(p.m, min(most, max(table))).size
    panels = _INTEGER_PANELS if activations == "codes" and rows == 1 else table[rows]
    if activations == "digits":
        panels = _DIGIT_PANELS[isa.registers >= 32]
        rows = 2 if p.m % 2 == 0 and isa.registers >= 32 else 1  # no row is repeated
        panels //= rows
    together = _together(b, isa, activations, rows)
    once = together == b.words
    as_floats = dot_of(isa) is SIGNED and activations != "floats" and stays_small(b)
    kernel = Pass(
        *(b.coding, b.scaling, activations, rows, panels),
        together=together,
        once=once,
        as_floats=as_floats,
        coupled=b.coupled,
    )
    work = p.entries * b.nbytes * -(-p.m // rows) / _GBPS / 1e3
    scratch = rows * panels * isa.vector_bytes
    return pass_launch(kernel, PassDriver, p, b, prepared, isa, threads, work=work, scratch=scratch)
