"""Definitions as steps: nests become Triton kernels, and a node that torch does better stays a call of torch.

Memory is torch's: a storage is a tensor that the first step to write it makes and that is let go after the last one to
read it, so a captured run reuses memory as an eager one does. Storages go by values of their own in a run's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ranvier.codegen.definitions.defs import Contraction, Opaque
from ranvier.codegen.definitions.groups import Group
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.realiser import BaseRealiser
from ranvier.codegen.loops.ir import Epilogue, Nest
from ranvier.codegen.storage import Storage, View, dense_strides, same_strides
from ranvier.codegen.triton.library import Printed, kernel
from ranvier.graph.ir import Value
from ranvier.providers.cuda.choosing import Chooser
from ranvier.providers.cuda.forms import Form, Work
from ranvier.providers.cuda.library import tensor_over, torch, torch_type
from ranvier.providers.cuda.place import Place
from ranvier.providers.cuda.steps import Env, NodeStep, Step

_LINE = 16  # bytes that kernels write at a time
_WIDE, _LARGE = 512, 1 << 20  # elements of a row and of a result for which it counts


class Places:
    """Which value of a run's tensors holds each storage, and how a tensor from elsewhere must lie."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._tokens: dict[Storage, Value] = {}
        self._layouts: dict[Value, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._constants: dict[Storage, Any] = {}

    def outside(self, value: Value, tensor: Any) -> View:
        """A tensor that a step of torch makes, or that comes from outside, where it lay when it was first seen."""
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if any(s == 0 and d > 1 for s, d in zip(strides, shape)):
            strides = dense_strides(shape)
        dtype = value.type.dtype  # type: ignore[union-attr]
        span = 1 + sum((d - 1) * s for d, s in zip(shape, strides)) if 0 not in shape else 0
        storage = Storage("temp", span * dtype.numpy.itemsize, name=value.name)
        self._tokens[storage] = value
        self._layouts[value] = (shape, strides)
        return View(storage, dtype, shape, strides)

    def held(self, value: Value, tensor: Any) -> View:
        """A tensor that is the same in every run and that no run's tensors need name."""
        dtype = value.type.dtype  # type: ignore[union-attr]
        storage = Storage("const", tensor.untyped_storage().nbytes(), name=value.name)
        self._constants[storage] = tensor
        return View(storage, dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def token(self, storage: Storage) -> Value:
        found = self._tokens.get(storage)
        if found is None:
            found = self._tokens[storage] = Value(storage.name)
        return found

    def tokens(self, storages: Iterable[Storage]) -> tuple[Value, ...]:
        """Of all but constants, which are put on the device once and belong to no run."""
        found = []
        for storage in dict.fromkeys(storages):
            if storage.kind != "const":
                found.append(self.token(storage))
            elif storage not in self._constants:
                assert storage.array is not None
                self._constants[storage] = tensor_over(storage.array).clone().to(self._device)
        return tuple(found)

    def memory(self, storage: Storage, env: Env) -> Any:
        if storage.kind == "const":
            return self._constants[storage]
        token = self.token(storage)
        tensor = env.tensors[token]
        layout = self._layouts.get(token)
        if layout is not None and tuple(tensor.stride()) != layout[1] and tensor.numel() > 1:
            made = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)
            tensor = made.copy_(tensor)
        return tensor

    def tensor(self, view: View, env: Env, memory: Any = None) -> Any:
        """A view as torch has it; of ``memory``, where that is not among the run's tensors."""
        memory = self.memory(view.storage, env) if memory is None else memory
        dtype = torch_type(view.dtype)
        flat = torch.empty(0, dtype=dtype, device=memory.device)
        start = memory.storage_offset() * memory.element_size() // dtype.itemsize + view.offset
        backwards = [axis for axis, (n, step) in enumerate(zip(view.shape, view.strides)) if step < 0 and n]
        if not backwards:
            return flat.set_(memory.untyped_storage(), start, view.shape, view.strides)
        # torch has no steps backwards: a copy of what is read the other way round
        start += sum((view.shape[axis] - 1) * view.strides[axis] for axis in backwards)
        return flat.set_(memory.untyped_storage(), start, view.shape, [abs(step) for step in view.strides]).flip(
            backwards
        )


class NestStep:
    """A nest that may yet be done together with others. ``origin``: which of a part's steps it is of; ``makes``: the
    storages that it is the first to write."""

    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(
        self, nest: Nest, places: Places, makes: Sequence[Storage], origin: frozenset[int], *, chained: bool = False
    ) -> None:
        self.nest = nest
        self.label = nest.label
        self.places = places
        self.makes = list(makes)
        self.origin = origin
        self.chained = chained
        written = nest.written()
        self.storages = frozenset(nest.operands[k].view.storage for k in written)
        self.reads = places.tokens(o.view.storage for o in nest.operands if o.view.storage not in self.storages)
        self.writes = places.tokens(self.storages)

    def printed(self) -> LoopStep:
        printed = kernel(self.nest)
        return LoopStep([self.nest], printed, self.places, [*self.makes, *printed.temporaries])

    def run(self, env: Env) -> None:
        self.printed().run(env)


class LoopStep:
    """Nests as Triton kernels, with the storages that they are the first to write. ``placed``: those of them that lie
    in memory which somebody else has."""

    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(
        self, nests: Sequence[Nest], printed: Printed, places: Places, makes: Sequence[Storage], label: str = ""
    ) -> None:
        self.nests = list(nests)
        self.label = label or nests[0].label
        self.printed = printed
        self.places = places
        self.makes = list(makes)
        self.placed: dict[Storage, Any] = {}
        written = {nest.operands[k].view.storage for nest in nests for k in nest.written()} | set(makes)
        operands = [operand.view.storage for nest in nests for operand in nest.operands]
        self._storages = list(dict.fromkeys([*operands, *printed.temporaries]))
        self.reads = places.tokens(s for s in self._storages if s not in written)
        self.writes = places.tokens(s for s in self._storages if s in written)

    def run(self, env: Env) -> None:
        for storage in self.makes:
            made = self.placed.get(storage)
            if made is None:
                made = torch.empty(storage.nbytes, dtype=torch.uint8, device=env.device)
            env.tensors[self.places.token(storage)] = made
        self.printed.launch({s: self.places.memory(s, env) for s in self._storages})


class ContractionStep:
    """A product with its epilogue, in the form that is fastest."""

    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(self, label: str, work: Work, places: Places, chooser: Chooser, *, fresh: bool) -> None:
        self.label = label
        self.work = work
        self.form: Form | None = chooser.known(work)
        self._places, self._chooser = places, chooser
        self._own = (work.out.storage,) if fresh else ()
        self.reads = places.tokens(work.reads())
        self.writes = places.tokens((work.out.storage,))
        if self.form is None:
            chooser.expect(work)

    def run(self, env: Env) -> None:
        if self.form is None:
            self.form = self._chooser.choose(self.work, lambda form: self._run(form, env))
        self._run(self.form, env)

    def _run(self, form: Form, env: Env) -> Any:
        """Returns the result as rows and columns."""
        memory: dict[Storage, Any] = {}
        makes = (*self._own, *form.temporaries)
        gives = form.gives

        def tensor(view: View) -> Any:
            return self._places.tensor(view, env, memory.get(view.storage))

        for storage in makes:
            if gives is None or storage is not gives.storage:
                memory[storage] = torch.empty(storage.nbytes, dtype=torch.uint8, device=env.device)
        if form.library is not None:
            made = form.library(tensor)
            if gives is not None:
                whole = gives.storage in makes and gives.nbytes == gives.storage.nbytes
                if whole and same_strides(gives.shape, gives.strides, tuple(made.stride())):
                    memory[gives.storage] = made
                else:
                    if whole:
                        memory[gives.storage] = torch.empty(gives.nbytes, dtype=torch.uint8, device=env.device)
                    tensor(gives).copy_(made)
        if form.printed is not None:
            storages = {p.storage for call in form.printed.calls for p in call.source.pointers}
            form.printed.launch({s: memory[s] if s in memory else self._places.memory(s, env) for s in storages})
        for storage in self._own:
            env.tensors[self._places.token(storage)] = memory[storage]
        return tensor(self.work.out) if self.form is None else None


class CallStep:
    """A node by its function of torch, on tensors that loops have made."""

    def __init__(self, step: Step, bound: Sequence[tuple[Value, View]], places: Places) -> None:
        self.step = step
        self.label = step.label
        self.stops = step.stops
        self.shaped_by = step.shaped_by
        self._bound = list(bound)
        self._places = places
        self.reads = (*step.reads, *places.tokens(view.storage for _, view in bound))
        self.writes = (*step.writes, *(value for value, _ in bound))

    def run(self, env: Env) -> None:
        for value, view in self._bound:
            env.tensors[value] = self._places.tensor(view, env)
        self.step.run(env)


class ResultStep:
    """Results of the part that loops have made, and what must be true for them to be right."""

    label = "results"
    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(
        self, bound: Sequence[tuple[Value, View]], checks: Sequence[tuple[Storage, str]], places: Places
    ) -> None:
        self.bound, self._checks, self._places = list(bound), list(checks), places
        self.reads = places.tokens((*(view.storage for _, view in bound), *(flag for flag, _ in checks)))
        self.writes = tuple(value for value, _ in bound)

    def run(self, env: Env) -> None:
        for value, view in self.bound:
            env.tensors[value] = self._places.tensor(view, env)
        for flag, message in self._checks:
            env.requirements.append(self._places.memory(flag, env)[:1] == 0)
            env.messages.append(message)


class CudaRealiser(BaseRealiser):
    """Steps for one part at given sizes. ``seen`` are the tensors of its first run, by which layouts are known, and
    ``held`` those that are the same in every run; ``origin`` tells from which step a definition is, by identity."""

    def __init__(
        self,
        program: Definitions,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        seen: dict[Value, Any],
        place: Place,
        *,
        held: Mapping[Value, Any] | None = None,
        chooser: Chooser | None = None,
        origin: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(program, inputs, outputs)
        self._origin = origin or {}
        self._from: frozenset[int] = frozenset()
        self.steps: list[Step] = []
        self.places = Places(place.device)
        self._chooser = chooser or Chooser(place)
        self._seen = seen
        self._made: set[Storage] = set()
        self._by_torch: set[Value] = set()
        self._factors: dict[tuple[object, ...], View] = {}
        self._copies.clear()  # a value is one tensor, however often it is a result
        for value in inputs:
            if value.const is not None and value.const.size == 1 and value not in self._outputs:
                del self._views[value]  # a number: what it is may decide how something is computed
            else:
                self._adopt(value)
        for value, tensor in (held or {}).items():
            self._views[value] = self.places.held(value, tensor)

    def _adopt(self, value: Value) -> None:
        self._views[value] = self.places.outside(value, self._seen[value])
        self._made.add(self._views[value].storage)
        self._by_torch.add(value)
        if value in self._outputs:
            self._outputs[value] = self._views[value]

    def settled(self) -> None:
        """A result that is a view of something may lie as it does: nobody says where results have to be."""
        for value in self._outputs:
            found = self._views.get(value)
            if found is not None:
                self._outputs[value] = found

    def run(self) -> list[Step]:
        self.realise()
        bound = [(v, self.view(v)) for v in self._outputs if v not in self._by_torch]
        checks = [(flag, message) for flag, message, _ in self.checks]
        if bound or checks:
            self.steps.append(ResultStep(bound, checks, self.places))
        return self.steps

    def _realise(self, each: Group) -> None:
        self._from = frozenset(self._origin[id(d)] for d in each.defs if id(d) in self._origin)
        super()._realise(each)

    def loops(self, nest: Nest) -> None:
        makes = [nest.operands[k].view.storage for k in sorted(nest.written())]
        fresh = [s for s in dict.fromkeys(makes) if s not in self._made]
        self._made.update(fresh)
        self.steps.append(NestStep(nest, self.places, fresh, self._from))

    def product(self, anchor: Contraction, views: list[View], target: View, epilogue: Epilogue | None) -> None:
        anchor.realise(self, views, self._aligned(target) if anchor.order is None else target, epilogue)

    def _aligned(self, target: View) -> View:
        """The result of a large product with rows that begin where the matrix unit's kernels can write whole vectors;
        they may do so wherever nobody has said yet where the result has to be."""
        shape, storage = target.shape, target.storage
        size = target.dtype.numpy.itemsize
        width = -(-shape[-1] * size // _LINE) * _LINE // size if shape else 0
        large = len(shape) > 1 and shape[-1] >= _WIDE and target.size >= _LARGE
        known = [value for value, view in self._views.items() if view is target] if large else []
        if not large or not known or storage in self._made or width == shape[-1] or storage.nbytes != target.nbytes:
            return target
        if not same_strides(shape, target.strides, dense_strides(shape)):
            return target
        strides = (*dense_strides((*shape[:-1], width))[:-1], 1)
        whole = Storage("temp", math.prod(shape[:-1]) * width * size, name=storage.name)
        made = View(whole, target.dtype, shape, strides)
        for value in known:
            self._views[value] = made
            if value in self._outputs:
                self._outputs[value] = made
        return made

    def multiplied(self, work: Work) -> None:
        """Add the step of a product."""
        storage = work.out.storage
        fresh = storage not in self._made
        self._made.add(storage)
        self.steps.append(ContractionStep(self.label, work, self.places, self._chooser, fresh=fresh))

    def call(self, each: Opaque, views: list[View], outs: list[View]) -> None:
        each.realise(self, views, outs)

    def _opaque(self, each: Opaque) -> None:
        """Results of torch stay where torch puts them."""
        views = [self.dense(v) if min(v.strides, default=0) < 0 else v for v in map(self.view, each.sources)]
        self.call(each, views, [])
        for value in each.outputs:
            self._adopt(value)

    def _factor(self, view: View) -> View:
        """A tensor of matrices as a library multiplies them: where their places are no multiples of one number it
        would make a copy at each product, so one is made for all."""
        rank = view.rank
        if rank < 4 or 0 in view.strides or 0 in view.shape:
            return view
        if view.reshaped((math.prod(view.shape[:-2]), *view.shape[-2:])) is not None:
            return view
        swap = (*range(rank - 2), rank - 1, rank - 2)
        turned = view.strides[-2] < view.strides[-1]
        upright = view.transposed(swap) if turned else view
        key = (upright.storage, upright.offset, upright.shape, upright.strides)
        made = self._factors.get(key)
        if made is None:
            made = self._factors[key] = self.dense(upright)
        return made.transposed(swap) if turned else made

    def by_torch(self, step: Step, values: Sequence[Value], views: Sequence[View]) -> None:
        """Add the step of a node that reads some of its operands where loops have put them."""
        bound = [(v, view) for v, view in zip(values, views) if v not in self._by_torch]
        if isinstance(step, NodeStep) and step.node.op == "MatMul":
            bound = [(v, self._factor(view)) for v, view in bound]
        self.steps.append(CallStep(step, bound, self.places) if bound else step)
