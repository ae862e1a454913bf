"""What a Python function that writes a loop nest works with.

The function gets a :class:`LoopBuilder` and one object for each parameter of the kernel: a :class:`TensorTerm` for a
tensor, a term for a scalar, a number for a size. It returns the nest that ``store`` or ``store_row`` gave it. Whatever
a nest made here reads or writes lies within its arguments: positions that are computed are guarded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.loops import ir
from ranvier.codegen.loops.ir import Expr, Fold, Index, Nest, Operand, Reduce, Result, Stage
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, nearest
from ranvier.providers.cpu.custom.signature import Access
from ranvier.providers.cpu.custom.terms import Term, apply


class Axis(Term):
    """The position along an axis of the loops."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__(Index(number))
        self.number = number


class TensorTerm(Term):
    """A tensor. Used as a term it is the element at this point, by broadcasting; ``x[i, j]`` is any other element."""

    __slots__ = ("_loops", "access", "name", "view")

    def __init__(self, loops: LoopBuilder, name: str, view: View, access: Access) -> None:
        self._loops = loops
        self.name = name
        self.view = view
        self.access = access

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    @property
    def expr(self) -> Expr:
        return self._loops.load(self)

    def __getitem__(self, position: Any) -> Term:
        return Term(self._loops.load_at(self, position if isinstance(position, tuple) else (position,)))

    def __iter__(self) -> Any:  # which Python would otherwise try by indexing, for ever
        raise InvalidConfig(f"{self.name}: a tensor is not gone through element by element; the loops do that")


