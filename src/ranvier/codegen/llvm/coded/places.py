"""Where packed codes and the numbers of groups of a vector of columns lie, and those numbers."""

from __future__ import annotations

from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.coded.numbers import STEP_BYTES, Layout
from ranvier.codegen.llvm.coded.shape import beside
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType


class Places:
    """Addresses by the number of a vector, counted through all panels."""

    def __init__(self, fn: Fn, isa: Isa) -> None:
        self.fn, self.isa, self.beside = fn, isa, beside(isa)
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

    def entry(self, base: Val, number: Val, groups: Val, group: Val, layout: Layout, v: int = 0) -> Val:
        """What a group has of the vector ``v`` behind a number; those have to be of its panel, where there are more."""
        return self._entry(base, number, groups, group, layout, v)[0]

    def numbers(self, base: Val, number: Val, groups: Val, group: Val, layout: Layout, v: int = 0) -> Val:
        """The same as floats."""
        f, lanes = self.fn, self.lanes
        at, step = self._entry(base, number, groups, group, layout, v)
        if layout.dtype is DType.float16:
            return vmath.half_to_float(f, f.load(vector("i16", lanes), at), self.isa)
        if layout.dtype is not DType.int8:
            return f.load(vector("float", lanes), at)
        found = f.cast(f.cast(f.load(vector("i8", lanes), at), "i32"), "float")
        return found if step is None else found * f.load(vector("float", lanes), step)

    def _entry(
        self, base: Val, number: Val, groups: Val, group: Val, layout: Layout, v: int
    ) -> tuple[Val, Val | None]:  # fmt: skip
        """Where the number is, and where the step that it is times, if it is."""
        f, columns, item = self.fn, self.beside * self.lanes, layout.dtype.numpy.itemsize
        panel, within = self._apart(number + v if v and self.beside == 1 else number)
        behind = v if self.beside > 1 else 0
        run = layout.run
        if not run:
            at = f.gep(base, (panel * groups + group) * (columns * item))
            return self._within(at, within, behind, item), None
        shift = run.bit_length() - 1
        at = f.gep(base, (panel * f.lshr(groups, shift) + f.lshr(group, shift)) * (columns * (STEP_BYTES + run * item)))
        byte = f.gep(at, f.and_(group, run - 1) * (columns * item) + columns * STEP_BYTES)
        return self._within(byte, within, behind, item), self._within(at, within, behind, STEP_BYTES)

    def _within(self, at: Val, within: Val | None, behind: int, item: int) -> Val:
        """The numbers of one vector of a panel."""
        if within is not None:
            at = self.fn.gep(at, within * (self.lanes * item))
        return self.fn.gep(at, behind * self.lanes * item) if behind else at
