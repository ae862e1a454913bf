"""Linear attention: a matrix per head that every step decays, writes to and is read from.

Columns of the matrix never meet, so a tile is a few vectors of columns of one head over all steps: its part of the
matrix stays in the first-level cache, and a step goes over it once (twice where what is written depends on what is
recalled).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.builder import Module, Val, Var
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_ELEMENTS = {DType.float32: "float", DType.float64: "double"}
_VECTORS = 4  # of columns in a tile, at most
_DIMS = (
    *("steps", "heads", "group", "size", "width", "blocks", "scale"),
    *("keep_batch", "keep_step", "keep_head", "keep_row", "rate_batch", "rate_step", "rate_head"),
)


@dataclass(frozen=True)
class Form:
    """What code depends on: element type, vectors of columns, and which operands there are."""

    element: str
    vectors: int
    past: bool
    decays: bool
    delta: bool  # what is written is the difference to what is recalled

    @property
    def key(self) -> tuple[object, ...]:
        return ("linear attention", self.element, self.vectors, self.past, self.decays, self.delta)

    def buffers(self) -> list[str]:
        optional = {"past": self.past, "keep": self.decays, "rate": self.delta}
        return ["q", "k", "v", *(name for name, there in optional.items() if there), "y", "state"]


def linear_attention(
    q: View,
    k: View,
    v: View,
    past: View | None,
    keep: View | None,
    rate: View | None,
    y: View,
    state: View,
    isa: Isa,
    *,
    heads: int,
    scale: float,
) -> list[Launch]:
    """Dense q ``[batch, time, q heads * size]``, k and v likewise over ``heads``; past and state ``[batch, heads, size,
    width]``. ``keep`` (factors, not their logarithms) has a number per head or per row of the matrix, ``rate`` one per
    head or one for all; both ``[batch, time, …]``."""
    batch, steps = k.shape[:2]
    size, width = state.shape[2:]
    if 0 in (batch, heads, size, width):
        return []
    lanes = isa.lanes(k.dtype.numpy.itemsize)
    vectors = min(_VECTORS, 1 << (-(-width // lanes) - 1).bit_length())
    form = Form(_ELEMENTS[k.dtype], vectors, past is not None, keep is not None, rate is not None)
    blocks = -(-width // (vectors * lanes))
    group = q.shape[2] // (heads * size)
    fine = keep is not None and keep.shape[2] == heads * size and size > 1
    numbers = {
        "steps": steps,
        "heads": heads,
        "group": group,
        "size": size,
        "width": width,
        "blocks": blocks,
        "scale": int(struct.unpack("<q", struct.pack("<d", scale))[0]),
        "keep_batch": 0 if keep is None else steps * keep.shape[2],
        "keep_step": 0 if keep is None else keep.shape[2],
        "keep_head": size if fine else 1,
        "keep_row": int(fine),
        "rate_batch": 0 if rate is None else steps * rate.shape[2],
        "rate_step": 0 if rate is None else rate.shape[2],
        "rate_head": int(rate is not None and rate.shape[2] == heads and heads > 1),
    }

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Kernel(module, symbol, isa, form).emit()

    views: Sequence[View | None] = (q, k, v, past, keep, rate, y, state)
    given = [view for view in views if view is not None]
    return [
        Launch(
            KernelSpec(f"linear attention {form.element}", form.key, emit),
            tuple(At.of(view) for view in given),
            tuple(numbers[name] for name in _DIMS),
            batch * heads * blocks,
            (y.storage, state.storage),
            scratch=size * vectors * lanes * k.dtype.numpy.itemsize,
            flops=float(math.prod(state.shape)) * steps * (4.0 + 2.0 * group),
            traffic=float(sum(view.nbytes for view in given)),
        )
    ]


class _Kernel:
    def __init__(self, module: Module, symbol: str, isa: Isa, form: Form) -> None:
        self.form = form
        self.frame = Frame(module, symbol, isa, form.element, form.buffers(), _DIMS)
        self.f, self.lanes, self.kind = self.frame.f, self.frame.lanes, self.frame.kind
        self.stride = form.vectors * self.lanes

    def emit(self) -> None:
        frame, f, form = self.frame, self.f, self.form
        per_batch = frame["heads"] * frame["blocks"]
        with f.loop(frame.begin, frame.end) as tile:
            batch = f.div(tile, per_batch, signed=False)
            within = tile - batch * per_batch
            head = f.div(within, frame["blocks"], signed=False)
            column = (within - head * frame["blocks"]) * self.stride
            self.masks = [
                f.mask_below(self.lanes, f.max_(frame["width"] - column - k * self.lanes, 0))
                for k in range(form.vectors)
            ]
            matrix = (batch * frame["heads"] + head) * frame["size"] * frame["width"] + column
            with f.loop(0, frame["size"]) as i:
                row = self._row(i)
                for k in range(form.vectors):
                    value = f.zero(self.kind)
                    if form.past:
                        place = self._place("past", matrix + i * frame["width"], k)
                        value = f.masked_load(self.kind, place, self.masks[k])
                    f.store(value, self._vector(row, k))
            with f.loop(0, frame["steps"]) as t:
                self._step(batch, head, column, t)
            with f.loop(0, frame["size"]) as i:
                row = self._row(i)
                for k in range(form.vectors):
                    value = f.load(self.kind, self._vector(row, k))
                    f.masked_store(value, self._place("state", matrix + i * frame["width"], k), self.masks[k])
        f.ret()

    def _row(self, i: Val) -> Val:
        return self.f.gep(self.frame.scratch, i * self.stride, self.form.element)

    def _vector(self, row: Val, k: int) -> Val:
        return self.f.gep(row, k * self.lanes, self.form.element)

    def _place(self, buffer: str, at: Val, k: int = 0) -> Val:
        return self.f.gep(self.frame.buffer(buffer), at + k * self.lanes, self.form.element)

    def _scalar(self, address: Val, i: Val) -> Val:
        """One number of a row, in all lanes."""
        return self.f.splat(self.f.load(self.form.element, self.f.gep(address, i, self.form.element)), self.lanes)

    def _step(self, batch: Val, head: Val, column: Val, t: Val) -> None:
        frame, f, form = self.frame, self.f, self.form
        count, size = range(form.vectors), frame["size"]
        token = batch * frame["steps"] + t
        key = self._place("k", (token * frame["heads"] + head) * size)
        value = (token * frame["heads"] + head) * frame["width"] + column
        write = [f.masked_load(self.kind, self._place("v", value, k), self.masks[k]) for k in count]
        keep = None
        if form.decays:
            at = batch * frame["keep_batch"] + t * frame["keep_step"] + head * frame["keep_head"]
            keep = self._place("keep", at)
        if form.delta:
            recalled = [f.var(self.kind, 0.0) for _ in count]
            with f.loop(0, size) as i:
                row, weight = self._row(i), self._scalar(key, i)
                held = self._decayed(row, keep, i)
                for k in count:
                    if keep is not None:
                        f.store(held[k], self._vector(row, k))
                    recalled[k].set(f.fma(weight, held[k], recalled[k].get()))
            at = batch * frame["rate_batch"] + t * frame["rate_step"] + head * frame["rate_head"]
            rate = f.splat(f.load(form.element, self._place("rate", at)), self.lanes)
            write = [f.mul(rate, f.sub(write[k], recalled[k].get())) for k in count]
        first = token * (frame["heads"] * frame["group"]) + head * frame["group"]
        scale = f.splat(frame.number("scale"), self.lanes)
        query = self._place("q", first * size)
        read = [f.var(self.kind, 0.0) for _ in count]
        with f.loop(0, size) as i:
            row, weight, asked = self._row(i), self._scalar(key, i), f.mul(self._scalar(query, i), scale)
            held = self._decayed(row, None if form.delta else keep, i)
            for k in count:
                new = f.fma(weight, write[k], held[k])
                f.store(new, self._vector(row, k))
                read[k].set(f.fma(asked, new, read[k].get()))
        self._answer(first, column, read)
        with f.loop(1, frame["group"]) as g:
            other = self._place("q", (first + g) * size)
            for each in read:
                each.set(0.0)
            with f.loop(0, size) as i:
                row, asked = self._row(i), f.mul(self._scalar(other, i), scale)
                for k in count:
                    read[k].set(f.fma(asked, f.load(self.kind, self._vector(row, k)), read[k].get()))
            self._answer(first + g, column, read)

    def _decayed(self, row: Val, keep: Val | None, i: Val) -> list[Val]:
        held = [self.f.load(self.kind, self._vector(row, k)) for k in range(self.form.vectors)]
        if keep is None:
            return held
        factor = self._scalar(keep, i * self.frame["keep_row"])
        return [self.f.mul(each, factor) for each in held]

    def _answer(self, row: Val, column: Val, read: Sequence[Var]) -> None:
        for k, each in enumerate(read):
            place = self._place("y", row * self.frame["width"] + column, k)
            self.f.masked_store(each.get(), place, self.masks[k])
