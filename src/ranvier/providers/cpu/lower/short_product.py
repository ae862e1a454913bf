"""Matrix products of 16-bit integers: MatMulInteger16."""

from __future__ import annotations

import numpy as np

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import cast
from ranvier.codegen.definitions.lower.contraction import MICROSOFT, matmul_of
from ranvier.codegen.definitions.lower.quantization import DERIVED
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.providers.cpu.lower.index import lowers

_SHORT = frozenset({DType.int16, DType.uint16})
_LONGEST = 1 << 20  # products of two 16-bit numbers, of which float64 holds every sum
_FEW = 4  # rows for which nothing is gained by packing the other matrix


@lowers("MatMulInteger16", domain=MICROSOFT, dtypes=_SHORT | {DType.int32, DType.uint32})
def matmul_integer16(n: NodeView, b: Definitions) -> None:
    """Exact modulo 2³²: by a product in float64 where that rounds no sum, else in loops of 32-bit integers."""
    left, right, target = n.shape(0), n.shape(1), n.out_dtype()
    fit = left and right and left[-1] == right[-2 if len(right) > 1 else 0]
    if not fit or any(1 not in pair and pair[0] != pair[1] for pair in zip(left[-3::-1], right[-3::-1])):
        raise Declined(f"{n.op}: matrices of {list(left)} and {list(right)} do not multiply")
    rows = left[-2] if len(left) > 1 else 1
    if rows <= _FEW or left[-1] > _LONGEST:
        x, y = (_converted(b, n.input(k), target) for k in range(2))
        matmul_of(n, b, x, y, n.out_shape(), n.outputs[0])
        return
    x, y = (_converted(b, n.input(k), DType.float64) for k in range(2))
    product = matmul_of(n, b, x, y, n.out_shape(), None)

    def wrapped(e: list[Expr]) -> Expr:
        return cast(cast(e[0], DType.int64), target)

    b.pointwise([product], wrapped, target, shape=n.out_shape(), out=n.outputs[0])


def _converted(b: Definitions, value: Value, dtype: DType) -> Value:
    """A matrix in another type; a constant stays one, the same array each time: what is packed is known by it."""
    if value.const is None:
        return b.pointwise([value], lambda e: cast(e[0], dtype), dtype)
    array = value.const.numpy()
    return b.constant(DERIVED.get([array], ("as", dtype.name), lambda: np.ascontiguousarray(array, dtype.numpy)))
