"""Products and convolutions as definitions, so that what follows one becomes its epilogue.

Only halves: their products are the GPU's matrix units', and a generated kernel comes near to what the libraries make of
them. Convolutions have their channels last in memory, from the first one to the last; nothing is turned around between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import HALVES
from ranvier.codegen.definitions.products import Window, folded_stride
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Op, Result
from ranvier.codegen.loops.normalize import Rewriter
from ranvier.codegen.storage import View, ordered_strides, same_strides
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.providers.cuda.forms import Convolved, Multiplied

if TYPE_CHECKING:
    from ranvier.providers.cuda.realise import CudaRealiser

CHANNELS_LAST = (0, 2, 3, 1)


class CudaProducts:
    """Products with two-dimensional right factors, and convolutions of images."""

    def matmul(
        self, b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None = None, alpha: float = 1.0
    ) -> Value:
        dtype, depth, result = b.dtype(x), b.shape(x)[-1], tuple(shape)
        if dtype not in HALVES:
            raise Declined(f"a product of {dtype}")
        if len(b.shape(y)) != 2 or not depth or 0 in result:
            raise Declined("a product of many matrices, or of nothing")

        def realise(r: CudaRealiser, views: list[View], target: View, epilogue: Epilogue | None) -> tuple[()]:
            rows = math.prod(result[:-1])
            left = _as(r, views[0], (1, rows, depth))
            right = View(views[1].storage, dtype, (1, *views[1].shape), (0, *views[1].strides), views[1].offset)
            whole = target.reshaped((1, rows, result[-1]))
            made = whole or View.temporary(target.dtype, (1, rows, result[-1]))
            r.multiplied(Multiplied(left, right, made, _scaled(epilogue, alpha, dtype)))
            if whole is None:
                seen = made.reshaped(target.shape)
                assert seen is not None
                r.copy(seen, target)
            return ()

        def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
            rows = folded_stride(result[:-1], strides[:-1])
            return None if rows is None else (0, rows, strides[-1])

        return b.contraction([x, y], realise, fold, dtype, result, out, flops=2.0 * math.prod(result) * depth)

    def convolve(
        self, b: Definitions, x: Value, w: Value, shape: Sequence[int], window: Window, out: Value | None = None
    ) -> Value:
        dtype, filters, result = b.dtype(x), b.shape(w), tuple(shape)
        if dtype not in HALVES:
            raise Declined(f"a convolution of {dtype}")
        if len(result) != 4 or window.transposed or 0 in (*result, *filters):
            raise Declined("a convolution that is transposed, or of other than two axes, or of nothing")
        number, _, high, wide = result

        def realise(r: CudaRealiser, views: list[View], target: View, epilogue: Epilogue | None) -> tuple[()]:
            image, weights = (_channels_last(r, view) for view in views)
            whole = _pixels(target)
            into = target if whole is not None else View.temporary(target.dtype, result, CHANNELS_LAST)
            pixels = whole or _pixels(into)
            assert pixels is not None
            r.multiplied(Convolved(image, weights, into, pixels, window, epilogue))
            if whole is None:
                r.copy(into, target)
            return ()

        def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
            rows = folded_stride((number, high, wide), (strides[0], strides[2], strides[3]))
            return None if rows is None else (0, rows, strides[1])

        flops = 2.0 * math.prod(result) * math.prod(filters[1:])
        return b.contraction([x, w], realise, fold, dtype, result, out, order=CHANNELS_LAST, flops=flops)


def _as(r: CudaRealiser, view: View, shape: tuple[int, ...]) -> View:
    found = view.reshaped(shape) or r.dense(view).reshaped(shape)
    assert found is not None
    return found


def _channels_last(r: CudaRealiser, view: View) -> View:
    """Filters of one tap lie like that in either order."""
    if same_strides(view.shape, view.strides, ordered_strides(view.shape, CHANNELS_LAST)):
        return view
    made = View.temporary(view.dtype, view.shape, CHANNELS_LAST)
    r.copy(view, made)
    return made


def _pixels(view: View) -> View | None:
    """[N, C, H, W] as [1, pixels, C], where strides can say it."""
    number, channels, high, wide = view.shape
    rows = folded_stride((number, high, wide), (view.strides[0], view.strides[2], view.strides[3]))
    if rows is None:
        return None
    return View(view.storage, view.dtype, (1, number * high * wide, channels), (0, rows, view.strides[1]), view.offset)


def _scaled(epilogue: Epilogue | None, alpha: float, dtype: DType) -> Epilogue | None:
    if alpha == 1.0:
        return epilogue

    def leaf(e: Expr) -> Expr:
        return Op("mul", (e, Const(alpha, e.dtype)), e.dtype) if isinstance(e, Result) else e

    given = epilogue or Epilogue(Result(0, dtype))
    return Epilogue(Rewriter(leaf)(given.value), given.operands)


__all__ = ["CHANNELS_LAST", "CudaProducts"]
