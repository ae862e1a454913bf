"""A part of a graph as a kernel: finds the variant for the sizes of a call, and runs it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ranvier.codegen.phases import phase
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType
from ranvier.providers.base import Array, CompileContext, Subgraph
from ranvier.providers.cuda.bounds import Bounds
from ranvier.providers.cuda.constants import Constants, is_constant
from ranvier.providers.cuda.failures import Health
from ranvier.providers.cuda.library import TORCH_NAMES, torch
from ranvier.providers.cuda.place import Gpu, Twin
from ranvier.providers.cuda.steps import NodeStep, part_steps
from ranvier.providers.cuda.transfers import KIND, host_of
from ranvier.providers.cuda.variant import Specialise, Variant, marked
from ranvier.providers.foreign import ForeignKernel

_LOW = {"f16": "float16", "bf16": "bfloat16"}


class CudaKernel(ForeignKernel):
    """Thread-safe: variants are shared, everything else belongs to a call."""

    holds_constants = True

    def __init__(
        self,
        part: Subgraph,
        ctx: CompileContext,
        place: Twin | Gpu,
        health: Health,
        *,
        precision: str = "f32",
        graphs: bool = False,
        kept: int = 8,
        specialise: Specialise | None = None,
        lay_out: Callable[[Constants], None] | None = None,
    ) -> None:
        self._place = place
        self._health = health
        self._label = part.label
        self._low = getattr(torch, _LOW[precision]) if precision in _LOW else None
        self._tf32 = precision == "tf32"
        self._graphs = graphs
        self._kept = kept
        self._specialise = specialise
        self._lay_out = lay_out  # puts weights, while they are loaded, into the order that kernels want
        self._outputs = part.outputs
        self._kinds = [_carried(value) for value in part.outputs]
        self._lock = threading.Lock()
        self._variants: OrderedDict[Any, Variant] = OrderedDict()
        self._tied: list[Variant] = []
        with phase("weights"):
            health.guarded(f"weights of {part.label!r}", lambda: self._load(part, ctx), place.empty_cache)
        super().__init__(sum(_nbytes(t) for t in {id(t): t for t in self._all_constants()}.values()))

    def _load(self, part: Subgraph, ctx: CompileContext) -> None:
        """Constants on the device, each in the form its readers want and in no other."""
        given = [(v, k) for k, v in enumerate(part.inputs) if not is_constant(v)]
        with self._place.computing():
            constants = Constants(self._place, part.inputs)
            if self._lay_out is not None:
                self._lay_out(constants)
            self._steps, on_host = part_steps(part, ctx.opsets, constants)
            read = {v for step in self._steps for v in step.reads} | set(part.outputs)
            constants.keep(read)
            self._fixed = constants.tensors  # also whoever lays out has it
        self._fixed_on_host = {v: v.const.numpy() for v in constants.values if v in on_host and v.const is not None}
        sized = {v for step in self._steps for v in getattr(step, "sizes_of", ())}
        self._given = [(v, k) for v, k in given if v in read or v in sized]
        self._shaping = [(v, k) for v, k in given if v in on_host]
        self._bounds = Bounds(part.nodes, [v for v, _ in self._shaping])

    def _all_constants(self) -> Iterator[Any]:
        yield from self._fixed.values()
        for step in self._steps:
            if isinstance(step, NodeStep):
                yield from (t for t in step.prepared.values() if hasattr(t, "element_size"))

    @property
    def source(self) -> str:
        with self._lock:
            latest = next(reversed([*self._variants.values(), *self._tied]), None)
        listed = self._steps if latest is None else latest.steps
        return "\n".join(f"{step.label}  # {type(step).__name__}" for step in listed)

    def graph_report(self) -> list[str]:
        """For every variant that is kept: whether it is captured, and why not. Before there is one: what forbids it."""
        with self._lock:
            found = list(self._variants.items())
        if not found and not self._tied:
            return [f"any sizes: {step.label}: {step.stops}" for step in self._steps if step.stops]
        off = "" if self._graphs else "CUDA graphs are off"
        told = [f"{_sizes(key)}: {'captured' if v.captured else v.refused or off or 'not yet'}" for key, v in found]
        return [*told, *(f"tied: {v.refused or off or 'captured'}" for v in self._tied)]

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        found = self._health.guarded(f"run of {self._label!r}", lambda: self._run(inputs), self.release)
        for tensor, kind in zip(found, self._kinds):
            if kind is not None:
                setattr(tensor, KIND, kind)
        outputs[:] = found
        self._count(started)

    def _run(self, inputs: Sequence[Any]) -> list[Any]:
        given = {v: inputs[k] for v, k in self._given}
        with torch.no_grad(), self._place.computing():
            shaping = self._bounds({v: host_of(inputs[k]) for v, k in self._shaping}, given)
            key = (
                tuple((tuple(t.shape), t.dtype) for t in given.values()),
                tuple((a.shape, a.dtype.str, a.tobytes()) for a in shaping.values()),
            )
            variant = self._variant(key)
            if variant is None:
                variant = Variant(self._place, self._low, self._outputs, self._fixed, self._fixed_on_host)
                with _float32_as(self._tf32, self._place):
                    results = variant.prepare(self._steps, given, shaping, self._specialise)
                self._keep(key, variant)
            elif variant.captured:
                results = variant.run(given, capture=True)
            else:
                with _float32_as(self._tf32, self._place):
                    results = variant.run(given, capture=self._graphs)
            return marked(results, list(given.values()))

    def tied(self, inputs: Sequence[Any], replaced: Mapping[int, int]) -> Callable[[], Sequence[Any]]:
        """See ``Ties``: captured on the given tensors themselves, in a stream of the caller's."""
        given = {v: inputs[k] for v, k in self._given}
        places = {k: v for v, k in self._given}
        taken = {output: places[k] for output, k in replaced.items() if k in places}
        made: list[Callable[[], Sequence[Any]]] = []

        def make() -> None:
            overwritten = frozenset(taken.values())
            variant = Variant(self._place, self._low, self._outputs, self._fixed, self._fixed_on_host, overwritten)
            with torch.no_grad(), self._place.computing(), _float32_as(self._tf32, self._place, measured=True):
                shaping = self._bounds({v: host_of(inputs[k]) for v, k in self._shaping}, given)
                variant.prepare(self._steps, given, shaping, self._specialise)
                made.append(variant.tied(given, taken, self._kinds, capture=self._graphs))
            self._place.synchronize()
            self._tied.append(variant)

        self._health.guarded(f"tying {self._label!r}", make, self.release)
        return made[-1]

    def shaped_by(self) -> list[int]:
        return [k for _, k in self._shaping]

    def _variant(self, key: Any) -> Variant | None:
        with self._lock:
            found = self._variants.get(key)
            if found is not None:
                self._variants.move_to_end(key)
            return found

    def _keep(self, key: Any, variant: Variant) -> None:
        with self._lock:
            self._variants[key] = variant
            while len(self._variants) > self._kept:
                self._variants.popitem(last=False)

    def release(self) -> None:
        """Give back what is kept for later runs: captured runs hold memory of their own."""
        with self._lock:
            self._variants.clear()
        with contextlib.suppress(RuntimeError):
            self._place.empty_cache()


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _carried(value: Value) -> Any:
    """The element type of a result in NumPy, where torch only carries it."""
    dtype = value.type.dtype if isinstance(value.type, TensorType) else None
    return dtype.numpy if dtype is not None and TORCH_NAMES.get(dtype) != dtype.name else None


def _sizes(key: Any) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in key[0]) or "no inputs"


@contextlib.contextmanager
def _float32_as(tf32: bool, place: Twin | Gpu, *, measured: bool = False) -> Iterator[None]:
    """float32 means float32 unless somebody said otherwise: for convolutions torch itself would take fewer bits.
    ``measured``: convolutions are done in the way that was the fastest here, which takes time to find."""
    if isinstance(place, Twin):
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark
    products.allow_tf32 = convolutions.allow_tf32 = tf32
    convolutions.benchmark = measured or before[2]
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32, convolutions.benchmark = before
