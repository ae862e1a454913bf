"""LLVM IR text to object code to callable addresses.

Emission and linking are apart: an object is bytes that can be cached and linked in another process. Code is linked
through ORC; the :class:`Linked` handle owns it, and dropping the handle frees it (MCJIT never would).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ranvier.codegen.llvm.isa import Isa

_lock = threading.RLock()
_names = itertools.count()


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # inline assembly would abort the process without it
    return llvm


@functools.cache
def target_machine(isa: Isa) -> Any:
    """The machine that emits code for an instruction set; also for architectures other than the host's."""
    llvm = _llvm()
    from ranvier.codegen.llvm.isa import architecture

    if isa.triple == architecture():
        triple = llvm.get_process_triple()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        triple = f"{isa.triple}-unknown-linux-gnu"
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=2, reloc="pic", codemodel="default", jit=False
    )


def _optimized(text: str, isa: Isa, level: int) -> Any:
    """Parsed and optimized by a short pipeline: kernels arrive unrolled and vectorised already."""
    llvm = _llvm()
    module = llvm.parse_assembly(text)
    module.triple = target_machine(isa).triple
    module.verify()
    builder = llvm.create_pass_builder(target_machine(isa), llvm.create_pipeline_tuning_options(level))
    manager = llvm.create_new_module_pass_manager()
    manager.add_always_inliner_pass()
    manager.add_sroa_pass()
    manager.add_instruction_combine_pass()
    manager.add_simplify_cfg_pass()
    manager.add_new_gvn_pass()
    manager.add_loop_simplify_pass()
    manager.add_instruction_combine_pass()
    manager.add_dead_code_elimination_pass()
    manager.run(module, builder)
    return module


def compile_object(text: str, isa: Isa, *, level: int = 2) -> bytes:
    """Relocatable object code of a module."""
    with _lock:
        return bytes(target_machine(isa).emit_object(_optimized(text, isa, level)))


def assembly(text: str, isa: Isa, *, level: int = 2) -> str:
    """The machine code as assembly, for people."""
    with _lock:
        return str(target_machine(isa).emit_assembly(_optimized(text, isa, level)))


def optimized_ir(text: str, isa: Isa, *, level: int = 2) -> str:
    with _lock:
        return str(_optimized(text, isa, level))


@functools.cache
def _jit() -> Any:
    llvm = _llvm()
    return llvm.create_lljit_compiler(use_jit_link=False, suppress_errors=False)


class Linked:
    """Linked code: addresses by name, valid while this object lives."""

    def __init__(self, tracker: Any, names: Iterable[str]) -> None:
        self._tracker = tracker
        self.addresses = {name: int(tracker[name]) for name in names}

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


def link(objects: Sequence[bytes], names: Sequence[str]) -> Linked:
    """Link objects into this process and look the names up."""
    llvm = _llvm()
    with _lock:
        builder = llvm.JITLibraryBuilder()
        for each in objects:
            builder.add_object_img(each)
        builder.add_current_process()
        for name in names:
            builder.export_symbol(name)
        return Linked(builder.link(_jit(), f"ranvier{next(_names)}"), names)
