"""Code that takes subnormal numbers for zeros: the word of a thread that says so, set and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import Isa

# Bits by which operands and results below the smallest normal number are zeros: DAZ and FTZ of MXCSR; FZ and, for
# float16, FZ16 of FPCR.
_BITS = {"x86_64": 0x8040, "aarch64": 1 << 24 | 1 << 19}


@contextmanager
def flushing(f: Fn, isa: Isa, wanted: Val) -> Iterator[None]:
    """Code written meanwhile takes subnormal numbers for zeros if ``wanted`` (an i64) is not 0; the thread computes as
    before afterwards."""
    bits = _BITS.get(isa.triple)
    if bits is None:
        yield
        return
    asked, before = f.cmp("ne", wanted, 0), f.var("i64", 0)
    with f.if_(asked):
        before.set(_read(f, isa))
        _write(f, isa, f.or_(before.get(), bits))
    yield
    with f.if_(asked):
        _write(f, isa, before.get())


def _read(f: Fn, isa: Isa) -> Val:
    if isa.triple == "aarch64":
        return f.intrinsic("llvm.aarch64.get.fpcr", "i64", [])
    place = f.stack("i32", 1)
    f.intrinsic("llvm.x86.sse.stmxcsr", "void", [place])
    return f.cast(f.load("i32", place), "i64", signed=False)


def _write(f: Fn, isa: Isa, word: Val) -> None:
    if isa.triple == "aarch64":
        f.intrinsic("llvm.aarch64.set.fpcr", "void", [word])
        return
    place = f.stack("i32", 1)
    f.store(f.cast(word, "i32"), place)
    f.intrinsic("llvm.x86.sse.ldmxcsr", "void", [place])
