"""The provider ``example``: LeakyIntegrator by a kernel of its own, and a few standard operators by NumPy."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ranvier.devices import CPU, Device
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, OutOfMemory
from ranvier.graph.ir import Node
from ranvier.graph.types import TensorType
from ranvier.providers.base import (
    Claim,
    CompileContext,
    Decline,
    GraphView,
    KernelHandle,
    KernelStats,
    MemoryUsage,
    ProviderCapability,
    Subgraph,
)
from ranvier.providers.cpu.custom import CpuKernels, Scalar, Signature, Size, Tensor
from ranvier.providers.memory import PoolAllocator
from ranvier_example.ops import DOMAIN, check

Array = np.ndarray[Any, Any]

# One tile is one row: rows do not depend on each other, so threads share them.
_TEXT = """
define void @leaky(ptr %x, ptr %y, float %decay, i64 %rows, i64 %n, i64 %row, i64 %one) {
entry:
  %any = icmp sgt i64 %n, 0
  br i1 %any, label %start, label %done
start:
  %first = mul i64 %row, %n
  br label %step
step:
  %t = phi i64 [ 0, %start ], [ %next, %step ]
  %before = phi float [ 0.0, %start ], [ %now, %step ]
  %at = add i64 %first, %t
  %px = getelementptr float, ptr %x, i64 %at
  %py = getelementptr float, ptr %y, i64 %at
  %value = load float, ptr %px
  %kept = fmul float %before, %decay
  %now = fadd float %kept, %value
  store float %now, ptr %py
  %next = add i64 %t, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %step, label %done
done:
  ret void
}
"""
_SIGNATURE = Signature(
    (
        Tensor("x", DType.float32, ("rows", "n")),
        Tensor("y", DType.float32, ("rows", "n"), "out"),
        Scalar("decay", DType.float32, low=-1, high=1),
        Size("rows"),
        Size("n"),
    )
)
_BY_NUMPY: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, 0),
}


@dataclass(frozen=True)
class ExampleOptions:
    """``max_elements``: of the largest tensor it takes, as if its memory were small."""

    max_elements: int = 1 << 30

    def __post_init__(self) -> None:
        if isinstance(self.max_elements, bool) or not isinstance(self.max_elements, int) or self.max_elements < 1:
            raise InvalidConfig(f"ExampleOptions: max_elements must be 1 or more, got {self.max_elements!r}")


class ExampleProvider:
    name: ClassVar[str] = "example"
    aliases: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type] = ExampleOptions

    def __init__(self) -> None:
        self.device: Device = CPU
        self._allocator = PoolAllocator(name=self.name)
        self._kernels = CpuKernels()

    @functools.cached_property
    def _leaky(self) -> KernelHandle:
        """Loaded when it is first needed: a session that uses all providers makes this one for every model."""
        return self._kernels.load(_TEXT, "leaky", _SIGNATURE)

    def available(self) -> str | None:
        return None

    def capability(self) -> ProviderCapability:
        return ProviderCapability(
            ops=frozenset({*_BY_NUMPY, "LeakyIntegrator"}),
            dtypes=frozenset({DType.float32}),
            notes="an example of a plugin",
        )

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        for node in view:
            reason = _reason_against(node)
            yield Claim((node,)) if reason is None else Decline(node, reason)

    def compile(self, part: Subgraph, ctx: CompileContext) -> ExampleKernel:
        return ExampleKernel(self, part, ctx.options)

    def allocator(self) -> PoolAllocator:
        return self._allocator

    def close(self) -> None:
        self._allocator.trim()

    def leaky(self, x: Array, decay: float) -> Array:
        """LeakyIntegrator by the kernel."""
        check(decay)
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1]) if x.size else np.empty((0, 0), np.float32)
        made = np.empty_like(rows)
        self._kernels.launch(self._leaky, rows.shape[0], 1, [rows, made, decay])
        return made.reshape(x.shape)


def _reason_against(node: Node) -> str | None:
    """Why the node is left to others; None where it is taken."""
    known = node.op in _BY_NUMPY if not node.domain else (node.domain, node.op) == (DOMAIN, "LeakyIntegrator")
    if not known:
        return "the example does not have this operator"
    for value in [*node.inputs, *node.outputs]:
        kind = value.type if value is not None else None
        if not isinstance(kind, TensorType) or kind.dtype is not DType.float32:
            return f"the example computes with float32, not with {kind}"
        if node.domain and kind.shape is not None and not kind.shape:
            return "a scalar has no axis to go along"
    return None


class ExampleKernel:
    """A part: its nodes one after another."""

    def __init__(self, provider: ExampleProvider, part: Subgraph, options: ExampleOptions) -> None:
        self._provider = provider
        self._part = part
        self._options = options
        self._lock = threading.Lock()
        self._calls, self._seconds = 0, 0.0

    @property
    def source(self) -> str:
        return "\n".join(str(node) for node in self._part.nodes)

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        values = dict(zip(self._part.inputs, inputs))
        for node in self._part.nodes:
            operands = [values[value] for value in node.inputs if value is not None]
            values[node.outputs[0]] = self._run(node, operands)
        for k, value in enumerate(self._part.outputs):
            found = values[value]
            if outputs[k] is not None and outputs[k].shape == found.shape:
                np.copyto(outputs[k], found)  # memory that the plan has set aside
            else:
                outputs[k] = found
        with self._lock:
            self._calls += 1
            self._seconds += time.perf_counter() - started

    def _run(self, node: Node, operands: list[Array]) -> Array:
        largest = max((x.size for x in operands), default=0)
        if largest > self._options.max_elements:
            raise OutOfMemory(f"example: {largest} elements, there is room for {self._options.max_elements}")
        if node.domain:
            return self._provider.leaky(operands[0], float(node.attrs.get("decay", 0.9)))
        return np.asarray(_BY_NUMPY[node.op](*operands))

    def in_place(self, output: int, input: int) -> bool:
        return False

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def stats(self) -> KernelStats:
        with self._lock:
            return KernelStats(self._calls, self._seconds)