class LoopBuilder:
    """Loops over ``domain``, which is the shape of the first tensor that is written until ``over`` says otherwise."""

    def __init__(self, name: str, domain: Sequence[int]) -> None:
        self.name = name
        self.domain = tuple(domain)
        self._row: tuple[int, ...] = ()
        self._nest: NestBuilder | None = None
        self._stages: list[Stage] = []
        self._finished: Nest | None = None

    # -- the loops --------------------------------------------------------------------------------------------------

    def over(self, *extents: int, row: Sequence[int] = ()) -> tuple[Axis, ...]:
        """Loop over a box; ``row`` are the axes that reductions run along. Returns the positions along all axes."""
        if self._nest is not None:
            raise InvalidConfig(f"kernel {self.name!r}: over() comes before anything is read or stored")
        if not extents:
            extents = self.domain
        if not all(isinstance(e, int) and not isinstance(e, bool) and e >= 0 for e in extents):
            raise InvalidConfig(f"kernel {self.name!r}: over() takes sizes, got {extents!r}")
        rank = len(extents)
        if not all(isinstance(a, int) and -rank <= a < rank for a in row):
            raise InvalidConfig(f"kernel {self.name!r}: row {tuple(row)!r} are no axes of {rank}")
        self.domain = tuple(extents)
        self._row = tuple(sorted({a % rank for a in row}))
        return tuple(Axis(a) for a in range(rank))

    @property
    def rank(self) -> int:
        return len(self.domain)

    def axis(self, number: int) -> Axis:
        if not isinstance(number, int) or not 0 <= number < len(self.domain):
            raise InvalidConfig(f"kernel {self.name!r}: there is no axis {number!r} of {len(self.domain)}")
        return Axis(number)

    # -- values -----------------------------------------------------------------------------------------------------

    def op(self, name: str, *operands: Any) -> Term:
        """An operation of the loop IR by its name: ``k.op("tanh", x)``."""
        return apply(name, *operands)

    def __getattr__(self, name: str) -> Callable[..., Term]:
        if name in ir.OPERATIONS:
            return lambda *operands: apply(name, *operands)
        known = [*ir.OPERATIONS, *(each for each in dir(type(self)) if not each.startswith("_"))]
        raise AttributeError(f"the loops have no operation {name!r}{nearest(name, known)}")

    def fold(self, how: Fold, value: Term, dtype: DType | None = None) -> Term:
        """``value`` folded over the row axes: ``sum``, ``prod``, ``max``, ``min``, ``argmax`` …"""
        if how not in get_args(Fold):
            raise InvalidConfig(f"kernel {self.name!r}: a fold is one of {', '.join(get_args(Fold))}, got {how!r}")
        if not self._row:
            raise InvalidConfig(f"kernel {self.name!r}: {how} needs row axes: over(…, row=…)")
        if not isinstance(value, Term):
            raise InvalidConfig(f"kernel {self.name!r}: {how} folds a term, got {value!r}")
        kind = DType.int64 if how.startswith("arg") else dtype or value.dtype
        self._open()
        self._stages.append(Reduce(how, value.expr, kind))
        return Term(Result(len(self._stages) - 1, kind))

    def sum(self, value: Term) -> Term:
        return self.fold("sum", value)

    def load(self, tensor: TensorTerm) -> Expr:
        self._readable(tensor)
        try:
            return self._open().load(tensor.view)
        except ValueError as error:
            raise InvalidConfig(f"kernel {self.name!r}: {tensor.name!r}: {error}") from None

    def load_scalar(self, view: View) -> Expr:
        """A number that is the same at all points."""
        return self._open().load(view, (0,) * len(self.domain))

    def load_at(self, tensor: TensorTerm, position: tuple[Any, ...]) -> Expr:
        """The element at a position; outside of the tensor stands 0."""
        self._readable(tensor)
        view = tensor.view
        if len(position) != view.rank:
            raise InvalidConfig(f"kernel {self.name!r}: {tensor.name!r} has {view.rank} axes, got {len(position)}")
        if tensor.access == "inout":
            raise InvalidConfig(
                f"kernel {self.name!r}: {tensor.name!r} is written to, and other tiles may have written there already"
            )
        strides = [0] * len(self.domain)
        offset = 0
        at: Term | None = None
        guard: Term | None = None
        for index, size, stride in zip(position, view.shape, view.strides):
            if isinstance(index, int) and not isinstance(index, bool):
                if not 0 <= index < size:
                    raise InvalidConfig(f"kernel {self.name!r}: {tensor.name!r} has size {size}, no element {index}")
                offset += index * stride
                continue
            if not isinstance(index, Term) or index.dtype is not DType.int64:
                raise InvalidConfig(f"kernel {self.name!r}: a position is a term of int64 or a number, got {index!r}")
            if isinstance(index, Axis):
                strides[index.number] += stride
                inside = self.domain[index.number] <= size
            else:
                step = index * Term(ir.Size(stride))
                at = step if at is None else at + step
                inside = False
            if not inside:
                within = (index >= Term(ir.Size(0))) & (index < Term(ir.Size(size)))
                guard = within if guard is None else guard & within
        return self._open().load(
            view,
            strides,
            offset=offset,
            at=None if at is None else at.expr,
            guard=None if guard is None else guard.expr,
        )

    # -- results ----------------------------------------------------------------------------------------------------

    def store(self, *pairs: Any) -> Nest:
        """Store at every point: ``store(out, value)``, or several tensors and values. Returns the nest so far."""
        return self._stored(pairs, once=False)

    def store_row(self, *pairs: Any) -> Nest:
        """Store once for all points along the row axes."""
        return self._stored(pairs, once=True)

    def _stored(self, pairs: Sequence[Any], *, once: bool) -> Nest:
        if not pairs or len(pairs) % 2:
            raise InvalidConfig(f"kernel {self.name!r}: store takes tensors and values, in turns")
        stores: list[tuple[int, Expr]] = []
        for tensor, value in zip(pairs[::2], pairs[1::2]):
            if not isinstance(tensor, TensorTerm):
                raise InvalidConfig(f"kernel {self.name!r}: store writes to a tensor, got {tensor!r}")
            if not isinstance(value, Term) or value.dtype is not tensor.dtype:
                got = value.dtype if isinstance(value, Term) else repr(value)
                raise InvalidConfig(f"kernel {self.name!r}: {tensor.name!r} holds {tensor.dtype}, got {got}; cast it")
            builder = self._open()
            stores.append((builder.store(tensor.view, self._places(tensor, once)), value.expr))
        self._stages.append(ir.Final(tuple(stores)) if once else ir.Map(tuple(stores)))
        self._finished = self._open().nest(self._stages, self._row)
        return self._finished

    def _places(self, tensor: TensorTerm, once: bool) -> tuple[int, ...]:
        """Strides of a result over the domain."""
        view = tensor.view
        if not once:
            if view.shape != self.domain:
                raise InvalidConfig(
                    f"kernel {self.name!r}: {tensor.name!r} has shape {view.shape}, the loops {self.domain}"
                )
            return view.strides
        kept = tuple(1 if a in self._row else d for a, d in enumerate(self.domain))
        outer = [a for a in range(len(self.domain)) if a not in self._row]
        if view.shape == kept:
            return tuple(0 if a in self._row else s for a, s in enumerate(view.strides))
        if view.shape == tuple(self.domain[a] for a in outer):
            steps = dict(zip(outer, view.strides))
            return tuple(steps.get(a, 0) for a in range(len(self.domain)))
        raise InvalidConfig(
            f"kernel {self.name!r}: {tensor.name!r} has shape {view.shape}, the loops without their rows {kept}"
        )

    def _open(self) -> NestBuilder:
        if self._nest is None:
            self._nest = NestBuilder(self.domain, self.name)
        return self._nest

    def _readable(self, tensor: TensorTerm) -> None:
        if tensor.access == "out":
            raise InvalidConfig(
                f"kernel {self.name!r}: {tensor.name!r} is only written to; declare it inout to read it"
            )


