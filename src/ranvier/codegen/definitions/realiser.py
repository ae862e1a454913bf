"""Definitions to nests, products and calls: where every tensor lies, and which loops make it.

Groups are realised in order. A tensor gets memory when its group is realised: a slice of a concatenation it only
goes into, the partition's output, or a temporary in whatever axis order suits its producer (channels-last after a
convolution, the operands' order after elementwise work), so layout changes happen only where somebody insists.

A provider says what becomes of a nest, a product and a call, and whether tensors are stored in another type than the
one they have in expressions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Alias, Contraction, Def, Joined, Moved, Opaque, Pointwise, Rows, Use
from ranvier.codegen.definitions.exprs import HALVES
from ranvier.codegen.definitions.groups import Group, group
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.realise_rows import rows_nest
from ranvier.codegen.definitions.registry import ALL
from ranvier.codegen.loops.ir import Epilogue, Expr, Map, Nest, Op, Operand, Result
from ranvier.codegen.storage import Kind, Storage, View, dense_strides, memory_order
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.graph.tensors import ConstTensor

Array = np.ndarray[Any, Any]


class BaseRealiser(ABC):
    """Realises one partition at given shapes.

    ``reuse``: results that may take over an operand's memory. ``checks``: flags that the run sets where data is
    refused, with the message and the node.
    """

    def __init__(self, program: Definitions, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        self.program = program
        self.label = ""
        self.reuse: dict[Storage, list[Storage]] = {}
        self.checks: list[tuple[Storage, str, str]] = []
        self._views: dict[Value, View] = {}
        self._tensors: dict[int, ConstTensor] = {}  # by the identity of their arrays
        for k, value in enumerate(inputs):
            self._views[value] = self._outside(value, "input", k)
        self._outputs: dict[Value, View] = {}
        self._copies: list[tuple[Value, View]] = []
        for k, value in enumerate(outputs):
            view = self._outside(value, "output", k)
            if value in self._outputs:
                self._copies.append((value, view))
            else:
                self._outputs[value] = view
        self._wanted = list(outputs)
        self._slices: dict[Value, tuple[Joined, int]] = {}
        self._slices_behind: dict[Value, Alias] = {}  # results that lie in a concatenation under another shape
        self._outputs_behind: dict[Value, View] = {}  # results that lie in an output's memory under another shape
        self._inputs = list(inputs)
        self._converted: dict[tuple[int, DType], tuple[View, View]] = {}  # with the view, whose identity it goes by

    def _outside(self, value: Value, kind: Kind, k: int) -> View:
        shape, dtype = self.program.shape(value), self.program.dtype(value)
        size = math.prod(shape)
        storage = Storage(kind, size * dtype.numpy.itemsize, index=k, name=value.name)
        return View.dense(storage, dtype, shape)

    # -- a provider's part ------------------------------------------------------------------------------------------

    @abstractmethod
    def loops(self, nest: Nest) -> None:
        """Add what carries out a nest."""

    @abstractmethod
    def product(self, anchor: Contraction, views: list[View], target: View, epilogue: Epilogue | None) -> None:
        """Add what makes a product, and its epilogue where there is one."""

    @abstractmethod
    def call(self, each: Opaque, views: list[View], outs: list[View]) -> None:
        """Add what an opaque definition does."""

    def planned(self, groups: Sequence[Group]) -> None:
        """Called with all groups before the first is realised."""
        return

    def settled(self) -> None:
        """Called after each group."""
        return

    def takes_epilogue(self, anchor: Contraction) -> bool:
        """Whether pointwise work may go into the product, rather than be a pass of its own."""
        return True

    def stored(self, value: Value) -> DType | None:
        """The type a result has in memory, where it is another than in expressions."""
        return None

    def takes_stored(self, each: Contraction | Opaque) -> bool:
        """Whether the kernel reads and writes tensors in whichever type they are stored."""
        return False

    def factors(self, anchor: Contraction) -> list[View]:
        """The operands of a product as it wants them stored."""
        return [self.plain(self.view(v)) for v in anchor.sources]

    def for_store(self, value: Expr, target: View) -> Expr:
        """The expression as good as it must be for the type that ``target`` is stored in."""
        return value

    # -- the walk ---------------------------------------------------------------------------------------------------

    def realise(self) -> None:
        flags = [check.flag for check in self.program.checks]
        groups = group(self.program, [*self._wanted, *flags])
        members = [d for g in groups for d in g.defs]
        self._plan_joins(members)
        self._plan_outputs(members)
        self.planned(groups)
        for each in groups:
            self.label = _label(each)
            self._realise(each)
            self._release(each)
            self.settled()
        for value, view in self._outputs.items():
            have = self.view(value)
            if have.storage is not view.storage:
                self.label = f"output {value.name}"
                self.copy(have, view)
        for value, view in self._copies:
            self.copy(self.view(value), view)
        for check in self.program.checks:
            self.checks.append((self.view(check.flag).storage, check.message, check.node))

    def _realise(self, each: Group) -> None:
        anchor = each.anchor
        if isinstance(anchor, Contraction):
            self._contraction(each, anchor)
        elif isinstance(anchor, Rows):
            self.loops(rows_nest(self, each, anchor))
        elif isinstance(each.last, Alias):
            self._alias(each.last)
        elif isinstance(each.last, Joined):
            self._join(each.last)
        elif isinstance(each.last, Opaque):
            self._opaque(each.last)
        else:
            self._elementwise(each.defs, each.kept)

    # -- memory -----------------------------------------------------------------------------------------------------

    def view(self, value: Value) -> View:
        """Where a finished tensor lies; constants are laid out when first asked for."""
        found = self._views.get(value)
        if found is None:
            found = self._views[value] = View.constant(self._content(value), self.program.dtype(value), value.name)
        return found

    def _content(self, value: Value) -> Array:
        known = self.program.known.get(value)
        if known is not None:
            return known
        assert value.const is not None, f"{value!r} is used before it is made"
        found = value.const.raw()
        self._tensors[id(found)] = value.const
        return found

    def _release(self, each: Group) -> None:
        """Weights are packed when their group is done; what a kernel reads as it is comes back by itself."""
        for value in (v for d in each.defs if not isinstance(d, Alias) for v in d.operands):
            view = self._views.get(value)
            tensor = self._tensors.get(id(view.storage.array)) if view is not None else None
            if tensor is not None and not tensor.again:  # which is there for as long as the kernel has it
                tensor.release()

    def temporary(self, dtype: DType, shape: Sequence[int], order: tuple[int, ...] | None = None) -> View:
        return View.temporary(dtype, tuple(shape), order)

    def destination(self, value: Value, order: tuple[int, ...] | None = None) -> View:
        """Memory for a result that is about to be written; ``order`` is what its producer would like."""
        slot = self._slices.get(value)
        if slot is not None:
            joined, start = slot
            whole = self._views.get(joined.out)
            if whole is None:
                whole = self._views[joined.out] = self.destination(joined.out, order)
            made = slice_of(whole, joined.axis, start, self.program.shape(value)[joined.axis])
        elif (behind := self._behind_slice(value)) is not None:
            made = behind
        elif value in self._outputs:
            made = self._outputs[value]
        elif value in self._outputs_behind:
            made = self._outputs_behind[value]
        else:
            dtype, shape = self.program.dtype(value), self.program.shape(value)
            stored = self.stored(value)
            if stored is None:
                made = View.temporary(dtype, shape, order)
            else:
                made = View.narrowed(dtype, stored, shape, order)
        self._views[value] = made
        return made

    def _behind_slice(self, value: Value) -> View | None:
        """Memory of a concatenation in the shape of a value that goes there under another one; None where it does not,
        or its elements would be in another order there."""
        shown = self._slices_behind.get(value)
        if shown is None or shown.inverse is None:
            return None
        view = shown.inverse(self.destination(shown.out))
        if view is None:
            return None
        order = [axis for axis in memory_order(view.shape, view.strides) if view.shape[axis] != 1]
        return view if order == sorted(order) else None

    def _plan_joins(self, defs: Sequence[Def]) -> None:
        """Let results that go into a concatenation be written there at once, also those that get another shape before
        (an array on top of others is one of them with an axis more)."""
        own: set[Value] = set()
        shown: dict[Value, Alias] = {}
        for each in defs:
            if isinstance(each, Pointwise | Moved | Rows | Contraction | Joined):
                own.update(each.outputs)
            elif isinstance(each, Alias) and each.inverse is not None:
                shown[each.out] = each
        taken: set[Value] = set()
        for each in reversed(defs):  # outer concatenations first: an inner one may then be a slice of it
            if not isinstance(each, Joined):
                continue
            start = 0
            for source in each.sources:
                size = self.program.shape(source)[each.axis]
                views, made = list[Alias](), source
                while made in shown and made not in taken and made not in self._outputs:
                    views.append(shown[made])
                    made = views[-1].source
                if made in own and made not in taken and made not in self._outputs and size:
                    taken.update((made, *(view.out for view in views)))
                    self._slices[source] = (each, start)
                    self._slices_behind.update((view.source, view) for view in views)
                start += size

    def _plan_outputs(self, defs: Sequence[Def]) -> None:
        """Let what becomes an output by another view (a transpose, a reshape) be written there at once: what nobody
        else reads, and what lies there for others as it would anywhere."""
        own: set[Value] = set()
        uses: dict[Value, int] = {}
        for each in defs:
            if isinstance(each, Pointwise | Moved | Rows | Contraction | Joined | Opaque):
                own.update(each.outputs)
            for value in each.operands:
                uses[value] = uses.get(value, 0) + 1
        behind = dict(self._outputs)
        for each in reversed(defs):
            if not isinstance(each, Alias) or each.inverse is None or each.out not in behind:
                continue
            source = each.source
            if source in behind or source in self._slices or source in self._slices_behind:
                continue
            view = each.inverse(behind[each.out])
            if view is not None and (uses[source] == 1 or view.strides == dense_strides(view.shape)):
                behind[source] = view
                if source in own:
                    self._outputs_behind[source] = view

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy(self, source: View, target: View) -> None:
        if target.dtype not in ALL:
            # elements that no code computes with are moved as the bytes they are
            source, target = _patterns(source, DType.uint8), _patterns(target, DType.uint8)
        elif source.dtype is target.dtype and source.dtype in HALVES:
            source, target = _patterns(source, DType.uint16), _patterns(target, DType.uint16)
        elif source.dtype is not target.dtype and (way := self._between(source, target)) is not None:
            self.copy(source, way)
            source = way
        nest = NestBuilder(target.shape, self.label)
        value = nest.load(source)
        self.loops(nest.nest([Map(((nest.store(target), value),))]))

    def _between(self, source: View, target: View) -> View | None:
        """A stop on the way to another type and another order of axes, which no kernel does at once: in the smaller
        type, so that less is turned round."""
        orders = [memory_order(v.shape, v.strides) for v in (source, target)]
        if orders[0] == orders[1] or 0 in source.strides:
            return None
        small = source.dtype.numpy.itemsize < target.dtype.numpy.itemsize
        if small:
            return self._like(source, source.dtype, orders[1])
        return self._like(source, target.dtype, orders[0])

    def _like(self, view: View, stored: DType, order: tuple[int, ...] | None) -> View:
        if stored is view.element:
            return View.temporary(stored, view.shape, order)
        return View.narrowed(view.element, stored, view.shape, order)

    def stored_as(self, view: View, dtype: DType) -> View:
        """The float32 tensor with its elements in memory as ``dtype``; converted once for all that want it so."""
        if view.dtype is dtype or view.element is not DType.float32 or view.storage.kind == "const":
            return view
        found = self._converted.get((id(view), dtype))
        if found is None:
            made = self._like(view, dtype, memory_order(view.shape, view.strides))
            found = self._converted[id(view), dtype] = view, made
            self.copy(view, made)
        return found[1]

    def plain(self, view: View) -> View:
        """The tensor with its elements in memory as they are in expressions."""
        return self.stored_as(view, view.element)

    def dense(self, view: View) -> View:
        """The tensor in row-major order, copied where it is not."""
        if view.is_dense:
            return view
        made = self._like(view, view.dtype, None)
        self.copy(view, made)
        return made

    def ordered(self, view: View, order: tuple[int, ...]) -> View:
        """The tensor with its axes in memory in ``order`` without gaps along the innermost, copied where not."""
        if memory_order(view.shape, view.strides) == order and (
            view.shape[order[-1]] == 1 or view.strides[order[-1]] == 1
        ):
            return view
        made = self._like(view, view.dtype, order)
        self.copy(view, made)
        return made

    # -- kinds of definitions ---------------------------------------------------------------------------------------

    def _alias(self, each: Alias) -> None:
        source = self.view(each.source)
        made = each.view(source)
        if made is None:
            made = each.view(self.dense(source))
            assert made is not None, f"no view of {source} for {each.label}"
        self._views[each.out] = made

    def _join(self, each: Joined) -> None:
        start = 0
        whole = self._views.get(each.out)
        if whole is None:
            orders = [memory_order(v.shape, v.strides) for v in map(self.view, each.sources) if v.size]
            whole = self.destination(each.out, orders[0] if orders else None)
        for source in each.sources:
            size = self.program.shape(source)[each.axis]
            placed = self._slices.get(source)
            # a tensor may be there twice, and lies at one of the places only
            there = placed is not None and placed[0] is each and placed[1] == start
            if size and not (there and self._is_placed(source, whole)):
                self.copy(self.view(source), slice_of(whole, each.axis, start, size))
            start += size

    def _is_placed(self, source: Value, whole: View) -> bool:
        return self._views[source].storage is whole.storage

    def _opaque(self, each: Opaque) -> None:
        able = self.takes_stored(each)
        views = [self.view(v) if able else self.plain(self.view(v)) for v in each.sources]
        views = [self.dense(v) for v in views] if each.dense else views
        outs = [self.destination(v) for v in each.outputs]
        kinds = [v.dtype if able else v.element for v in outs]
        whole = [v if v.is_dense and v.dtype is kind else self._like(v, kind, None) for v, kind in zip(outs, kinds)]
        self.call(each, views, whole)
        for made, wanted in zip(whole, outs):
            if made is not wanted:
                self.copy(made, wanted)

    def expr(self, nest: NestBuilder, made: Mapping[Value, Expr], use: Use, *, plain: bool = False) -> Expr:
        found = made.get(use.value)
        if found is not None:
            return found
        return nest.load(self.seen(use, plain=plain))

    def seen(self, use: Use, *, plain: bool = False) -> View:
        view = self.plain(self.view(use.value)) if plain else self.view(use.value)
        if use.shape is None:
            return view
        seen = view.reshaped(use.shape)
        if seen is None:
            seen = self.dense(view).reshaped(use.shape)
        assert seen is not None
        return seen

    def _elementwise(self, defs: Sequence[Def], kept: Sequence[Def] = ()) -> None:
        result = defs[-1].out
        nest = NestBuilder(self.program.shape(result), self.label)
        made: dict[Value, Expr] = {}
        for each in defs:
            if isinstance(each, Pointwise):
                made[each.out] = each.compute([self.expr(nest, made, u) for u in each.uses])
            else:
                assert isinstance(each, Moved)
                made[each.out] = each.compute(nest, [self.view(v) for v in each.sources])
        reads = list(nest.operands)
        stores = []
        for value in (*(each.out for each in kept), result):
            target = self.destination(value, nest.order())
            self._offer_reuse(target, reads, nest.domain)
            stores.append((nest.store(target), self.for_store(made[value], target)))
        self.loops(nest.nest([Map(tuple(stores))]))

    def _offer_reuse(self, target: View, reads: Sequence[Operand], domain: Sequence[int]) -> None:
        """The result may take over the memory of an operand that is read exactly where it writes: temporaries do so by
        themselves, an output that of an input where the caller gives both the same memory."""
        kinds = {"temp": "temp", "output": "input"}
        wanted = kinds.get(target.storage.kind)
        if wanted is None or target.offset or target.nbytes != target.storage.nbytes:
            return
        step = target.expanded(tuple(domain)).strides
        same: dict[Storage, bool] = {}
        for operand in reads:
            view = operand.view
            fits = (
                view.storage.kind == wanted
                and operand.at is None
                and operand.guard is None
                and operand.offset == 0
                and view.offset == 0
                and view.nbytes == view.storage.nbytes == target.nbytes
                and view.dtype.numpy.itemsize == target.dtype.numpy.itemsize
                and all(a == b or d == 1 for a, b, d in zip(operand.strides, step, domain))
            )
            same[view.storage] = same.get(view.storage, True) and fits
        found = [storage for storage, ok in same.items() if ok]
        if found:
            self.reuse[target.storage] = found

    # -- contractions -----------------------------------------------------------------------------------------------

    def _contraction(self, each: Group, anchor: Contraction) -> None:
        views = self.factors(anchor)
        after = [d for d in each.defs if d is not anchor]
        result = each.last.out
        epilogue = self._epilogue(anchor, after) if after and self.takes_epilogue(anchor) else None
        if after and epilogue is None:
            # an operand's layout cannot be addressed by rows and columns: a pass of its own
            self._product(anchor, views, self.destination(anchor.out, anchor.order), None)
            self._elementwise(after)
            return
        self._product(anchor, views, self.destination(result, anchor.order), epilogue)

    def _product(self, anchor: Contraction, views: list[View], target: View, epilogue: Epilogue | None) -> None:
        if epilogue is not None:
            epilogue = Epilogue(self.for_store(epilogue.value, target), epilogue.operands)
        axis = anchor.unit_axis
        kind = target.dtype if self.takes_stored(anchor) else target.element
        if kind is target.dtype and (axis is None or target.shape[axis] == 1 or target.strides[axis] == 1):
            self.product(anchor, views, target, epilogue)
            return
        made = self._like(target, kind, anchor.order)
        self.product(anchor, views, made, epilogue)
        self.copy(made, target)

    def _epilogue(self, anchor: Contraction, after: Sequence[Def]) -> Epilogue | None:
        shape = self.program.shape(anchor.out)
        nest, plain = NestBuilder(shape, self.label), not self.takes_stored(anchor)
        made: dict[Value, Expr] = {anchor.out: _product_of(anchor, self.program.dtype(anchor.out))}
        for each in after:
            assert isinstance(each, Pointwise)
            made[each.out] = each.compute([self.expr(nest, made, u, plain=plain) for u in each.uses])
        operands: list[Operand] = []
        for operand in nest.operands:
            folded = anchor.fold(operand.strides)
            if folded is None:
                return None
            operands.append(Operand(operand.view, folded))
        return Epilogue(made[after[-1].out], tuple(operands))


def _product_of(anchor: Contraction, dtype: DType) -> Expr:
    """The sum that an epilogue begins with. Where the graph says that a product has 16 bits it has no more here, as if
    it had been stored; a product in the midst of a node (Gemm before its bias) is nobody's to see and keeps its own."""
    if dtype not in HALVES or anchor.out.producer is None:
        return Result(0, dtype)
    return Op("cast", (Result(0, DType.float32),), dtype)


def _label(each: Group) -> str:
    names = dict.fromkeys(d.label for d in each.defs if d.label)
    return " + ".join(names)


def _patterns(view: View, kind: DType) -> View:
    """The elements as what they are in memory: for moving them."""
    assert view.dtype.numpy.itemsize == kind.numpy.itemsize
    return View(view.storage, kind, view.shape, view.strides, view.offset)


def slice_of(view: View, axis: int, start: int, size: int) -> View:
    shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
    return View(view.storage, view.dtype, shape, view.strides, view.offset + start * view.strides[axis])
