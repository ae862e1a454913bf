"""LLVM IR text to object code, and object code linked by LLVM.

Code is compiled in processes of its own where it can then be loaded without LLVM, and inside this process elsewhere;
``RANVIER_COMPILER`` says otherwise. Whatever goes wrong with another process, the code is compiled inside, after a
warning: that takes longer and more memory and gives the same results.

llvmlite is imported only to link.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ranvier import logs
from ranvier.codegen.llvm import image, toolchain
from ranvier.codegen.llvm.isa import Isa, architecture
from ranvier.devices import usable_cores
from ranvier.errors import InvalidConfig, KernelError, nearest

if TYPE_CHECKING:
    from ranvier.codegen.llvm.servers import Servers

VARIABLE = "RANVIER_COMPILER"
PROCESS, INSIDE = WAYS = ("process", "inside")

_names = itertools.count()
_link_lock = threading.Lock()
_given_up = False  # on other processes


def way() -> str:
    """Where code is compiled at the moment: ``process`` or ``inside``."""
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted not in ("", *WAYS):
        raise InvalidConfig(f"environment variable {VARIABLE}: unknown value {wanted!r}{nearest(wanted, WAYS)}")
    if wanted == INSIDE or _given_up or not (wanted or image.supported()):
        return INSIDE
    problem = _obstacle()
    if problem and wanted:
        _give_up(problem)
    return INSIDE if problem else PROCESS


def side_by_side() -> int:
    """How many threads keep all compilers busy; one more than there are, to write the next text meanwhile."""
    return usable_cores() + (1 if way() == PROCESS else 0)


def prepare(count: int) -> None:
    """Get ready to compile so many texts: what takes time to start may start now."""
    if way() == PROCESS:
        from ranvier.codegen.llvm.servers import Unavailable

        try:
            _servers().prepare(count)
        except Unavailable as error:
            _give_up(str(error))


def compile_object(text: str, isa: Isa) -> bytes:
    """Relocatable object code of a module."""
    return _compiled(text, isa, toolchain.OBJECT)


def assembly(text: str, isa: Isa) -> str:
    """The machine code as assembly, for people."""
    return _compiled(text, isa, toolchain.ASSEMBLY).decode()


def _compiled(text: str, isa: Isa, want: int) -> bytes:
    triple = "" if isa.triple == architecture() else f"{isa.triple}-unknown-linux-gnu"
    if way() == PROCESS:
        from ranvier.codegen.llvm import servers

        try:
            return _servers().compile(servers.request(text, triple, isa.cpu, isa.features, want))
        except servers.Rejected as error:
            raise KernelError(str(error)) from None
        except servers.Unavailable as error:
            _give_up(str(error))
    try:
        return _inside().compile(text.encode(), triple, isa.cpu, isa.features, want)
    except toolchain.Rejected as error:
        raise KernelError(str(error)) from None


def _servers() -> Servers:
    from ranvier.codegen.llvm import servers

    return servers.of(servers.command(_library()), usable_cores())


@functools.cache
def _obstacle() -> str | None:
    """Why this process cannot start a Python of its own kind; None where it should be able to."""
    found = no_interpreter()
    return found or (None if os.path.isfile(_library()) else "llvmlite's shared library is not a file")


def no_interpreter() -> str | None:
    """Why this process does not know a Python to start; None where it does."""
    program = os.path.basename(sys.executable or "")
    if os.name != "posix":
        return "only POSIX systems start compile servers"
    if getattr(sys, "frozen", False):
        return "the application is frozen"
    if program.rstrip("0123456789.dtmu") != "python":  # that of an application that embeds Python
        return f"{program or 'nothing'} is not the name of a Python interpreter"
    return None


def _give_up(why: str) -> None:
    """Compile inside from now on."""
    global _given_up
    _given_up = True
    logs.warn_once(
        VARIABLE,
        f"kernels are compiled inside this process: {why}; {VARIABLE}={INSIDE} asks for that without a warning",
    )


@functools.cache
def _inside() -> toolchain.Toolchain:
    return toolchain.Toolchain(_library())


@functools.cache
def _library() -> str:
    """The file to load LLVM from, found without importing llvmlite where it lies as usual."""
    found = importlib.util.find_spec("llvmlite")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = toolchain.library_in(folder)
        if os.path.isfile(path):
            return path
    from llvmlite.binding import ffi

    return str(ffi.lib._name)


# -- linking --------------------------------------------------------------------------------------------------------


@functools.cache
def _jit() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(use_jit_link=False, suppress_errors=False)


class Linked:
    """Code linked by LLVM's ORC (MCJIT would never free it): addresses by name, valid while this object lives."""

    def __init__(self, tracker: Any, names: Iterable[str]) -> None:
        self._tracker = tracker
        self.addresses = {name: int(tracker[name]) for name in names}

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]


def link(objects: Sequence[bytes], names: Sequence[str]) -> Linked:
    """Link objects into this process and look the names up."""
    import llvmlite.binding as llvm

    with _link_lock:
        builder = llvm.JITLibraryBuilder()
        for each in objects:
            builder.add_object_img(each)
        builder.add_current_process()
        for name in names:
            builder.export_symbol(name)
        return Linked(builder.link(_jit(), f"ranvier{next(_names)}"), names)
