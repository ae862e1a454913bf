"""Instruction sets: what each offers to the emitter, which one this machine has, and which one is forced.

An :class:`Isa` is data. Kernels read it (vector width, registers, masks) and never ask for a name; what is chosen is
the best of :data:`TABLE` that the host supports, unless ``RANVIER_CPU_ISA`` names another.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace

from ranvier.codegen.llvm.permission import tiles_allowed
from ranvier.devices import cpu_features
from ranvier.errors import InvalidConfig, NotSupported, nearest
from ranvier.records import dataclass

VARIABLE = "RANVIER_CPU_ISA"


@dataclass(frozen=True)
class Isa:
    """One instruction set as the emitter sees it."""

    name: str
    triple: str  # architecture part of the target triple
    cpu: str  # LLVM's name of the baseline that has it all
    features: str  # LLVM feature string on top of the baseline
    vector_bytes: int
    registers: int  # vector registers
    score: int  # the best available one wins
    needs: frozenset[str] = frozenset()  # LLVM's names of host features without which it cannot run
    fma: bool = False
    masks: bool = False  # masked loads and stores of any element size are one instruction
    half: bool = False  # conversion between half and float is an instruction
    extremes: bool = False  # so is the smaller or larger of two floats, NaN if either is
    streams: int = 4  # walks through far memory at once that bring a core the most bytes
    turns: bool = False  # the second-level cache is several times as fast as what lies behind it (see the driver)
    pace: float = 1.0  # of float32 arithmetic, beside that of the machine where the rules' constants were measured
    extensions: frozenset[str] = frozenset()  # of OPTIONAL, those in use

    def lanes(self, element_bytes: int) -> int:
        """Elements of the given size in one register."""
        return self.vector_bytes // element_bytes

    @property
    def abreast(self) -> int:
        """Vectors worked on side by side where a function of each is a long chain of instructions: as many as make 64
        bytes, as far as registers hold what they need."""
        return max(1, 64 // self.vector_bytes) if self.registers >= 32 else 1

    def has(self, extension: str) -> bool:
        return extension in self.extensions

    @property
    def key(self) -> str:
        """What distinguishes generated code: part of every cache key."""
        return "+".join([self.name, *sorted(self.extensions)])


# Instructions some members of a family have: used where present, each under its LLVM name.
OPTIONAL: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512vnni", "avx512vbmi", "avx512bf16", "avx512fp16", "amx-tile", "amx-int8", "amx-bf16"),
    "avx2": ("avxvnni",),
    "neon": ("dotprod", "i8mm", "bf16", "fullfp16", "sve"),
}
TILES = frozenset({"amx-tile", "amx-int8", "amx-bf16"})  # of these, the system gives permission
_V3 = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
TABLE: tuple[Isa, ...] = (
    Isa(
        "avx512", "x86_64", "x86-64-v4", "-prefer-256-bit", 64, 32, 40, _V4, fma=True, masks=True, half=True, turns=True
    ),
    Isa("avx2", "x86_64", "x86-64-v3", "", 32, 16, 30, _V3, fma=True, half=True, turns=True),
    Isa("portable", "x86_64", "x86-64", "", 16, 16, 10, turns=True),
    # any aarch64 has it
    Isa("neon", "aarch64", "generic", "+neon", 16, 32, 30, fma=True, half=True, extremes=True, streams=1, pace=0.25),
    Isa("portable", "aarch64", "generic", "", 16, 32, 10, fma=True, half=True, extremes=True, streams=1, pace=0.25),
)


def architecture() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@functools.cache
def host_features() -> Mapping[str, bool]:
    """Features of this machine by LLVM's names.

    Linux says what the processor has and the system lets programs use; LLVM is asked elsewhere, because loading it
    only to look would cost more than all cached kernels of a model.
    """
    if sys.platform == "linux" and (found := cpu_features()):
        return dict.fromkeys(found, True)
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())


def available() -> list[Isa]:
    """Instruction sets that run here, the best first, with the extensions this machine has."""
    features = host_features()
    found = [isa for isa in TABLE if isa.triple == architecture() and all(features.get(f) for f in isa.needs)]
    return [_extended(isa, features) for isa in sorted(found, key=lambda isa: -isa.score)]


def _extended(isa: Isa, features: Mapping[str, bool]) -> Isa:
    has = frozenset(name for name in OPTIONAL.get(isa.name, ()) if features.get(name))
    if "amx-tile" in has and not tiles_allowed():
        has -= TILES
    return with_extensions(isa, has)


def with_extensions(isa: Isa, has: frozenset[str]) -> Isa:
    """An entry of the table, or what was made of one, with these extensions and no others."""
    isa = next(i for i in TABLE if (i.name, i.triple) == (isa.name, isa.triple))
    extra = ",".join([*([isa.features] if isa.features else []), *(f"+{name}" for name in sorted(has))])
    return replace(isa, features=extra, extensions=has)


def host() -> Isa:
    """The instruction set to generate for: the best one here, or the one the environment forces."""
    return chosen(os.environ.get(VARIABLE, ""))


@functools.cache
def chosen(name: str, asked_by: str = VARIABLE) -> Isa:
    """The named instruction set, or the best one for an empty name. One this machine lacks raises, and says what asked
    for it."""
    here = available()
    if not here:
        raise NotSupported(f"there is no code generator for processors of the kind {architecture()!r}")
    if not name:
        return here[0]
    for isa in here:
        if isa.name == name:
            return isa
    known = sorted({isa.name for isa in TABLE})
    if name in known:
        raise InvalidConfig(f"{asked_by}: this machine has no {name} (it has {', '.join(i.name for i in here)})")
    raise InvalidConfig(f"{asked_by}: unknown instruction set {name!r}{nearest(name, known)}")


def named(name: str, triple: str) -> Isa:
    """An entry of the table whether or not this machine has it: for emitting code to look at."""
    return next(isa for isa in TABLE if (isa.name, isa.triple) == (name, triple))
