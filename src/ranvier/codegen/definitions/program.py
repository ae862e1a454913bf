"""The definitions of one partition, and the helpers that lowerings write them with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen.definitions.defs import (
    Alias,
    Contraction,
    Declined,
    Def,
    Joined,
    Moved,
    Opaque,
    Pointwise,
    Realiser,
    RowBody,
    Rows,
    Shape,
    Target,
    Use,
    broadcast,
)
from ranvier.codegen.definitions.products import Products
from ranvier.codegen.launch import Launch
from ranvier.codegen.loops.ir import Epilogue, Expr
from ranvier.codegen.storage import View, row_major
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.records import dataclass
from ranvier.varying import whole

if TYPE_CHECKING:
    from ranvier.codegen.definitions.nest_builder import NestBuilder

Array = np.ndarray[Any, Any]


@dataclass
class Check:
    """A run-time condition: the program stores a nonzero byte into ``flag`` where it is violated."""

    flag: Value
    message: str
    node: str


@dataclass
class Drawn:
    """A tensor that is made anew before every run, by ``make``, and comes into it as an input does."""

    value: Value
    make: Callable[[], Array]


class Definitions:
    """The definitions of one partition at given shapes, and the helpers lowerings write them with."""

    def __init__(self, products: Products) -> None:
        self.products = products
        self.types: dict[Value, TensorType] = {}
        self.known: dict[Value, Array] = {}
        self.expand: Callable[[Iterable[Node]], None] | None = None  # lowers the nodes of a nested graph too
        self.defs: list[Def] = []
        self.checks: list[Check] = []
        self.draws: list[Drawn] = []
        self.label = ""

    # -- values -----------------------------------------------------------------------------------------------------

    def temp(self, dtype: DType, shape: Sequence[int]) -> Value:
        value = Value("", TensorType(dtype, tuple([whole(d) for d in shape])))
        self.types[value] = value.type  # type: ignore[assignment]
        return value

    def constant(self, array: Any, dtype: DType | None = None) -> Value:
        array = row_major(array)
        tensor = ConstTensor.of(array)
        value = Value("", TensorType(dtype or dtypes.of(array), array.shape))
        value.const = tensor
        self.types[value] = value.type  # type: ignore[assignment]
        return value

    def shape(self, value: Value) -> Shape:
        return self.types[value].shape  # type: ignore[return-value]

    def dtype(self, value: Value) -> DType:
        found = self.types[value].dtype
        assert found is not None
        return found

    def _result(self, out: Value | None, dtype: DType, shape: Sequence[int]) -> Value:
        if out is None:
            return self.temp(dtype, shape)
        self.types[out] = TensorType(dtype, tuple([whole(d) for d in shape]))
        return out

    def _add(self, definition: Def) -> None:
        definition.label = self.label
        self.defs.append(definition)

    # -- definitions ------------------------------------------------------------------------------------------------

    def pointwise(
        self,
        operands: Sequence[Value | Use],
        compute: Callable[[list[Expr]], Expr],
        dtype: DType,
        shape: Sequence[int] | None = None,
        out: Value | None = None,
    ) -> Value:
        """An elementwise tensor; its shape is that of the broadcast operands unless given. Declined where an operand
        is to be taken in a shape that has not as many elements."""
        uses = tuple(o if isinstance(o, Use) else Use(o) for o in operands)
        for use in uses:
            if use.shape is not None and math.prod(use.shape) != math.prod(self.shape(use.value)):
                raise Declined(f"{self.label}: an operand of {list(self.shape(use.value))} as {list(use.shape)}")
        if shape is None:
            shapes = [u.shape if u.shape is not None else self.shape(u.value) for u in uses]
            shape = broadcast(*shapes)
        result = self._result(out, dtype, shape)
        self._add(Pointwise((result,), uses, compute))
        return result

    def alias(
        self,
        source: Value,
        view: Callable[[View], View | None],
        shape: Sequence[int],
        out: Value | None = None,
        dtype: DType | None = None,
        inverse: Callable[[View], View | None] | None = None,
    ) -> Value:
        result = self._result(out, dtype or self.dtype(source), shape)
        self._add(Alias((result,), source, view, inverse))
        return result

    def reshape(self, source: Value, shape: Sequence[int], out: Value | None = None) -> Value:
        target = tuple([whole(d) for d in shape])
        have = self.shape(source)
        return self.alias(
            source, lambda view: view.reshaped(target), target, out, inverse=lambda view: view.reshaped(have)
        )

    def transpose(self, source: Value, perm: Sequence[int], out: Value | None = None) -> Value:
        order = tuple(perm)
        have = self.shape(source)
        back = tuple(order.index(axis) for axis in range(len(order)))
        return self.alias(
            source,
            lambda view: view.transposed(order),
            [have[p] for p in order],
            out,
            inverse=lambda view: view.transposed(back),
        )

    def identity(self, source: Value, out: Value | None = None) -> Value:
        return self.alias(source, lambda view: view, self.shape(source), out, inverse=lambda view: view)

    def moved(
        self,
        sources: Sequence[Value],
        compute: Callable[[NestBuilder, list[View]], Expr],
        dtype: DType,
        shape: Sequence[int],
        out: Value | None = None,
    ) -> Value:
        result = self._result(out, dtype, shape)
        self._add(Moved((result,), tuple(sources), compute))
        return result

    def rows(
        self,
        operands: Sequence[Value | Use],
        axes: Sequence[int],
        build: Callable[[list[Expr]], RowBody],
        outs: Sequence[tuple[DType, bool]],  # (element type, has the domain's shape?)
        *,
        domain: Shape | None = None,
        keepdims: bool = True,
        results: Sequence[Value | None] = (),
        sources: Sequence[Value] = (),
        gather: Callable[[NestBuilder, list[View]], list[Expr]] | None = None,
    ) -> list[Value]:
        """Row work over ``axes`` of the operands' broadcast shape (or ``domain``)."""
        uses = tuple(o if isinstance(o, Use) else Use(o) for o in operands)
        if domain is None:
            domain = broadcast(*[u.shape if u.shape is not None else self.shape(u.value) for u in uses])
        row = tuple(sorted(a % max(1, len(domain)) for a in axes))
        reduced = (
            tuple(1 if k in row else d for k, d in enumerate(domain))
            if keepdims
            else tuple(d for k, d in enumerate(domain) if k not in row)
        )
        made: list[Value] = []
        for k, (dtype, mapped) in enumerate(outs):
            given = results[k] if k < len(results) else None
            made.append(self._result(given, dtype, domain if mapped else reduced))
        at_points = frozenset(k for k, (_, mapped) in enumerate(outs) if mapped)
        self._add(Rows(tuple(made), uses, tuple(domain), row, build, at_points, keepdims, tuple(sources), gather))
        return made

    def contraction(
        self,
        sources: Sequence[Value],
        realise: Callable[[Realiser, list[View], View, Epilogue | None], Sequence[Launch]],
        fold: Callable[[Sequence[int]], tuple[int, int, int] | None],
        dtype: DType,
        shape: Sequence[int],
        out: Value | None = None,
        *,
        order: tuple[int, ...] | None = None,
        unit_axis: int | None = None,
        flops: float = 0.0,
        narrow: Callable[[Target], str | None] | None = None,
        rounds: bool = False,
        pace: Callable[[Target], tuple[float, float]] | None = None,
    ) -> Value:
        result = self._result(out, dtype, shape)
        self._add(Contraction((result,), tuple(sources), realise, fold, order, unit_axis, flops, narrow, rounds, pace))
        return result

    def joined(self, sources: Sequence[Value], axis: int, shape: Sequence[int], out: Value | None = None) -> Value:
        result = self._result(out, self.dtype(sources[0]), shape)
        self._add(Joined((result,), tuple(sources), axis))
        return result

    def opaque(
        self,
        sources: Sequence[Value],
        realise: Callable[[Realiser, list[View], list[View]], Sequence[Launch]],
        outs: Sequence[tuple[DType, Sequence[int]]],
        results: Sequence[Value | None] = (),
        *,
        dense: bool = True,
        flops: float = 0.0,
        narrow: Callable[[Target], str | None] | None = None,
        rounds: bool = False,
        widens: bool = False,
        positive: bool = False,
        about: Any = None,
    ) -> list[Value]:
        made = [
            self._result(results[k] if k < len(results) else None, dtype, shape)
            for k, (dtype, shape) in enumerate(outs)
        ]
        how = dense, flops, narrow, rounds, widens, positive, about
        self._add(Opaque(tuple(made), tuple(sources), realise, *how))
        return made

    def drawn(self, make: Callable[[], Array], dtype: DType, shape: Sequence[int]) -> Value:
        """A tensor of random numbers, which ``make`` draws before every run."""
        value = self.temp(dtype, shape)
        self.draws.append(Drawn(value, make))
        return value

    def check(self, flag: Value, message: str) -> None:
        """Fail the run with ``message`` where the (one-element bool or uint8) ``flag`` is not zero."""
        self.checks.append(Check(flag, message, self.label))
