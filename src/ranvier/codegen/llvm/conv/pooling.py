"""Loops that are a pool, and back: the largest of windows as a layer among convolutions, for any rows of its result."""

from __future__ import annotations

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.conv.pool_bounds import bounds
from ranvier.codegen.llvm.conv.pool_values import LARGEST, MEANS, held_in
from ranvier.codegen.llvm.conv.pools import Counts, pooled
from ranvier.codegen.llvm.conv.shape import ConvShape, triple
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.fold import identity
from ranvier.codegen.loops.ir import Expr, Final, Index, Load, Nest, Op, Operand, Reduce, Result, Size, Stage
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_AXES = 6  # image, channel, two of the result, two of the window
_WINDOW = frozenset({4, 5})


@dataclass(frozen=True)
class Pooling:
    """What a launch that pools was made from. ``shape`` is that of a depthwise convolution with the same windows;
    ``counts`` of means, none of the largest."""

    x: View
    out: View
    shape: ConvShape
    counts: Counts | None = None


def pooling(nest: Nest) -> Pooling | None:
    """The pool that a nest is, where it is one."""
    if len(nest.extents) != _AXES or nest.row != _WINDOW or len(nest.operands) != 2 or len(nest.stages) < 2:
        return None
    fold, *counts, final = nest.stages
    if not isinstance(fold, Reduce) or not isinstance(final, Final) or len(final.stores) != 1:
        return None
    value, (k, result) = _uncast(fold.value) if fold.fold == "sum" else fold.value, final.stores[0]
    if fold.fold not in ("max", "sum") or not isinstance(value, Load):
        return None
    source, target = nest.operands[value.operand], nest.operands[k]
    shape = _shape(source, target, nest.extents[4:])
    if shape is None:
        return None
    x, out = source.view, target.view
    if fold.fold == "max":
        plain = not counts and isinstance(result, Result) and x.dtype is out.dtype and x.dtype in LARGEST
        return Pooling(x, out, shape) if plain else None
    if not {x.dtype, out.dtype} <= MEANS or fold.dtype is not held_in(x.dtype) or source.other != 0:
        return None
    counted = _counted(_uncast(result), counts, fold.dtype, shape)
    return None if counted is None else Pooling(x, out, shape, counted)


def _uncast(expr: Expr) -> Expr:
    return expr.args[0] if isinstance(expr, Op) and expr.name == "cast" else expr


def _shape(source: Operand, target: Operand, kernel: tuple[int, ...]) -> ConvShape | None:
    """The windows that are read, if they are some of an image."""
    x, out = source.view, target.view
    if x.rank != 4 or out.rank != 4 or source.at is not None or target.at is not None or target.guard is not None:
        return None
    high, wide = x.strides[2:]
    if not high > wide > 0 or source.strides[:2] != x.strides[:2]:
        return None
    if target.strides != (*out.strides, 0, 0) or target.offset:
        return None
    steps = [divmod(given, own) for given, own in zip(source.strides[2:], (high, wide, high, wide))]
    if any(odd for _, odd in steps):
        return None
    (sh, _), (sw, _), (dh, _), (dw, _) = steps
    inside = bounds(source.guard, [(sh, dh), (sw, dw)])
    if inside is None:
        return None
    up, left = (inside.get(k, (0, 0))[0] for k in (0, 1))
    channels = x.shape[1]
    shape = ConvShape(
        n=x.shape[0],
        group=channels,
        cin=channels,
        cout=channels,
        size=triple(x.shape[2:], 1),
        out=triple(out.shape[2:], 1),
        kernel=triple(kernel, 1),
        strides=(1, sh, sw),
        dilations=(1, dh, dw),
        begin=(0, up, left),
    )
    whole = all(last - first == shape.size[1 + k] for k, (first, last) in inside.items())
    missing = any(_leaves(shape, 1 + k) for k in (0, 1) if k not in inside)
    return shape if whole and not missing and source.offset == -(up * high + left * wide) else None


def _counted(mean: Expr, counts: list[Stage], dtype: DType, shape: ConvShape) -> Counts | None:
    """What the sum is divided by to give the mean."""
    if not isinstance(mean, Op) or mean.name != "div" or mean.dtype is not dtype or mean.args[0] != Result(0, dtype):
        return None
    number = mean.args[1]
    if not counts:
        size = _uncast(number)
        return Counts(size.value) if isinstance(size, Size) else None
    each = counts[0]
    if len(counts) > 1 or number != Result(1, dtype) or not isinstance(each, Reduce) or each.fold != "sum":
        return None
    found = bounds(_uncast(each.value), list(zip(shape.strides, shape.dilations))[1:])
    if found is None:
        return None
    places = {k: (first - shape.begin[1 + k], last - shape.begin[1 + k]) for k, (first, last) in found.items()}
    everything = Counts(None)
    return Counts(None, places.get(0, everything.rows), places.get(1, everything.columns))


def pool(x: View, out: View, shape: ConvShape, isa: Isa) -> list[Launch]:
    """The launches of a pool of the largest."""
    quick = pooled(x, out, shape, isa)
    if quick is not None:
        return [quick]
    high, wide = x.strides[2:]
    (_, sh, sw), (_, dh, dw), (_, down, across) = shape.strides, shape.dilations, shape.begin
    strides = (*x.strides[:2], sh * high, sw * wide, dh * high, dw * wide)
    source = Operand(x, strides, -(down * high + across * wide), guard=_guard(shape), other=identity("max", x.dtype))
    stages = (Reduce("max", Load(0, x.dtype), x.dtype), Final(((1, Result(0, x.dtype)),)))
    extents = (shape.n, shape.cout, *shape.out[1:], *shape.kernel[1:])
    return nests.launches(Nest(extents, (source, Operand(out, (*out.strides, 0, 0))), stages, _WINDOW), isa)


def _leaves(shape: ConvShape, axis: int) -> bool:
    """Whether windows leave the image along an axis."""
    last = (shape.out[axis] - 1) * shape.strides[axis] + (shape.kernel[axis] - 1) * shape.dilations[axis]
    return shape.begin[axis] > 0 or last - shape.begin[axis] >= shape.size[axis]


def _guard(shape: ConvShape) -> Expr | None:
    """Is a place of the window inside the image? None where every one is."""
    found: Expr | None = None
    for axis in (1, 2):
        if not _leaves(shape, axis):
            continue
        step, tap, before = shape.strides[axis], shape.dilations[axis], shape.begin[axis]
        reached = _whole("add", _whole("mul", Index(1 + axis), Size(step)), _whole("mul", Index(3 + axis), Size(tap)))
        place = _whole("sub", reached, Size(before))
        low = Op("ge", (place, Size(0)), DType.bool)
        here = Op("and", (low, Op("lt", (place, Size(shape.size[axis])), DType.bool)), DType.bool)
        found = here if found is None else Op("and", (found, here), DType.bool)
    return found


def _whole(name: str, a: Expr, b: Expr) -> Expr:
    return Op(name, (a, b), DType.int64)


__all__ = ["Pooling", "pool", "pooling"]