def check_nest(name: str, nest: Any, tensors: Sequence[TensorTerm], readable: Sequence[View]) -> None:
    """Refuse a nest that reaches beyond its arguments, or whose tiles depend on each other.

    Nests of a builder keep to this; one that was put together by hand is held to the same.
    """
    if not isinstance(nest, Nest):
        raise InvalidConfig(f"kernel {name!r}: the function must return the nest, got {type(nest).__name__}")
    by_storage = {id(t.view.storage): t for t in tensors}
    known = {id(v.storage) for v in readable} | set(by_storage)
    written = nest.written()
    for k, operand in enumerate(nest.operands):
        if id(operand.view.storage) not in known:
            raise InvalidConfig(f"kernel {name!r}: operand {k} of the nest is none of the kernel's arguments")
        tensor = by_storage.get(id(operand.view.storage))
        what = "a scalar" if tensor is None else repr(tensor.name)
        if k in written:
            if tensor is None or tensor.access == "in":
                raise InvalidConfig(f"kernel {name!r}: stores to {what}, which is only read")
            if any(operand.strides[a] == 0 and nest.extents[a] > 1 for a in nest.outer):
                raise InvalidConfig(f"kernel {name!r}: several tiles store to the same element of {what}")
        _check_reach(name, nest, operand, what)
    for tensor in tensors:
        if tensor.access == "in":
            continue
        own = [k for k, o in enumerate(nest.operands) if o.view.storage is tensor.view.storage]
        stores = [nest.operands[k] for k in own if k in written]
        loads = [nest.operands[k] for k in own if k not in written]
        if not stores:
            raise InvalidConfig(f"kernel {name!r}: {tensor.name!r} is an output and nothing is stored to it")
        for load, store in itertools.product(loads, stores):
            if load.at is not None or (load.strides, load.offset) != (store.strides, store.offset):
                raise InvalidConfig(f"kernel {name!r}: {tensor.name!r} is read elsewhere than it is written")


def _check_reach(name: str, nest: Nest, operand: Operand, what: str) -> None:
    if operand.at is not None and operand.guard is None:
        raise InvalidConfig(f"kernel {name!r}: {what} is addressed by an expression without a guard")
    if operand.guard is not None or math.prod(nest.extents) == 0:
        return
    view = operand.view
    low = high = operand.offset
    for extent, stride in zip(nest.extents, operand.strides):
        low, high = low + min(0, (extent - 1) * stride), high + max(0, (extent - 1) * stride)
    first = sum(min(0, (d - 1) * s) for d, s in zip(view.shape, view.strides))
    last = sum(max(0, (d - 1) * s) for d, s in zip(view.shape, view.strides))
    if view.size == 0 or low < first or high > last:
        raise InvalidConfig(f"kernel {name!r}: the loops reach beyond {what}, which has shape {view.shape}")


__all__ = ["Axis", "LoopBuilder", "TensorTerm", "check_nest"]
