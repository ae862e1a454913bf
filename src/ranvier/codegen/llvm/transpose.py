"""Copies whose source and target are contiguous along different axes: square tiles turned in registers.

Vector loads along the source's axis, a network of interleavings, vector stores along the target's: every cache line is
read and written whole, where a gather would touch one per element.
"""

from __future__ import annotations

import math

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Load, Map, Nest
from ranvier.records import dataclass

_TILE = 64  # elements along each axis in one tile, at most: 16 KB of floats read, as much written
_STREAM = 24 << 20  # a target of more bytes than this is out of cache before anyone reads it: it is written past it


@dataclass(frozen=True)
class _Shape:
    """What the code depends on."""

    size: int  # bytes of an element
    side: int  # rows and columns of a register tile
    packed: int  # axes besides the two
    stream: bool  # whether aligned whole lines are written past the cache


def side(isa: Isa, size: int) -> int:
    """Rows of a register tile: a full register for words, and the 16 bytes that every set interleaves for the rest."""
    return isa.lanes(size) if size >= 4 else 16 // size


def transposed_axes(nest: Nest, isa: Isa) -> tuple[int, int] | None:
    """(the source's contiguous axis, the target's) of a nest that is such a copy and large enough along both."""
    if nest.row or len(nest.stages) != 1 or len(nest.operands) != 2:
        return None
    stage = nest.stages[0]
    if not isinstance(stage, Map) or len(stage.stores) != 1:
        return None
    target, value = stage.stores[0]
    if not isinstance(value, Load) or value.operand == target:
        return None
    if any(o.at is not None or o.guard is not None for o in nest.operands):
        return None
    source, result = nest.operands[value.operand], nest.operands[target]
    if source.dtype is not result.dtype or 1 not in source.strides or 1 not in result.strides:
        return None
    a, b = source.strides.index(1), result.strides.index(1)
    least = side(isa, source.dtype.numpy.itemsize) // 2
    if a == b or min(nest.extents[a], nest.extents[b]) < max(2, least):
        return None
    return a, b


