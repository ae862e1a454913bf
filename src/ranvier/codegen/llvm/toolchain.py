"""LLVM as one function: IR text in, machine code out.

llvmlite's shared library is called directly. Importing ``llvmlite.binding`` takes a fresh process 60 ms, five times as
long as loading the library; its lock around each call would keep threads from compiling side by side, which LLVM
allows as long as each has a context and a target machine of its own; and its shared context never gives memory back.

Nothing of Ranvier is imported: the compile server loads this file into a process that has nothing else.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

OBJECT, ASSEMBLY = range(2)  # what a request asks for
REDUCE = b"; reduce addresses\n"  # at the head of a text: see Toolchain

_POINTER, _TEXT, _NUMBER, _NOTHING = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, None
_SIGNATURES: dict[str, tuple[object, ...]] = {  # result, then arguments
    "ContextCreate": (_POINTER,),
    "ContextDispose": (_NOTHING, _POINTER),
    "CreateNewModulePassManager": (_POINTER,),
    "CreatePassBuilder": (_POINTER, _POINTER, _POINTER),
    "CreatePipelineTuningOptions": (_POINTER,),
    "CopyStringRepOfTargetData": (_NOTHING, _POINTER, _POINTER),
    "CreateTargetMachineData": (_POINTER, _POINTER),
    "DisposeTargetData": (_NOTHING, _POINTER),
    "CreateTargetMachine": (
        *(_POINTER, _POINTER, _TEXT, _TEXT, _TEXT, _NUMBER),  # target, triple, processor, features, level
        *(_TEXT, _TEXT, _NUMBER, _NUMBER, _TEXT),  # relocation, code model, print, for a JIT, ABI
    ),
    "DisposeMemoryBuffer": (_NOTHING, _POINTER),
    "DisposeModule": (_NOTHING, _POINTER),
    "DisposeNewModulePassManger": (_NOTHING, _POINTER),
    "DisposePassBuilder": (_NOTHING, _POINTER),
    "DisposePipelineTuningOptions": (_NOTHING, _POINTER),
    "DisposeString": (_NOTHING, _POINTER),
    "GetBufferSize": (ctypes.c_size_t, _POINTER),
    "GetBufferStart": (_POINTER, _POINTER),
    "GetProcessTriple": (_NOTHING, _POINTER),
    "GetTargetFromTriple": (_POINTER, _TEXT, _POINTER),
    "InitializeAllAsmPrinters": (_NOTHING,),
    "InitializeAllTargetInfos": (_NOTHING,),
    "InitializeAllTargetMCs": (_NOTHING,),
    "InitializeAllTargets": (_NOTHING,),
    "InitializeNativeAsmParser": (_NOTHING,),
    "InitializeNativeAsmPrinter": (_NOTHING,),
    "InitializeNativeTarget": (_NOTHING,),
    "ParseAssembly": (_POINTER, _POINTER, _TEXT, _POINTER),
    "RunNewModulePassManager": (_NOTHING, _POINTER, _POINTER, _POINTER),
    "SetCommandLine": (_NOTHING, _TEXT, _TEXT),
    "SetDataLayout": (_NOTHING, _POINTER, _TEXT),
    "SetTarget": (_NOTHING, _POINTER, _TEXT),
    "TargetMachineEmitToMemory": (_POINTER, _POINTER, _POINTER, _NUMBER, _POINTER),
    "VerifyModule": (ctypes.c_bool, _POINTER, _POINTER),
    "module_AddAlwaysInlinerPass": (_NOTHING, _POINTER),
    "module_AddInstCombinePass": (_NOTHING, _POINTER),
    "module_AddLoopStrengthReducePass": (_NOTHING, _POINTER),
    "module_AddSROAPass": (_NOTHING, _POINTER),
    "module_AddSimplifyCFGPass": (_NOTHING, _POINTER),
}
# A short pipeline: kernels arrive unrolled and vectorised already. Over 150 kernels of every family, value numbering
# and a second round of combining changed no inner loop and took as long as all the rest; without the first round a
# quarter of the loops had more instructions.
_PASSES = ("AlwaysInliner", "SROA", "InstCombine", "SimplifyCFG")


class Rejected(Exception):
    """LLVM says that the text is wrong, or that it cannot make code of it."""


def library_in(folder: str) -> str:
    """The shared library of the llvmlite package that lies in a folder."""
    name = {"win32": "llvmlite.dll", "darwin": "libllvmlite.dylib"}.get(sys.platform, "libllvmlite.so")
    return os.path.join(folder, "binding", name)


class Toolchain:
    """LLVM loaded into this process. Threads may use it side by side.

    With ``alone``, nobody else in this process uses LLVM, so that options of its command line may be given: they hold
    for everybody. Loop strength reduction is turned off then, and back on for texts that ask for it: it takes a quarter
    of the time of emitting code, and loops that step few pointers need none of it. Otherwise every text gets it.
    """

    def __init__(self, library: str, *, alone: bool = False) -> None:
        loaded = ctypes.CDLL(library)
        self._call: dict[str, ctypes._NamedFuncPointer] = {}
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"LLVMPY_{name}")
            function.restype, function.argtypes = result, arguments
            self._call[name] = function
        self._alone = alone
        if alone:
            self._call["SetCommandLine"](b"ranvier", b"-disable-lsr")
        self._call["InitializeNativeTarget"]()
        self._call["InitializeNativeAsmPrinter"]()
        self._call["InitializeNativeAsmParser"]()  # inline assembly would abort the process without it
        self._lock = threading.Lock()
        self._machines: dict[tuple[str, str, str], list[int]] = {}  # those nobody compiles with at the moment

    def compile(self, text: bytes, triple: str, cpu: str, features: str, want: int = OBJECT) -> bytes:
        """Machine code of a module: an object, or assembly for people. No triple is the host's."""
        target = (triple, cpu, features)
        with self._lock:
            free = self._machines.setdefault(target, [])
            machine = free.pop() if free else self._machine(target)
        try:
            return self._compile(text, machine, triple or self._host_triple(), want)
        finally:
            with self._lock:
                free.append(machine)

    def _machine(self, target: tuple[str, str, str]) -> int:
        call = self._call
        triple, cpu, features = (each.encode() for each in target)
        if triple:
            for each in ("TargetInfos", "Targets", "TargetMCs", "AsmPrinters"):
                call[f"InitializeAll{each}"]()
        triple = triple or self._host_triple().encode()
        message = _Message(call)
        found = call["GetTargetFromTriple"](triple, message.place)
        if not found:
            raise Rejected(f"no code can be made for {triple.decode()}: {message.taken()}")
        # levels 1 to 3 take the same time; 2 was up to 4 % quicker than 1 in code full of address arithmetic
        machine = call["CreateTargetMachine"](found, triple, cpu, features, 2, b"pic", b"default", 0, 0, b"")
        if not machine:
            raise Rejected(f"no code can be made for {cpu.decode()} with {features.decode()!r}")
        return int(machine)

    def _host_triple(self) -> str:
        message = _Message(self._call)
        self._call["GetProcessTriple"](message.place)
        return message.taken()

    def _compile(self, text: bytes, machine: int, triple: str, want: int) -> bytes:
        call = self._call
        context = call["ContextCreate"]()
        module = 0
        try:
            message = _Message(call)
            module = call["ParseAssembly"](context, text, message.place)
            if not module:
                raise Rejected(f"generated code does not parse: {message.taken()}")
            call["SetTarget"](module, triple.encode())
            wrong = call["VerifyModule"](module, message.place)
            problem = message.taken()
            if wrong:
                raise Rejected(f"generated code is not valid: {problem}")
            self._optimize(module, machine, reduce=self._alone and text.startswith(REDUCE))
            return self._emit(module, machine, want)
        finally:
            if module:
                call["DisposeModule"](module)
            call["ContextDispose"](context)

    def _optimize(self, module: int, machine: int, *, reduce: bool) -> None:
        call = self._call
        if reduce:  # which integers are legal decides what it looks at
            layout = call["CreateTargetMachineData"](machine)
            message = _Message(call)
            call["CopyStringRepOfTargetData"](layout, message.place)
            call["DisposeTargetData"](layout)
            call["SetDataLayout"](module, message.taken().encode())
        tuning = call["CreatePipelineTuningOptions"]()
        builder = call["CreatePassBuilder"](machine, tuning)
        passes = call["CreateNewModulePassManager"]()
        try:
            for name in (*_PASSES, *(["LoopStrengthReduce"] if reduce else [])):
                call[f"module_Add{name}Pass"](passes)
            call["RunNewModulePassManager"](passes, module, builder)
        finally:
            call["DisposeNewModulePassManger"](passes)
            call["DisposePassBuilder"](builder)
            call["DisposePipelineTuningOptions"](tuning)

    def _emit(self, module: int, machine: int, want: int) -> bytes:
        call = self._call
        message = _Message(call)
        buffer = call["TargetMachineEmitToMemory"](machine, module, int(want == OBJECT), message.place)
        if not buffer:
            raise Rejected(f"no code could be emitted: {message.taken()}")
        try:
            return ctypes.string_at(call["GetBufferStart"](buffer), call["GetBufferSize"](buffer))
        finally:
            call["DisposeMemoryBuffer"](buffer)


class _Message:
    """Where LLVM leaves a text it allocated."""

    def __init__(self, call: dict[str, ctypes._NamedFuncPointer]) -> None:
        self._dispose = call["DisposeString"]
        self._found = ctypes.c_void_p()
        self.place = ctypes.byref(self._found)

    def taken(self) -> str:
        """The text, freed; empty where there is none."""
        if not self._found.value:
            return ""
        text = ctypes.string_at(self._found.value).decode(errors="replace").strip()
        self._dispose(self._found)
        self._found.value = None
        return text
