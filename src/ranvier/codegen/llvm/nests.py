"""Loop nests to launches."""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.nest_emit import emit_nest
from ranvier.codegen.llvm.schedule import Schedule, schedule
from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.loops.normalize import normalized


def launches(nest: Nest, isa: Isa, threads: int = 1) -> list[Launch]:
    """The kernel calls that carry out a nest: usually one, none where there is nothing to do."""
    normal = normalized(nest)
    if normal is None:
        return []
    return [launch_of(schedule(normal, isa), nest.label)]


def launch_of(plan: Schedule, label: str = "") -> Launch:
    structure = plan.structure

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        emit_nest(structure, module, symbol, isa)

    buffers = tuple(At(o.view.storage, (o.view.offset + o.offset) * o.dtype.numpy.itemsize) for o in plan.operands)
    written = {k: None for k, arg in enumerate(structure.args) if arg.written}
    return Launch(
        KernelSpec(_name(structure.key), structure.key, emit),
        buffers,
        plan.dims,
        plan.tiles,
        tuple(dict.fromkeys(plan.operands[k].view.storage for k in written)),
        scratch=plan.scratch,
        flops=plan.flops,
        traffic=plan.traffic,
        label=label,
    )


def _name(key: tuple[object, ...]) -> str:
    return "nest"
