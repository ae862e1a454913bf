"""Max pooling as a layer among convolutions: the loops that make it, for any rows of its result."""

from __future__ import annotations

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.conv.maxima import DTYPES, maxima
from ranvier.codegen.llvm.conv.shape import ConvShape, triple
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.fold import identity
from ranvier.codegen.loops.ir import Expr, Final, Index, Load, Nest, Op, Operand, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_AXES = 6  # image, channel, two of the result, two of the window
_WINDOW = frozenset({4, 5})


@dataclass(frozen=True)
class Pooling:
    """What a launch that pools was made from. ``shape`` is that of a depthwise convolution with the same windows."""

    x: View
    out: View
    shape: ConvShape


def pooling(nest: Nest) -> Pooling | None:
    """The pool that a nest is, where it is one."""
    if len(nest.extents) != _AXES or nest.row != _WINDOW or len(nest.operands) != 2 or len(nest.stages) != 2:
        return None
    fold, final = nest.stages
    if not isinstance(fold, Reduce) or fold.fold != "max" or not isinstance(fold.value, Load):
        return None
    if not isinstance(final, Final) or len(final.stores) != 1 or not isinstance(final.stores[0][1], Result):
        return None
    source, target = nest.operands[fold.value.operand], nest.operands[final.stores[0][0]]
    x, out = source.view, target.view
    plain = x.rank == out.rank == 4 and x.dtype is out.dtype and x.dtype in DTYPES
    if not plain or source.at is not None or target.strides != (*out.strides, 0, 0) or target.offset:
        return None
    high, wide = x.strides[2:]
    if not high > wide > 0 or source.strides[:2] != x.strides[:2] or source.offset > 0:
        return None
    down, rest = divmod(-source.offset, high)
    across, left = divmod(rest, wide)
    steps = [divmod(given, own) for given, own in zip(source.strides[2:], (high, wide, high, wide))]
    if left or any(odd for _, odd in steps):
        return None
    (sh, _), (sw, _), (dh, _), (dw, _) = steps
    channels, (kh, kw) = x.shape[1], nest.extents[4:]
    shape = ConvShape(
        n=x.shape[0],
        group=channels,
        cin=channels,
        cout=channels,
        size=triple(x.shape[2:], 1),
        out=triple(out.shape[2:], 1),
        kernel=(1, kh, kw),
        strides=(1, sh, sw),
        dilations=(1, max(1, dh), max(1, dw)),
        begin=(0, down, across),
    )
    return Pooling(x, out, shape) if (source.guard is None) == (_guard(shape) is None) else None


def pool(x: View, out: View, shape: ConvShape, isa: Isa) -> list[Launch]:
    """The launches of a pool."""
    quick = maxima(x, out, shape, isa)
    if quick is not None:
        return [quick]
    high, wide = x.strides[2:]
    (_, sh, sw), (_, dh, dw), (_, down, across) = shape.strides, shape.dilations, shape.begin
    strides = (*x.strides[:2], sh * high, sw * wide, dh * high, dw * wide)
    source = Operand(x, strides, -(down * high + across * wide), guard=_guard(shape), other=identity("max", x.dtype))
    stages = (Reduce("max", Load(0, x.dtype), x.dtype), Final(((1, Result(0, x.dtype)),)))
    extents = (shape.n, shape.cout, *shape.out[1:], *shape.kernel[1:])
    return nests.launches(Nest(extents, (source, Operand(out, (*out.strides, 0, 0))), stages, _WINDOW), isa)


def _guard(shape: ConvShape) -> Expr | None:
    """Is a place of the window inside the image? None where every one is."""
    found: Expr | None = None
    for axis in (1, 2):
        step, tap, before = shape.strides[axis], shape.dilations[axis], shape.begin[axis]
        last = (shape.out[axis] - 1) * step - before + (shape.kernel[axis] - 1) * tap
        if before <= 0 and last < shape.size[axis]:
            continue
        reached = _whole("add", _whole("mul", Index(1 + axis), Size(step)), _whole("mul", Index(3 + axis), Size(tap)))
        place = _whole("sub", reached, Size(before))
        low = Op("ge", (place, Size(0)), DType.bool)
        here = Op("and", (low, Op("lt", (place, Size(shape.size[axis])), DType.bool)), DType.bool)
        found = here if found is None else Op("and", (found, here), DType.bool)
    return found


def _whole(name: str, a: Expr, b: Expr) -> Expr:
    return Op(name, (a, b), DType.int64)


__all__ = ["Pooling", "pool", "pooling"]
