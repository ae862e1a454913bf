"""What a function does with memory: addresses, loads and stores, its own stack."""

from __future__ import annotations

from ranvier.codegen.llvm.builder.types import element_of, mangled, size_of, vector
from ranvier.codegen.llvm.builder.values import Declarations, Operand, Val, Values


class Var:
    """A mutable variable."""

    __slots__ = ("fn", "slot", "type")

    def __init__(self, fn: Values, kind: str, slot: str) -> None:
        self.fn = fn
        self.type = kind
        self.slot = slot

    def get(self) -> Val:
        return self.fn.emit(self.type, f"load {self.type}, ptr {self.slot}")

    def set(self, value: Operand) -> None:
        value = value if isinstance(value, Val) else self.fn.const(self.type, value)
        assert value.type == self.type, f"variable of {self.type} set to {value.type}"
        self.fn.line(f"store {self.type} {value.name}, ptr {self.slot}")


class Memory(Values):
    """The part of a function's writer that reads and writes memory."""

    def __init__(self, module: Declarations) -> None:
        super().__init__(module)
        self._entry: list[str] = []  # stack slots: they must stand in the first block

    def emit_first(self, kind: str, text: str) -> Val:
        """In the entry block, so that the value is known everywhere; of arguments and other such values only."""
        name = self.fresh()
        self._entry.append(f"  {name} = {text}")
        return Val(self, kind, name)

    def gep(self, base: Val, index: Operand, element: str = "i8") -> Val:
        """The address of ``base[index]`` for elements of the given type."""
        if isinstance(index, int) and index == 0:
            return base
        at = index if isinstance(index, Val) else self.i64(int(index))
        return self.emit("ptr", f"getelementptr inbounds {element}, ptr {base.name}, i64 {at.name}")

    def load(self, kind: str, address: Val, align: int | None = None, *, invariant: bool = False) -> Val:
        """Load; ``align`` defaults to that of the element, never of the vector: tensors may start anywhere."""
        align = align or size_of(element_of(kind))
        tail = ", !invariant.load !{}" if invariant else ""
        return self.emit(kind, f"load {kind}, ptr {address.name}, align {align}{tail}")

    def store(self, value: Val, address: Val, align: int | None = None, *, passing: bool = False) -> None:
        """``passing`` stores go to memory without the caches: whole vectors, at a multiple of their size."""
        align = align or size_of(value.element)
        hint = ", !nontemporal !{i32 1}" if passing else ""
        self.line(f"store {value.type} {value.name}, ptr {address.name}, align {align}{hint}")

    def masked_load(
        self, kind: str, address: Val, mask: Val, other: Val | None = None, align: int | None = None
    ) -> Val:
        filler = other or self.zero(kind)
        name = f"llvm.masked.load.{mangled(kind)}.p0"
        self.module.declare(name, kind, ["ptr", mask.type, kind])
        at = f"ptr align {align or size_of(element_of(kind))} {address.name}"
        return self.emit(kind, f"call {kind} @{name}({at}, {mask.type} {mask.name}, {kind} {filler.name})")

    def masked_store(self, value: Val, address: Val, mask: Val, align: int | None = None) -> None:
        name = f"llvm.masked.store.{mangled(value.type)}.p0"
        self.module.declare(name, "void", [value.type, "ptr", mask.type])
        at = f"ptr align {align or size_of(value.element)} {address.name}"
        self.line(f"call void @{name}({value.type} {value.name}, {at}, {mask.type} {mask.name})")

    def gather(self, element: str, base: Val, indices: Val, mask: Val | None = None, other: Val | None = None) -> Val:
        """One element per lane from ``base[indices]``."""
        lanes = indices.lanes
        kind = vector(element, lanes)
        where = self.emit(
            vector("ptr", lanes), f"getelementptr inbounds {element}, ptr {base.name}, {indices.type} {indices.name}"
        )
        if lanes == 1:
            return self.load(kind, where)
        on = mask or self.const(vector("i1", lanes), 1)
        filler = other or self.zero(kind)
        name = f"llvm.masked.gather.{mangled(kind)}.{mangled(where.type)}"
        self.module.declare(name, kind, [where.type, on.type, kind])
        at = f"{where.type} align {size_of(element)} {where.name}"
        return self.emit(kind, f"call {kind} @{name}({at}, {on.type} {on.name}, {kind} {filler.name})")

    def scatter(self, value: Val, base: Val, indices: Val, mask: Val | None = None) -> None:
        lanes = indices.lanes
        where = self.emit(
            vector("ptr", lanes),
            f"getelementptr inbounds {value.element}, ptr {base.name}, {indices.type} {indices.name}",
        )
        if lanes == 1:
            self.store(value, where)
            return
        on = mask or self.const(vector("i1", lanes), 1)
        name = f"llvm.masked.scatter.{mangled(value.type)}.{mangled(where.type)}"
        self.module.declare(name, "void", [value.type, where.type, on.type])
        at = f"{where.type} align {size_of(value.element)} {where.name}"
        self.line(f"call void @{name}({value.type} {value.name}, {at}, {on.type} {on.name})")

    def prefetch(self, address: Val, *, write: bool = False, locality: int = 3) -> None:
        self.module.declared["llvm.prefetch.p0"] = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        self.line(f"call void @llvm.prefetch.p0(ptr {address.name}, i32 {int(write)}, i32 {locality}, i32 1)")

    def stack(self, element: str, count: int, align: int = 64) -> Val:
        """An array on the stack; for small scratch only."""
        slot = self.fresh("stack")
        self._entry.append(f"  {slot} = alloca [{count} x {element}], align {align}")
        return Val(self, "ptr", slot)

    def var(self, kind: str, value: Operand | None = None) -> Var:
        slot = self.fresh("var")
        self._entry.append(f"  {slot} = alloca {kind}")
        made = Var(self, kind, slot)
        if value is not None:
            made.set(value)
        return made
