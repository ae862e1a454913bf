"""A matrix product with its batch axes taken apart, and the rewrites that make it cheaper."""

from __future__ import annotations

from dataclasses import replace

from ranvier.codegen.llvm.elements import NARROW
from ranvier.codegen.llvm.gemm.epilogue import uses_index
from ranvier.codegen.llvm.gemm.pack import PackedB
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import KernelError
from ranvier.records import dataclass

ELEMENTS = {DType.float32: "float", DType.float64: "double"}  # types of sums, by LLVM's names
_TYPES = (*ELEMENTS, *NARROW)


@dataclass(frozen=True)
class Axis:
    """A batch axis: its extent and the strides of the operands, in elements."""

    extent: int
    a: int
    b: int
    out: int


@dataclass(frozen=True)
class Problem:
    """One product with its batch axes taken apart; strides are (row, column) in elements. ``dtype`` is the sums'."""

    dtype: DType
    m: int
    n: int
    k: int
    a: View
    b: View | PackedB
    out: View
    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    out_strides: tuple[int, int]
    batch: tuple[Axis, ...]
    epilogue: Epilogue | None
    alpha: float

    @property
    def entries(self) -> int:
        count = 1
        for axis in self.batch:
            count *= axis.extent
        return count

    def key(self) -> tuple[object, ...]:
        """What decisions about the product depend on."""
        kept = "packed" if isinstance(self.b, PackedB) else "columns" if self.b_strides[1] == 1 else "rows"
        sizes = (self.entries, self.m, self.n, self.k)
        return (*sizes, self.a.dtype.name, self.b.dtype.name, self.out.dtype.name, kept)


def problem_of(a: View, b: View | PackedB, out: View, epilogue: Epilogue | None, alpha: float) -> Problem:
    if a.dtype not in _TYPES or b.dtype not in _TYPES or (a.dtype is DType.float64) != (b.dtype is DType.float64):
        raise KernelError(f"no matrix product of {a.dtype} and {b.dtype}")
    dtype = DType.float64 if a.dtype is DType.float64 else DType.float32
    if isinstance(b, PackedB) and b.n == 1:
        b = b.column
    batch = out.shape[:-2]
    m, n = out.shape[-2:]
    k = a.shape[-1]
    a_all = a.expanded((*batch, m, k)).strides
    if isinstance(b, PackedB):
        entry = View.dense(b.storage, b.dtype, (*b.batch, b.entry)).expanded((*batch, b.entry))
        b_batch, b_strides = entry.strides[:-1], (0, 0)
    else:
        b_all = b.expanded((*batch, k, n)).strides
        b_batch, b_strides = b_all[:-2], (b_all[-2], b_all[-1])
    axes: list[Axis] = []
    for each in map(Axis, batch, a_all, b_batch, out.strides):
        if each.extent == 1:
            continue
        if axes and _merges(axes[-1], each):
            axes[-1] = replace(each, extent=each.extent * axes[-1].extent)
        else:
            axes.append(each)
    return Problem(
        *(dtype, m, n, k, a, b, out),
        a_strides=(a_all[-2], a_all[-1]),
        b_strides=b_strides,
        out_strides=(out.strides[-2], out.strides[-1]),
        batch=tuple(axes),
        epilogue=epilogue,
        alpha=alpha,
    )


def _merges(outer: Axis, inner: Axis) -> bool:
    return all(x == y * inner.extent for x, y in ((outer.a, inner.a), (outer.b, inner.b), (outer.out, inner.out)))


def swapped(p: Problem) -> Problem:
    """The transposed product where that makes the output's columns contiguous."""
    row, column = p.out_strides
    if not can_turn(p) or column == 1 or p.n == 1 or (row != 1 and p.m != 1):
        return p
    return turned(p)


def can_turn(p: Problem) -> bool:
    return isinstance(p.b, View) and not uses_index(p.epilogue)


def turned(p: Problem) -> Problem:
    """The transpose of the output as the product of the transposes; B must not be packed, nor positions used."""
    assert isinstance(p.b, View)
    epilogue = p.epilogue
    if epilogue is not None:
        operands = tuple(replace(o, strides=(o.strides[0], o.strides[2], o.strides[1])) for o in epilogue.operands)
        epilogue = replace(epilogue, operands=operands)
    return replace(
        p,
        m=p.n,
        n=p.m,
        a=p.b,
        b=p.a,
        epilogue=epilogue,
        a_strides=(p.b_strides[1], p.b_strides[0]),
        b_strides=(p.a_strides[1], p.a_strides[0]),
        out_strides=(p.out_strides[1], p.out_strides[0]),
        batch=tuple(replace(x, a=x.b, b=x.a) for x in p.batch),
    )


def folded(p: Problem) -> Problem:
    """The innermost batch axis as more rows, where B is the same for all its entries and the strides allow it."""
    if not p.batch or uses_index(p.epilogue):
        return p
    axis = p.batch[-1]
    operands = p.epilogue.operands if p.epilogue is not None else ()
    fits = (
        axis.b == 0
        and _continues(axis.a, p.a_strides[0], p.m)
        and _continues(axis.out, p.out_strides[0], p.m)
        and all(_continues(o.strides[0], o.strides[1], p.m) for o in operands)
    )
    if not fits:
        return p

    def row(outer: int, inner: int) -> int:
        return outer if p.m == 1 else inner

    epilogue = p.epilogue
    if epilogue is not None:
        rest = tuple(
            replace(o, strides=(o.strides[0] * axis.extent, row(o.strides[0], o.strides[1]), o.strides[2]))
            for o in operands
        )
        epilogue = replace(epilogue, operands=rest)
    return replace(
        p,
        m=p.m * axis.extent,
        a_strides=(row(axis.a, p.a_strides[0]), p.a_strides[1]),
        out_strides=(row(axis.out, p.out_strides[0]), p.out_strides[1]),
        batch=p.batch[:-1],
        epilogue=epilogue,
    )


def _continues(outer: int, inner: int, count: int) -> bool:
    return count == 1 or outer == inner * count
