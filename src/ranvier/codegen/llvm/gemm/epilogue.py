"""What happens to a finished tile of accumulators: recognised simple forms, and a small kernel for all others.

Bias over columns, a residual addend and clamping are done by the micro-kernel on its registers (:class:`Simple`).
Any other expression, output type or column stride is a *finish* kernel: the micro-kernel leaves its tile in scratch
and ``finish`` evaluates the expression over it, vector by vector, and stores. A driver calls it through a pointer::

    void finish(ptr bufs, ptr dims, ptr tile, ptr out, ptr place)

``bufs`` are the operands' addresses and ``dims`` the numbers of :attr:`Finish.dims`; ``out`` is the output's first
element of this batch entry; ``place`` holds six i64: batch, row, column, rows, columns of the tile, and the bytes
between its rows in scratch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ranvier.codegen.launch import At, KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.control import by_widths
from ranvier.codegen.llvm.elements import (
    NARROW,
    gather_elements,
    load_vector,
    memory_type,
    scatter_elements,
    store_product,
)
from ranvier.codegen.llvm.exprs import ExprEmitter
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.stored_codes import stored
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Index, Load, Op, Operand, Result, Size, walk
from ranvier.dtypes import DType
from ranvier.errors import KernelError
from ranvier.records import dataclass


@dataclass(frozen=True)
class Simple:
    """``clamp(acc + bias[column] + residual[batch, row, column])``, each part optional."""

    bias: Operand | None = None
    residual: Operand | None = None
    low: float = -math.inf
    high: float = math.inf

    @property
    def clamps(self) -> bool:
        return self.low > -math.inf or self.high < math.inf


def simple_form(epilogue: Epilogue | None, dtype: DType) -> Simple | None:
    """The epilogue as the micro-kernel can do it, or None where it needs a finish kernel."""
    if epilogue is None:
        return Simple()
    value = epilogue.value
    if value.dtype is not dtype:
        return None
    low, high = -math.inf, math.inf
    while isinstance(value, Op) and value.name in ("min", "max"):
        bound = next((a for a in value.args if isinstance(a, Const)), None)
        if bound is None or math.isnan(bound.value):
            return None
        # peeled from the outside: a bound found further in must lie within those found before
        if value.name == "max":
            low = max(low, float(bound.value))
        else:
            high = min(high, float(bound.value))
        value = value.args[0] if value.args[1] is bound else value.args[1]
    if low > high:
        return None
    terms, stack = [], [value]
    while stack:
        each = stack.pop()
        if isinstance(each, Op) and each.name == "add":
            stack += each.args
        else:
            terms.append(each)
    bias: Operand | None = None
    residual: Operand | None = None
    accumulators = 0
    for term in terms:
        if isinstance(term, Result):
            accumulators += 1
            continue
        if not isinstance(term, Load):
            return None
        operand = epilogue.operands[term.operand]
        if operand.dtype is not dtype or operand.strides[2] != 1:
            return None
        if operand.strides[:2] == (0, 0) and bias is None:
            bias = operand
        elif residual is None:
            residual = operand
        else:
            return None
    return Simple(bias, residual, low, high) if accumulators == 1 else None


def uses_index(epilogue: Epilogue | None) -> bool:
    """Whether positions are part of the value: then axes can be neither folded nor swapped."""
    return epilogue is not None and any(isinstance(e, Index) for e in walk(epilogue.value))


def place_of(operand: Operand) -> At:
    if operand.at is not None or operand.guard is not None:
        raise KernelError("operands of a contraction's epilogue have plain strides")
    return At(operand.view.storage, (operand.view.offset + operand.offset) * operand.dtype.numpy.itemsize)


@dataclass(frozen=True)
class Finish:
    """A finish kernel with what it needs at run time."""

    spec: KernelSpec
    buffers: tuple[At, ...]
    dims: tuple[int, ...]  # row and column stride of the output, three strides per operand, then sizes; in elements


def finish(epilogue: Epilogue | None, dtype: DType, out: DType, out_strides: tuple[int, int]) -> Finish:
    """The kernel for an epilogue on accumulators of ``dtype``, stored as ``out``."""
    value = epilogue.value if epilogue is not None else Result(0, dtype)
    operands = epilogue.operands if epilogue is not None else ()
    if value.dtype is not out and not (out in NARROW and value.dtype is DType.float32):  # a store rounds by itself
        value = Op("cast", (value,), out)
    sizes = list(dict.fromkeys(e for e in walk(value) if isinstance(e, Size)))
    numbered: dict[Expr, Expr] = {size: Size(k) for k, size in enumerate(sizes)}
    classes = tuple(o.strides[2] if o.strides[2] in (0, 1) else 2 for o in operands)
    dense = out_strides[1] == 1
    types = tuple(o.dtype for o in operands)
    body = _Body(_renumbered(value, numbered) if sizes else value, dtype, out, types, classes, dense)
    dims = [*out_strides]
    for o in operands:
        dims += o.strides
    dims += [s.value for s in sizes]
    return Finish(body.spec(), tuple(place_of(o) for o in operands), tuple(dims))


def _renumbered(value: Expr, numbered: dict[Expr, Expr]) -> Expr:
    """Sizes replaced by their position, so that code depends on how many there are and not on what they are."""
    if isinstance(value, Op):
        return Op(value.name, tuple(_renumbered(a, numbered) for a in value.args), value.dtype)
    return numbered.get(value, value)


@dataclass(frozen=True)
class _Body:
    value: Expr
    dtype: DType
    out: DType
    operands: tuple[DType, ...]
    classes: tuple[int, ...]  # stride along columns: 1, 0, or 2 for any other
    dense: bool  # columns of the output are contiguous

    def spec(self) -> KernelSpec:
        types = tuple(d.name for d in self.operands)
        key = ("gemm finish", 2, repr(self.value), self.dtype.name, self.out.name, types, self.classes, self.dense)
        return KernelSpec(f"gemm finish {self.dtype.name}", key, self._emit)

    def _emit(self, module: Module, symbol: str, isa: Isa) -> None:
        params = [("ptr", n) for n in ("bufs", "dims", "tile", "out", "place")]
        f = module.function(symbol, params)
        batch, row, column, rows, columns, step = (f.load("i64", f.gep(f.args["place"], k, "i64")) for k in range(6))
        dims = f.args["dims"]

        def dim(k: int) -> Val:
            return f.load("i64", f.gep(dims, k, "i64"), invariant=True)

        out_row, out_column = dim(0), dim(1)
        strides = [[dim(2 + 3 * k + axis) for axis in range(3)] for k in range(len(self.operands))]
        sizes = [dim(2 + 3 * len(self.operands) + k) for k in range(_size_count(self.value))]
        bases = [f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(len(self.operands))]
        lanes = isa.lanes(self.dtype.numpy.itemsize)
        with f.loop(0, rows) as r:
            here = row + r
            tile_row = f.gep(f.args["tile"], r * step)
            out_start = f.gep(f.args["out"], here * out_row, memory_type(self.out))
            starts = [
                f.gep(base, batch * s[0] + here * s[1], memory_type(kind))
                for base, s, kind in zip(bases, strides, self.operands)
            ]

            def piece(c: Val, count: int, mask: Val | None) -> None:
                at = column + c
                positions = f.splat(at, count) + f.lane_ids(count) if count > 1 else at

                def leaf(expr: Expr) -> Val:
                    if isinstance(expr, Result):
                        # the tile in scratch is whole, only what leaves it is masked
                        return load_vector(f, isa, self.dtype, f.gep(tile_row, c, memory_type(self.dtype)), count)
                    if isinstance(expr, Size):
                        return sizes[expr.value]
                    if isinstance(expr, Index):
                        return (batch, here, positions)[expr.axis]
                    assert isinstance(expr, Load)
                    k = expr.operand
                    kind, kept = self.operands[k], self.classes[k]
                    if kept == 0:
                        return load_vector(f, isa, kind, starts[k], 1)
                    if kept == 1:
                        start = f.gep(starts[k], at, memory_type(kind))
                        return load_vector(f, isa, kind, start, count, mask=mask)
                    return gather_elements(f, isa, kind, starts[k], positions * strides[k][2], mask=mask)

                value = stored(ExprEmitter(f, isa, count), self.value, leaf)
                if self.dense:
                    target = f.gep(out_start, at, memory_type(self.out))
                    store_product(f, isa, self.out, value, target, mask)
                else:
                    scatter_elements(f, isa, self.out, value, out_start, positions * out_column, mask=mask)

            _pieces(f, isa, lanes, columns, piece)
        f.ret()


def _size_count(value: Expr) -> int:
    return len({e for e in walk(value) if isinstance(e, Size)})


def _pieces(f: Fn, isa: Isa, lanes: int, stop: Val, body: Callable[[Val, int, Val | None], None]) -> None:
    """Run ``body(start, lanes, mask)`` over [0, stop): the rest by a mask where there are masks, else one by one."""
    if isa.masks:
        with f.loop(0, stop, lanes) as c:
            body(c, lanes, f.mask_below(lanes, stop - c))
        return
    by_widths(f, f.i64(0), stop, (lanes * isa.abreast, lanes, 1), lambda c, width: body(c, width, None))
