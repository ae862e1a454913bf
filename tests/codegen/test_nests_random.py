"""Random nests: any mix of axes, rows, strides, guards, gathers and stages, against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import (
    Const,
    Expr,
    Final,
    Index,
    Load,
    Map,
    Nest,
    Op,
    Operand,
    Reduce,
    Result,
    Size,
    Stage,
)
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.nest_oracle import check

Array = np.ndarray[Any, Any]
ISAS = pytest.mark.parametrize("isa", harness.ISAS, ids=lambda i: i.name)
F32, I64 = DType.float32, DType.int64


class Random:
    """One random nest and the memory it works on."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = [F32, F32, DType.float64, DType.int32, DType.int16][self.pick(5)]
        self.extents = tuple([1, 2, 3, 5, 8, 17, 35][self.pick(7)] for _ in range(1 + self.pick(4)))
        self.operands: list[Operand] = []
        self.memory: dict[Storage, Array] = {}

    def pick(self, n: int) -> int:
        return int(self.rng.integers(n))

    def often(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def storage(self, dtype: DType, size: int, fill: bool) -> Storage:
        found = Storage.temporary(size * dtype.numpy.itemsize)
        values = self.rng.normal(size=size) * 3 if dtype.is_float else self.rng.integers(-20, 20, size)
        self.memory[found] = values.astype(dtype.numpy) if fill else np.zeros(size, dtype.numpy)
        return found

    def load(self, dtype: DType) -> Load:
        """A new operand with strides of its own: broadcast, dense, gapped, permuted or reversed axes."""
        strides, size = [0] * len(self.extents), 1
        start = 0
        for axis in self.rng.permutation(len(self.extents)):
            if self.often(0.25):
                continue
            step = size * (1 + (self.pick(3) == 0))
            strides[axis] = step
            size = step * self.extents[axis]
            if self.often(0.15):
                start += step * (self.extents[axis] - 1)
                strides[axis] = -step
        at: Expr | None = None
        guard: Expr | None = None
        axis = self.pick(len(self.extents))
        if self.often(0.2):
            at = Op("floordiv", (Index(axis), Size(1 + self.pick(3))), I64)
            if self.often(0.5):
                at = Op("mod", (Op("add", (at, Size(3)), I64), Size(4)), I64)
            size += max(4, self.extents[axis])
        if self.often(0.2):
            guard = Op(["lt", "ge"][self.pick(2)], (Index(axis), Size(self.pick(self.extents[axis] + 1))), DType.bool)
        view = View(self.storage(dtype, size, True), dtype, (size,), (1,))
        self.operands.append(Operand(view, tuple(strides), start, at, guard, self.pick(3)))
        return Load(len(self.operands) - 1, dtype)

    def target(self, dtype: DType, axes: list[int]) -> int:
        """A new operand to store to, dense over the given axes in any order."""
        strides, size = [0] * len(self.extents), 1
        for k in self.rng.permutation(len(axes)):
            strides[axes[k]] = size
            size *= self.extents[axes[k]]
        view = View(self.storage(dtype, size, False), dtype, (size,), (1,))
        self.operands.append(Operand(view, tuple(strides)))
        return len(self.operands) - 1

    def expr(self, leaves: list[Expr], depth: int) -> Expr:
        if depth == 0 or self.often(0.2):
            return leaves[self.pick(len(leaves))]
        a, b = self.expr(leaves, depth - 1), self.expr(leaves, depth - 1)
        name = ["add", "sub", "mul", "max", "min", "where", "neg"][self.pick(7)]
        if name == "neg":
            return Op(name, (a,), self.dtype)
        if name == "where":
            return Op(name, (Op("lt", (a, b), DType.bool), a, b), self.dtype)
        return Op(name, (a, b), self.dtype)

    def nest(self) -> Nest:
        axes = list(range(len(self.extents)))
        row = [a for a in axes if self.often(0.4)]
        outer = [a for a in axes if a not in row]
        leaves: list[Expr] = [self.load(self.dtype) for _ in range(1 + self.pick(3))]
        leaves.append(Const(2, self.dtype))
        leaves.append(Op("cast", (Index(self.pick(len(axes))),), self.dtype))
        stages: list[Stage] = []
        known: list[Expr] = []
        if row:
            for _ in range(1 + self.pick(2)):
                fold = (["max", "min", "sum"] if self.dtype.is_float else ["max", "min", "sum", "prod"])[self.pick(3)]
                value = self.expr(leaves + known, 2)
                known.append(Result(len(stages), self.dtype))
                stages.append(Reduce(fold, value, self.dtype))  # type: ignore[arg-type]
            results = [*known, Const(1, self.dtype)]
            stages.append(Final(((self.target(self.dtype, outer), self.expr(results, 2)),)))
        if not row or self.often(0.5):
            stores = tuple(
                (self.target(self.dtype, axes), self.expr(leaves + known, 3)) for _ in range(1 + self.pick(2))
            )
            stages.append(Map(stores))
        return Nest(self.extents, tuple(self.operands), tuple(stages), frozenset(row), f"{self.dtype}")


@ISAS
def test_random_nests(isa: Isa) -> None:
    for seed in range(15):
        made = Random(seed)
        nest = made.nest()
        check(nest, made.memory, isa, splits=(1, 3), tolerance=1e-4 * math.sqrt(math.prod(nest.extents)))
