"""Which coding integers of any width are packed in.

Kernels read codes of 2, 4, 6 and 8 bits. Those of 3 and 5 take 4 and 6: taking them apart takes longer than reading the
bits that they save.
"""

from __future__ import annotations

from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.coupled import couples
from ranvier.codegen.llvm.isa import Isa

_HELD = {3: 4, 5: 6}


def held(bits: int, isa: Isa, *, codes: bool) -> Coding:
    """``codes``: activations are codes of 8 bits. Where products of those pick lanes, others are four times as many
    instructions, which wait for no memory: there codes of 6 bits only cost more."""
    found = _HELD.get(bits, bits)
    return Coding(8 if found == 6 and couples(isa) and not codes else found)
