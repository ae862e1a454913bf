"""The epilogue of a convolution as code: what happens to an accumulator between the last addition and the store.

Operands are addressed by (image, output pixel in row-major order, channel). Along the channel they are contiguous, one
value for all, or strided; that class is part of the code, the strides themselves are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ranvier.codegen.launch import At
from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.control import by_widths
from ranvier.codegen.llvm.elements import gather_elements, load_vector, memory_type, store_product
from ranvier.codegen.llvm.exprs import ExprEmitter
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.stored_codes import stored
from ranvier.codegen.loops.ir import Epilogue, Expr, Load, Op, Result, substitute, walk
from ranvier.dtypes import DType
from ranvier.records import dataclass

_CHEAP = frozenset({"add", "sub", "mul", "div", "min", "max", "neg", "abs", "fma", "where", "cast"}) | {
    *("quotient", "reciprocal", "round", "lt", "le", "gt", "ge", "eq", "ne"),
}
_SUM, _BEGUN = Result(0, DType.float32), Result(-1, DType.float32)
_MANY = 12  # operations that are still worth writing out once per accumulator


@dataclass(frozen=True)
class Tail:
    """An epilogue taken apart: structure for the kernel's key, memory and numbers for its arguments."""

    value: Expr
    dtypes: tuple[DType, ...]
    classes: tuple[int, ...]  # stride along the channel: 1, 0, or 2 for any other
    still: tuple[bool, ...]  # the same for every pixel of an image
    buffers: tuple[At, ...]
    dims: tuple[int, ...]  # three strides per operand

    @classmethod
    def of(cls, epilogue: Epilogue | None, dtype: DType) -> Tail:
        if epilogue is None:
            return cls(Result(0, dtype), (), (), (), (), ())
        buffers: list[At] = []
        dims: list[int] = []
        classes: list[int] = []
        for each in epilogue.operands:
            if each.at is not None or each.guard is not None:
                raise ValueError("operands of an epilogue have plain strides")
            item = each.dtype.numpy.itemsize
            buffers.append(At(each.view.storage, (each.view.offset + each.offset) * item))
            dims += each.strides
            classes.append(each.strides[2] if each.strides[2] in (0, 1) else 2)
        types = tuple(each.dtype for each in epilogue.operands)
        still = tuple(each.strides[1] == 0 for each in epilogue.operands)
        return cls(epilogue.value, types, tuple(classes), still, tuple(buffers), tuple(dims))

    @property
    def key(self) -> tuple[object, ...]:
        return repr(self.value), tuple(d.name for d in self.dtypes), self.classes, self.still

    def begun(self) -> tuple[int | None, Tail]:
        """The operand that is added to every sum before anything else, a number for each channel, and what is left to
        do where sums begin with it."""
        for k, (dtype, kind, still) in enumerate(zip(self.dtypes, self.classes, self.still)):
            if not (still and kind == 1 and dtype is DType.float32):
                continue
            value = substitute(self.value, {Op("add", (_SUM, Load(k, DType.float32)), DType.float32): _BEGUN})
            if value is not self.value and not any(each == _SUM for each in walk(value)):
                return k, replace(self, value=substitute(value, {_BEGUN: _SUM}))
        return None, self

    @property
    def is_plain(self) -> bool:
        """Nothing but the accumulator."""
        return isinstance(self.value, Result)

    @property
    def is_cheap(self) -> bool:
        """Short enough to be written out for every accumulator."""
        ops = [e for e in walk(self.value) if isinstance(e, Op)]
        return len(ops) <= _MANY and all(o.name in _CHEAP for o in ops)


