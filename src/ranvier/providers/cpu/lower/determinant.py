"""Determinants: Det."""

from __future__ import annotations

import math

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import cast
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.llvm.determinant import determinants
from ranvier.providers.cpu.lower.index import lowers


@lowers("Det", dtypes=FLOATS)
def det(n: NodeView, b: Definitions) -> None:
    shape, dtype = n.shape(0), n.dtype(0)
    wide = wide_type(dtype)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise Declined(f"Det: of shape {list(shape)}")
    count = math.prod(shape[:-2])
    matrices = b.reshape(n.input(0), (count, *shape[-2:]))
    if wide is not dtype:
        matrices = b.pointwise([matrices], lambda e: cast(e[0], wide), wide)
    (flat,) = b.opaque([matrices], lambda r, views, outs: determinants(views[0], outs[0]), [(wide, (count,))])
    if wide is not dtype:
        flat = b.pointwise([flat], lambda e: cast(e[0], dtype), dtype)
    b.reshape(flat, shape[:-2], out=n.outputs[0])
