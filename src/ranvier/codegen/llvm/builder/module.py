"""Functions, and the compilation unit they make up."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.llvm.builder.control import Control
from ranvier.codegen.llvm.builder.types import literal
from ranvier.codegen.llvm.builder.values import Declarations, Val

_KERNEL = (("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch"))


class Module(Declarations):
    """One compilation unit: functions, and what they declare. ``extremes``: see :class:`Isa`."""

    def __init__(self, *, extremes: bool = False) -> None:
        super().__init__()
        self.extremes = extremes
        self.functions: list[Fn] = []
        self.globals: list[str] = []

    def function(
        self,
        name: str,
        params: Sequence[tuple[str, str]],
        ret: str = "void",
        *,
        internal: bool = False,
        optimized: bool = True,
    ) -> Fn:
        """A new function; ``params`` are (type, name) pairs. ``ptr`` parameters are assumed not to alias.

        Without ``optimized`` LLVM translates it as it stands, in a third of the time: for code that decides what others
        do and takes no part in it.
        """
        made = Fn(self, name, params, ret, internal, optimized)
        self.functions.append(made)
        return made

    def kernel(self, symbol: str, *, optimized: bool = True) -> Fn:
        """A function that a launch can call."""
        return self.function(symbol, _KERNEL, optimized=optimized)

    def table(self, name: str, element: str, values: Sequence[int | float]) -> str:
        """A constant array; returns its name, a ``ptr``."""
        items = ", ".join(f"{element} {literal(element, v)}" for v in values)
        self.globals.append(f"@{name} = internal constant [{len(values)} x {element}] [{items}], align 64")
        return f"@{name}"

    def __str__(self) -> str:
        parts = [*self.globals, *(str(f) for f in self.functions), *self.declared.values()]
        return "\n\n".join(parts) + "\n"


class Fn(Control):
    """One function, written from top to bottom."""

    module: Module

    def __init__(
        self,
        module: Module,
        name: str,
        params: Sequence[tuple[str, str]],
        ret: str = "void",
        internal: bool = False,
        optimized: bool = True,
    ) -> None:
        super().__init__(module)
        self.name = name
        self.ret_type = ret
        self._params = list(params)
        self._internal = internal
        self.optimized = optimized
        self.args = {n: Val(self, t, f"%{n}") for t, n in params}

    def __str__(self) -> str:
        params = ", ".join(f"{t} noalias %{n}" if t == "ptr" else f"{t} %{n}" for t, n in self._params)
        linkage = "internal " if self._internal else ""
        body = "\n".join(["entry:", *self._entry, *self._lines])
        effort = "" if self.optimized else " noinline optnone"
        return f"define {linkage}{self.ret_type} @{self.name}({params}) nounwind{effort} {{\n{body}\n}}"
