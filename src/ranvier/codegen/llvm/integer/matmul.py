"""Products of integer matrices: which driver one gets."""

from __future__ import annotations

import math

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.gemm.problem import Axis, Problem, folded
from ranvier.codegen.llvm.integer.convolution import finishes_together, integer_conv
from ranvier.codegen.llvm.integer.dots import BYTES
from ranvier.codegen.llvm.integer.pack import PackedCodes, left_codes, pack_at_run, put_right
from ranvier.codegen.llvm.integer.product import launch_of, problem_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Load, Map, Nest, Operand
from ranvier.codegen.storage import View

_ALONE = 10 << 20  # products of codes for each thread: with fewer, joining those of one tensor gains more
PIXELS = 16  # rows from which a product is a convolution of windows of one pixel, where tiles are finished together


def integer_matmul(
    a: View,
    b: View | PackedCodes,
    out: View,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
) -> list[Launch]:
    """``out = epilogue(a @ b)`` with exact int32 sums: a [..., M, K], b [..., K, N] of 8-bit codes.

    The sums are those of the codes as ``pack`` describes: unsigned codes of B are 128 less than they say. ``b`` may be
    packed by ``pack_codes``.
    """
    if 0 in out.shape:
        return []
    m = out.shape[-2]
    before: list[Launch] = []
    if isinstance(b, View):
        shared = math.prod(a.shape[:-2]) if b.rank == 2 else 1
        b, before = pack_at_run(b, m * shared, a.dtype, isa, threads)
    # of one matrix, where there are rows enough
    strips = b.dot is BYTES and isa.masks and math.prod(b.batch) == 1 and math.prod(out.shape[:-1]) >= PIXELS
    if epilogue is not None and (finishes_together(b) or strips) and a.strides[-1] == 1 and a.shape[-1]:
        epilogue, beside = _side_by_side(epilogue, out.shape, isa, threads)
        before += beside
        p = folded(problem_of(a, b, out, epilogue))
        alone = threads == 1 or p.m * p.n * a.shape[-1] * p.entries >= threads * _ALONE
        if len(p.batch) <= 1 and p.m >= PIXELS and alone:
            return [*before, *_as_pixels(p, b, isa, threads)]
    assert b.dot.groups(a.shape[-1]) == b.k
    rows, copying = left_codes(a, b.dot, isa, threads)
    epilogue, spreading = put_right(a.dtype, b, epilogue, out.shape[:-2], isa, threads)
    problem = folded(problem_of(rows, b, out, epilogue))
    return [*before, *copying, *spreading, launch_of(problem, b, a, isa, threads)]


def _as_pixels(p: Problem, b: PackedCodes, isa: Isa, threads: int) -> list[Launch]:
    """Rows are the pixels of an image, codes of a row its channels; of a batch, every matrix is an image with filters
    of its own."""
    k = p.a.shape[-1]
    each = p.batch[0] if p.batch else Axis(1, 0, 0, 0)
    shape = ConvShape.conv((each.extent, k, p.m), (p.n, k, 1))
    image = View(p.a.storage, p.a.dtype, (each.extent, k, p.m), (each.a, 1, p.a_strides[0]), p.a.offset)
    strides = (each.out, p.out_strides[1], p.out_strides[0])
    target = View(p.out.storage, p.out.dtype, (each.extent, p.n, p.m), strides, p.out.offset)
    zero = View(p.a.storage, p.a.dtype, (1,), (1,), p.a.offset)  # no window leaves the image
    epilogue, spreading = p.epilogue, list[Launch]()
    if each.b:  # else the convolution does, for all images alike
        epilogue, spreading = put_right(p.a.dtype, b, epilogue, (each.extent,), isa, threads)
    made = integer_conv(image, zero, b, target, shape, isa, epilogue=epilogue, threads=threads, apart=each.b)
    return [*spreading, *made]


def _side_by_side(
    epilogue: Epilogue, shape: tuple[int, ...], isa: Isa, threads: int
) -> tuple[Epilogue, list[Launch]]:  # fmt: skip
    """The epilogue with what belongs to columns in their order: sums over a transposed tensor lie apart."""
    entries, columns = math.prod(shape[:-2]), shape[-1]
    operands, launches = list(epilogue.operands), list[Launch]()
    for k, operand in enumerate(operands):
        apart, row, column = operand.strides
        if row or column in (0, 1) or columns == 1 or operand.at is not None or operand.guard is not None:
            continue
        target = View.temporary(operand.dtype, (entries if apart else 1, columns))
        given = Operand(operand.view, (apart, column), operand.offset)
        copy = Map(((1, Load(0, operand.dtype)),))
        nest = Nest(target.shape, (given, Operand(target, target.strides)), (copy,), label="columns")
        launches += nests.launches(nest, isa, threads)
        operands[k] = Operand(target, (columns if apart else 0, 0, 1))
    return Epilogue(epilogue.value, tuple(operands)), launches
