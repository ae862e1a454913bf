"""Which values are stored in 16 bits and which products are made of such, over a whole partition at once.

Every float32 tensor that lies in memory between two kernels, and every product that could be had in 16 bits, gets one
of two labels. A tensor in 16 bits is written and read in half the time; a product of 16-bit operands takes a fraction
of the time; where a kernel wants the other type than the one in memory, a conversion is paid, once for all that want
it. The labels with the least time in all are a minimum cut. What must keep its bits (:mod:`.sensitive`), what crosses
the partition's border and what the user keeps has one label from the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ranvier.codegen.definitions.defs import Alias, Contraction, Def, Joined, Opaque, Rows
from ranvier.codegen.definitions.groups import Group
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.llvm.gemm.halves import CHUNK as HALF_STEPS
from ranvier.codegen.llvm.gemm.halves import multiplies_halves
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.providers.base import NodePrecision
from ranvier.providers.cpu.narrow.extremes import largest
from ranvier.providers.cpu.narrow.kept import Kept
from ranvier.providers.cpu.narrow.mincut import Cut
from ranvier.providers.cpu.narrow.positive import Positive
from ranvier.providers.cpu.narrow.rates import CACHE, LAUNCH, multiplying, product_pace, touching
from ranvier.providers.cpu.narrow.sensitive import ROUNDED, centred, exact_reads, running_sums
from ranvier.providers.cpu.narrow.signals import before_logarithms
from ranvier.providers.cpu.target import Assignment, Target
from ranvier.varying import value_at

F32 = DType.float32
_HALF_END = 65504.0  # the largest float16
_COARSE = "computed in float32 where float64 would be more exact"
_HEADROOM = 8.0  # values seen in a sample are taken to grow to this many times as much


def assign(
    program: Definitions,
    groups: Sequence[Group],
    border: Iterable[Value],
    slices: Mapping[Value, tuple[Joined, int]],
    target: Target,
) -> Assignment:
    """``border``: inputs and outputs; ``slices``: results that are written into a concatenation at once."""
    narrow = target.narrow
    if narrow is None:
        return _without_narrow(groups, target) if target.coarse else Assignment()
    return _Assigning(program, groups, set(border), slices, target, narrow).run()


def _without_narrow(groups: Sequence[Group], target: Target) -> Assignment:
    """What less precision is good for on a processor that multiplies no 16 bits: float32 instead of float64."""
    made, kept = Assignment(), Kept(target.keep_f32).by
    for group in groups:
        if isinstance(group.last, Opaque) and group.last.widens and not kept(group):
            made.coarse.add(id(group.last))
            if group.last.label:
                made.choices[group.last.label] = NodePrecision("f32", "f32", _COARSE)
    return made


class _Assigning:
    def __init__(
        self,
        program: Definitions,
        groups: Sequence[Group],
        border: set[Value],
        slices: Mapping[Value, tuple[Joined, int]],
        target: Target,
        narrow: DType,
    ) -> None:
        self.program = program
        self.groups = groups
        self.target = target
        self.narrow = narrow
        self.cut = Cut()
        self.same: dict[Value, Value] = {}  # values in one piece of memory, to the one that stands for them
        self.items: dict[Value, int] = {}
        self.why: dict[Value, str] = {}  # memory that stays float32
        self.widened: dict[Value, int] = {}  # items: the tensor is needed in float32 too …
        self.narrowed: dict[Value, int] = {}  # … and in 16 bits
        self.products: dict[int, int] = {}  # of definitions, their items
        self.unable: dict[int, str] = {}  # of definitions, why they multiply in float32
        self.rounding: set[int] = set()  # definitions whose own constants are in 16 bits
        self.coarse: set[int] = set()  # definitions that compute in float32 instead of float64
        self.readers: dict[Value, list[Group]] = {}
        self.positive = Positive((d for g in groups for d in g.defs), program)
        self.kept = Kept(target.keep_f32).by
        keeps = self._keeps_exactness
        exact = [(v, why) for g in groups for v, why in exact_reads(g, program, keeps).items()]
        self.signals, self.unrounded = before_logarithms(groups, program, exact, keeps)
        self.exact = [(v, why) for v, why in exact if why != ROUNDED]
        self.constants: set[Value] = set()  # constants under another shape, and all that is not of float32
        self.sources: dict[Value, Value] = {}  # of values that are others under another shape
        self._share_memory(slices)
        self._find_readers()
        self._pin(border)

    def _keeps_exactness(self, each: Def) -> bool:
        """Small powers are as exact as others in bfloat16; float16 has none of them."""
        return self.narrow is DType.bfloat16 and self.positive.keeps(each)

    # -- what lies where --------------------------------------------------------------------------------------------

    def _share_memory(self, slices: Mapping[Value, tuple[Joined, int]]) -> None:
        for each in (d for g in self.groups for d in g.defs):
            if isinstance(each, Alias):
                if not self._movable(each.source):
                    self.constants.add(each.out)
                self.sources[each.out] = each.source
                self._unite(each.source, each.out)
            elif isinstance(each, Joined):
                for source in each.sources:
                    if source in slices and slices[source][0] is each:
                        self._unite(source, each.out)

    def memory(self, value: Value) -> Value:
        """The value that stands for all that lie in the same memory."""
        while value in self.same:
            value = self.same[value]
        return value

    def _unite(self, a: Value, b: Value) -> None:
        a, b = self.memory(a), self.memory(b)
        if a is not b:
            self.same[a] = b

    def _find_readers(self) -> None:
        for group in self.groups:
            for value in self.reads(group):
                self.readers.setdefault(value, []).append(group)

    def reads(self, group: Group) -> list[Value]:
        """Tensors of float32 that a group reads from memory that is not constant."""
        made = {v for d in group.defs for v in d.outputs}
        found = dict.fromkeys(v for d in group.defs for v in d.operands if v not in made)
        return [v for v in found if self._movable(v)]

    def writes(self, group: Group) -> list[Value]:
        return [v for v in group.last.outputs if self._movable(v)]

    def _movable(self, value: Value) -> bool:
        fixed = value.const is not None or value in self.program.known or value in self.constants
        return not fixed and self.program.dtype(value) is F32

    # -- what must stay as it is ------------------------------------------------------------------------------------

    def _pin(self, border: set[Value]) -> None:
        for value in border:
            self._keep(value, "crosses the border of the partition")
        for value, why in self.exact:
            self._keep(value, why)
        for group in self.groups:
            if name := self.kept(group):
                for value in group.last.outputs:
                    self._keep(value, f"kept by {name!r}")
            if isinstance(group.anchor, Rows) and group.anchor.gather is None:  # windows are no statistics
                reduced = [v for k, v in enumerate(group.anchor.outputs) if k not in group.anchor.mapped]
                for value in group.last.outputs if reduced and group.last is not group.anchor else reduced:
                    if not self._only_multiplied(value):
                        self._keep(value, "is a reduction")
            for value in group.last.outputs:
                if why := self._out_of_range(value):
                    self._keep(value, why)
        for value in running_sums(self.groups, self.program, self.readers):
            self._keep(value, "is a sum that every layer adds to")
        for value in centred(self.groups, self.program, self.readers):
            if self._bytes(value) <= CACHE:  # a large one, of pictures, would cost more time than it gains exactness
                self._keep(value, "is normalised")
        for value in self.unrounded:
            self._keep(value, "goes into log")

    def _only_multiplied(self, value: Value) -> bool:
        """Whether products alone read it, which round it themselves."""
        memory = self.memory(value)
        readers = [g for v, found in self.readers.items() if self.memory(v) is memory for g in found]
        return all(isinstance(g.last, Alias) or isinstance(g.anchor, Contraction) for g in readers)

    def _keep(self, value: Value, why: str) -> None:
        self.why.setdefault(self.memory(value), why)

    def _out_of_range(self, value: Value) -> str:
        """Why a value may not fit into float16, which ends at 65504; bfloat16 reaches as far as float32."""
        if self.narrow is not DType.float16 or not self._movable(value):
            return ""
        seen = (self.target.ranges or {}).get(value.name)
        if seen is None:
            return "is of unknown range, which a calibration sample would tell"
        return "" if seen * _HEADROOM < _HALF_END else f"reaches {seen:.3g}, near the end of float16"

    def _sums_out_of_range(self, anchor: Contraction) -> str:
        """Why sums of products may leave float16, where they are made in it."""
        if self.narrow is not DType.float16 or not multiplies_halves(self.target.isa):
            return ""
        most = math.prod((self._largest(v) for v in anchor.sources), start=float(HALF_STEPS))
        if most * _HEADROOM < _HALF_END:
            return ""
        return f"{HALF_STEPS} products may come to {most:.3g}, near the end of float16"

    def _largest(self, value: Value) -> float:
        """The largest absolute value of a constant, or seen of a tensor."""
        while value in self.sources:
            value = self.sources[value]
        array = value.const.raw() if value.const is not None else self.program.known.get(value)
        if array is None:
            return (self.target.ranges or {}).get(value.name, math.inf)
        return largest(array)

    # -- costs ------------------------------------------------------------------------------------------------------

    def run(self) -> Assignment:
        for group in self.groups:
            self._count(group)
        ones = self.cut.solve()
        stored = {
            v: self.narrow
            for g in self.groups
            for d in g.defs
            for v in d.outputs
            if self._movable(v) and self.items.get(self.memory(v)) in ones
        }
        products = {key for key, item in self.products.items() if item in ones} | self.rounding
        made = Assignment(stored, products, self.coarse)
        for group in self.groups:
            self._tell(group, made)
        return made

    def item(self, value: Value) -> int:
        found = self.items.get(self.memory(value))
        if found is None:
            memory = self.memory(value)
            # a rounding for nothing is no gain: ties go to float32, and so do tensors too small to matter
            found = self.items[memory] = self.cut.item(one=math.inf if memory in self.why else LAUNCH / 100)
        return found

    def _count(self, group: Group) -> None:
        anchor = group.anchor if isinstance(group.anchor, Contraction) else group.last
        if isinstance(anchor, Alias):
            return
        if isinstance(anchor, Contraction):
            self._contraction(group, anchor)
        elif isinstance(anchor, Opaque):
            able = anchor.narrow is not None and anchor.narrow(self.target) is None
            self._plain(group) if able else self._float_only(group)
            if anchor.rounds and self.narrow is DType.bfloat16:
                self._constants_of(group, anchor)
            if anchor.widens and not self.kept(group):
                self.coarse.add(id(anchor))
        else:
            self._plain(group)

    def _plain(self, group: Group, skip: Iterable[Value] = ()) -> None:
        """Loops that take every tensor as it is stored."""
        skipped = set(skip)
        placed = self._placed(group)
        for value in [v for v in self.reads(group) if v not in skipped and v not in placed] + self.writes(group):
            if not (isinstance(group.last, Joined) and placed and value is group.last.out):
                self.cut.cost(self.item(value), touching(self._bytes(value)), touching(self._bytes(value) / 2))

    def _placed(self, group: Group) -> set[Value]:
        """Sources of a concatenation that lie there already."""
        joined = group.last
        if not isinstance(joined, Joined):
            return set()
        return {v for v in joined.sources if self.memory(v) is self.memory(joined.out)}

    def _float_only(self, group: Group) -> None:
        for value in self.reads(group):
            self._needs_float(value)
        for value in self.writes(group):
            self.cut.cost(self.item(value), one=self._conversion(value))

    def _constants_of(self, group: Group, anchor: Opaque) -> None:
        """A kernel's own weights cost nothing to convert: they are narrow unless they must not be."""
        if name := self.kept(group):
            self.unable[id(anchor)] = f"kept by {name!r}"
        elif id(anchor) in self.signals:
            self.unable[id(anchor)] = "what it makes goes into log"
        else:
            self.rounding.add(id(anchor))

    def _contraction(self, group: Group, anchor: Contraction) -> None:
        able = anchor.narrow is not None and self.program.dtype(anchor.out) is F32
        why = "its kernel multiplies in float32 only"
        if able and anchor.narrow is not None:
            why = anchor.narrow(self.target) or ""
        if why:
            self.unable[id(anchor)] = why
            self._float_only(group)
            return
        # whatever it multiplies in, such a kernel reads what is added, and writes, as it is stored
        self._plain(group, anchor.sources)
        item = self.products[id(anchor)] = self.cut.item()
        beyond = next((f"an operand {why}" for v in anchor.sources if (why := self._out_of_range(v))), "")
        beyond = beyond or self._sums_out_of_range(anchor)
        name = self.kept(group)
        if name or beyond or id(anchor) in self.signals:
            reason = beyond or "what it makes goes into log"
            self.unable[id(anchor)] = f"kept by {name!r}" if name else reason
            self.cut.cost(item, one=math.inf)
        else:
            (flops,) = value_at([anchor.flops], 0)
            work, operands = multiplying(flops, self.target.isa), sum(self._bytes(v) for v in anchor.sources)
            wide, fast = (
                anchor.pace(self.target) if anchor.pace else product_pace(self.target.isa, self.narrow, math.inf)
            )
            narrow_cost = max(work / fast, touching(operands / 2)) + LAUNCH / 10
            self.cut.cost(item, max(work / wide, touching(operands)), narrow_cost)
        for value in dict.fromkeys(v for v in anchor.sources if self._movable(v)):
            memory, bytes_ = self.memory(value), self._bytes(value)
            self.cut.pair(self._wide(value), item, math.inf)
            if anchor.rounds:  # as it reads them
                self.cut.pair(item, self.item(value), touching(bytes_) - touching(bytes_ / 2))
                continue
            if memory not in self.narrowed:
                made = self.narrowed[memory] = self.cut.item()
                self.cut.pair(made, self.item(value), touching(bytes_) + touching(bytes_ / 2) + LAUNCH)
            self.cut.pair(item, self.narrowed[memory], math.inf)

    def _wide(self, value: Value) -> int:
        """An item with label 1 where nobody needs the tensor in float32; label 0 costs where it is in 16 bits."""
        memory = self.memory(value)
        if memory not in self.widened:
            made = self.widened[memory] = self.cut.item()
            self.cut.pair(self.item(value), made, self._conversion(value))
        return self.widened[memory]

    def _needs_float(self, value: Value) -> None:
        self.cut.cost(self._wide(value), one=math.inf)

    def _conversion(self, value: Value) -> float:
        bytes_ = self._bytes(value)
        return touching(bytes_) + touching(bytes_ / 2) + LAUNCH

    def _bytes(self, value: Value) -> float:
        # of this call, where sizes will vary: what is chosen is right for others too, only perhaps not the quickest
        return float(4 * math.prod(value_at(self.program.shape(value), 0)))

    # -- for people -------------------------------------------------------------------------------------------------

    def _tell(self, group: Group, made: Assignment) -> None:
        results = self.writes(group)
        stores = self.target.precision if any(v in made.stored for v in results) else "f32"
        for each in group.defs:
            if each.label and self._worth_telling(each, results):
                narrow = {id(group.anchor), id(group.last)} & made.products
                computes = self.target.precision if narrow else "f32"
                made.choices.setdefault(each.label, NodePrecision(computes, stores, self._reason(group, made, results)))

    def _worth_telling(self, each: Def, results: Sequence[Value]) -> bool:
        return isinstance(each, Contraction) or bool(results)

    def _reason(self, group: Group, made: Assignment, results: Sequence[Value]) -> str:
        found: list[str] = []
        anchor = group.anchor
        if isinstance(anchor, Contraction) and id(anchor) not in made.products:
            found.append(self.unable.get(id(anchor), "conversions would cost more than they save"))
        elif id(group.last) in self.unable:
            found.append(self.unable[id(group.last)])
        elif id(group.last) in self.coarse:
            found.append(_COARSE)
        kept = next((self.why[self.memory(v)] for v in results if self.memory(v) in self.why), "")
        if kept and kept not in found:
            found.append(f"result {kept}")
        return "; ".join(found)
