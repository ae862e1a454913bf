"""The finish kernel of integer products: an epilogue over a tile of int32 sums, mostly towards bytes.

It stands where the float products' does (``gemm/epilogue.py``) and is called alike. Requantized results are most of
the work of a small convolution, so whole vectors are handled apart from the columns left over, which need a mask: a
masked store of narrowed elements is many times slower than a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, mangled, vector
from ranvier.codegen.llvm.elements import (
    gather_elements,
    load_vector,
    memory_type,
    scatter_elements,
    store_vector,
    widened,
)
from ranvier.codegen.llvm.exprs import ExprEmitter
from ranvier.codegen.llvm.gemm.epilogue import Finish, place_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Index, Load, Op, Result, Size, substitute, walk
from ranvier.dtypes import DType
from ranvier.records import dataclass

_SUMS = DType.int32


def integer_finish(epilogue: Epilogue | None, out: DType, out_strides: tuple[int, int]) -> Finish:
    """The kernel for an epilogue on int32 sums, stored as ``out``."""
    value: Expr = epilogue.value if epilogue is not None else Result(0, _SUMS)
    operands = epilogue.operands if epilogue is not None else ()
    if value.dtype is not out:
        value = Op("cast", (value,), out)
    sizes = list(dict.fromkeys(e for e in walk(value) if isinstance(e, Size)))
    if sizes:
        value = substitute(value, {size: Size(k) for k, size in enumerate(sizes)})
    classes = tuple(o.strides[2] if o.strides[2] in (0, 1) else 2 for o in operands)
    body = _Body(value, out, tuple(o.dtype for o in operands), classes, len(sizes), out_strides[1] == 1)
    dims = [*out_strides]
    for o in operands:
        dims += o.strides
    dims += [s.value for s in sizes]
    return Finish(body.spec(), tuple(place_of(o) for o in operands), tuple(dims))


@dataclass(frozen=True)
class _Body:
    value: Expr
    out: DType
    operands: tuple[DType, ...]
    classes: tuple[int, ...]  # stride along columns: 1, 0, or 2 for any other
    sizes: int
    dense: bool  # columns of the output are contiguous

    def spec(self) -> KernelSpec:
        types = tuple(d.name for d in self.operands)
        key = ("integer finish", repr(self.value), self.out.name, types, self.classes, self.dense)
        return KernelSpec(f"integer finish {self.out.name}", key, self._emit)

    def _value(self, f: Fn, emitter: ExprEmitter, leaf: Callable[[Expr], Val], lanes: int) -> Val:
        """The epilogue in every lane; codes by one conversion that rounds, of numbers clipped before."""
        found = _rounded_to_codes(self.value)
        if found is None:
            return widened(f, emitter.value(self.value, leaf), lanes)
        number, zero, low, high = found
        x = widened(f, emitter.value(number, leaf), lanes)
        shift = None if zero is None else widened(f, emitter.value(zero, leaf), lanes)
        least, most = (f.const(x.type, float(end)) for end in (low, high))
        if shift is not None:
            least, most = least - shift, most - shift
        # the bound stands second: it is what comes out where x is NaN
        clipped = f.quick_min(f.quick_max(x, least), most)
        kind = vector("i32", lanes)
        name = f"llvm.lrint.{mangled(kind)}.{mangled(x.type)}"
        code = f.intrinsic(name, kind, [clipped])
        if shift is not None:
            code = code + f.cast(shift, "i32")
        return f.cast(code, "i8")

    def _emit(self, module: Module, symbol: str, isa: Isa) -> None:
        f = module.function(symbol, [("ptr", n) for n in ("bufs", "dims", "tile", "out", "place")])
        batch, row, column, rows, columns, step = (f.load("i64", f.gep(f.args["place"], k, "i64")) for k in range(6))

        def dim(k: int) -> Val:
            return f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True)

        count = len(self.operands)
        out_row, out_column = dim(0), dim(1)
        strides = [[dim(2 + 3 * k + axis) for axis in range(3)] for k in range(count)]
        sizes = [dim(2 + 3 * count + k) for k in range(self.sizes)]
        bases = [f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(count)]
        lanes = isa.lanes(4)
        whole = f.and_(columns, -lanes)
        with f.loop(0, rows) as r:
            here = row + r
            sums = f.gep(f.args["tile"], r * step)
            start = f.gep(f.args["out"], here * out_row, memory_type(self.out))
            places = [
                f.gep(base, batch * s[0] + here * s[1], memory_type(kind))
                for base, s, kind in zip(bases, strides, self.operands)
            ]
            once = ExprEmitter(f, isa, 1)  # what is the same for all columns

            def piece(c: Val, size: int, mask: Val | None) -> None:
                at = column + c
                positions = f.splat(at, size) + f.lane_ids(size) if size > 1 else at

                def leaf(expr: Expr) -> Val:
                    if isinstance(expr, Result):
                        # the tile is whole, only what leaves it is masked
                        return load_vector(f, isa, _SUMS, f.gep(sums, c, "i32"), size)
                    if isinstance(expr, Size):
                        return sizes[expr.value]
                    if isinstance(expr, Index):
                        return (batch, here, positions)[expr.axis]
                    assert isinstance(expr, Load)
                    k, kind = expr.operand, self.operands[expr.operand]
                    if self.classes[k] == 1:
                        place = f.gep(places[k], at, memory_type(kind))
                        return load_vector(f, isa, kind, place, size, mask=mask)
                    return gather_elements(f, isa, kind, places[k], positions * strides[k][2], mask=mask)

                value = self._value(f, once.child(size), leaf, size)
                if self.dense:
                    target = f.gep(start, at, memory_type(self.out))
                    store_vector(f, isa, self.out, value, target, mask=mask)
                else:
                    scatter_elements(f, isa, self.out, value, start, positions * out_column, mask=mask)

            for expr in walk(self.value):
                if isinstance(expr, Load) and self.classes[expr.operand] == 0:
                    once.preset(expr, load_vector(f, isa, expr.dtype, places[expr.operand], 1))
            with f.loop(0, whole, lanes) as c:
                piece(c, lanes, None)
            if isa.masks:
                with f.if_(f.cmp("slt", whole, columns)):
                    piece(whole, lanes, f.mask_below(lanes, columns - whole))
            else:
                with f.loop(whole, columns) as c:
                    piece(c, 1, None)
        f.ret()


def _rounded_to_codes(value: Expr) -> tuple[Expr, Expr | None, int, int] | None:
    """Of an expression that rounds a float32 number and saturates it to 8 bits: the number, the zero point (a whole
    float32 number) and the bounds; None for other expressions."""
    low, high = 0, 255
    if _is(value, "bits", DType.int8):
        # signed codes come by way of unsigned ones
        flipped = value.args[0]
        if not (_is(flipped, "bitxor", DType.uint8) and flipped.args[1] == Const(128, DType.uint8)):
            return None
        low, high = -128, 127
        value = flipped.args[0]
    if not _is(value, "cast", DType.uint8):
        return None
    codes = value.args[0]
    if low < 0:
        if not (_is(codes, "add", DType.float32) and codes.args[1] == Const(128.0, DType.float32)):
            return None
        codes = codes.args[0]
    zero: Expr | None = None
    if _is(codes, "add", DType.float32):
        codes, zero = codes.args
        if not (isinstance(zero, Op) and zero.name == "cast" and zero.args[0].dtype in (DType.int8, DType.uint8)):
            return None
    return (codes.args[0], zero, low, high) if _is(codes, "round", DType.float32) else None


def _is(value: Expr, name: str, dtype: DType) -> TypeGuard[Op]:
    return isinstance(value, Op) and value.name == name and value.dtype is dtype
