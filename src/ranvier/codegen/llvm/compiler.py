"""LLVM IR text to object code, and object code linked by LLVM.

Every compilation has a context and a target machine of its own, so threads compile side by side: LLVM allows that,
and llvmlite's lock around each of its calls, which would forbid it, is held only for the short ones. A context that
dies with its module also gives its memory back; the shared one never would.

llvmlite is imported when something must be compiled: a process whose kernels are all in the disk cache goes without
its 30 ms and 45 MB.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ranvier.codegen.llvm.isa import Isa, architecture
from ranvier.errors import KernelError

_names = itertools.count()
_machines: dict[Isa, list[Any]] = {}  # those nobody compiles with at the moment
_machines_lock = threading.Lock()
_link_lock = threading.Lock()


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # inline assembly would abort the process without it
    return llvm


class _Unlocked:
    """The C functions that take long, called without llvmlite's lock."""

    def __init__(self) -> None:
        from llvmlite.binding import ffi

        library = ctypes.CDLL(ffi.lib._name)
        pointer = ctypes.c_void_p
        for name, result, arguments in (
            ("ParseAssembly", pointer, [pointer, ctypes.c_char_p, pointer]),
            ("VerifyModule", ctypes.c_bool, [pointer, pointer]),
            ("RunNewModulePassManager", None, [pointer, pointer, pointer]),
            ("TargetMachineEmitToMemory", pointer, [pointer, pointer, ctypes.c_int, pointer]),
            ("GetBufferStart", pointer, [pointer]),
            ("GetBufferSize", ctypes.c_size_t, [pointer]),
            ("DisposeMemoryBuffer", None, [pointer]),
            ("DisposeString", None, [pointer]),
        ):
            function = getattr(library, f"LLVMPY_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.module_type = ffi.LLVMModuleRef

    def __getattr__(self, name: str) -> Any:  # the functions above, for the type checker
        raise AttributeError(name)

    def text(self, message: ctypes.c_void_p) -> str:
        """A message that LLVM allocated, freed."""
        if not message.value:
            return ""
        found = ctypes.string_at(message.value).decode(errors="replace").strip()
        self.DisposeString(message)
        return found


_unlocked = functools.cache(_Unlocked)


def _address(thing: Any) -> ctypes.c_void_p:
    return ctypes.cast(thing._ptr, ctypes.c_void_p)


def _new_machine(isa: Isa) -> Any:
    """A machine that emits code for an instruction set; also for architectures other than the host's."""
    llvm = _llvm()
    if isa.triple == architecture():
        triple = llvm.get_process_triple()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        triple = f"{isa.triple}-unknown-linux-gnu"
    # levels 1 to 3 take the same time; 2 was up to 4 % quicker than 1 in code full of address arithmetic
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=2, reloc="pic", codemodel="default", jit=False
    )


@contextmanager
def _machine(isa: Isa) -> Iterator[Any]:
    """A target machine for the time of one compilation."""
    with _machines_lock:
        free = _machines.setdefault(isa, [])
        machine = free.pop() if free else None
    machine = machine or _new_machine(isa)
    try:
        yield machine
    finally:
        with _machines_lock:
            free.append(machine)


@contextmanager
def _optimized(text: str, machine: Any, level: int) -> Iterator[Any]:
    """The module, optimized by a short pipeline: kernels arrive unrolled and vectorised already.

    Over 150 kernels of every family, value numbering and a second round of combining changed no inner loop and took as
    long as all the rest; without the first round a quarter of the loops had more instructions.
    """
    llvm, unlocked = _llvm(), _unlocked()
    context = llvm.create_context()
    message = ctypes.c_void_p()
    raw = unlocked.ParseAssembly(_address(context), text.encode(), ctypes.byref(message))
    if problem := unlocked.text(message):
        context.close()
        raise KernelError(f"generated code does not parse: {problem}")
    module = llvm.ModuleRef(ctypes.cast(raw, unlocked.module_type), context)
    try:
        module.triple = machine.triple
        message = ctypes.c_void_p()
        wrong = unlocked.VerifyModule(_address(module), ctypes.byref(message))
        problem = unlocked.text(message)
        if wrong:
            raise KernelError(f"generated code is not valid: {problem}")
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(level))
        manager = llvm.create_new_module_pass_manager()
        manager.add_always_inliner_pass()
        manager.add_sroa_pass()
        manager.add_instruction_combine_pass()
        manager.add_simplify_cfg_pass()
        unlocked.RunNewModulePassManager(_address(manager), _address(module), _address(builder))
        yield module
    finally:
        module.close()
        context.close()


def _emitted(text: str, isa: Isa, level: int, *, as_object: bool) -> bytes:
    unlocked = _unlocked()
    with _machine(isa) as machine, _optimized(text, machine, level) as module:
        message = ctypes.c_void_p()
        buffer = unlocked.TargetMachineEmitToMemory(
            _address(machine), _address(module), int(as_object), ctypes.byref(message)
        )
        problem = unlocked.text(message)
        if not buffer:
            raise KernelError(f"no code could be emitted: {problem}")
        try:
            return ctypes.string_at(unlocked.GetBufferStart(buffer), unlocked.GetBufferSize(buffer))
        finally:
            unlocked.DisposeMemoryBuffer(buffer)


def compile_object(text: str, isa: Isa, *, level: int = 2) -> bytes:
    """Relocatable object code of a module."""
    return _emitted(text, isa, level, as_object=True)


def assembly(text: str, isa: Isa, *, level: int = 2) -> str:
    """The machine code as assembly, for people."""
    return _emitted(text, isa, level, as_object=False).decode()


@functools.cache
def _jit() -> Any:
    return _llvm().create_lljit_compiler(use_jit_link=False, suppress_errors=False)


class Linked:
    """Code linked by LLVM's ORC (MCJIT would never free it): addresses by name, valid while this object lives."""

    def __init__(self, tracker: Any, names: Iterable[str]) -> None:
        self._tracker = tracker
        self.addresses = {name: int(tracker[name]) for name in names}

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


def link(objects: Sequence[bytes], names: Sequence[str]) -> Linked:
    """Link objects into this process and look the names up."""
    llvm = _llvm()
    with _link_lock:
        builder = llvm.JITLibraryBuilder()
        for each in objects:
            builder.add_object_img(each)
        builder.add_current_process()
        for name in names:
            builder.export_symbol(name)
        return Linked(builder.link(_jit(), f"ranvier{next(_names)}"), names)
