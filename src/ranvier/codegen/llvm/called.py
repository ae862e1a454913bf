"""Generated code that Python calls by itself, outside of programs."""

from __future__ import annotations

import functools
from typing import Any

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.isa import Isa, available
from ranvier.codegen.llvm.library import kernels


def called(spec: KernelSpec, isa: Isa, signature: Any) -> Any:
    """A function of ctypes; its code lives as long as it does."""
    kernel = kernels([spec], isa)[spec]
    function = signature(kernel.address)
    function.kernel = kernel
    return function


@functools.cache
def runs(isa: Isa) -> bool:
    """Whether this machine has these instructions: for others, code can only be looked at."""
    known = (each for each in available() if (each.name, each.triple) == (isa.name, isa.triple))
    return any(isa.extensions <= each.extensions for each in known)
