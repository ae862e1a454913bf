"""Weights of a recurrent layer in the order its kernels read them: once for constants, by a small kernel otherwise.

Columns of every arranged matrix follow one table: phase after phase, panel after panel, vector of units after vector
of units, and the gates of a vector side by side. Units past the last are zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import ELEMENTS, transposed
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Arrangement:
    """Where each unit's gates stand."""

    hidden: int
    lanes: int
    unit_vectors: int  # vectors of units per panel
    phases: tuple[tuple[int, ...], ...]

    @property
    def panels(self) -> int:
        return -(-self.hidden // (self.lanes * self.unit_vectors))

    @property
    def padded(self) -> int:
        """Units, with those that fill up the last panel."""
        return self.panels * self.unit_vectors * self.lanes

    @property
    def columns(self) -> int:
        return self.padded * sum(map(len, self.phases))

    def width(self, phase: int) -> int:
        """Columns of a panel."""
        return self.unit_vectors * self.lanes * len(self.phases[phase])

    def table(self, phase: int) -> Array:
        """The row of ONNX's matrix (gate times hidden plus unit) behind each column of a phase, -1 for none."""
        units = np.arange(self.padded).reshape(self.panels, self.unit_vectors, 1, self.lanes)
        gates = np.array(self.phases[phase]).reshape(1, 1, -1, 1)
        return np.where(units < self.hidden, gates * self.hidden + units, -1).reshape(-1)

    def whole_table(self) -> Array:
        return np.concatenate([self.table(p) for p in range(len(self.phases))])

    def unit_table(self, start: int) -> Array:
        """Rows of a vector over units that begins at ``start``, one per padded unit."""
        units = np.arange(self.padded)
        return np.where(units < self.hidden, start + units, -1)


def array_of(view: View) -> Array | None:
    """The numbers of a constant view."""
    data = view.storage.array
    if data is None:
        return None
    flat = np.ascontiguousarray(data).reshape(-1).view(view.dtype.numpy)[view.offset :]
    strides = tuple(s * flat.itemsize for s in view.strides)
    return np.lib.stride_tricks.as_strided(flat, view.shape, strides, writeable=False)


@dataclass(frozen=True)
class Placed:
    """Arranged columns: ``matrix[table[c], k] + matrix[second[c], k]`` for every column c (no entry: nothing).

    Column c of row k goes to ``c // width * panel + c % width + k * step`` of the target.
    """

    matrix: View  # [rows, k]
    table: Array
    second: Array | None
    width: int
    panel: int
    step: int
    offset: int  # in the target


def place(parts: list[Placed], size: int, dtype: DType, isa: Isa) -> tuple[Storage, list[Launch]]:
    """All parts in one storage: a constant where all matrices are, otherwise a temporary and what fills it."""
    arrays = [array_of(p.matrix) for p in parts]
    if all(a is not None for a in arrays):
        target = np.zeros(size, dtype.numpy)
        for part, array in zip(parts, arrays):
            assert array is not None
            values = _rows(array, part.table)
            if part.second is not None:
                values = values + _rows(array, part.second)
            count, depth = values.shape
            item = target.itemsize
            shape = (count // part.width, depth, part.width)
            strides = (part.panel * item, part.step * item, item)
            out = np.lib.stride_tricks.as_strided(target[part.offset :], shape, strides)
            out[...] = values.reshape(shape[0], part.width, depth).swapaxes(1, 2)
        return Storage.packed(target), []
    storage = Storage.temporary(size * dtype.numpy.itemsize)
    return storage, [_place_launch(part, storage, isa) for part in parts]


def _rows(array: Array, table: Array) -> Array:
    return np.where((table >= 0)[:, None], array[np.maximum(table, 0)], array.dtype.type(0))


_DIMS = ("depth", "row_stride", "column_stride", "width", "panel", "step")


def _place_launch(part: Placed, target: Storage, isa: Isa) -> Launch:
    matrix, item = part.matrix, part.matrix.dtype.numpy.itemsize
    second = np.full_like(part.table, -1) if part.second is None else part.second
    spec, table = _place_spec(ELEMENTS[matrix.dtype]), np.stack([part.table, second], axis=1)
    groups = _groups(part, isa.lanes(item))
    if groups is not None and 1 in matrix.strides:
        spec, table = _group_spec(ELEMENTS[matrix.dtype], turned=matrix.strides[1] == 1), groups
    return Launch(
        spec,
        (At(matrix.storage, matrix.offset * item), At(Storage.constant(table)), At(target, part.offset * item)),
        (matrix.shape[1], *matrix.strides, part.width, part.panel, part.step),
        tiles=len(table),
        writes=(target,),
        traffic=2.0 * len(part.table) * matrix.shape[1] * item,
        label="arrange weights",
    )


def _groups(part: Placed, lanes: int) -> Array | None:
    """Of every vector of columns the first row behind it and how many follow each other, the rest being nothing; None
    where rows come in another order."""
    if part.second is not None or part.width % lanes or part.matrix.shape[1] < lanes:
        return None
    table = part.table.reshape(-1, lanes)
    count = (table >= 0).sum(axis=1)
    if not (table == np.where(np.arange(lanes) < count[:, None], table[:, :1] + np.arange(lanes), -1)).all():
        return None
    return np.stack([table[:, 0], count], axis=1).astype(np.int64)


def _group_spec(element: str, *, turned: bool) -> KernelSpec:
    """A vector of columns at a time: of rows that are ``turned`` by squares in registers, of others as they lie."""

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        frame = Frame(module, symbol, isa, element, ("matrix", "table", "target"), _DIMS)
        f, lanes = frame.f, frame.lanes
        with f.loop(frame.begin, frame.end) as tile:
            row, count = (f.load("i64", f.gep(frame.buffer("table"), tile * 2 + k, "i64")) for k in range(2))
            panel = f.div(tile * lanes, frame["width"], signed=False)
            target = frame.at(frame.buffer("target"), (panel, frame["panel"]))
            target = frame.at(target, (tile * lanes - panel * frame["width"], 1))
            source = frame.at(frame.buffer("matrix"), (f.max_(row, 0), frame["row_stride"]))
            (_turned if turned else _as_they_lie)(frame, source, count, target)
        f.ret()

    how = "turned" if turned else "as they lie"
    return KernelSpec(f"arrange {element} {how}", ("arrange weights by vectors", element, turned), emit)


def _as_they_lie(frame: Frame, source: Val, count: Val, target: Val) -> None:
    f = frame.f
    present = f.mask_below(frame.lanes, count)
    with f.loop(0, frame["depth"]) as k:
        found = f.masked_load(frame.kind, frame.at(source, (k, frame["column_stride"])), present)
        f.store(found, frame.at(target, (k, frame["step"])))


def _turned(frame: Frame, source: Val, count: Val, target: Val) -> None:
    f, lanes = frame.f, frame.lanes
    present, nothing = f.mask_below(lanes, count), f.zero(frame.kind)
    last = f.max_(count - 1, 0)  # rows past it are read from it, and then left out
    rows = [frame.at(source, (f.min_(f.i64(r), last), frame["row_stride"])) for r in range(lanes)]
    # the last square lies over the one before where the depth is no multiple
    with f.loop(0, frame["depth"], lanes) as start:
        k = f.min_(start, frame["depth"] - lanes)
        columns = transposed(f, [f.load(frame.kind, frame.at(each, (k, 1))) for each in rows])
        for j, column in enumerate(columns):
            f.store(f.select(present, column, nothing), frame.at(target, (k + j, frame["step"])))


def _place_spec(element: str) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        frame = Frame(module, symbol, isa, element, ("matrix", "table", "target"), _DIMS)
        f = frame.f
        with f.loop(frame.begin, frame.end) as c:
            rows = [f.load("i64", f.gep(frame.buffer("table"), c * 2 + k, "i64")) for k in range(2)]
            panel = f.div(c, frame["width"], signed=False)
            target = frame.at(frame.buffer("target"), (panel, frame["panel"]), (c - panel * frame["width"], 1))
            with f.loop(0, frame["depth"]) as k:
                total = f.var(element, 0.0)
                for row in rows:
                    with f.if_(f.cmp("sge", row, 0)):
                        source = frame.at(
                            frame.buffer("matrix"), (row, frame["row_stride"]), (k, frame["column_stride"])
                        )
                        total.set(total.get() + f.load(element, source))
                f.store(total.get(), frame.at(target, (k, frame["step"])))
        f.ret()

    return KernelSpec(f"arrange {element}", ("arrange weights", element), emit)
