"""What the integer convolutions share: named arguments, and handing finished sums to the finish kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranvier.codegen.llvm.builder import Fn, Module, Operand, Val
from ranvier.codegen.llvm.conv.shape import Pixels
from ranvier.codegen.llvm.gemm.epilogue import Finish
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.reach import Array
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View


class Frame:
    """The function of a kernel with its numbers by name; ``numbers`` come first in dims, the finish kernel's after."""

    def __init__(self, module: Module, symbol: str, isa: Isa, names: Sequence[str], operands: int) -> None:
        self.f: Fn = module.kernel(symbol)
        self.isa = isa
        self._place = self.f.stack("i64", 6)
        self._operands = operands  # position of the finish kernel, its operands follow
        self._count = len(names)
        self.at = {
            name: self.f.load("i64", self.f.gep(self.f.args["dims"], k, "i64"), invariant=True)
            for k, name in enumerate(names)
        }

    def buf(self, k: int) -> Val:
        return self.f.load("ptr", self.f.gep(self.f.args["bufs"], k, "ptr"), invariant=True)

    def finish(self, out: Val, tile: Val, place: Sequence[Operand]) -> None:
        """``place`` is batch, row, column, rows, columns of the sums at ``tile``, and bytes between its rows."""
        f = self.f
        for k, value in enumerate(place):
            f.store(value if isinstance(value, Val) else f.i64(int(value)), f.gep(self._place, k, "i64"))
        operands = f.gep(f.args["bufs"], self._operands + 1, "ptr")
        dims = f.gep(f.args["dims"], self._count, "i64")
        f.call_pointer(self.buf(self._operands), "void", [operands, dims, tile, out, self._place])


def in_order(names: Sequence[str], numbers: Mapping[str, int]) -> tuple[int, ...]:
    assert set(names) == set(numbers), set(names) ^ set(numbers)
    return tuple(numbers[name] for name in names)


def finish_of(
    epilogue: Epilogue | None, out: View, reach: Array | None = None, *, shortens: bool = False
) -> Finish:  # fmt: skip
    """The finish kernel of a convolution whose output pixels lie evenly apart."""
    return integer_finish(epilogue, out.dtype, (Pixels.of(out).w, out.strides[1]), reach, shortens=shortens)
