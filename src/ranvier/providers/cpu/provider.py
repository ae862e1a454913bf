"""What the CPU provider takes, and why it leaves the rest."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from ranvier.codegen import tuning, tuning_store
from ranvier.codegen.definitions import reasons
from ranvier.codegen.definitions.registry import ALL
from ranvier.codegen.llvm import fresh_code, isa
from ranvier.devices import CPU, Device, usable_cores
from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Node
from ranvier.providers.base import (
    LARGEST_VALUES,
    Claim,
    CompileContext,
    Decline,
    GraphView,
    ProviderCapability,
    Subgraph,
)
from ranvier.providers.cpu.kernel import CpuKernel
from ranvier.providers.cpu.lower.index import LOWERINGS
from ranvier.providers.cpu.narrow.effective import effective
from ranvier.providers.cpu.target import Target
from ranvier.providers.memory import PoolAllocator

if TYPE_CHECKING:
    from ranvier.providers.cpu.custom import CpuKernels
from ranvier.records import dataclass


@dataclass(frozen=True)
class CpuOptions:
    """``isa``: an instruction set other than the best. ``winograd``: fewer multiplications in 3×3 convolutions, of
    floats and of codes, at the price of a slightly larger rounding error. ``tuned``: decisions that ``ranvier
    tune`` found to be faster. ``int8_activations``: products with weights of few bits round their other operand to
    8 bits, in groups like the weights', whatever accuracy their nodes ask for. ``joined_products``: products of one
    tensor, such as Q, K and V of attention, are one step for all threads where that is quicker.
    ``flush_subnormals``: numbers below 2^-126 are zeros as operands and results, which saves time where there are
    many, as in recurrent layers and filters that hear nothing for long; they are computed as IEEE 754 has it
    otherwise."""

    isa: str = ""
    winograd: bool = True
    tuned: bool = True
    int8_activations: bool = False
    joined_products: bool = True
    flush_subnormals: bool = False

    def __post_init__(self) -> None:
        for name in ("winograd", "tuned", "int8_activations", "joined_products", "flush_subnormals"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"CpuOptions: {name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.isa, str):
            raise InvalidConfig(f"{type(self).__name__}: isa must be a name, got {self.isa!r}")
        if self.isa:  # also where nothing would be compiled
            isa.chosen(self.isa, f"{type(self).__name__}: isa")


class CpuProvider:
    name: ClassVar[str] = "cpu"
    aliases: ClassVar[tuple[str, ...]] = ("CPUExecutionProvider",)
    Options: ClassVar[type] = CpuOptions

    def __init__(self) -> None:
        self.device: Device = CPU
        self._allocator = PoolAllocator(name=self.name)
        self._kernels: CpuKernels | None = None

    @property
    def kernels(self) -> CpuKernels:
        """Kernels of the user's own; see docs/custom-kernels.md."""
        if self._kernels is None:
            from ranvier.providers.cpu.custom import CpuKernels  # few sessions need it

            self._kernels = CpuKernels()
        return self._kernels

    def available(self) -> str | None:
        return _llvm_problem()

    def capability(self) -> ProviderCapability:
        return _capability(isa.host().key)

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        for node in view:
            reason = reason_against(node)
            yield Claim((node,)) if reason is None else Decline(node, reason)

    def compile(self, part: Subgraph, ctx: CompileContext) -> CpuKernel:
        fresh_code.expect()
        options: CpuOptions = ctx.options
        chosen = isa.chosen(options.isa) if options.isa else isa.host()
        threads = min(ctx.config.threads or usable_cores(), 64)
        precision, refused = effective(ctx.config.precision, chosen)
        ranges = part.graph.metadata.get(LARGEST_VALUES)
        tuned = (tuning.given_table() or tuning_store.table(chosen.key, threads)) if options.tuned else None
        how = (options.winograd, precision, ctx.config.keep_f32, ranges, tuned)
        more = options.int8_activations, options.joined_products, options.flush_subnormals, bool(refused)
        target = Target(chosen, threads, *how, *more)
        return CpuKernel(part, ctx, target, ctx.allocator or self._allocator)

    def allocator(self) -> PoolAllocator:
        return self._allocator

    def close(self) -> None:
        if self._kernels is not None:
            self._kernels.close()
        self._allocator.trim()


@functools.cache
def _capability(code: str) -> ProviderCapability:
    ops = frozenset(op for _, op in LOWERINGS.operators())
    return ProviderCapability(
        ops=ops,
        dtypes=ALL,
        notes=f"machine code for {code}",
        asks_for_bodies=True,
        threads="given",
        flash_attention=True,
        custom_kernels=frozenset({"llvm", "loops"}),
    )


@functools.cache
def _llvm_problem() -> str | None:
    # only looked for: a process whose kernels are all in the disk cache never loads it
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    if isa.architecture() not in {entry.triple for entry in isa.TABLE}:
        return f"no code generation for {isa.architecture()}"
    return None


def reason_against(node: Node) -> str | None:
    """None where the node can be lowered once its shapes are known, otherwise why not."""
    return reasons.reason_against(node, LOWERINGS)
