"""Panels: how many vectors of columns are one."""

from __future__ import annotations

from ranvier.codegen.llvm.isa import Isa

LINE = 64


def beside(isa: Isa) -> int:
    """Vectors of a panel."""
    return max(1, LINE // isa.vector_bytes) if isa.streams == 1 else 1
