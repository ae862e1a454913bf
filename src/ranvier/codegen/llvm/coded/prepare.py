"""Activations as the kernels of coded weights read them: in their order, with zeros where weights are padded.

Besides, what depends on a row and a group alone: sums of activations, where zero points are taken out of sums of
products; and codes of 8 bits with the step between them, where those are multiplied instead.

"digits" are activations to the full, for instructions that multiply bytes: as integers below 2^31 times a power of two
that a group shares, in four signed digits of 8 bits. Three of them are off by 2^-23 of the group's largest at most, and
sums of floats lose as much. The lowest ones lie apart. They count where most of a group's activations are so small
beside its largest that their first digit says nothing: then what is at least a 128th of the largest is exact, and
anything smaller off by 2^-31 of it. A row with something that is not finite has NaN as its step.
"""

from __future__ import annotations

import math
from typing import Literal

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.coded.decode import subtracted
from ranvier.codegen.llvm.coded.pack import CodedB
from ranvier.codegen.llvm.control import Launched, batch_offsets
from ranvier.codegen.llvm.elements import gather_elements, load_vector, memory_type
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.integer.dots import add_signed
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

Form = Literal["plain", "sums", "codes", "digits"]
DIGITS = 3  # that lie side by side; the lowest of all follow behind the row's others
# 32-bit numbers about a group of codes: their step, -middle * sum (an integer), their sum as a float, nothing
ABOUT = 4
# likewise of digits: their step, -middle * sum of each kind, the sum of all as a float; then of the lowest their step
# (zero where they do not count), -middle * sum and sum
DIGITS_ABOUT = 8
LOWEST_ABOUT = 2 + DIGITS
_WORK = {"plain": 4.0, "sums": 6.0, "codes": 40.0, "digits": 80.0}  # for an element, in operations on floats
_MOST = 127.0
_BITS = 31  # of the integers that become digits
# Digits go up to 127, so integers only to 0x7F7F7F7F: numbers nearer than this to a power of two, by the bits of their
# fraction, count as that power.
_ROOM = 1 << 17
_SMALL = float(1 << 24)  # what is below has no first digit
_CARRY = 0x00808080  # added, it makes digits below zero borrow from the next
# positions in dims
_GROUPS, _LENGTH, _MIDDLE, _STEP, _RANK, _BATCH = range(6)
_X, _ORDER, _ROWS, _ABOUT = range(4)


@dataclass(frozen=True)
class Prepared:
    """Rows [..., M, deep] of float32 or int8, and numbers about their groups; strides per batch axis and row, bytes."""

    rows: At
    row: int
    about: At
    about_row: int
    batch: tuple[tuple[int, int], ...]  # of rows, of what is about them
    launches: tuple[Launch, ...]


def given(p: Problem) -> Prepared:
    """Rows that can be read where they are: float32, contiguous along K."""
    rows = At(p.a.storage, p.a.offset * 4)
    return Prepared(rows, p.a_strides[0] * 4, rows, 0, tuple((axis.a * 4, 0) for axis in p.batch), ())


def readable(p: Problem, b: CodedB) -> bool:
    return p.a.dtype is DType.float32 and (p.a_strides[1] == 1 or p.k == 1) and b.order is None


def prepare(p: Problem, b: CodedB, isa: Isa, form: Form) -> Prepared:
    """Copies of the rows of A; entries that broadcasting repeats are copied once."""
    axes = [axis for axis in p.batch if axis.a]
    extents = [axis.extent for axis in axes]
    count = p.m * math.prod(extents)
    row = b.deep * (1 if form == "codes" else 4)
    numbers = {"plain": 0, "sums": 1, "codes": ABOUT, "digits": DIGITS_ABOUT}
    about_row = 4 * b.groups * numbers[form]
    rows, about = Storage.temporary(count * row, "rows"), Storage.temporary(count * about_row, "groups")
    length = b.words * b.coding.per_word
    width = min(isa.lanes(4), length & -length)
    table: list[int] = []
    steps: dict[int, tuple[int, int]] = {}
    apart = p.m
    for axis in reversed(axes):
        steps[id(axis)] = (apart * row, apart * about_row)
        apart *= axis.extent
    for axis in axes:
        table += [axis.extent, axis.a, steps[id(axis)][0], steps[id(axis)][1]]
    table += [p.m, p.a_strides[0], row, about_row]
    item = p.a.dtype.numpy.itemsize
    ordered, dense = b.order is not None, p.a_strides[1] == 1
    launch = Launch(
        _spec(p.a.dtype, form, ordered, dense, width),
        (At(p.a.storage, p.a.offset * item), At(b.order or p.a.storage), At(rows), At(about)),
        (b.groups, length, -subtracted(isa, b.coding), p.a_strides[1], len(axes) + 1, *table),
        tiles=count,
        writes=(rows, about) if about_row else (rows,),
        flops=_WORK[form] * count * b.deep,
        traffic=float(count * (p.k * item + row)),
        label="prepare",
    )
    batch = tuple(steps.get(id(axis), (0, 0)) for axis in p.batch)
    return Prepared(At(rows), row, At(about), about_row, batch, (launch,))


