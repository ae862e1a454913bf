"""Loop nests to launches."""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.nest_emit import emit_nest
from ranvier.codegen.llvm.schedule import Schedule, schedule
from ranvier.codegen.llvm.transpose import transpose_launch, transposed_axes
from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.loops.normalize import normalized
from ranvier.codegen.loops.split import split


def launches(nest: Nest, isa: Isa, threads: int = 1) -> list[Launch]:
    """The kernel calls that carry out a nest: usually one, none where there is nothing to do."""
    normal = normalized(nest)
    if normal is None:
        return []
    parts = split(normal)
    if parts[0] is not normal:
        parts = [n for n in map(normalized, parts) if n is not None]
    return [_launch(part, isa) for part in parts]


def _launch(nest: Nest, isa: Isa) -> Launch:
    axes = transposed_axes(nest, isa)
    return launch_of(schedule(nest, isa), nest.label) if axes is None else transpose_launch(nest, isa, axes)


def launch_of(plan: Schedule, label: str = "") -> Launch:
    structure = plan.structure

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        emit_nest(structure, module, symbol, isa)

    buffers = tuple(At(o.view.storage, (o.view.offset + o.offset) * o.dtype.numpy.itemsize) for o in plan.operands)
    written = {k: None for k, arg in enumerate(structure.args) if arg.written}
    return Launch(
        KernelSpec(structure.name, structure.key, emit),
        buffers,
        plan.dims,
        plan.tiles,
        tuple(dict.fromkeys(plan.operands[k].view.storage for k in written)),
        scratch=plan.scratch,
        flops=plan.flops,
        traffic=plan.traffic,
        label=label,
    )
