"""The finish kernel of integer products: an epilogue over a tile of int32 sums, mostly towards bytes.

It stands where the float products' does (``gemm/epilogue.py``) and is called alike. Requantized results are most of
the work of a small convolution, so whole vectors are handled apart from the columns left over, which need a mask: a
masked store of narrowed elements is many times slower than a plain one. Codes of two vectors of two rows each, and
of a last vector of four rows, are packed together where the processor has instructions for that, which saturate for
nothing (``narrow.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeGuard

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.code_forms import Codes, CodesAsNumbers, codes_as_numbers, codes_of
from ranvier.codegen.llvm.control import by_widths
from ranvier.codegen.llvm.elements import (
    gather_elements,
    load_vector,
    memory_type,
    scatter_elements,
    store_vector,
    widened,
)
from ranvier.codegen.llvm.exprs import ExprEmitter, divided
from ranvier.codegen.llvm.gemm.epilogue import Finish, place_of
from ranvier.codegen.llvm.integer.dividing import divided_in_parts, in_parts
from ranvier.codegen.llvm.integer.narrow import lowest_beyond, packed_bytes, packed_low_bytes
from ranvier.codegen.llvm.integer.reach import Array, by_additions, fits_integers, stays_near, used
from ranvier.codegen.llvm.integer.shortcuts import shortened
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.stored_codes import nearest, stored
from ranvier.codegen.llvm.vmath.core import WHOLE, exactly
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Index, Load, Op, Result, Size, substitute, walk
from ranvier.dtypes import DType
from ranvier.records import dataclass

_SUMS = DType.int32
_FOUR = 4  # rows whose codes of one vector are packed together


def integer_finish(
    epilogue: Epilogue | None,
    out: DType,
    out_strides: tuple[int, int],
    reach: Array | None = None,
    *,
    shortens: bool = False,
) -> Finish:
    """The kernel for an epilogue on int32 sums, stored as ``out``.

    ``reach`` is how large the sums of every column can be, if that is known; ``shortens``: whether codes of codes are
    made by the shortest way that gives the same.
    """
    value: Expr = epilogue.value if epilogue is not None else Result(0, _SUMS)
    operands = epilogue.operands if epilogue is not None else ()
    if value.dtype is not out:
        value = Op("cast", (value,), out)
    near, fits, parts = False, False, None
    if shortens:
        value, operands = used(*shortened(value, operands, None if reach is None else reach.size))
    if reach is not None and shortens:
        near = stays_near(value, operands, reach)
        value, operands = used(*by_additions(value, operands, reach))
    elif reach is not None and fits_integers(value, operands, reach):
        fits, parts = True, in_parts(value, operands)
        value, operands = used(*parts) if parts else (value, operands)
    sizes = list(dict.fromkeys(e for e in walk(value) if isinstance(e, Size)))
    if sizes:
        value = substitute(value, {size: Size(k) for k, size in enumerate(sizes)})
    classes = tuple(_class(*o.strides[1:]) for o in operands)
    types, dense = tuple(o.dtype for o in operands), out_strides[1] == 1
    body = _Body(value, out, types, classes, len(sizes), dense, near, fits, parts is not None)
    dims = [*out_strides]
    for o in operands:
        dims += o.strides
    dims += [s.value for s in sizes]
    return Finish(body.spec(), tuple(place_of(o) for o in operands), tuple(dims))


_ROW, _COLUMNS, _SCATTERED, _ALL = range(4)  # what an operand's elements belong to


def _class(row: int, column: int) -> int:
    if column == 0:
        return _ALL if row == 0 else _ROW
    return _COLUMNS if column == 1 else _SCATTERED


@dataclass(frozen=True)
class _Body:
    value: Expr
    out: DType
    operands: tuple[DType, ...]
    classes: tuple[int, ...]
    sizes: int
    dense: bool  # columns of the output are contiguous
    near: bool  # what becomes codes fits 16 bits
    fits: bool  # it fits 32 bits, and is a number
    parts: bool  # it is divided by way of a reciprocal in two parts

    def spec(self) -> KernelSpec:
        types = tuple(d.name for d in self.operands)
        kind = self.near, self.fits, self.parts
        key = ("integer finish", repr(self.value), self.out.name, types, self.classes, self.dense, *kind)
        return KernelSpec(f"integer finish {self.out.name}", key, self._emit)

    def _value(self, emitter: ExprEmitter, leaf: Callable[[Expr], Val], lanes: int, made: list[Val] | None) -> Val:
        """The epilogue in every lane; codes by one conversion that rounds, of numbers clipped before.

        ``made`` is what :meth:`_bounds` found before.
        """
        f, codes = emitter.fn, codes_of(self.value)
        if codes is None:
            return stored(emitter, self.value, leaf)
        divides = _divides(codes)
        x = widened(f, emitter.value(_unbounded(codes), leaf), lanes)
        made = made or [widened(f, each, lanes) for each in self._bounds(emitter, leaf, codes)]
        if self.fits:
            code = nearest(f, emitter.isa, self._divided(f, x, made) if divides else x)
            code = code if codes.zero is None else code + made[-1]
            return f.cast(f.min_(f.max_(code, codes.low), codes.high), "i8")
        # the bound stands second: it is what comes out where x is NaN
        number = f.quick_min(_at_least(f, emitter.isa, x, made[0]), made[1])
        if divides:
            number = divided(f, number, made[2], made[3])
        code = nearest(f, emitter.isa, number)
        return f.cast(code if codes.zero is None else code + made[-1], "i8")

    def _unclipped(self, emitter: ExprEmitter, leaf: Callable[[Expr], Val], codes: Codes, made: list[Val]) -> Val:
        """Codes less their zero point as 32 bits, for instructions that saturate.

        Only one end is clipped. Where numbers that no integer holds become the lowest one it is the upper: that is
        right for those below and for NaN. Elsewhere NaN has to go with what lies below. Numbers that surely fit 16
        bits are left in the lower half of the 32, with others above; those that surely are integers need no bound.
        """
        f, divides = emitter.fn, _divides(codes)
        x = widened(f, emitter.value(_unbounded(codes), leaf), emitter.lanes)
        if self.near:
            return f.bitcast(exactly(f, "fadd", x, WHOLE), vector("i32", emitter.lanes))
        if self.fits:
            return nearest(f, emitter.isa, self._divided(f, x, made) if divides else x)
        if lowest_beyond(emitter.isa):
            # the number stands second: it is what comes out where it is NaN
            x = f.quick_min(made[1], x)
        else:
            x = _at_least(f, emitter.isa, x, made[0])
            x = f.number_min(x, made[1]) if divides else x
        return nearest(f, emitter.isa, divided(f, x, made[2], made[3]) if divides else x)

    def _divided(self, f: Fn, x: Val, made: list[Val]) -> Val:
        if self.parts:
            return divided_in_parts(f, x, made[0], made[1])
        return divided(f, x, made[0], made[1])

    def _bounds(self, emitter: ExprEmitter, leaf: Callable[[Expr], Val], codes: Codes) -> list[Val]:
        """Bounds for the number that becomes a code, unless it fits, what it is divided by and the reciprocal, or the
        parts of that, and the zero point."""
        f, divides = emitter.fn, _divides(codes)
        if self.fits:
            made = [emitter.value(each, leaf) for each in divides.args[1:]] if divides else []
            return made if codes.zero is None else [*made, f.cast(emitter.value(codes.zero, leaf), "i32")]
        made = emitter.ends(CodesAsNumbers(codes.rounded, codes.zero, codes.low, codes.high), leaf)
        if divides:
            factors = [emitter.value(each, leaf) for each in divides.args[1:]]
            # clipped before it is divided, a number is finite, and its quotient rounds to a code
            made = [f.mul(end, factors[0]) for end in made] + factors
        return made if codes.zero is None else [*made, f.cast(emitter.value(codes.zero, leaf), "i32")]

    def _steady(self, emitter: ExprEmitter, leaf: Callable[[Expr], Val]) -> list[Val]:
        """Scalars that the whole tile shares and vectors are made of."""
        found: dict[str, Val] = {}
        for expr in walk(self.value):
            codes = codes_as_numbers(expr)
            if codes is not None and codes.zero is not None and self._belongs(codes.zero, _ALL):
                found.update((v.name, v) for v in emitter.ends(codes, leaf))
            for arg in expr.args if isinstance(expr, Op) and not self._belongs(expr, _ALL) else ():
                if self._belongs(arg, _ALL):
                    value = emitter.value(arg, leaf)
                    found[value.name] = value
        return list(found.values())

    def _belongs(self, expr: Expr, *classes: int) -> bool:
        """Is it worked out from operands of these classes alone?"""
        if isinstance(expr, Op):
            inner = [a for a in expr.args if not isinstance(a, Const)]
            return bool(inner) and all(self._belongs(a, *classes) for a in inner)
        return isinstance(expr, Load) and self.classes[expr.operand] in classes

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
        always = ExprEmitter(f, isa, 1)

        def one(expr: Expr) -> Val:
            assert isinstance(expr, Load)
            k = expr.operand
            return load_vector(f, isa, expr.dtype, f.gep(bases[k], batch * strides[k][0], memory_type(expr.dtype)), 1)

        steady = [(v, _kept(f, isa, f.splat(v, lanes))) for v in self._steady(always, one)]
        codes = codes_of(self.value)
        bounds: list[Val] | None = None
        if codes is not None and all(self._belongs(e, _ALL) for e in _shared(codes)):
            bounds = [_kept(f, isa, f.splat(v, lanes)) for v in self._bounds(always, one, codes)]

        def piece(line: _Line, c: Val, size: int, mask: Val | None) -> None:
            leaf, emitter = line.leaf(c, size, mask), line.once.child(size)
            for scalar, wide in steady if size == lanes else ():
                emitter.spread(scalar, wide)
            value = self._value(emitter, leaf, size, bounds if size == lanes else None)
            if self.dense:
                target = f.gep(line.out, column + c, memory_type(self.out))
                store_vector(f, isa, self.out, value, target, mask=mask)
            else:
                scatter_elements(f, isa, self.out, value, line.out, line.positions(c, size) * out_column, mask=mask)

        def whole_piece(line: _Line, c: Val, size: int) -> None:
            piece(line, c, size, None)

        def line_of(r: Val) -> _Line:
            here = row + r
            places = [
                f.gep(base, batch * s[0] + here * s[1], memory_type(kind))
                for base, s, kind in zip(bases, strides, self.operands)
            ]
            once = always.child(1)  # what is the same for all columns
            sums = f.gep(f.args["tile"], r * step)
            out = f.gep(f.args["out"], here * out_row, memory_type(self.out))
            line = _Line(self, f, isa, batch, here, column, sums, out, places, [s[2] for s in strides], sizes, once)
            for expr in walk(self.value):
                if self._belongs(expr, _ROW, _ALL):
                    once.value(expr, line.single)
            return line

        def unclipped(line: _Line, c: Val, codes: Codes, mask: Val | None = None) -> Val:
            emitter = line.once.child(lanes)
            for scalar, wide in steady:
                emitter.spread(scalar, wide)
            return self._unclipped(emitter, line.leaf(c, lanes, mask), codes, bounds or [])

        narrowed = packed_low_bytes if self.near else packed_bytes
        done = f.i64(0)  # rows and columns of a corner that is finished
        pairs = f.i64(0)
        fours = f.i64(0)  # rows whose other columns are finished too
        if self.dense and codes is not None and bounds is not None:
            zero = None if codes.zero is None else bounds[-1]
            done, pairs = f.and_(rows, -2), f.and_(columns, -2 * lanes)
            with f.loop(0, done, 2) as r:
                two = [line_of(r), line_of(r + 1)]
                with f.loop(0, pairs, 2 * lanes) as c:
                    values = [unclipped(line, at, codes) for line in two for at in (c, c + lanes)]
                    for line, made in zip(two, narrowed(f, isa, values, zero, signed=codes.low < 0)):
                        f.store(made, f.gep(line.out, column + c), 1)
            if isa.masks:
                # a single vector of a row is less than what it takes to begin four
                left = f.and_(f.cmp("slt", pairs, columns), f.cmp("slt", f.i64(lanes), columns))
                fours = f.select(left, f.and_(rows, -_FOUR), f.i64(0))
                with f.loop(0, fours, _FOUR) as r:
                    four = [line_of(r + k) for k in range(_FOUR)]
                    with f.loop(pairs, columns, lanes) as c:
                        mask = f.mask_below(lanes, columns - c)
                        values = [unclipped(line, c, codes, mask) for line in four]
                        packed = packed_bytes(f, isa, values, zero, signed=codes.low < 0, rows=_FOUR)
                        for line, each in zip(four, packed):
                            f.masked_store(each, f.gep(line.out, column + c), mask)

        def rest(r: Val) -> None:
            line = line_of(r)
            start = f.select(f.cmp("slt", r, done), pairs, 0)
            if isa.abreast > 1 and codes is None:  # codes are made by instructions for one vector
                widths = (lanes * isa.abreast, lanes, 1)
                by_widths(f, start, columns, widths, functools.partial(whole_piece, line))
                return
            with f.loop(start, whole, lanes) as c:
                piece(line, c, lanes, None)
            if isa.masks:
                with f.if_(f.cmp("slt", whole, columns)):
                    piece(line, whole, lanes, f.mask_below(lanes, columns - whole))
            else:
                with f.loop(whole, columns) as c:
                    piece(line, c, 1, None)

        # where whole pairs of vectors were all there is, rows begin behind the corner
        with f.loop(f.select(f.cmp("eq", pairs, columns), done, fours), rows) as r:
            rest(r)
        f.ret()


@dataclass(frozen=True)
class _Line:
    """A row of a tile: where its operands lie and what is known of it."""

    body: _Body
    f: Fn
    isa: Isa
    batch: Val
    row: Val
    column: Val  # of the tile
    sums: Val
    out: Val
    places: list[Val]
    apart: list[Val]  # elements between neighbouring columns of operands
    sizes: list[Val]
    once: ExprEmitter

    def positions(self, c: Val, size: int) -> Val:
        at = self.column + c
        return self.f.splat(at, size) + self.f.lane_ids(size) if size > 1 else at

    def leaf(self, c: Val, size: int, mask: Val | None) -> Callable[[Expr], Val]:
        """What expressions are made of at columns ``c`` and following."""
        f, isa = self.f, self.isa

        def found(expr: Expr) -> Val:
            if isinstance(expr, Result):
                # the tile is whole, only what leaves it is masked
                return load_vector(f, isa, _SUMS, f.gep(self.sums, c, "i32"), size)
            if isinstance(expr, Size):
                return self.sizes[expr.value]
            if isinstance(expr, Index):
                return (self.batch, self.row, self.positions(c, size))[expr.axis]
            assert isinstance(expr, Load)
            k, kind = expr.operand, self.body.operands[expr.operand]
            if self.body.classes[k] == _COLUMNS:
                place = f.gep(self.places[k], self.column + c, memory_type(kind))
                return load_vector(f, isa, kind, place, size, mask=mask)
            return gather_elements(f, isa, kind, self.places[k], self.positions(c, size) * self.apart[k], mask=mask)

        return found

    def single(self, expr: Expr) -> Val:
        assert isinstance(expr, Load)
        return load_vector(self.f, self.isa, expr.dtype, self.places[expr.operand], 1)


def _at_least(f: Fn, isa: Isa, x: Val, bound: Val) -> Val:
    """The larger of a number and a bound; the bound where the number is NaN. One instruction."""
    return f.quick_max(x, bound) if isa.triple == "x86_64" else f.number_max(x, bound)


def _unbounded(codes: Codes) -> Expr:
    """The number that becomes a code, or what it divides, without a bound at zero where codes have the same one: of two
    such bounds in a row the compiler keeps the one that lets NaN pass."""
    divides = _divides(codes)
    number = divides.args[0] if divides else codes.number
    return number.args[0] if codes.zero is None and codes.low == 0 and _cuts_at_zero(number) else number


def _cuts_at_zero(expr: Expr) -> TypeGuard[Op]:
    return isinstance(expr, Op) and expr.name == "max" and expr.args[1] == Const(0, DType.float32)


def _divides(codes: Codes) -> Op | None:
    number = codes.number
    return number if isinstance(number, Op) and number.name == "quotient" else None


def _shared(codes: Codes) -> list[Expr]:
    """What numbers have in common before they become codes."""
    divides = _divides(codes)
    return [*([] if codes.zero is None else [codes.zero]), *(divides.args[1:] if divides else ())]


def _kept(f: Fn, isa: Isa, value: Val) -> Val:
    """A vector that stays one: the compiler would make it of a scalar again in every turn of a loop."""
    if isa.triple != "x86_64" or value.lanes == 1:
        return value
    return f.opaque(value, "v")
