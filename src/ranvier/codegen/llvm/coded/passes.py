"""Passes over coded weights: what the code of one depends on, and what it is launched with."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.coupled import FACTOR
from ranvier.codegen.llvm.coded.numbers import Scaling
from ranvier.codegen.llvm.coded.pack import CodedB
from ranvier.codegen.llvm.coded.prepare import DIGITS, Prepared
from ranvier.codegen.llvm.gemm.blocks import TILE_US, grain
from ranvier.codegen.llvm.gemm.epilogue import finish
from ranvier.codegen.llvm.gemm.problem import Problem
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.turning import slices
from ranvier.dtypes import DType
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.codegen.llvm.coded.driver import PassDriver

Activations = Literal["floats", "codes", "digits"]


class Buf(IntEnum):
    """Positions in ``bufs``; the finish kernel's operands follow."""

    ROWS = 0
    ABOUT = 1
    CODES = 2
    SCALES = 3
    ZEROS = 4
    OUT = 5
    FINISH = 6
    OPERANDS = 7


class Dim(IntEnum):
    """Positions in ``dims``; the batch table and the finish dims follow."""

    M = 0
    N = 1
    PANELS = 2
    GROUPS = 3
    WORDS = 4  # of a group
    ROW = 5  # bytes between rows
    ABOUT_ROW = 6
    SHARE = 7  # panels of a tile
    SHARES = 8
    FINISH_DIMS = 9
    RANK = 10
    BATCH = 11  # extent, then bytes between entries of rows, of what is about them, of the output


@dataclass(frozen=True)
class Pass:
    """What code of a pass depends on."""

    coding: Coding
    scaling: Scaling
    activations: Activations
    rows: int
    panels: int
    together: int = 1  # words of a group that the code of a turn takes
    once: bool = False  # a group is one turn
    as_floats: bool = False  # integers are counted in the lowest bits of a float
    coupled: bool = False  # codes of two columns share a byte

    def spec(self, driver: type[PassDriver]) -> KernelSpec:
        key = (driver.name, *self.coding.key, *self.scaling.key, self.activations, self.rows, self.panels)
        key += (self.together, self.once, self.as_floats, self.coupled)

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            driver(module.kernel(symbol), isa, self, f"{symbol}_levels").emit()

        size = f"{self.rows}x{self.panels}"
        return KernelSpec(f"{driver.name} {self.coding.bits} bits {self.activations} {size}", key, emit)

    @property
    def integers(self) -> bool:
        return self.activations != "floats"

    @property
    def digits(self) -> int:
        """Numbers that stand for an activation."""
        return DIGITS if self.activations == "digits" else 1


def fits_bytes(b: CodedB) -> bool:
    """Whether sums of a group, of codes times codes of 8 bits, fit 32 bits."""
    return b.words * b.coding.per_word << (b.coding.reach.bit_length() + 7) < 1 << 31


def stays_small(b: CodedB) -> bool:
    """Whether sums of a group, less what the middle adds, fit the lowest 22 bits of a float and their sign."""
    return (FACTOR if b.coupled else 1) * b.words * b.coding.per_word << (b.coding.reach.bit_length() + 6) < 1 << 22


def pass_launch(
    kernel: Pass, driver: type[PassDriver], p: Problem, b: CodedB, prepared: Prepared, isa: Isa, threads: int, *,
    work: float, scratch: int,
) -> Launch:  # fmt: skip
    """``work``: microseconds of one core, roughly."""
    flops = 2.0 * p.m * p.n * p.k * p.entries
    steps = -(-b.vectors // kernel.panels)
    wanted = slices(b.nbytes, isa)
    if threads > 1:
        wanted = max(1, min(math.floor(work / TILE_US), 8 * threads))
    share = kernel.panels * max(1, steps * p.entries // wanted)
    shares = -(-b.vectors // share)
    done = finish(p.epilogue, DType.float32, p.out.dtype, p.out_strides)
    item = p.out.dtype.numpy.itemsize
    batch = [x for axis, steps in zip(p.batch, prepared.batch) for x in (axis.extent, *steps, axis.out * item)]
    numbers = {
        Dim.M: p.m,
        Dim.N: p.n,
        Dim.PANELS: b.vectors,
        Dim.GROUPS: b.groups,
        Dim.WORDS: b.words,
        Dim.ROW: prepared.row,
        Dim.ABOUT_ROW: prepared.about_row,
        Dim.SHARE: share,
        Dim.SHARES: shares,
        Dim.FINISH_DIMS: Dim.BATCH + len(batch),
        Dim.RANK: len(p.batch),
    }
    tiles = p.entries * shares
    return Launch(
        kernel.spec(driver),
        (
            *(prepared.rows, prepared.about, At(b.codes), At(b.scales.storage), At(b.zeros.storage), At.of(p.out)),
            Code(done.spec),
            *done.buffers,
        ),
        (*(numbers[each] for each in Dim if each in numbers), *batch, *done.dims),
        tiles=tiles,
        writes=(p.out.storage,),
        grain=grain(tiles, work, threads),
        scratch=scratch,
        flops=flops,
        traffic=float(p.entries * b.nbytes),
        label="coded matmul",
    )
