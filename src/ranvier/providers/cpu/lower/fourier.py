"""DFT and STFT, and the powers of a spectrum where nothing else is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Alias, Declined, Def, Opaque
from ranvier.codegen.definitions.exprs import HALVES, op
from ranvier.codegen.definitions.lower.reduction import reduce_axes
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import fourier
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.patterns import scalar_of
from ranvier.providers.cpu.lower.index import lowers, tries
from ranvier.providers.cpu.realise import Realiser
from ranvier.records import dataclass


def _real_floats(node: Node) -> str | None:
    x = node.input(0)
    dtype = getattr(x.type, "dtype", None) if x is not None else None
    if dtype in HALVES:
        return f"a Fourier transform in {dtype}"
    if node.attrs.get("inverse", 0) and not node.attrs.get("onesided", 0):
        return "inverse transforms of complex spectra run by NumPy's FFT"
    return None


@lowers("DFT", values=(1, 2), check=_real_floats, dtypes=FLOATS | {DType.int32, DType.int64})
def dft(n: NodeView, b: Definitions) -> None:
    rank = n.rank(0)
    if n.version < 20:
        axis = int(n.attr("axis", 1))
    else:
        axis = int(np.ravel(n.need(2))[0]) if n.has(2) else -2
    axis %= rank
    length = int(np.ravel(n.need(1))[0]) if n.has(1) else None
    inverse, onesided = bool(n.attr("inverse", 0)), bool(n.attr("onesided", 0))
    order = (*(a for a in range(rank - 1) if a != axis), axis, rank - 1)
    moved = b.transpose(n.input(0), order) if axis != rank - 2 else n.input(0)
    shape = tuple(n.out_shape()[a] for a in order)
    points = length or (2 * (n.shape(0)[axis] - 1) if inverse and onesided else n.shape(0)[axis])
    reason = fourier.unsupported(n.dtype(0), points, rank)
    if reason is not None:
        raise Declined(reason)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        return fourier.dft(
            views[0],
            outs[0],
            r.isa,
            inverse=inverse,
            onesided=onesided,
            length=length,
            threads=r.threads,
            coarse=r.coarse,
        )

    last = axis == rank - 2
    (made,) = b.opaque(
        [moved], realise, [(n.dtype(0), shape)], [n.outputs[0]] if last else (), dense=False, widens=True
    )
    if not last:
        back = tuple(order.index(a) for a in range(rank))
        b.transpose(made, back, out=n.outputs[0])


@lowers("STFT", values=(1, 3), check=_real_floats, dtypes=FLOATS | {DType.int32, DType.int64})
def stft(n: NodeView, b: Definitions) -> None:
    step = int(np.ravel(n.need(1))[0])
    if n.has(3):
        length = int(np.ravel(n.need(3))[0])
    else:
        length = n.shape(2)[0] if n.has(2) else n.shape(0)[1]
    reason = fourier.unsupported(n.dtype(0), length, 4)
    if reason is not None or step < 1 or not 1 <= length <= n.shape(0)[1]:
        raise Declined(reason or f"STFT: frames of {length} every {step}")
    onesided = bool(n.attr("onesided", 1))
    sources = [n.input(0), *([n.input(2)] if n.has(2) else [])]

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        return fourier.stft(
            views[0],
            views[1] if len(views) > 1 else None,
            outs[0],
            r.isa,
            frame_step=step,
            frame_length=length,
            onesided=onesided,
            threads=r.threads,
            coarse=r.coarse,
        )

    how: dict[str, Any] = {"dense": False, "widens": True}
    b.opaque(sources, realise, [(n.dtype(0), n.out_shape())], [n.outputs[0]], about=_Spectrum(realise), **how)


@dataclass(frozen=True)
class _Spectrum:
    """``realise`` gives powers too, where there is room for one number of each bin."""

    realise: Callable[[Realiser, list[View], list[View]], Sequence[Launch]]


@tries("ReduceSumSquare", "ReduceSum", "ReduceL2")
def power(n: NodeView, b: Definitions) -> bool:
    """Powers, or magnitudes, of a spectrum that nobody else reads, of all of it or a slice: half as much is stored, and
    it is not read again; False for other sums."""
    rank = n.rank(0)
    if reduce_axes(n) != (rank - 1,) or n.shape(0)[-1] != 2 or n.dtype(0) not in FLOATS:
        return False
    value, gone = n.input(0), list[Def]()
    if n.op == "ReduceSum":
        made = _maker(value, b)
        square = value.producer
        if made is None or square is None or not _is_square(square) or not _only_here(value):
            return False
        gone.append(made)
        value = square.inputs[0]  # type: ignore[assignment]
    found, slice_ = _maker(value, b), None
    while isinstance(found, Alias) and slice_ is None and _only_here(value):
        gone.append(found)
        slice_, value = found, found.source
        found = _maker(value, b)
    if not isinstance(found, Opaque) or not isinstance(found.about, _Spectrum) or not _only_here(value):
        return False
    gone.append(found)
    b.defs[:] = [each for each in b.defs if each not in gone]
    shape = b.shape(value)[:-1]
    (made_of,) = b.opaque(
        *(found.sources, found.about.realise, [(b.dtype(value), shape)]),
        dense=False,
        narrow=lambda target: None,
        widens=True,
        positive=True,
    )
    b.defs[-1].label = found.label  # that of the transform, which nearly all of the work is
    if slice_ is not None:
        view, sides = slice_.view, b.shape(slice_.out)[:-1]
        made_of = b.alias(made_of, lambda each: _without_parts(view(_with_parts(each))), sides)
    if n.op == "ReduceL2":
        made_of = b.pointwise([made_of], lambda x: op("sqrt", x[0]), n.dtype(0))
    b.reshape(made_of, n.out_shape(), out=n.outputs[0])
    return True


def _maker(value: Value, b: Definitions) -> Def | None:
    return next((each for each in reversed(b.defs) if value in each.outputs), None)


def _only_here(value: Value) -> bool:
    """Whether one node alone reads a value."""
    return len({node for node, _ in value.uses}) == 1 and not value.is_graph_output


def _is_square(node: Node) -> bool:
    if node.op == "Mul" and not node.domain:
        return node.inputs[0] is node.inputs[1]
    return node.op == "Pow" and not node.domain and scalar_of(node.inputs[1]) == 2.0


def _with_parts(view: View) -> View:
    """Powers as slices of the spectrum see them."""
    return View(view.storage, view.dtype, (*view.shape, 2), (*view.strides, 0), view.offset)


def _without_parts(view: View | None) -> View | None:
    return view and View(view.storage, view.dtype, view.shape[:-1], view.strides[:-1], view.offset)
