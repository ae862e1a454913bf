"""The norm of summed embeddings from tables of 8-bit codes: QEmbedLayerNormalization decodes the rows asked for."""

from __future__ import annotations

import math

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.lower.fused_contrib import mask_lengths
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.normalization import MICROSOFT, normalized
from ranvier.codegen.definitions.lower.quantization import real
from ranvier.codegen.definitions.lower.tables import looked_up, part
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import BYTES
from ranvier.dtypes import DType
from ranvier.graph.ir import Value

FLOAT = DType.float32
_TYPES = BYTES | {FLOAT, DType.int32}
# codes, and where their scale and zero point are
_WORDS, _POSITIONS, _SEGMENTS = (2, 8, 13), (3, 9, 14), (4, 10, 15)
_GAMMA, _BETA = (5, 11, 16), (6, 12, 17)


@lowers("QEmbedLayerNormalization", domain=MICROSOFT, dtypes=_TYPES)
def qembed_layer_norm(n: NodeView, b: Definitions) -> None:
    batch, time, hidden = _sizes(n)
    terms = [
        _decoded(n, b, looked_up(n, b, _WORDS[0], n.input(0)), _WORDS),
        _decoded(n, b, part(b, n.input(_POSITIONS[0]), 0, 0, time), _POSITIONS),
    ]
    if _has_segments(n):
        terms.append(_decoded(n, b, looked_up(n, b, _SEGMENTS[0], n.input(1)), _SEGMENTS))
    gamma, beta = (_decoded(n, b, n.input(which[0]), which) for which in (_GAMMA, _BETA))
    normalized(
        b,
        terms[0],
        (2,),
        float(n.attr("epsilon", 1e-12)),
        gamma,
        beta,
        n.outputs[0],
        domain=(batch, time, hidden),
        dtype=FLOAT,
        added=terms[1:],
    )
    if n.wants(1):
        mask_lengths(n, b, batch)


def _has_segments(n: NodeView) -> bool:
    return n.has(1) and n.has(_SEGMENTS[0]) and n.has(_SEGMENTS[1])


def _sizes(n: NodeView) -> tuple[int, int, int]:
    """Batch, tokens and width; Declined where the tables are not for them."""
    if n.rank(0) != 2 or n.rank(2) != 2 or (n.has(7) and (n.rank(7) != 2 or n.shape(7)[0] != n.shape(0)[0])):
        raise Declined(f"{n.op}: tokens of {list(n.shape(0))}, words of {list(n.shape(2))}")
    (batch, time), hidden = n.shape(0), n.shape(2)[1]
    tables = [3, *([4] if _has_segments(n) else [])]
    if any(n.rank(k) != 2 or n.shape(k)[1] != hidden for k in tables) or n.shape(3)[0] < time:
        raise Declined(f"{n.op}: tables of {[list(n.shape(k)) for k in tables]} for {time} tokens of {hidden}")
    if (_has_segments(n) and n.shape(1) != (batch, time)) or n.shape(5) != (hidden,) or n.shape(6) != (hidden,):
        raise Declined(f"{n.op}: operands that do not fit {time} tokens of {hidden}")
    return batch, time, hidden


def _decoded(n: NodeView, b: Definitions, codes: Value, which: tuple[int, int, int]) -> Value:
    """The numbers of codes by the scale and the zero point of operands ``which``."""
    _, scale, zero = which
    given = [k for k in (scale, zero) if n.has(k)]
    if any(math.prod(n.shape(k)) != 1 for k in given):
        raise Declined(f"{n.op}: a table has one scale and one zero point")
    uses = [Use(codes), *(Use(n.input(k), ()) for k in given)]
    return b.pointwise(uses, lambda e: real(e[0], e[2] if len(e) > 2 else None, e[1]), FLOAT, shape=b.shape(codes))
