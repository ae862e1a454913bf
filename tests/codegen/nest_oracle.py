"""Nests evaluated by NumPy, point by point in float64: what generated code is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.nests import launches
from ranvier.codegen.loops.ir import Const, Expr, Final, Index, Load, Map, Nest, Op, Operand, Reduce, Result, Scan, Size
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from tests.codegen import harness

Array = np.ndarray[Any, Any]
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "exp": np.exp, "sqrt": np.sqrt, "neg": np.negative, "floordiv": np.floor_divide, "mod": np.mod, "lt": np.less,
    "le": np.less_equal, "ge": np.greater_equal, "gt": np.greater, "eq": np.equal, "and": np.logical_and,
    "or": np.logical_or, "not": np.logical_not, "where": np.where, "rsqrt": lambda x: 1 / np.sqrt(x), "abs": np.abs,
    "tanh": np.tanh, "bitand": np.bitwise_and, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip
_FOLDS: dict[str, Callable[..., Any]] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip
_kept: dict[tuple[str, KernelSpec], Any] = {}  # kernels of earlier cases: many cases share one, and it is compiled once


def _wide(array: Array) -> Array:
    """Floats as float64; integers keep their type, and with it their wrapping."""
    if array.dtype.kind in "iub":
        return array
    return array.astype(np.float64)


class Oracle:
    """Runs a nest on arrays of bytes, one per storage."""

    def __init__(self, nest: Nest, memory: dict[Storage, Array]) -> None:
        self.nest = nest
        self.memory = {s: a.reshape(-1).view(np.uint8) for s, a in memory.items()}
        self.results: dict[int, Array] = {}
        axes = np.meshgrid(*(np.arange(n) for n in nest.extents), indexing="ij", sparse=True)
        self.index = list(axes)

    def run(self) -> None:
        nest = self.nest
        row = tuple(sorted(nest.row))
        with np.errstate(all="ignore"):
            for number, stage in enumerate(nest.stages):
                if isinstance(stage, Reduce):
                    full = np.broadcast_to(self.value(stage.value), nest.extents)
                    self.results[number] = self._fold(stage, full, row)
                elif isinstance(stage, Scan):
                    self._store(stage.operand, self._scanned(stage, row[0]))
                else:
                    for k, expr in stage.stores:
                        value = self.value(expr)
                        self._store(k, value, row if isinstance(stage, Final) else ())

    def _fold(self, stage: Reduce, full: Array, row: tuple[int, ...]) -> Array:
        if not stage.fold.startswith("arg"):
            fold = _FOLDS[stage.fold]
            if stage.fold in ("max", "min") and 0 in [full.shape[a] for a in row]:
                low = -np.inf if stage.fold == "max" else np.inf
                return np.full([1 if a in row else n for a, n in enumerate(full.shape)], low)
            found: Array = fold.reduce(full, axis=row, keepdims=True, **self._accumulate(stage, full))
            return found
        outer = [a for a in range(full.ndim) if a not in row]
        lines = full.transpose([*outer, *row]).reshape([full.shape[a] for a in outer] + [-1])
        pick = np.argmax if "max" in stage.fold else np.argmin
        where = lines.shape[-1] - 1 - pick(lines[..., ::-1], axis=-1) if "last" in stage.fold else pick(lines, axis=-1)
        return np.asarray(where).reshape([1 if a in row else n for a, n in enumerate(full.shape)])

    @staticmethod
    def _accumulate(stage: Reduce, full: Array) -> dict[str, Any]:
        return {"dtype": full.dtype} if stage.fold in ("sum", "prod") else {}

    def _scanned(self, stage: Scan, axis: int) -> Array:
        full = np.broadcast_to(self.value(stage.value), self.nest.extents)
        if stage.reverse:
            full = np.flip(full, axis)
        out: Array = _FOLDS[stage.fold].accumulate(
            full, axis=axis, **({"dtype": full.dtype} if stage.fold in ("sum", "prod") else {})
        )
        if stage.exclusive:
            out = np.roll(out, 1, axis)
            first: list[Any] = [slice(None)] * out.ndim
            first[axis] = 0
            out[tuple(first)] = {"sum": 0, "prod": 1, "max": -np.inf, "min": np.inf}[stage.fold]
        return np.flip(out, axis) if stage.reverse else out

    def value(self, expr: Expr) -> Array:
        if isinstance(expr, Const | Size):
            return _wide(np.asarray(expr.value, expr.dtype.numpy))
        if isinstance(expr, Index):
            return self.index[expr.axis]
        if isinstance(expr, Result):
            return self.results[expr.stage]
        if isinstance(expr, Load):
            return self._load(expr.operand)
        assert isinstance(expr, Op)
        args = [self.value(a) for a in expr.args]
        if expr.name == "cast":
            return _wide(args[0].astype(expr.dtype.numpy))
        return np.asarray(_FUNCTIONS[expr.name](*args))

    def _where(self, operand: Operand) -> tuple[Array, Array]:
        place = np.asarray(operand.view.offset + operand.offset)
        for index, stride in zip(self.index, operand.strides):
            place = place + index * stride
        if operand.at is not None:
            place = place + self.value(operand.at)
        on = np.asarray(True) if operand.guard is None else self.value(operand.guard)
        return np.broadcast_arrays(place, on)  # type: ignore[return-value]

    def _load(self, k: int) -> Array:
        operand = self.nest.operands[k]
        place, on = self._where(operand)
        items = self.memory[operand.view.storage].view(operand.dtype.numpy)
        found = np.asarray(items[np.where(on, place, 0)] if items.size else np.zeros(place.shape, items.dtype))
        return _wide(np.where(on, found, np.asarray(operand.other).astype(items.dtype)))

    def _store(self, k: int, value: Array, once: tuple[int, ...] = ()) -> None:
        operand = self.nest.operands[k]
        shape = tuple(1 if a in once else n for a, n in enumerate(self.nest.extents))
        every = self.index
        self.index = [index.take([0], axis=a) if a in once else index for a, index in enumerate(every)]
        place, on = self._where(operand)
        self.index = every
        place, on, value = np.broadcast_arrays(place, on, value)
        if math.prod(shape) == 0:
            return
        place, on, value = (np.broadcast_to(x, shape) for x in (place, on, value))
        items = self.memory[operand.view.storage].view(operand.dtype.numpy)
        items[place[on]] = value[on].astype(operand.dtype.numpy)


def check(
    nest: Nest,
    memory: dict[Storage, Array],
    isa: Isa,
    *,
    splits: Sequence[int] = (1,),
    tolerance: float = 0.0,
    threads: int = 1,
    here: Callable[[Sequence[Launch]], Sequence[Launch]] | None = None,
) -> None:
    """Run a nest both ways and compare every byte range it may write, bit by bit or within a tolerance; ``here`` makes
    launches of another machine's kernels those that this one runs."""
    dtypes: dict[Storage, DType] = {nest.operands[k].view.storage: nest.operands[k].dtype for k in nest.written()}
    poisoned = dict(memory)
    for storage in dtypes:
        fresh = harness.aligned(memory[storage].nbytes)
        if storage.kind == "input":  # in place
            fresh[:] = memory[storage].reshape(-1).view(np.uint8)
        poisoned[storage] = fresh
    want = {s: a.reshape(-1).view(np.uint8).copy() for s, a in poisoned.items()}
    Oracle(nest, want).run()
    made: Sequence[Launch] = launches(nest, isa, threads)
    if here is not None:
        made, isa = here(made), harness.ISAS[0]
    for split in splits:
        got = {s: (a.copy() if s in dtypes else a) for s, a in poisoned.items()}
        for storage in dtypes:
            fresh = harness.aligned(got[storage].nbytes)
            fresh[:] = got[storage]
            got[storage] = fresh
        runner = harness.Runner(made, isa, got, split=split)
        _kept.update({(isa.key, spec): kernel for spec, kernel in runner.kernels.items()})
        runner()
        for storage, dtype in dtypes.items():
            a, b = got[storage].view(dtype.numpy), want[storage].view(dtype.numpy)
            if dtype.is_float:
                a, b = a.astype(np.float64), b.astype(np.float64)
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=nest.label)
            else:
                np.testing.assert_array_equal(a, b, err_msg=nest.label)


def strided(array: Array, index: int = 0) -> tuple[View, Storage, Array]:
    """A view of an array with any strides, negative ones included, over the memory of its base."""
    from ranvier import dtypes

    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    item = array.itemsize
    start = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // item
    storage = Storage("temp", base.nbytes, index=index)
    view = View(storage, dtypes.of(array), array.shape, tuple(s // item for s in array.strides), start)
    return view, storage, base


__all__ = ["Map", "Oracle", "check", "strided"]
