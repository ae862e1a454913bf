"""Loops and branches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ranvier.codegen.llvm.builder.memory import Memory
from ranvier.codegen.llvm.builder.values import Operand, Val, Values


class Control(Memory):
    """The part of a function's writer that decides what runs next."""

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Val]:
        """``for i in range(start, stop, step)`` over i64 with a positive step; nothing runs when start >= stop."""
        first = start if isinstance(start, Val) else self.i64(int(start))
        last = stop if isinstance(stop, Val) else self.i64(int(stop))
        by = step if isinstance(step, Val) else self.i64(int(step))
        self._count += 1
        n = self._count
        head, end = f"head{n}", f"end{n}"
        enter = self.cmp("slt", first, last)
        before = self._block
        self.line(f"br i1 {enter.name}, label %{head}, label %{end}")
        self.label(head)
        index = Val(self, "i64", f"%i{n}")
        # the back edge's block is known only at the end: the line is filled in then
        self._lines.append("")
        where = len(self._lines) - 1
        yield index
        nxt = self.emit("i64", f"add nsw i64 {index.name}, {by.name}")
        self._lines[where] = f"  {index.name} = phi i64 [ {first.name}, %{before} ], [ {nxt.name}, %{self._block} ]"
        again = self.cmp("slt", nxt, last)
        self.line(f"br i1 {again.name}, label %{head}, label %{end}")
        self.label(end)

    @contextmanager
    def if_(self, condition: Val) -> Iterator[None]:
        self._count += 1
        n = self._count
        self.line(f"br i1 {condition.name}, label %then{n}, label %after{n}")
        self.label(f"then{n}")
        yield
        self.line(f"br label %after{n}")
        self.label(f"after{n}")

    @contextmanager
    def if_else(self, condition: Val) -> Iterator[_Else]:
        """``with f.if_else(c) as other: … ; other(); …``"""
        self._count += 1
        n = self._count
        self.line(f"br i1 {condition.name}, label %then{n}, label %else{n}")
        self.label(f"then{n}")
        other = _Else(self, n)
        yield other
        if not other.used:
            other()
        self.line(f"br label %after{n}")
        self.label(f"after{n}")

    @contextmanager
    def while_(self) -> Iterator[_While]:
        """``with f.while_() as w: …; w.until(condition)`` or ``w.only(condition)`` anywhere in the body."""
        self._count += 1
        n = self._count
        self.line(f"br label %again{n}")
        self.label(f"again{n}")
        yield _While(self, n)
        self.line(f"br label %again{n}")
        self.label(f"done{n}")

    def ret(self, value: Val | None = None) -> None:
        self.line("ret void" if value is None else f"ret {value.type} {value.name}")


class _Else:
    __slots__ = ("fn", "n", "used")

    def __init__(self, fn: Values, n: int) -> None:
        self.fn, self.n, self.used = fn, n, False

    def __call__(self) -> None:
        self.used = True
        self.fn.line(f"br label %after{self.n}")
        self.fn.label(f"else{self.n}")


class _While:
    __slots__ = ("fn", "n")

    def __init__(self, fn: Values, n: int) -> None:
        self.fn, self.n = fn, n

    def until(self, condition: Val) -> None:
        """Leave the loop when the condition holds."""
        self.fn._count += 1
        on = f"on{self.fn._count}"
        self.fn.line(f"br i1 {condition.name}, label %done{self.n}, label %{on}")
        self.fn.label(on)

    def only(self, condition: Val) -> None:
        """Leave the loop when the condition does not hold."""
        self.fn._count += 1
        on = f"on{self.fn._count}"
        self.fn.line(f"br i1 {condition.name}, label %{on}, label %done{self.n}")
        self.fn.label(on)
