"""Collects the operands of a loop nest while expressions are written over its axes."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.loops.ir import Expr, Load, Nest, Operand, Scalar, Stage
from ranvier.codegen.storage import View, memory_order
from ranvier.varying import following


class NestBuilder:
    """A nest over ``domain``: loads are made on demand, the same operand once."""

    def __init__(self, domain: Sequence[int], label: str = "") -> None:
        self.domain = tuple(domain)
        self.label = label
        self.operands: list[Operand] = []
        self._index: dict[Operand, int] = {}
        self._loads: list[tuple[int, Operand]] = []
        self._alike: tuple[int, ...] | None = None

    def load(
        self,
        view: View,
        strides: Sequence[int] | None = None,
        *,
        offset: int = 0,
        at: Expr | None = None,
        guard: Expr | None = None,
        other: Scalar = 0,
    ) -> Expr:
        """The element of ``view`` at this point: by broadcasting, or by the given strides per axis of the domain."""
        steps = tuple(strides) if strides is not None else view.expanded(self.domain).strides
        return Load(self._operand(Operand(view, steps, offset, at, guard, other)), view.element)

    def _operand(self, operand: Operand) -> int:
        if following():  # its numbers may vary, and are compared rather than hashed
            found = next((k for k, known in self._loads if known == operand), None)
        else:
            found = self._index.get(operand)
        if found is None:
            found = len(self.operands)
            if following():
                self._loads.append((found, operand))
            else:
                self._index[operand] = found
            self.operands.append(operand)
        return found

    def store(self, view: View, strides: Sequence[int] | None = None) -> int:
        """A place to store to; always an operand of its own, also where the same memory is read."""
        steps = tuple(strides) if strides is not None else view.expanded(self.domain).strides
        self.operands.append(Operand(view, steps))
        return len(self.operands) - 1

    def nest(self, stages: Sequence[Stage], row: Sequence[int] = ()) -> Nest:
        return Nest(self.domain, tuple(self.operands), tuple(stages), frozenset(row), self.label)

    def like(self, view: View) -> None:
        """The result should lie in memory as ``view`` does, of which it is read at computed positions."""
        self.prefer(memory_order(view.shape, view.strides))

    def prefer(self, order: Sequence[int]) -> None:
        """The result should have its axes in memory in this order, outermost first, unless an operand's lie otherwise
        than row-major."""
        self._alike = tuple(order)

    def order(self) -> tuple[int, ...] | None:
        """How the largest operand that covers the whole domain lies in memory; None for row-major or no such."""
        best: tuple[int, ...] | None = None
        for operand in self.operands:
            strides = operand.strides
            if operand.at is not None or any(s == 0 and d != 1 for s, d in zip(strides, self.domain)):
                continue
            order = memory_order(self.domain, strides)
            if best is None or best == tuple(range(len(best))):
                best = order
        if self._alike is not None and (best is None or best == tuple(range(len(best)))):
            best = self._alike
        return best