class TailCode:
    """Writes a tail into one function. ``bufs`` and ``dims`` are the kernel's, from the given positions on."""

    def __init__(self, fn: Fn, isa: Isa, tail: Tail, bufs: Val, first: int, dims: Val, first_dim: int) -> None:
        self.fn, self.isa, self.tail = fn, isa, tail
        self.bases = [fn.load("ptr", fn.gep(bufs, first + k, "ptr")) for k in range(len(tail.dtypes))]
        self.strides = [
            [fn.load("i64", fn.gep(dims, first_dim + 3 * k + a, "i64")) for a in range(3)]
            for k in range(len(tail.dtypes))
        ]

    def rows(self, image: Val, pixel: Val) -> list[Val]:
        """Addresses of channel 0 of every operand at an output pixel."""
        f = self.fn
        return [
            f.gep(base, image * s[0] + pixel * s[1], memory_type(dtype))
            for base, s, dtype in zip(self.bases, self.strides, self.tail.dtypes)
        ]

    def moved(self, rows: list[Val], by: Val) -> list[Val]:
        """The addresses ``by`` pixels further on."""
        f = self.fn
        return [
            row if still else f.gep(row, by * s[1], memory_type(dtype))
            for row, s, dtype, still in zip(rows, self.strides, self.tail.dtypes, self.tail.still)
        ]

    def operand(self, k: int, rows: list[Val], channel: Val, lanes: int, mask: Val | None) -> Val:
        """Operand ``k`` at ``channel`` and following ones."""
        f, isa, kind, kept = self.fn, self.isa, self.tail.dtypes[k], self.tail.classes[k]
        if kept == 0:
            return load_vector(f, isa, kind, rows[k], 1)
        if kept == 1:
            return load_vector(f, isa, kind, f.gep(rows[k], channel, memory_type(kind)), lanes, mask=mask)
        where = f.lane_ids(lanes) + channel
        return gather_elements(f, isa, kind, rows[k], f.mul(where, f.like(where, self.strides[k][2])), mask=mask)

    def fixed(self, rows: list[Val], channel: Val, piece: Lanes) -> dict[int, Val]:
        """Operands that are the same for all pixels, loaded once."""
        return {
            k: self.operand(k, rows, channel, piece.count, piece.mask)
            for k, still in enumerate(self.tail.still)
            if still
        }

    def value(
        self, acc: Val, rows: list[Val], channel: Val, mask: Val | None = None, fixed: dict[int, Val] | None = None
    ) -> Val:
        """What becomes of one accumulator that stands for ``channel`` and following ones."""
        f, isa, lanes = self.fn, self.isa, acc.lanes
        known = fixed or {}

        def leaf(expr: Expr) -> Val:
            if isinstance(expr, Result):
                return acc
            assert isinstance(expr, Load)
            if expr.operand in known:
                return known[expr.operand]
            return self.operand(expr.operand, rows, channel, lanes, mask)

        return stored(ExprEmitter(f, isa, lanes), self.tail.value, leaf)

    def store(
        self,
        acc: Val,
        rows: list[Val],
        channel: Val,
        address: Val,
        dtype: DType,
        mask: Val | None = None,
        fixed: dict[int, Val] | None = None,
    ) -> None:
        """Finish one accumulator and store it at ``address``."""
        self.keep(self.value(acc, rows, channel, mask, fixed), address, dtype, mask)

    def keep(self, value: Val, address: Val, dtype: DType, mask: Val | None = None) -> None:
        """Store what an accumulator became, rounded once."""
        store_product(self.fn, self.isa, dtype, value, address, mask)


@dataclass(frozen=True)
class Lanes:
    """A piece of the channel axis that the body of a loop handles: how many lanes, and which of them count."""

    count: int
    channel: Val
    mask: Val | None


def channel_pieces(
    f: Fn,
    isa: Isa,
    item: int,
    start: Val,
    stop: Val,
    body: Callable[[Lanes], None],
    *,
    abreast: bool = False,
    apart: bool = False,
) -> None:
    """Run ``body`` over [start, stop) by vectors; the rest by a mask where the machine has them, else one by one.

    With masks there is a single copy of the body, unless whole vectors are to be ``apart`` because a mask costs them
    time; without them a second, scalar one, and one more for several short vectors at a time where it may take them
    ``abreast``.
    """
    lanes = isa.lanes(item)
    if isa.masks and apart:
        whole = start + f.and_(stop - start, -lanes)
        with f.loop(start, whole, lanes) as c:
            body(Lanes(lanes, c, None))
        with f.if_(f.cmp("slt", whole, stop)):
            body(Lanes(lanes, whole, below(f, lanes, stop - whole)))
        return
    if isa.masks:
        with f.loop(start, stop, lanes) as c:
            body(Lanes(lanes, c, below(f, lanes, stop - c)))
        return
    widths = (lanes * isa.abreast if abreast else lanes, lanes, 1)
    by_widths(f, start, stop, widths, lambda c, width: body(Lanes(width, c, None)))


def below(f: Fn, lanes: int, count: Val) -> Val:
    """A mask of the lanes under ``count``, by 32-bit compares (half the registers of 64-bit ones)."""
    ids = f.lane_ids(lanes, "i32")
    return f.cmp("slt", ids, f.splat(f.cast(f.min_(count, lanes), "i32"), lanes))


class Fields:
    """The integer arguments of a kernel by name.

    Each that is used is read once, when the function begins; one that is not optimized reads them wherever it needs
    them, because what it kept would be kept in memory.
    """

    def __init__(self, fn: Fn, dims: Val, names: tuple[str, ...]) -> None:
        self._fn, self._dims = fn, dims
        self._numbers = {name: k for k, name in enumerate(names)}
        self._values: dict[str, Val] = {}

    def __getitem__(self, name: str) -> Val:
        place = f"getelementptr inbounds i64, ptr {self._dims.name}, i64 {self._numbers[name]}"
        if not self._fn.optimized:
            return self._fn.load("i64", self._fn.emit("ptr", place), invariant=True)
        if name not in self._values:
            address = self._fn.emit_first("ptr", place)
            found = f"load i64, ptr {address.name}, align 8, !invariant.load !{{}}"
            self._values[name] = self._fn.emit_first("i64", found)
        return self._values[name]

    def of(self, *names: str) -> Iterator[Val]:
        return (self[name] for name in names)
