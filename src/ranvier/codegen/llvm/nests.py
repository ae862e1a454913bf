"""Loop nests to launches."""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.nest_emit import emit_nest
from ranvier.codegen.llvm.nest_memo import Memo, likeness
from ranvier.codegen.llvm.schedule import Schedule, schedule
from ranvier.codegen.llvm.transpose import transpose_launch, transposed_axes
from ranvier.codegen.loops.across import along_operands
from ranvier.codegen.loops.ir import Nest, Size
from ranvier.codegen.loops.normalize import leaves, normalized, roots
from ranvier.codegen.loops.pieces import by_pieces
from ranvier.codegen.loops.split import split
from ranvier.varying import following, varies

_ENOUGH = 6  # tiles; with fewer, threads would idle


def launches(nest: Nest, isa: Isa, threads: int = 1) -> list[Launch]:
    """The kernel calls that carry out a nest: usually one, none where there is nothing to do."""
    if following() and _varies(nest):
        return _launches(nest, isa)  # which hold for one span of calls
    pieces = by_pieces(nest)
    if pieces is not None:  # which depend on what tables hold
        return [each for piece in pieces for each in launches(piece, isa, threads)]
    key = likeness(nest, isa)
    found = _MEMO.find(key, nest)
    if found is None:
        found = _launches(nest, isa)
        _MEMO.keep(key, nest, found)
    return found


_MEMO = Memo()


def _varies(nest: Nest) -> bool:
    numbers = [*nest.extents]
    for operand in nest.operands:
        numbers += [*operand.strides, operand.offset, operand.view.offset]
    numbers += [leaf.value for leaf in leaves(roots(nest)) if isinstance(leaf, Size)]
    return any(varies(n) for n in numbers)


def _launches(nest: Nest, isa: Isa) -> list[Launch]:
    normal = normalized(nest)
    if normal is None:
        return []
    axes = transposed_axes(normal, isa)
    if axes is not None:
        return [transpose_launch(normal, isa, axes)]
    apart = along_operands(normal)
    if apart is not None:
        return [each for part in apart for each in _launches(part, isa)]
    plan = schedule(normal, isa)
    if plan.tiles < _ENOUGH and normal.row:
        parts = split(normal)
        if parts[0] is not normal:
            plans = [schedule(n, isa) for n in map(normalized, parts) if n is not None]
            return [launch_of(p, nest.label) for p in plans]
    return [launch_of(plan, nest.label)]


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
        grain=plan.grain,
        scratch=plan.scratch,
        flops=plan.flops,
        traffic=plan.traffic,
        label=label,
    )
