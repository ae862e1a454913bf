"""Which coding integers of any width are packed in.

Kernels read codes of 2, 4, 6 and 8 bits. Those of 3 and 5 take 4 and 6: taking them apart takes longer than reading the
bits that they save. Integers of more than 4 bits that are no others than the levels of a known table (``tables.py``)
are positions in it, which take 4.
"""

from __future__ import annotations

from ranvier.codegen.llvm.coded.adding import multiplies_fours
from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.tables import Array, table_of
from ranvier.codegen.llvm.integer.dots import multiplies_bytes
from ranvier.codegen.llvm.isa import Isa

_HELD = {3: 4, 5: 6}


def looks_up(isa: Isa) -> bool:
    """Whether levels are looked up sooner than twice the bytes are read, as floats too: one instruction does it."""
    return multiplies_bytes(isa) or (multiplies_fours(isa) and isa.registers >= 32)


def held(bits: int, isa: Isa, stored: Array, k: int) -> Coding:
    """``stored``: bytes full of codes, the low bits first, ``k`` of them and anything behind those in a row."""
    found = _HELD.get(bits, bits)
    if found > 4 and looks_up(isa) and (table := table_of(stored, bits, k, isa)) is not None:
        return Coding(4, "levels", table)
    return Coding(found)
