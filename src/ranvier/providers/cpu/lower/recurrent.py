"""LSTM, GRU, RNN: templates that fill dense results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.codegen.definitions.defs import RowBody
from ranvier.codegen.definitions.exprs import HALVES, cast, clamp, op
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.launch import Launch
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
