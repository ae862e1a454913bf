"""DFT and STFT of tensors: which signals there are, and which way they are transformed."""

from __future__ import annotations

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.attention.micro import ELEMENTS
from ranvier.codegen.llvm.fourier import fast, products
from ranvier.codegen.llvm.fourier.passes import Work
from ranvier.codegen.llvm.fourier.transform import BATCH_AXES, Transform
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Load, Map, Nest, Op, Operand
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_COPY = Map(((1, Load(0, DType.float32)),))


def unsupported(dtype: DType, length: int, rank: int = 3) -> str | None:
    """None where a transform of this length can be compiled, or the reason why not."""
    if dtype not in ELEMENTS:
        return f"a Fourier transform in {dtype.name}"
    if rank - 2 > BATCH_AXES:
        return f"a Fourier transform of {rank} axes"
    if not products.possible(length):
        return f"a Fourier transform of {length} points, which do not factor well"
    return None


def dft(
    x: View,
    out: View,
    isa: Isa,
    *,
    inverse: bool = False,
    onesided: bool = False,
    length: int | None = None,
    threads: int = 1,
    coarse: bool = False,
) -> list[Launch]:
    """Along the axis before the last; the last holds real and (if 2) imaginary parts. Other axes may be anything.

    The signal is cut or padded with zeros to ``length``. Inverse and one-sided together make a real signal of that
    length from the first half of its spectrum. ``coarse``: passes over float32 are computed in it, not in float64.
    """
    points, parts = x.shape[-2:]
    mirrored = inverse and onesided
    if length is None:
        length = 2 * (points - 1) if mirrored else points
    made = 1 if mirrored else 2
    bins = length if mirrored or not onesided else length // 2 + 1
    assert out.shape == (*x.shape[:-2], bins, made), f"{out.shape} for {x.shape}"
    transform = Transform(length, bins, parts, made, inverse, mirrored)
    kept = min(points, length // 2 + 1 if mirrored else length)
    cropped = View(x.storage, x.dtype, (*x.shape[:-2], kept, parts), x.strides, x.offset)
    return _lowered(transform, cropped, None, out, isa, threads, coarse)


def stft(
    signal: View,
    window: View | None,
    out: View,
    isa: Isa,
    *,
    frame_step: int,
    frame_length: int,
    onesided: bool = True,
    threads: int = 1,
    coarse: bool = False,
) -> list[Launch]:
    """Signal ``[batch, length]`` or ``[batch, length, 1 or 2]``; out ``[batch, frames, bins, 2]``, or ``[batch, frames,
    bins]`` for the power of each bin, the sum of the squares of both its parts.

    Frames are a strided view of the signal: they overlap where it lies. ``coarse`` as for :func:`dft`.
    """
    before: list[Launch] = []
    if signal.dtype is not signal.element:  # in 16 bits
        wide = View.temporary(signal.element, signal.shape)
        copy = Nest(signal.shape, (Operand(signal, signal.strides), Operand(wide, wide.strides)), (_COPY,))
        signal, before = wide, nests.launches(copy, isa, threads)
    if signal.rank == 2:
        signal = View(signal.storage, signal.dtype, (*signal.shape, 1), (*signal.strides, 1), signal.offset)
    batch, total, parts = signal.shape
    frames = (total - frame_length) // frame_step + 1
    bins = frame_length // 2 + 1 if onesided else frame_length
    assert out.shape in ((batch, frames, bins, 2), (batch, frames, bins)), f"{out.shape} for {signal.shape}"
    over_batch, over_time, over_parts = signal.strides
    shape, strides = (batch, frames, frame_length, parts), (over_batch, frame_step * over_time, over_time, over_parts)
    framed = View(signal.storage, signal.dtype, shape, strides, signal.offset)
    transform = Transform(frame_length, bins, parts, 2, False, False)
    if out.rank == 3:
        out = View(out.storage, out.dtype, (*out.shape, 1), (*out.strides, 1), out.offset)
    return [*before, *_lowered(transform, framed, window, out, isa, threads, coarse)]


def _lowered(
    t: Transform, x: View, window: View | None, out: View, isa: Isa, threads: int, coarse: bool
) -> list[Launch]:
    if 0 in out.shape:
        return []
    work: Work = "float" if coarse and x.dtype is DType.float32 else "double"
    passes = fast.passes(t, out.size // (t.bins * out.shape[-1]), x.dtype.numpy.itemsize, isa, work)
    if passes is not None:
        return [fast.launch(t, passes, x, window, out)]
    if out.shape[-1] == t.made and out.dtype is x.dtype:
        return products.launches(t, x, window, out, isa, threads)
    pairs = View.temporary(x.dtype, (*out.shape[:-1], t.made))
    return [*products.launches(t, x, window, pairs, isa, threads), *_powers(pairs, out, isa, threads)]


def _powers(pairs: View, out: View, isa: Isa, threads: int) -> list[Launch]:
    """Of bins that are there as two numbers."""
    shape, dtype = out.shape[:-1], pairs.dtype
    real, imaginary = (
        Operand(View(pairs.storage, dtype, shape, pairs.strides[:-1], pairs.offset + part), pairs.strides[:-1])
        for part in range(2)
    )
    first, second = Load(0, dtype), Load(1, dtype)
    power = Op("add", (Op("mul", (first, first), dtype), Op("mul", (second, second), dtype)), dtype)
    target = View(out.storage, out.dtype, shape, out.strides[:-1], out.offset)
    stages = (Map(((2, power),)),)
    return nests.launches(Nest(shape, (real, imaginary, Operand(target, target.strides)), stages), isa, threads)
