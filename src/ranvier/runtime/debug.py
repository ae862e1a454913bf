"""``RANVIER_DEBUG``: 1 shows passes and placement, 2 every kernel call with its rates and its share of what the machine
can do, 3 what was generated, 4 the machine code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen.llvm import isa
from ranvier.codegen.llvm.peaks import Peaks, peaks
from ranvier.graph.types import TensorType
from ranvier.ops.estimate import node_cost
from ranvier.providers.base import KernelTime
from ranvier.runtime.program import CompiledPart, Step
from ranvier.runtime.report import Report


def show_report(report: Report) -> None:
    """Level 1: what the passes did and where every node runs."""
    lines = [str(report)]
    for node in report.nodes:
        why = "; ".join(f"{who} declined: {reason}" for who, reason in node.declined)
        origin = f"  by {node.origin}" if node.origin else ""
        lines.append(f"  {node.provider:10} {node.op:24} {node.name}{origin}{f'  ({why})' if why else ''}")
    print("\n".join(lines), file=sys.stderr)


def show_sources(parts: Sequence[CompiledPart], *, assembly: bool = False) -> None:
    """Levels 3 and 4: what was generated, once per kernel text; then the machine code of kernels that have some."""
    for source in dict.fromkeys(item.kernel.source for item in parts):
        print(source.rstrip(), end="\n\n", file=sys.stderr)
    if not assembly:
        return
    for code in dict.fromkeys(text for item in parts for text in getattr(item.kernel, "assembly", list)()):
        print(code.rstrip(), end="\n\n", file=sys.stderr)


class KernelPrinter:
    """Level 2: a line per kernel call with its time and rates; called like a Profiler."""

    def __init__(self, parts: Sequence[CompiledPart]) -> None:
        self._parts = {item.kernel: item.part.subgraph for item in parts}

    def record(self, step: Step, start: int, end: int, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        seconds = max(end - start, 1) / 1e9
        flops = self._flops(step, inputs, outputs)
        nbytes = sum(x.nbytes for x in [*inputs, *outputs] if isinstance(x, np.ndarray))
        shapes = " ".join(f"{x.dtype}{list(x.shape)}" for x in inputs if isinstance(x, np.ndarray))
        print(
            f"{step.provider:10} {step.op:24} {seconds * 1e6:9.1f} µs {flops / seconds / 1e9:8.2f} GFLOP/s "
            f"{nbytes / seconds / 1e9:7.2f} GB/s  {step.label}  {shapes}",
            file=sys.stderr,
        )

    def inside(self, step: Step, times: Iterable[KernelTime]) -> None:
        """The kernels inside a step, each held against what as many threads could do at best."""
        for each in times:
            seconds = max(each.end_ns - each.start_ns, 1) / 1e9
            flops, nbytes = each.flops / seconds / 1e9, each.bytes / seconds / 1e9
            print(
                f"  {step.provider:8} {seconds * 1e6:9.1f} µs {flops:8.2f} GFLOP/s {nbytes:7.2f} GB/s "
                f"{_share(flops, nbytes, each):>5} of peak  {each.kernel}  {each.label}",
                file=sys.stderr,
            )

    def _flops(self, step: Step, inputs: Sequence[Any], outputs: Sequence[Any]) -> float:
        part = self._parts.get(step.kernel)
        if part is None:  # a kernel of a nested graph
            return 0.0
        arrays = zip([*part.inputs, *part.outputs], [*inputs, *outputs])
        known = {v: TensorType(dtypes.of(x), x.shape) for v, x in arrays if isinstance(x, np.ndarray)}
        return sum(node_cost(node, known).flops for node in part.nodes)


def _share(gflops: float, gbs: float, kernel: KernelTime) -> str:
    """The nearer of the two limits: arithmetic, by the units that the kernel uses, and memory."""
    top = _peaks(max(1, kernel.threads))
    return f"{max(gflops / top.arithmetic(kernel.units), gbs / top.copy_gbs):.0%}"


@functools.cache
def _peaks(threads: int) -> Peaks:
    return peaks(isa.host(), threads, refresh=True)  # a busy moment may have left a low figure


class Fan:
    """Hands events to several of those who listen."""

    __slots__ = ("_targets",)

    def __init__(self, targets: Sequence[Any]) -> None:
        self._targets = targets

    def record(self, *event: Any) -> None:
        for target in self._targets:
            target.record(*event)

    def inside(self, step: Any, times: Sequence[KernelTime]) -> None:
        for target in self._targets:
            target.inside(step, times)
