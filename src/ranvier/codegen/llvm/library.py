"""Compiled kernels of this process: each distinct spec compiled once, freed when nobody holds it."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import compiler
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa


class Kernel:
    """A compiled function; its code lives as long as this object."""

    __slots__ = ("__weakref__", "_code", "address", "symbol")

    def __init__(self, symbol: str, address: int, code: compiler.Linked) -> None:
        self.symbol = symbol
        self.address = address
        self._code = code


_lock = threading.RLock()
_kernels: weakref.WeakValueDictionary[tuple[str, str], Kernel] = weakref.WeakValueDictionary()


def symbol_of(spec: KernelSpec, isa: Isa) -> str:
    """The name of the function: a digest of everything the code depends on."""
    return "rv_" + hashlib.sha256(repr((isa.key, spec.key)).encode()).hexdigest()[:32]


def source(spec: KernelSpec, isa: Isa) -> str:
    """The LLVM IR of a spec."""
    module = Module()
    spec.emit(module, symbol_of(spec, isa), isa)
    return str(module)


def kernels(specs: Iterable[KernelSpec], isa: Isa) -> dict[KernelSpec, Kernel]:
    """Compiled kernels for all specs; what another caller already holds is shared."""
    found: dict[KernelSpec, Kernel] = {}
    with _lock:
        for spec in specs:
            if spec in found:
                continue
            symbol = symbol_of(spec, isa)
            kernel = _kernels.get((isa.key, symbol))
            if kernel is None:
                code = compiler.link([compiler.compile_object(source(spec, isa), isa)], [symbol])
                kernel = _kernels[isa.key, symbol] = Kernel(symbol, code[symbol], code)
            found[spec] = kernel
    return found
