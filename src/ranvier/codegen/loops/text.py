"""A nest as people read it: one line per operand and per statement, shared values named."""

from __future__ import annotations

from collections import Counter

from ranvier.codegen.loops.fold import expressions
from ranvier.codegen.loops.ir import (
    Const,
    Expr,
    Index,
    Load,
    Map,
    Nest,
    Op,
    Operand,
    Reduce,
    Result,
    Scan,
    Size,
)

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_INFIX |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "and", "or": "or"}
_INFIX |= {"bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>"}


def text(nest: Nest) -> str:
    """The nest as a small program.

    >>> from ranvier.codegen.storage import View
    >>> from ranvier.dtypes import DType
    >>> a, out = View.temporary(DType.float32, (4, 8)), View.temporary(DType.float32, (4, 8))
    >>> x = Load(0, a.dtype)
    >>> square = Map(((1, Op("mul", (x, x), x.dtype)),))
    >>> operands = (Operand(a, a.strides), Operand(out, out.strides))
    >>> print(text(Nest((4, 8), operands, (square,), label="square")))
    # square
    t0 = float32 temp[i0*8 + i1]
    t1 = float32 temp[i0*8 + i1]
    for i0 < 4, i1 < 8:
        t1 = t0 * t0
    """
    return "\n".join(_Printer(nest).lines())


class _Printer:
    def __init__(self, nest: Nest) -> None:
        self.nest = nest
        self.named: dict[int, str] = {}

    def lines(self) -> list[str]:
        nest = self.nest
        found = [f"# {nest.label}"] if nest.label else []
        found += [f"t{k} = {self.operand(o)}" for k, o in enumerate(nest.operands)]
        outer = ", ".join(f"i{a} < {nest.extents[a]}" for a in nest.outer)
        found.append(f"for {outer or 'once'}:")
        row = ", ".join(f"i{a} < {nest.extents[a]}" for a in sorted(nest.row))
        for number, stage in enumerate(nest.stages):
            indent = "    "
            if isinstance(stage, Reduce):
                found += self.shared(list(expressions(stage)), indent)
                found.append(f"{indent}r{number} = {stage.fold}({self.expr(stage.value)} for {row or 'once'})")
            elif isinstance(stage, Scan):
                order = " reversed" * stage.reverse + " exclusive" * stage.exclusive
                found.append(
                    f"{indent}t{stage.operand} = running {stage.fold}{order} of {self.expr(stage.value)} over {row}"
                )
            else:
                if isinstance(stage, Map) and row:
                    found.append(f"{indent}for {row}:")
                    indent *= 2
                found += self.shared(list(expressions(stage)), indent)
                found += [f"{indent}t{k} = {self.expr(value)}" for k, value in stage.stores]
            self.named.clear()
        return found

    def operand(self, operand: Operand) -> str:
        start = operand.view.offset + operand.offset
        terms = [f"i{a}*{s}" if s != 1 else f"i{a}" for a, s in enumerate(operand.strides) if s]
        terms += [str(start)] if start else []
        terms += [self.expr(operand.at)] if operand.at is not None else []
        storage = operand.view.storage
        name = f"{storage.kind} {storage.name}".strip()
        guard = f" where {self.expr(operand.guard)} else {operand.other}" if operand.guard is not None else ""
        return f"{operand.dtype} {name}[{' + '.join(terms) or '0'}]{guard}"

    def shared(self, roots: list[Expr], indent: str) -> list[str]:
        """Lines that name the operations used more than once, innermost first."""
        uses: Counter[int] = Counter()
        order: list[Op] = []

        def visit(expr: Expr) -> None:
            if isinstance(expr, Op):
                uses[id(expr)] += 1
                if uses[id(expr)] == 1:
                    for arg in expr.args:
                        visit(arg)
                    order.append(expr)

        for root in roots:
            visit(root)
        lines = []
        for expr in order:
            if uses[id(expr)] > 1:
                written = self.expr(expr)
                self.named[id(expr)] = f"v{len(self.named)}"
                lines.append(f"{indent}{self.named[id(expr)]} = {written}")
        return lines

    def expr(self, expr: Expr, inside: bool = False) -> str:
        name = self.named.get(id(expr))
        if name is not None:
            return name
        if isinstance(expr, Const):
            return f"{expr.value}"
        if isinstance(expr, Size):
            return f"{expr.value}"
        if isinstance(expr, Index):
            return f"i{expr.axis}"
        if isinstance(expr, Load):
            return f"t{expr.operand}"
        if isinstance(expr, Result):
            return f"r{expr.stage}"
        assert isinstance(expr, Op)
        if expr.name in _INFIX:
            sides = f" {_INFIX[expr.name]} ".join(self.expr(a, True) for a in expr.args)
            return f"({sides})" if inside else sides
        what = str(expr.dtype) if expr.name == "cast" else expr.name
        return f"{what}({', '.join(self.expr(a) for a in expr.args)})"
