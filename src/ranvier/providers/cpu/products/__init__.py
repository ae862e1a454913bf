"""Products on the CPU; what a model does not have, it does not import."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.definitions.products import Window
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.llvm.isa import Isa
from ranvier.graph.ir import Value


class CpuProducts:
    """See :class:`ranvier.codegen.definitions.products.Products`. ``isa``: what lowerings may ask who have two ways."""

    def __init__(self, isa: Isa) -> None:
        self.isa = isa

    def matmul(
        self, b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None = None, alpha: float = 1.0
    ) -> Value:
        from ranvier.providers.cpu.products.matmul import multiply

        return multiply(b, x, y, shape, out, alpha)

    def convolve(
        self, b: Definitions, x: Value, w: Value, shape: Sequence[int], window: Window, out: Value | None = None
    ) -> Value:
        from ranvier.providers.cpu.products.convolution import convolve

        return convolve(b, x, w, shape, window, out)