def copied(p: Problem, b: CodedB, prepared: Prepared) -> View:
    """The prepared rows as a tensor of the shape that the product's A has, but for K."""
    strides = (*(step // 4 for step, _ in prepared.batch), prepared.row // 4, 1)
    shape = (*(axis.extent for axis in p.batch), p.m, b.deep)
    return View(prepared.rows.storage, DType.float32, shape, strides)


def _spec(dtype: DType, form: Form, ordered: bool, dense: bool, width: int) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Rows(module.kernel(symbol), isa, dtype, form, ordered, dense, width).emit()

    key = ("coded rows", dtype.name, form, ordered, dense, width)
    return KernelSpec(f"prepare {form} {dtype.name}", key, emit)


class _Rows(Launched):
    def __init__(self, fn: Fn, isa: Isa, dtype: DType, form: Form, ordered: bool, dense: bool, width: int) -> None:
        super().__init__(fn)
        self.isa, self.dtype, self.form = isa, dtype, form
        self.ordered, self.dense, self.width = ordered, dense, width
        self.kind = vector("float", width)

    def emit(self) -> None:
        f = self.fn
        groups, self.length, self.step = self.dim(_GROUPS), self.dim(_LENGTH), self.dim(_STEP)
        order = self.buf(_ORDER)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            from_, to, beside = batch_offsets(f, self.dim, tile, _RANK, _BATCH, 3)
            self.x = f.gep(self.buf(_X), from_, memory_type(self.dtype))
            rows, about = f.gep(self.buf(_ROWS), to), f.gep(self.buf(_ABOUT), beside)
            with f.loop(0, groups) as group:
                self.first = group * self.length
                self.order = order
                if self.form == "codes":
                    self._codes(f.gep(rows, self.first), f.gep(about, group * (4 * ABOUT)))
                elif self.form == "digits":
                    lowest = f.gep(rows, groups * self.length * DIGITS + self.first)
                    self._digits(f.gep(rows, self.first * DIGITS), lowest, f.gep(about, group * (4 * DIGITS_ABOUT)))
                else:
                    self._floats(f.gep(rows, self.first, "float"), f.gep(about, group, "float"))
        f.ret()

    def _load(self, at: Val) -> Val:
        """Activations from position ``at`` of the group on."""
        f = self.fn
        k = self.first + at
        if self.ordered:
            index = f.load(vector("i32", self.width), f.gep(self.order, k, "i32"))
            there = f.cmp("sge", index, 0)
            places = f.cast(f.select(there, index, 0), "i64") * self.step
            found = gather_elements(f, self.isa, self.dtype, self.x, places)
            return f.select(there, found, 0.0)
        if self.dense:
            return load_vector(f, self.isa, self.dtype, f.gep(self.x, k, memory_type(self.dtype)), self.width)
        places = (f.splat(k, self.width) + f.lane_ids(self.width)) * self.step
        return gather_elements(f, self.isa, self.dtype, self.x, places)

    def _floats(self, rows: Val, about: Val) -> None:
        f = self.fn
        total = f.var(self.kind, f.const(self.kind, 0.0))
        with f.loop(0, self.length, self.width) as at:
            x = self._load(at)
            f.store(x, f.gep(rows, at, "float"))
            if self.form == "sums":
                total.set(total.get() + x)
        if self.form == "sums":
            f.store(f.reduce("add", total.get()), about)

    def _codes(self, rows: Val, about: Val) -> None:
        """The nearest of 255 codes around zero; the largest magnitude of a group has the largest one."""
        f = self.fn
        largest = self._largest()
        some = f.cmp("ogt", largest, 0.0)
        factor = f.select(some, f.div(f.const("float", _MOST), largest), 0.0)
        wide = f.splat(factor, self.width)
        total = f.var(vector("i32", self.width), f.const(vector("i32", self.width), 0))
        with f.loop(0, self.length, self.width) as at:
            scaled = f.unary("roundeven", self._load(at) * wide)
            # what is no number shows in the step; as a code it has to be defined all the same
            fine = f.cmp("ole", f.unary("fabs", scaled), _MOST)
            code = f.cast(f.select(fine, scaled, 0.0), "i32")
            total.set(total.get() + code)
            f.store(f.cast(code, "i8"), f.gep(rows, at))
        count = f.reduce("add", total.get())
        f.store(largest * (1.0 / _MOST), about)
        f.store(count * f.cast(self.dim(_MIDDLE), "i32"), f.gep(about, 4))
        f.store(f.cast(count, "float"), f.gep(about, 8))
        f.store(f.const("i32", 0), f.gep(about, 12))

    def _largest(self) -> Val:
        """The largest magnitude of the group, NaN where there is one."""
        f = self.fn
        most = f.var(self.kind, f.const(self.kind, 0.0))
        with f.loop(0, self.length, self.width) as at:
            most.set(f.max_(most.get(), f.unary("fabs", self._load(at))))
        return f.reduce("fmaximum", most.get())

    def _digits(self, rows: Val, lowest: Val, about: Val) -> None:
        """Digits of one kind of four consecutive k lie side by side, the lower kind first."""
        f, words = self.fn, vector("i32", self.width)
        bits = f.bitcast(self._largest(), "i32")
        finite = f.cmp("slt", bits, 255 << 23)
        # a step is no smaller than the smallest normal number
        exponent = f.max_(f.lshr(bits + _ROOM, 23), _BITS)
        factor = f.bitcast(f.shl(f.const("i32", 2 * 127 + _BITS - 1) - exponent, 23), "float")
        step = f.bitcast(f.shl(exponent - (_BITS - 1), 23), "float")
        wide = f.splat(factor, self.width)
        nothing = f.const(words, 0)
        sums, some, small = (f.var(words, nothing) for _ in range(3))
        kinds = 1 + DIGITS
        fours = [4 * (part + k) + kind for part in range(0, self.width, 4) for kind in range(kinds) for k in range(4)]
        with f.loop(0, self.length, self.width) as at:
            scaled = f.unary("roundeven", self._load(at) * wide)
            size = f.unary("fabs", scaled)
            whole = f.cast(f.select(f.cmp("olt", size, float(1 << _BITS)), scaled, 0.0), "i32")
            is_some, is_small = f.cmp("ogt", size, 0.0), f.cmp("olt", size, _SMALL)
            some.set(some.get() + f.cast(is_some, "i32"))
            small.set(small.get() + f.cast(f.and_(is_some, is_small), "i32"))
            digits = f.bitcast(f.xor(whole + _CARRY, _CARRY), vector("i8", 4 * self.width))
            beside = f.bitcast(f.shuffle(digits, None, fours), words)
            sums.set(add_signed(f, self.isa, sums.get(), beside))
            f.store(f.shuffle(beside, None, [k for k in range(self.width) if k % kinds]), f.gep(rows, at * DIGITS), 4)
            f.store(f.shuffle(beside, None, range(0, self.width, kinds)), f.gep(lowest, at), 4)
        total = sums.get()
        while total.lanes > kinds:
            half = total.lanes // 2
            total = f.shuffle(total, None, range(half)) + f.shuffle(total, None, range(half, 2 * half))
        least, *others = (f.extract(total, kind) for kind in range(kinds))
        middle = f.cast(self.dim(_MIDDLE), "i32")
        f.store(f.select(finite, step * 256.0, f.const("float", float("nan"))), about)
        everything = f.const("float", 0.0)
        for kind, count in reversed(list(enumerate(others))):
            f.store(count * middle, f.gep(about, 4 + 4 * kind))
            everything = f.fma(everything, f.const("float", 256.0), f.cast(count, "float"))
        f.store(everything, f.gep(about, 4 + 4 * DIGITS))
        about = f.gep(about, 4 * LOWEST_ABOUT)
        counts = f.cmp("sgt", f.reduce("add", small.get() + small.get() - some.get()), 0)
        f.store(f.select(counts, step, f.const("float", 0.0)), about)
        f.store(least * middle, f.gep(about, 4))
        f.store(f.cast(least, "float"), f.gep(about, 8))
