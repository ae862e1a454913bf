"""``RANVIER_DEBUG``: 1 shows passes and placement, 2 every kernel call with its rates, 3 and up the kernels' source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.graph.types import TensorType
from ranvier.ops.estimate import node_cost
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


def show_sources(parts: Sequence[CompiledPart]) -> None:
    """Level 3: what was generated, once per kernel text."""
    for source in dict.fromkeys(item.kernel.source for item in parts):
        print(source.rstrip(), end="\n\n", file=sys.stderr)


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

    def _flops(self, step: Step, inputs: Sequence[Any], outputs: Sequence[Any]) -> float:
        part = self._parts.get(step.kernel)
        if part is None:  # a kernel of a nested graph
            return 0.0
        arrays = zip([*part.inputs, *part.outputs], [*inputs, *outputs])
        known = {v: TensorType(dtypes.of(x), x.shape) for v, x in arrays if isinstance(x, np.ndarray)}
        return sum(node_cost(node, known).flops for node in part.nodes)
