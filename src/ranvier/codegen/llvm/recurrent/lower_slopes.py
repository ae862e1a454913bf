"""From ``ranvier::LSTMSlopes`` to launches: recurrent weights in panels, then the way back through all steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.codegen.launch import At, Code, Launch
from ranvier.codegen.llvm.attention.micro import ELEMENTS, most_rows, most_vectors, product
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.recurrent import slopes
from ranvier.codegen.llvm.recurrent.weights import Arrangement, Placed, place
from ranvier.codegen.llvm.recurrent.work import batch_parts, moment_ns, moments_at_once, shares_steps
from ranvier.codegen.storage import Storage, View
from ranvier.records import dataclass


@dataclass(frozen=True)
class Kept:
    """What the way back reads, dense: absent operands are None."""

    r: View  # [directions, 4 * hidden, hidden]
    gates: View  # [steps, directions, batch, 4 * hidden]
    cells: View  # [steps, directions, batch, hidden]
    initial_c: View | None = None  # states: [directions, batch, hidden]
    peepholes: View | None = None  # [directions, 3 * hidden]
    grad_y: View | None = None  # as cells
    grad_h: View | None = None
    grad_c: View | None = None


@dataclass(frozen=True)
class Slopes:
    """Where to write; None for what nobody wants."""

    gates: View
    initial_h: View | None = None
    initial_c: View | None = None


def lstm_slopes(given: Kept, wanted: Slopes, backwards: Sequence[bool], isa: Isa, *, threads: int = 1) -> list[Launch]:
    """Slopes of all gates and of the first states; ``backwards`` says which directions ran from the end."""
    steps, ways, batch, hidden = given.cells.shape
    if batch == 0 or hidden == 0:
        return []
    dtype = given.cells.dtype
    item, element = dtype.numpy.itemsize, ELEMENTS[dtype]
    lanes = isa.lanes(item)
    weights = ways * slopes.GATES * hidden * hidden
    lasts = moment_ns(weights, batch, item)
    shared = shares_steps(lasts, weights * item // ways, ways, batch, threads)
    tile_rows = batch if shared else -(-batch // batch_parts(ways, batch, threads))
    unit_vectors = min(most_vectors(min(tile_rows, 6), isa), -(-hidden // lanes))
    arrangement = Arrangement(hidden, lanes, unit_vectors, ((0,),))
    block = most_rows(unit_vectors, isa)
    block = -(-tile_rows // -(-tile_rows // block))
    if tile_rows < batch:  # only the last tile may leave rows over
        tile_rows = -(-tile_rows // block) * block
    batch_tiles = -(-batch // tile_rows)
    panels, launches = _panels(given.r, arrangement, isa)
    holes, more = _holes(given.peepholes, arrangement, isa)
    parts, part_panels = (arrangement.panels, 1) if shared else (1, arrangement.panels)
    span = 1 if shared else moments_at_once(lasts * tile_rows / batch)
    optional = {
        "first_memory": given.initial_c,
        "grad_y": given.grad_y,
        "grad_hidden": given.grad_h,
        "grad_memory": given.grad_c,
        "to_hidden": wanted.initial_h,
        "to_memory": wanted.initial_c,
    }
    numbers = {
        "steps": steps,
        "hidden": hidden,
        "padded": arrangement.padded,
        "panels": arrangement.panels,
        "unit_vectors": unit_vectors,
        "row_block": block,
        "groups": ways * batch_tiles,
        "parts": parts,
        "part_panels": part_panels,
        "span": span,
        "batch": batch,
        "batch_tiles": batch_tiles,
        "tile_rows": tile_rows,
        "backwards": sum(1 << d for d, back in enumerate(backwards) if back),
        "direction": batch * hidden,
        "step": ways * batch * hidden,
        "weight_direction": arrangement.padded * slopes.GATES * hidden,
        **{f"has_{name}": int(view is not None) for name, view in optional.items()},
    }
    inner = Storage.temporary(ways * batch_tiles * tile_rows * arrangement.padded * item)
    rest = batch % tile_rows % block or tile_rows % block or block
    views = {"gates": given.gates, "cells": given.cells, **optional, "slopes": wanted.gates}
    places: dict[str, At | Code] = {
        "weights": At(panels),
        "holes": At(holes),
        **{name: At(panels) if view is None else At.of(view) for name, view in views.items()},
        "state": At(inner),
        "product": Code(product(element, block, unit_vectors)),
        "last_product": Code(product(element, rest, unit_vectors)),
    }
    written = (wanted.gates, wanted.initial_h, wanted.initial_c)
    loop = Launch(
        slopes.spec(element, given.peepholes is not None),
        tuple(places[name] for name in slopes.BUFFERS),
        tuple(numbers[name] for name in slopes.DIMS),
        tiles=ways * batch_tiles * parts,
        writes=(inner, *(v.storage for v in written if v is not None)),
        scratch=tile_rows * unit_vectors * lanes * item,
        flops=2.0 * steps * batch * weights,
        traffic=float(steps * weights * item),
        label="LSTM",
        rounds=-(-(steps + 1) // span),
    )
    return [*launches, *more, loop]


def _panels(r: View, arrangement: Arrangement, isa: Isa) -> tuple[Storage, list[Launch]]:
    """All rows of R, in panels of columns."""
    ways, depth, _ = r.shape
    width = arrangement.width(0)
    parts = []
    for d in range(ways):
        turned = View(r.storage, r.dtype, r.shape[:0:-1], r.strides[:0:-1], r.offset + d * r.strides[0])
        offset = d * arrangement.padded * depth
        parts.append(Placed(turned, arrangement.table(0), None, width, width * depth, width, offset))
    return place(parts, ways * arrangement.padded * depth, r.dtype, isa)


def _holes(peepholes: View | None, arrangement: Arrangement, isa: Isa) -> tuple[Storage, list[Launch]]:
    """Peepholes of all directions, each filled up to whole panels."""
    if peepholes is None:
        return Storage.packed(np.zeros(1, np.float64)), []
    ways = peepholes.shape[0]
    hidden = arrangement.hidden
    table = np.concatenate([arrangement.unit_table(start) for start in (0, hidden, 2 * hidden)])
    parts = []
    for d in range(ways):
        column = View(
            peepholes.storage,
            peepholes.dtype,
            (3 * hidden, 1),
            (peepholes.strides[1], 1),
            peepholes.offset + d * peepholes.strides[0],
        )
        parts.append(Placed(column, table, None, len(table), 0, 1, d * len(table)))
    return place(parts, ways * len(table), peepholes.dtype, isa)