def transpose_launch(nest: Nest, isa: Isa, axes: tuple[int, int]) -> Launch:
    a, b = axes
    stage = nest.stages[0]
    assert isinstance(stage, Map)
    target, value = stage.stores[0]
    assert isinstance(value, Load)
    source_of, target_of = nest.operands[value.operand], nest.operands[target]
    packed = [k for k in range(len(nest.extents)) if k not in axes]
    size = source_of.dtype.numpy.itemsize
    points = math.prod(nest.extents)
    lines = side(isa, size) * size == 64 and isa.triple == "x86_64"
    lines = lines and all(s * size % 64 == 0 for k, s in enumerate(target_of.strides) if k != b)
    shape = _Shape(size, side(isa, size), len(packed), lines and points * size > _STREAM)
    tile_a, tile_b = (min(_TILE, _up(nest.extents[k], shape.side)) for k in axes)
    count_a, count_b = -(-nest.extents[a] // tile_a), -(-nest.extents[b] // tile_b)
    dims = [nest.extents[a], nest.extents[b], source_of.strides[b], target_of.strides[a]]
    dims += [tile_a, tile_b, count_a, count_b]
    for k in packed:
        dims += [nest.extents[k], source_of.strides[k], target_of.strides[k]]

    def emit(module: Module, symbol: str, where: Isa) -> None:
        _Emitter(shape, module.kernel(symbol), where).emit()

    return Launch(
        KernelSpec(f"transpose {size} bytes", ("transpose", shape.size, shape.side, shape.packed, shape.stream), emit),
        tuple(At(o.view.storage, (o.view.offset + o.offset) * size) for o in (source_of, target_of)),
        tuple(dims),
        math.prod(nest.extents[k] for k in packed) * count_a * count_b,
        (target_of.view.storage,),
        grain=4,
        flops=1.0 * points,
        traffic=2.0 * points * size,
        label=nest.label,
    )


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class _Emitter:
    def __init__(self, shape: _Shape, f: Fn, isa: Isa) -> None:
        self.shape = shape
        self.f = f
        self.isa = isa
        self.element = f"i{8 * shape.size}"
        self.dims = [
            f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True) for k in range(8 + 3 * shape.packed)
        ]
        self.source, self.target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(2))

    def emit(self) -> None:
        f, dims = self.f, self.dims
        n_a, n_b, _, _, tile_a, tile_b, count_a, count_b = dims[:8]
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            # neighbouring tiles follow the source's rows
            rest, in_a = self.divided(tile, count_a)
            rest, in_b = self.divided(rest, count_b)
            source, target = self.source, self.target
            for k in range(self.shape.packed - 1, -1, -1):
                extent, from_stride, to_stride = dims[8 + 3 * k : 11 + 3 * k]
                rest, index = self.divided(rest, extent)
                source = f.gep(source, f.mul(index, from_stride), self.element)
                target = f.gep(target, f.mul(index, to_stride), self.element)
            start_a, start_b = f.mul(in_a, tile_a), f.mul(in_b, tile_b)
            stop_a, stop_b = f.min_(f.add(start_a, tile_a), n_a), f.min_(f.add(start_b, tile_b), n_b)
            if self.isa.masks:
                self.masked(source, target, (start_a, stop_a), (start_b, stop_b))
            else:
                self.unmasked(source, target, (start_a, stop_a), (start_b, stop_b))
        if self.shape.stream:
            f.intrinsic("llvm.x86.sse.sfence", "void", [])  # such stores are not ordered with what follows
        f.ret()

    def divided(self, a: Val, b: Val) -> tuple[Val, Val]:
        quotient = self.f.div(a, b, signed=False)
        return quotient, self.f.sub(a, self.f.mul(quotient, b))

    def masked(self, source: Val, target: Val, a: tuple[Val, Val], b: tuple[Val, Val]) -> None:
        f, step = self.f, self.shape.side
        with f.loop(*b, step) as j, f.loop(*a, step) as i:
            left_a, left_b = f.sub(a[1], i), f.sub(b[1], j)
            whole = f.and_(f.cmp("sge", left_a, step), f.cmp("sge", left_b, step))
            with f.if_else(whole) as otherwise:
                if self.shape.stream:
                    address = f.emit("i64", f"ptrtoint ptr {self.target.name} to i64")
                    with f.if_else(f.cmp("eq", f.and_(address, 63), 0)) as unaligned:
                        self.turn(source, target, i, j, stream=True)
                        unaligned()
                        self.turn(source, target, i, j)
                else:
                    self.turn(source, target, i, j)
                otherwise()
                self.turn(source, target, i, j, f.min_(left_a, step), f.min_(left_b, step))

    def unmasked(self, source: Val, target: Val, a: tuple[Val, Val], b: tuple[Val, Val]) -> None:
        f, step = self.f, self.shape.side
        whole_a = f.add(a[0], f.and_(f.sub(a[1], a[0]), -step))
        whole_b = f.add(b[0], f.and_(f.sub(b[1], b[0]), -step))
        with f.loop(b[0], whole_b, step) as j, f.loop(a[0], whole_a, step) as i:
            self.turn(source, target, i, j)
        self.one_by_one(source, target, (whole_a, a[1]), (b[0], whole_b))
        self.one_by_one(source, target, a, (whole_b, b[1]))

    def one_by_one(self, source: Val, target: Val, a: tuple[Val, Val], b: tuple[Val, Val]) -> None:
        f = self.f
        with f.loop(*a) as i, f.loop(*b) as j:
            f.store(f.load(self.element, self.source_at(source, i, j)), self.target_at(target, i, j))

    def source_at(self, base: Val, i: Val, j: Val) -> Val:
        return self.f.gep(base, self.f.add(i, self.f.mul(j, self.dims[2])), self.element)

    def target_at(self, base: Val, i: Val, j: Val) -> Val:
        return self.f.gep(base, self.f.add(self.f.mul(i, self.dims[3]), j), self.element)

    def turn(
        self,
        source: Val,
        target: Val,
        i: Val,
        j: Val,
        some_a: Val | None = None,
        some_b: Val | None = None,
        *,
        stream: bool = False,
    ) -> None:
        """One register tile; where counts are given, only that many elements along each axis."""
        f, n = self.f, self.shape.side
        kind = vector(self.element, n)
        mask_a, mask_b = (None if k is None else f.mask_below(n, k) for k in (some_a, some_b))
        if mask_a is None and not stream and self.shape.side * self.shape.size == 64:
            # the next tile's lines lie far apart, where no hardware would look for them (measured: half the time)
            ahead = self.target_at(target, f.add(i, n), j)
            for k in range(n):
                f.prefetch(f.gep(ahead, f.mul(self.dims[3], k), self.element) if k else ahead, write=True)
        first = self.source_at(source, i, j)
        rows = []
        for k in range(n):
            at = f.gep(first, f.mul(self.dims[2], k), self.element) if k else first
            if mask_a is None or some_b is None:
                rows.append(f.load(kind, at))
            else:
                on = f.select(f.cmp("sgt", some_b, k), mask_a, f.zero(mask_a.type))
                rows.append(f.masked_load(kind, at, on))
        first = self.target_at(target, i, j)
        for k, row in enumerate(turned(f, rows)):
            at = f.gep(first, f.mul(self.dims[3], k), self.element) if k else first
            if stream:
                f.line(f"store {row.type} {row.name}, ptr {at.name}, align 64, !nontemporal !{{i32 1}}")
            elif mask_b is None or some_a is None:
                f.store(row, at)
            else:
                f.masked_store(row, at, f.select(f.cmp("sgt", some_a, k), mask_b, f.zero(mask_b.type)))


def turned(f: Fn, rows: list[Val]) -> list[Val]:
    """The columns of a square of vectors: interleaving first with second half as often as halves can be halved."""
    n = len(rows)
    low = [k // 2 + (k % 2) * n for k in range(n)]
    high = [k + n // 2 for k in low]
    for _ in range(n.bit_length() - 1):
        pairs = zip(rows[: n // 2], rows[n // 2 :])
        rows = [f.shuffle(x, y, picks) for x, y in pairs for picks in (low, high)]
    return rows
