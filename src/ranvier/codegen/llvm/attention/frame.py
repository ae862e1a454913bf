"""The frame of a launch kernel: its buffers and numbers by name, and addresses by indices and strides."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.llvm.builder import Fn, Module, Val, size_of, vector
from ranvier.codegen.llvm.isa import Isa


class Frame:
    """A launch kernel under construction, with its buffers and numbers by name."""

    def __init__(
        self, module: Module, symbol: str, isa: Isa, element: str, buffers: Sequence[str], dims: Sequence[str]
    ) -> None:
        self.f = f = module.kernel(symbol)
        self.module, self.symbol, self.isa, self.element = module, symbol, isa, element
        self.size = size_of(element)
        self.lanes = isa.lanes(self.size)
        self.kind = vector(element, self.lanes)
        self.begin, self.end, self.scratch = f.args["begin"], f.args["end"], f.args["scratch"]
        self._buffers = {n: k for k, n in enumerate(buffers)}
        self._dims = {n: k for k, n in enumerate(dims)}

    # Read where they are used, not at the start: dozens of values that live throughout a kernel keep the register
    # allocator busy for longer than all the rest of the compilation takes.

    def __getitem__(self, name: str) -> Val:
        """One of the numbers."""
        return self.f.load("i64", self.f.gep(self.f.args["dims"], self._dims[name], "i64"), invariant=True)

    def buffer(self, name: str) -> Val:
        """The address of one of the buffers."""
        return self.f.load("ptr", self.f.gep(self.f.args["bufs"], self._buffers[name], "ptr"), invariant=True)

    def number(self, name: str) -> Val:
        """A dim that carries the bits of a double, as an element."""
        wide = self.f.bitcast(self[name], "double")
        return wide if self.element == "double" else self.f.cast(wide, "float")

    def at(self, base: Val, *terms: tuple[Val, Val | int]) -> Val:
        """``base`` moved by the sum of index times stride, in elements."""
        return moved(self.f, base, self.element, *terms)


def moved(f: Fn, base: Val, element: str, *terms: tuple[Val, Val | int]) -> Val:
    for index, stride in terms:
        base = f.gep(base, index * stride, element)
    return base
