"""What happens to a tile of float32 sums of a bfloat16 convolution: the epilogue, one rounding, the store.

A driver calls the kernel through a pointer as ``void finish(ptr bufs, ptr dims, ptr tile, ptr out, ptr place)``:
operands' addresses, then :attr:`Tail.dims`, the first sum, the first output, and a block of numbers (:data:`PLACE`).
Vectors run along the channels; for each the rows are walked down, so that what is the same for all pixels (a bias)
is loaded once.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.conv.epilogues import Lanes, Tail, TailCode
from ranvier.codegen.llvm.elements import (
    gather_elements,
    load_vector,
    memory_type,
    narrowed_pair,
    scatter_elements,
)
from ranvier.codegen.llvm.exprs import ExprEmitter
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.stored_codes import stored
from ranvier.codegen.loops.ir import Expr, Load, Result
from ranvier.dtypes import DType

# image; the first pixel's number and how far the numbers of neighbours are apart; the first channel; how many rows and
# columns there are; bytes between rows of sums; elements between rows of outputs
PLACE = ("image", "number", "number_step", "channel", "rows", "columns", "step", "out_step")


def finish_spec(tail: Tail, out: DType, *, single: bool = False) -> KernelSpec:
    """``single``: there is one column only, and vectors run down the rows."""

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        f = module.function(symbol, [("ptr", n) for n in ("bufs", "dims", "tile", "out", "place")])
        at = {name: f.load("i64", f.gep(f.args["place"], k, "i64")) for k, name in enumerate(PLACE)}
        code = TailCode(f, isa, tail, f.args["bufs"], 0, f.args["dims"], 0)
        (_single_column if single else _columns)(f, at, code, isa, out)
        f.ret()

    return KernelSpec(f"conv bfloat16 finish {out}", ("bfloat conv finish", 2, tail.key, out.name, single), emit)


def _columns(f: Fn, at: dict[str, Val], code: TailCode, isa: Isa, out: DType) -> None:
    lanes = isa.lanes(4)
    first = code.rows(at["image"], at["number"])

    def piece(column: Val, masks: list[Val | None]) -> None:
        """One or two vectors of columns of all rows."""
        columns = [column + lanes * h for h in range(len(masks))]
        fixed = [code.fixed(first, at["channel"] + c, Lanes(lanes, c, m)) for c, m in zip(columns, masks)]
        with f.loop(0, at["rows"]) as r:
            sums = f.gep(f.args["tile"], r * at["step"])
            start = f.gep(f.args["out"], r * at["out_step"], memory_type(out))
            rows = code.moved(first, r * at["number_step"])
            values = [
                code.value(f.load(vector("float", lanes), f.gep(sums, c, "float")), rows, at["channel"] + c, m, known)
                for c, m, known in zip(columns, masks, fixed)
            ]
            place = f.gep(start, column, memory_type(out))
            if len(masks) == 2 and out is DType.bfloat16:
                store_both(narrowed_pair(f, *values), place, masks[1])
            else:
                for h, (value, m) in enumerate(zip(values, masks)):
                    code.keep(value, f.gep(place, lanes * h, memory_type(out)), out, m)

    def store_both(value: Val, place: Val, mask: Val | None) -> None:
        if mask is None:
            f.store(value, place, 2)
        else:
            every = f.shuffle(f.const(mask.type, 1), mask, range(2 * lanes))
            f.masked_store(value, place, every, 2)

    pairs = f.and_(at["columns"], -2 * lanes)
    with f.loop(0, pairs, 2 * lanes) as column:
        piece(column, [None, None])
    left = at["columns"] - pairs
    with f.if_(f.cmp("sgt", left, lanes)):
        piece(pairs, [None, f.mask_below(lanes, left - lanes)])
    with f.if_(f.and_(f.cmp("sgt", left, 0), f.cmp("sle", left, lanes))):
        piece(pairs, [f.mask_below(lanes, left)])


def _single_column(f: Fn, at: dict[str, Val], code: TailCode, isa: Isa, out: DType) -> None:
    lanes, tail = isa.lanes(4), code.tail
    first = code.rows(at["image"], at["number"])
    dense = f.cmp("eq", at["out_step"], 1)
    with f.loop(0, at["rows"], lanes) as r:
        mask = f.mask_below(lanes, at["rows"] - r)
        ids = f.lane_ids(lanes) + r

        def leaf(expr: Expr) -> Val:
            if isinstance(expr, Result):
                return f.gather("float", f.args["tile"], ids * f.lshr(at["step"], 2), mask)
            assert isinstance(expr, Load)
            k, kind = expr.operand, tail.dtypes[expr.operand]
            row = first[k]
            if tail.classes[k]:
                row = f.gep(row, at["channel"] * code.strides[k][2], memory_type(kind))
            if tail.still[k]:
                return load_vector(f, isa, kind, row, 1)
            return gather_elements(f, isa, kind, row, ids * (code.strides[k][1] * at["number_step"]), mask=mask)

        value = stored(ExprEmitter(f, isa, lanes), tail.value, leaf)
        with f.if_else(dense) as otherwise:
            code.keep(value, f.gep(f.args["out"], r, memory_type(out)), out, mask)
            otherwise()
            scatter_elements(f, isa, out, value, f.args["out"], ids * at["out_step"], mask=mask)
