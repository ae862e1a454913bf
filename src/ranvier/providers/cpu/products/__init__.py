"""Products on the CPU; what a model does not have, it does not import."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.definitions.products import Window
from ranvier.codegen.definitions.program import Definitions
from ranvier.graph.ir import Value


class CpuProducts:
    """See :class:`ranvier.codegen.definitions.products.Products`."""

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


PRODUCTS = CpuProducts()
