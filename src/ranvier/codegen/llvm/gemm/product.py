"""Matrix products as launches: which kind of kernel a product gets."""

from __future__ import annotations

from ranvier.codegen import tuning
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.amx import micro as amx
from ranvier.codegen.llvm.gemm.gemv import can_be_dots, dots, suits_dots
from ranvier.codegen.llvm.gemm.half_plan import HalfPlan
from ranvier.codegen.llvm.gemm.halves import multiplies_halves
from ranvier.codegen.llvm.gemm.narrow import PairPlan, TilePlan
from ranvier.codegen.llvm.gemm.pack import PackedB, multiplies_pairs
from ranvier.codegen.llvm.gemm.plan import Plan
from ranvier.codegen.llvm.gemm.problem import Problem, can_turn, folded, problem_of, swapped, turned
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_STREAMED_ROWS = 8  # so few may be multiplied without tiles
_PAIRED_ROWS = 24  # from here on it pays to put a B of the graph into pairs


def matmul(
    a: View,
    b: View | PackedB,
    out: View,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
    alpha: float = 1.0,
    halves: bool = False,
) -> list[Launch]:
    """``out = epilogue(alpha * a @ b)``: a [..., M, K], b [..., K, N], out [..., M, N]; batch axes broadcast.

    Operands are float32 or float64, or stored in 16 bits: then sums are float32, and so is the epilogue, which may be
    stored in any type. Where one operand is bfloat16 and the machine multiplies pairs of them, a float32 one is
    rounded to bfloat16 too. With ``halves``, float16 operands are multiplied by float16 arithmetic, where there is one,
    and sums are float16 for some steps (``halves.py``).
    """
    if 0 in out.shape:
        return []
    problem = folded(swapped(problem_of(a, b, out, epilogue, alpha)))
    for either in (problem, turned(problem)) if can_turn(problem) else (problem,):
        if _by_dots(either):
            return [dots(either, isa, threads)]
    return _plan(problem, isa, threads, halves and multiplies_halves(isa)).launches()


def _plan(p: Problem, isa: Isa, threads: int, halves: bool) -> Plan:
    if p.b.halves if isinstance(p.b, PackedB) else halves and p.a.dtype is p.b.dtype is DType.float16:
        return HalfPlan(p, isa, threads)
    if not (p.b.pairs if isinstance(p.b, PackedB) else _wants_pairs(p, isa)):
        return Plan(p, isa, threads)
    if not amx.suits(isa, DType.bfloat16, DType.bfloat16):
        return PairPlan(p, isa, threads)
    streams = p.m == 1 and _can_stream_pairs(p, isa)
    if tuning.consulted() and p.m <= _STREAMED_ROWS and _can_stream_pairs(p, isa):
        other = {"tiles" if streams else "pairs": not streams}
        streams = tuning.choose("product way", p.key, streams, lambda: other)
    return PairPlan(p, isa, threads) if streams else TilePlan(p, isa, threads)


def _by_dots(p: Problem) -> bool:
    few = suits_dots(p)
    if not tuning.consulted() or not can_be_dots(p):
        return few
    return tuning.choose("product way", p.key, few, lambda: {"packed" if few else "dots": not few})


def _can_stream_pairs(p: Problem, isa: Isa) -> bool:
    """One row has nothing to multiply, only a B to read: that goes faster by several streams than by tiles.

    A B packed for tiles serves, if its rows are whole and nothing was added to its K that the row does not have.
    """
    return isa.has("avx512bf16") and isinstance(p.b, PackedB) and not p.b.apart and 2 * p.b.deep == p.k


def _wants_pairs(p: Problem, isa: Isa) -> bool:
    types = {p.a.dtype, p.b.dtype}
    fitting = DType.bfloat16 in types and types <= {DType.bfloat16, DType.float32}
    return fitting and multiplies_pairs(isa) and p.m >= _PAIRED_ROWS and p.k > 0
