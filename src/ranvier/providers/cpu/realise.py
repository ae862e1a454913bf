"""Definitions to launches: nests and products as machine code, and tensors of float32 stored in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen import tuning
from ranvier.codegen.definitions.defs import Contraction, Opaque
from ranvier.codegen.definitions.groups import Group
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.realiser import BaseRealiser
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.sharing import mark_far, paced, tuned_sharing
from ranvier.codegen.loops.ir import Epilogue, Expr, Nest
from ranvier.codegen.loops.shorten import for_bfloat16, of_bfloat16
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.providers.cpu.joining import Choice, made_once, together
from ranvier.providers.cpu.overwriting import postponed
from ranvier.providers.cpu.target import Packs, Realised, Target
from ranvier.varying import following


class Realiser(BaseRealiser):
    """Makes the launches of one partition at given shapes."""

    def __init__(
        self,
        program: Definitions,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        target: Target,
        packs: Packs,
    ) -> None:
        super().__init__(program, inputs, outputs)
        self.target = target
        self.isa = target.isa
        self.threads = target.threads
        self.packs = packs
        self.done = Realised(reuse=self.reuse, checks=self.checks)
        self.multiplies: DType | None = None  # of the contraction at hand: the type of 16 bits of its operands
        self.coarse = False  # whether the kernel at hand may compute in float32 what it has float64 for
        self._consultation: tuning.Consultation | None = None
        self._products: list[Launch] = []
        self._prepares: list[Launch] = []  # what makes operands ready for a product

    def run(self) -> Realised:
        launches = self.done.launches
        with tuning.consulting(self.target.tuning, lambda: len(launches)) as self._consultation:
            self.realise()
            if self._consultation is not None:
                self.done.decisions = self._consultation.decisions
        if any(each.origin is not None for each in launches) and not following():
            self._chain()
        if self.threads > 1:
            mark_far(self.done.launches)
        if self.target.joined_products:
            self._join_products()
        if not self.done.decisions and not following():  # which count launches in the order they have
            self.done.launches = postponed(self.done.launches, self.reuse, [x for x, _, _ in self.checks])
        return self.done

    def _chain(self) -> None:
        """Convolutions that follow each other are taken together where the tensors between them are large."""
        from ranvier.codegen.llvm.conv import chained

        kept = {storage for storage, _, _ in self.checks} | set(self.reuse)
        launches, places = chained(self.done.launches, self.isa, self.threads, kept)
        if len(launches) < len(places):
            self._moved(launches, places)

    def _join_products(self) -> None:
        """Products of one tensor share what they need of it, and are one step where that pays."""
        kept = {storage for storage, _, _ in self.checks} | set(self.reuse)
        before = self.done.launches
        products, prepares = (_places(before, found) for found in (self._products, self._prepares))
        launches, places = made_once(before, prepares, kept)
        products = {places[k] for k in products}
        if len(launches) < len(places):
            self._moved(launches, places)
        choice = Choice(launches, self.threads, self._consultation)
        launches, places, self.done.joined = together(launches, products, choice)
        if len(launches) < len(places):
            self._moved(launches, places)
        choice.settle(places)

    def _moved(self, launches: list[Launch], places: Sequence[int]) -> None:
        """Other launches take the place of those there are; ``places`` says where each of these is now."""
        self.done.launches = launches
        for each in self.done.decisions:
            each.first, each.end = places[each.first], places[each.end - 1] + 1

    def planned(self, groups: Sequence[Group]) -> None:
        if self.target.narrow is not None or self.target.coarse:
            from ranvier.providers.cpu.narrow.assign import assign  # few sessions ask for it

            border = [*self._inputs, *self._wanted]
            self.done.assignment = assign(self.program, groups, border, self._slices, self.target)
        if self._consultation is not None:
            self._consultation.begin()

    def settled(self) -> None:
        if self._consultation is not None:
            self._consultation.settle()

    # -- launches ---------------------------------------------------------------------------------------------------

    def add(self, launches: Sequence[Launch]) -> None:
        launches = paced(launches, self.isa)
        if self.threads > 1 and tuning.consulted():
            launches = [tuned_sharing(each) for each in launches]
        for each in launches:
            self.done.launches.append(each if each.label == self.label else each.labelled(self.label))

    def loops(self, nest: Nest) -> None:
        if (len(nest.row), len(nest.extents)) != (2, 6) or following():  # a pool of pictures is nothing else
            self.add(nests.launches(nest, self.isa, self.threads))
            return
        from ranvier.codegen.llvm.conv.after_pool import pool_and_rest  # convolutions mostly have been here
        from ranvier.codegen.llvm.conv.pools import pooled

        pool, rest = pool_and_rest(nest)
        quick = None if pool is None else pooled(pool.x, pool.out, pool.shape, self.isa, self.threads, pool.counts)
        if quick is None and rest is not None:
            pool = rest = None
        made = nests.launches(nest, self.isa, self.threads) if quick is None else [quick]
        largest = pool is not None and pool.counts is None
        if largest and len(made) == 1 and self.done.launches and self.done.launches[-1].origin is not None:
            made[0].origin = pool
        self.add(made)
        if rest is not None:
            self.add(nests.launches(rest, self.isa, self.threads))

    def product(self, anchor: Contraction, views: list[View], target: View, epilogue: Epilogue | None) -> None:
        first = len(self.done.launches)
        if epilogue is not None and self._multiplies(anchor) is DType.bfloat16:
            epilogue = Epilogue(of_bfloat16(epilogue.value), epilogue.operands)
        made = anchor.realise(self, views, target, epilogue)
        self.add(made)
        if made and made[-1].label.endswith("matmul"):
            *prepares, product = self.done.launches[first:]
            self._products.append(product)
            self._prepares += prepares

    def call(self, each: Opaque, views: list[View], outs: list[View]) -> None:
        self.multiplies = self._multiplies(each)
        self.coarse = id(each) in self.done.assignment.coarse
        self.add(each.realise(self, views, outs))

    # -- storage in 16 bits -----------------------------------------------------------------------------------------

    def stored(self, value: Value) -> DType | None:
        return self.done.assignment.stored.get(value)

    def takes_stored(self, each: Contraction | Opaque) -> bool:
        return self.target.narrow is not None and each.narrow is not None and each.narrow(self.target) is None

    def factors(self, anchor: Contraction) -> list[View]:
        wanted = self.multiplies = self._multiplies(anchor)
        views = [self.view(v) for v in anchor.sources]
        if wanted and anchor.rounds:
            return views
        return [self.stored_as(v, wanted or v.element) for v in views]

    def _multiplies(self, each: Contraction | Opaque) -> DType | None:
        return self.target.narrow if id(each) in self.done.assignment.products else None

    def for_store(self, value: Expr, target: View) -> Expr:
        return _for_store(value, target)


def _places(launches: Sequence[Launch], wanted: Sequence[Launch]) -> set[int]:
    marked = {id(each) for each in wanted}
    return {k for k, each in enumerate(launches) if id(each) in marked}


def _for_store(value: Expr, target: View) -> Expr:
    """A float32 value as good as it must be: one kept as bfloat16 need not be exact before it is rounded."""
    narrow = target.dtype is DType.bfloat16 and target.element is DType.float32
    return for_bfloat16(value) if narrow else value
