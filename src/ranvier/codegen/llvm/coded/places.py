"""Where packed codes and scales of a vector of columns lie."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.coded.pack import beside
from ranvier.codegen.llvm.isa import Isa


class Places:
    """Addresses by the number of a vector, counted through all panels."""

    def __init__(self, fn: Fn, isa: Isa) -> None:
        self.fn, self.beside = fn, beside(isa)
        self.lanes, self.size = isa.lanes(4), isa.vector_bytes
        self.step = self.beside * self.size  # bytes from one word of a vector to the next

    def _apart(self, number: Val) -> tuple[Val, Val | None]:
        """The panel, and which of its vectors."""
        if self.beside == 1:
            return number, None
        bits = self.beside.bit_length() - 1
        return self.fn.lshr(number, bits), self.fn.and_(number, self.beside - 1)

    def codes(self, base: Val, number: Val, deep: Val) -> Val:
        """The first word; ``deep``: words of a column."""
        panel, within = self._apart(number)
        at = panel * deep * self.step
        return self.fn.gep(base, at if within is None else at + within * self.size)

    def entry(self, base: Val, number: Val, groups: Val, group: Val, item: int) -> Val:
        """What a group has one of for every column, ``item`` bytes each."""
        panel, within = self._apart(number)
        at = (panel * groups + group) * (self.beside * self.lanes * item)
        return self.fn.gep(base, at if within is None else at + within * (self.lanes * item))
