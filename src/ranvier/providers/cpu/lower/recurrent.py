"""LSTM, GRU, RNN, and Fourier transforms: templates that fill dense results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import HALVES, cast, clamp, op
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import fourier
from ranvier.codegen.llvm.recurrent import Kept, Layer, Operands, Results, Slopes, lstm_slopes, recurrent, supported
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops.own.lstm import DOMAIN
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

_LAYERS = ("LSTM", "GRU", "RNN")
_LENGTHS = 4
_OPERANDS = 8  # X, W, R, B, sequence_lens, initial_h, initial_c, P
_STATES = 3  # results of an LSTM; those after them are kept for its gradient


def _layer_check(node: Node) -> str | None:
    x = node.input(0)
    dtype = getattr(x.type, "dtype", None) if x is not None else None
    return supported(node.op, node.attrs, DType.float32 if dtype in HALVES or dtype is None else dtype)  # type: ignore[arg-type]


@lowers(*_LAYERS, check=_layer_check, dtypes=FLOATS | {DType.int32})
def layer(n: NodeView, b: Definitions) -> None:
    _layer(n, b, Layer.of(n.op, n.attrs), 3)  # type: ignore[arg-type]


@lowers("LSTMTraining", domain=DOMAIN, dtypes=FLOATS)
def training_layer(n: NodeView, b: Definitions) -> None:
    """The same layer, which keeps gates and cells too."""
    _layer(n, b, Layer.of("LSTM", n.attrs), 5)


def _layer(n: NodeView, b: Definitions, made: Layer, results: int) -> None:
    places: list[int | None] = [None] * _OPERANDS
    sources: list[Value] = []
    for k in range(len(n.inputs)):
        if not n.has(k):
            continue
        places[k] = len(sources)
        value = n.input(k)
        if k == _LENGTHS:
            value = _lengths(n, b, value, n.shape(0)[1 if n.attr("layout", 0) else 0])
        sources.append(_widened(b, value))
    wanted = [k for k in range(results) if n.wants(k) or k >= _STATES]

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        given = [None if p is None else views[p] for p in places]
        assert given[0] is not None and given[1] is not None and given[2] is not None
        operands = Operands(given[0], given[1], given[2], *given[3:])
        where = dict(zip(wanted, outs))
        narrow = r.multiplies is DType.bfloat16
        targets = Results(*(where.get(k) for k in range(5)))
        return recurrent(made, operands, targets, r.isa, threads=r.threads, narrow=narrow)

    _filled(n, b, sources, realise, wanted)


@lowers("LSTMSlopes", domain=DOMAIN, dtypes=FLOATS)
def slopes(n: NodeView, b: Definitions) -> None:
    present = [k for k in range(len(n.inputs)) if n.has(k)]
    sources = [_widened(b, n.input(k)) for k in present]
    wanted = [k for k in range(3) if k == 0 or n.wants(k)]
    backwards = Layer("LSTM", str(n.attr("direction", "forward"))).backwards

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        given, where = dict(zip(present, views)), dict(zip(wanted, outs))
        kept = Kept(given[0], given[1], given[2], *(given.get(k) for k in range(3, 8)))
        targets = Slopes(where[0], where.get(1), where.get(2))
        return lstm_slopes(kept, targets, backwards, r.isa, threads=r.threads)

    _filled(n, b, sources, realise, wanted)


def _widened(b: Definitions, value: Value) -> Value:
    if b.dtype(value) not in HALVES:
        return value
    return b.pointwise([value], lambda e: cast(e[0], DType.float32), DType.float32)


def _filled(
    n: NodeView,
    b: Definitions,
    sources: Sequence[Value],
    realise: Callable[[Realiser, list[View], list[View]], Sequence[Launch]],
    wanted: Sequence[int],
) -> None:
    """The wanted results by one template, which computes in float32 where they are narrower."""
    dtype = n.dtype(0)
    work = DType.float32 if dtype in HALVES else dtype
    shapes = [(work, n.out_shape(k)) for k in wanted]
    if dtype not in HALVES:
        b.opaque(sources, realise, shapes, [n.outputs[k] for k in wanted], rounds=dtype is DType.float32)
        return
    for k, value in zip(wanted, b.opaque(sources, realise, shapes)):
        b.pointwise([value], lambda e: cast(e[0], dtype), dtype, out=n.outputs[k])


def _lengths(n: NodeView, b: Definitions, lengths: Value, steps: int) -> Value:
    """Lengths of sequences within their bounds; others end the run with an error, and memory is safe before that."""
    dtype = b.dtype(lengths)

    def outside(x: list[Expr]) -> RowBody:
        beyond = op("not", between(Size(0), cast(x[0], DType.int64), Size(steps + 1)), dtype=DType.bool)
        return RowBody([Reduce("or", beyond, DType.bool)], finals={0: Result(0, DType.bool)})

    def within(x: list[Expr]) -> Expr:
        return cast(clamp(cast(x[0], DType.int64), Size(0), Size(steps)), dtype)

    if 0 in b.shape(lengths):
        return lengths
    (flag,) = b.rows([lengths], [0], outside, [(DType.bool, False)], keepdims=False)
    b.check(flag, f"{n.op}: sequence_lens must lie in 0 to {steps}")
    return b.pointwise([lengths], within, dtype)


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

    b.opaque(sources, realise, [(n.dtype(0), n.out_shape())], [n.outputs[0]], dense=False, widens=True)
