"""From an ONNX recurrent layer to launches: one product for the inputs of all steps, then the time loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, Code, Launch
from ranvier.codegen.llvm import gemm
from ranvier.codegen.llvm.attention.micro import ELEMENTS, most_rows, most_vectors, pairs, product
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.recurrent import steps
from ranvier.codegen.llvm.recurrent.cells import DEFAULTS, GATES, PARAMETERS, Cell, Kind, activations_of, phases_of
from ranvier.codegen.llvm.recurrent.weights import Arrangement, Placed, place
from ranvier.codegen.llvm.recurrent.work import FEW_ROWS, batch_parts, moment_ns, moments_at_once, shares_steps
from ranvier.codegen.loops.ir import Epilogue, Load, Op, Operand, Result
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class Layer:
    """Attributes of an LSTM, GRU or RNN node."""

    kind: Kind
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    activation_alpha: tuple[float, ...] = ()
    activation_beta: tuple[float, ...] = ()
    clip: float = 0.0
    input_forget: bool = False
    linear_before_reset: bool = False
    layout: int = 0

    @classmethod
    def of(cls, kind: Kind, attrs: Mapping[str, Any]) -> Layer:
        """From a node's attributes by their ONNX names; what does not concern code is ignored."""
        return cls(
            kind,
            str(attrs.get("direction") or "forward"),
            tuple(attrs.get("activations") or ()),
            tuple(attrs.get("activation_alpha") or ()),
            tuple(attrs.get("activation_beta") or ()),
            float(attrs.get("clip") or 0.0),
            bool(attrs.get("input_forget")),
            bool(attrs.get("linear_before_reset")),
            int(attrs.get("layout") or 0),
        )

    @property
    def backwards(self) -> tuple[bool, ...]:
        return _BACKWARDS[self.direction]


@dataclass(frozen=True)
class Operands:
    """Tensors of a layer as ONNX shapes them (in the node's layout); absent ones are None.

    The last axis of states and outputs is contiguous.
    """

    x: View
    w: View
    r: View
    bias: View | None = None
    lengths: View | None = None
    initial_h: View | None = None
    initial_c: View | None = None
    peepholes: View | None = None


@dataclass(frozen=True)
class Results:
    """Where to write; None for what nobody wants."""

    y: View | None = None
    y_h: View | None = None
    y_c: View | None = None
    # LSTM, both or none, dense: [steps, directions, batch, hidden], and four times as wide
    cells: View | None = None
    gates: View | None = None


def supported(kind: Kind, attrs: Mapping[str, Any], dtype: DType = DType.float32) -> str | None:
    """None where :func:`recurrent` can compile such a node, or the reason why not."""
    layer = Layer.of(kind, attrs)
    if dtype not in ELEMENTS:
        return f"{kind} in {dtype.name}"
    if layer.direction not in _BACKWARDS:
        return f"{kind} with direction {layer.direction!r}"
    unknown = [a for a in layer.activations if a.lower() not in PARAMETERS]
    if unknown:
        return f"{kind} with activation {unknown[0]!r}"
    if layer.activations and len(layer.activations) < len(DEFAULTS[kind]) * len(layer.backwards):
        return f"{kind} with {len(layer.activations)} activations"
    return None


def recurrent(
    layer: Layer, given: Operands, wanted: Results, isa: Isa, *, threads: int = 1, narrow: bool = False
) -> list[Launch]:
    """The whole layer. Weights that are constants are arranged now, others whenever the launches run.

    ``narrow``: recurrent weights that are float32 constants may be rounded to bfloat16. Every step reads all of them,
    which takes longer than multiplying; states and sums stay float32.
    """
    plan = _Plan.of(layer, given, wanted, isa, threads, narrow)
    if plan.batch == 0 or plan.hidden == 0:
        return []
    inputs, launches = _projected(plan)
    return launches + _loops(plan, inputs)


@dataclass(frozen=True)
class _Plan:
    layer: Layer
    given: Operands
    wanted: Results
    isa: Isa
    threads: int
    steps: int
    batch: int
    hidden: int
    row_block: int
    tile_rows: int
    arrangement: Arrangement
    paired: bool  # recurrent weights are bfloat16, two in 32 bits
    shared: bool  # threads share every step
    moment_ns: float  # how long a phase of a step takes one thread, roughly

    @classmethod
    def of(cls, layer: Layer, given: Operands, wanted: Results, isa: Isa, threads: int, narrow: bool) -> _Plan:
        steps_, batch = given.x.shape[:2] if layer.layout == 0 else given.x.shape[1::-1]
        hidden = given.r.shape[2]
        phases = phases_of(layer.kind, layer.linear_before_reset)
        dtype = given.x.dtype.numpy
        lanes = isa.lanes(dtype.itemsize)
        directions, gates = len(layer.backwards), max(map(len, phases))
        weights = directions * GATES[layer.kind] * hidden * hidden
        paired = narrow and given.r.storage.array is not None and given.x.dtype is DType.float32
        item = dtype.itemsize // 2 if paired else dtype.itemsize
        lasts = moment_ns(weights, batch, item) / len(phases)
        shared = shares_steps(lasts, weights * item // directions, directions, batch, threads)
        tiles = 1 if shared else batch_parts(directions, batch, threads)
        tile_rows = -(-max(batch, 1) // tiles)
        most = most_vectors(min(tile_rows, 6), isa)
        unit_vectors = max(1, min(most // gates, -(-hidden // lanes)))
        if any(unit_vectors * len(phase) % 2 for phase in phases):
            paired = paired and unit_vectors > 1
            unit_vectors -= unit_vectors % 2 if paired else 0
        arrangement = Arrangement(hidden, lanes, unit_vectors, phases)
        if shared:  # few units and many sequences: both are split
            parts = max(1, min(-(-2 * threads // max(1, directions * arrangement.panels)), batch // FEW_ROWS))
            tile_rows = -(-batch // parts)
        block = most_rows(unit_vectors * gates, isa)
        block = -(-tile_rows // -(-tile_rows // block))
        if tile_rows < batch:  # only the last tile may leave rows over
            tile_rows = -(-tile_rows // block) * block
        sizes = (steps_, batch, hidden, block, tile_rows)
        return cls(layer, given, wanted, isa, threads, *sizes, arrangement, paired, shared, lasts)

    @property
    def directions(self) -> int:
        return len(self.layer.backwards)

    @property
    def dtype(self) -> DType:
        return self.given.x.dtype


def _direction(view: View, d: int) -> View:
    """One direction of a weight; a vector becomes a matrix of one column."""
    shape, strides = view.shape[1:], view.strides[1:]
    if len(shape) == 1:
        shape, strides = (*shape, 1), (*strides, 1)
    return View(view.storage, view.dtype, shape, strides, view.offset + d * view.strides[0])


def _projected(plan: _Plan) -> tuple[View, list[Launch]]:
    """Inputs of all steps times W, plus the biases that may be added up front: ``[…, …, directions * columns]``."""
    given, arrangement = plan.given, plan.arrangement
    columns, width = arrangement.columns, given.w.shape[2]
    total = plan.directions * columns
    table = arrangement.whole_table()
    parts = [
        Placed(_direction(given.w, d), table, None, columns, 0, total, d * columns) for d in range(plan.directions)
    ]
    storage, launches = place(parts, max(1, width * total), plan.dtype, plan.isa)
    out = View.temporary(plan.dtype, (*given.x.shape[:2], total))
    weights: View | gemm.PackedB = View.dense(storage, plan.dtype, (width, total))
    if storage.array is not None and width:
        array = storage.array.reshape(width, total)
        weights = gemm.pack_b(array, plan.isa, rows_hint=plan.steps * plan.batch)
    epilogue = None
    if given.bias is not None:
        bias, more = _bias(plan, table)
        launches = launches + more
        result, load = Result(0, plan.dtype), Load(0, plan.dtype)
        epilogue = Epilogue(Op("add", (result, load), plan.dtype), (Operand(bias, (0, 0, 1)),))
    return out, launches + gemm.matmul(given.x, weights, out, plan.isa, epilogue=epilogue, threads=plan.threads)


def _bias(plan: _Plan, table: np.ndarray[Any, Any]) -> tuple[View, list[Launch]]:
    """Input and recurrent bias together, except where a GRU's reset gate has to come between."""
    assert plan.given.bias is not None
    rows = GATES[plan.layer.kind] * plan.hidden
    second = np.where(table >= 0, table + rows, -1)
    if plan.layer.kind == "GRU" and plan.layer.linear_before_reset:
        second = np.where(table >= 2 * plan.hidden, -1, second)
    columns = len(table)
    parts = [
        Placed(_direction(plan.given.bias, d), table, second, columns, 0, 1, d * columns)
        for d in range(plan.directions)
    ]
    storage, launches = place(parts, plan.directions * columns, plan.dtype, plan.isa)
    return View.dense(storage, plan.dtype, (plan.directions * columns,)), launches


def _recurrent_weights(plan: _Plan) -> tuple[Storage, list[Launch], int, int]:
    """R in panels, with the distances between directions and between phases."""
    arrangement, hidden = plan.arrangement, plan.hidden
    phases = range(len(arrangement.phases))
    starts = [sum(len(arrangement.table(q)) for q in range(p)) * hidden for p in phases]
    per_direction = arrangement.columns * hidden
    parts = []
    for d in range(plan.directions):
        for p in phases:
            width = arrangement.width(p)
            matrix = _direction(plan.given.r, d)
            offset = d * per_direction + starts[p]
            parts.append(Placed(matrix, arrangement.table(p), None, width, width * hidden, width, offset))
    storage, launches = place(parts, plan.directions * per_direction, plan.dtype, plan.isa)
    if plan.paired:
        assert storage.array is not None
        return Storage.packed(pairs(storage.array, arrangement.lanes)), launches, per_direction // 2, starts[-1] // 2
    return storage, launches, per_direction, starts[-1]


def _extra(plan: _Plan) -> tuple[Storage, list[Launch], int]:
    """Vectors over units that the gates need: peepholes, or the recurrent bias that the reset gate scales."""
    hidden, arrangement = plan.hidden, plan.arrangement
    source: View | None = None
    starts: list[int] = []
    if plan.layer.kind == "LSTM" and plan.given.peepholes is not None:
        source, starts = plan.given.peepholes, [0, hidden, 2 * hidden]
    elif plan.layer.kind == "GRU" and plan.layer.linear_before_reset:
        source, starts = plan.given.bias, [5 * hidden]
    if source is None:
        zeros = np.zeros(arrangement.padded, plan.dtype.numpy)
        return Storage.packed(zeros), [], 0
    table = np.concatenate([arrangement.unit_table(s) for s in starts])
    each = len(table)
    parts = [Placed(_direction(source, d), table, None, each, 0, 1, d * each) for d in range(plan.directions)]
    storage, launches = place(parts, plan.directions * each, plan.dtype, plan.isa)
    return storage, launches, each


def _state_strides(name: str, view: View | None, layout: int) -> dict[str, int]:
    """Strides over directions and batch of ``[directions, batch, hidden]``, or batch first."""
    strides = (0, 0, 1) if view is None else view.strides
    assert strides[2] == 1 or view is None or view.shape[2] == 1, f"{name}: units are not neighbours"
    direction, row = strides[:2] if layout == 0 else strides[1::-1]
    return {f"has_{name}": int(view is not None), f"{name}_direction": direction, f"{name}_row": row}


def _loops(plan: _Plan, inputs: View) -> list[Launch]:
    layer, given, wanted, arrangement = plan.layer, plan.given, plan.wanted, plan.arrangement
    weights, launches, per_direction, second_phase = _recurrent_weights(plan)
    extra, more, extra_direction = _extra(plan)
    launches = [*launches, *more]
    functions = activations_of(
        layer.kind, layer.activations, layer.activation_alpha, layer.activation_beta, plan.directions
    )
    cell = Cell(
        layer.kind,
        ELEMENTS[plan.dtype],
        functions[0],
        layer.clip,
        layer.input_forget and layer.kind == "LSTM",
        given.peepholes is not None and layer.kind == "LSTM",
        layer.linear_before_reset and layer.kind == "GRU",
        given.lengths is not None and plan.steps > 0,
        plan.paired,
        wanted.gates is not None,
    )
    y = wanted.y
    y_strides = (0, 0, 0, 1) if y is None else y.strides
    y_step, y_direction, y_row = y_strides[:3] if layer.layout == 0 else (y_strides[1], y_strides[2], y_strides[0])
    input_step, input_row = inputs.strides[:2] if layer.layout == 0 else inputs.strides[1::-1]
    batch_tiles = -(-plan.batch // plan.tile_rows)
    parts, part_panels = (arrangement.panels, 1) if plan.shared else (1, arrangement.panels)
    moments = plan.steps * len(arrangement.phases) + 2
    span = 1 if plan.shared else moments_at_once(plan.moment_ns * plan.tile_rows / plan.batch)
    numbers = {
        "steps": plan.steps,
        "hidden": plan.hidden,
        "padded": arrangement.padded,
        "panels": arrangement.panels,
        "unit_vectors": arrangement.unit_vectors,
        "row_block": plan.row_block,
        "parts": parts,
        "part_panels": part_panels,
        "moments": moments,
        "span": span,
        "turns": int(plan.isa.turns),
        "batch": plan.batch,
        "batch_tiles": batch_tiles,
        "tile_rows": plan.tile_rows,
        "backwards": sum(1 << d for d, back in enumerate(layer.backwards) if back),
        "input_step": input_step,
        "input_row": input_row,
        "input_direction": arrangement.columns,
        "weight_direction": per_direction,
        "weight_phase": second_phase,
        "extra_direction": extra_direction,
        **_state_strides("first_hidden", given.initial_h, layer.layout),
        **_state_strides("first_memory", given.initial_c, layer.layout),
        **_state_strides("y_hidden", wanted.y_h, layer.layout),
        **_state_strides("y_memory", wanted.y_c, layer.layout),
        "has_y": int(y is not None),
        "y_step": y_step,
        "y_direction": y_direction,
        "y_row": y_row,
        "kept_step": plan.directions * plan.batch * plan.hidden,
        "kept_direction": plan.batch * plan.hidden,
    }
    outside = (given.lengths, given.initial_h, given.initial_c, y, wanted.y_h, wanted.y_c)
    buffers: list[At | Code] = [At(inputs.storage), At(weights), At(extra)]
    buffers += [At(inputs.storage) if v is None else At.of(v) for v in outside]
    item = plan.dtype.numpy.itemsize
    group_bytes = steps.STATES * plan.tile_rows * arrangement.padded * item
    state = Storage.temporary(plan.directions * batch_tiles * group_bytes)
    buffers += [At(state), *_codes(plan, cell)]
    kept = [v for v in (wanted.gates, wanted.cells) if v is not None]
    buffers += [At.of(v) for v in kept] or [At(inputs.storage)] * 2
    widest = max(arrangement.width(p) for p in range(len(arrangement.phases)))
    scratch = plan.tile_rows * widest * item
    # directions with different functions are different code
    for first, count in (
        [(0, plan.directions)] if len(set(functions)) == 1 else [(d, 1) for d in range(plan.directions)]
    ):
        numbers["first_direction"], numbers["groups"] = first, count * batch_tiles
        launches.append(
            Launch(
                steps.spec(replace(cell, activations=functions[first])),
                tuple(buffers),
                tuple(numbers[n] for n in steps.DIMS),
                tiles=count * batch_tiles * parts,
                writes=(state, *(v.storage for v in (y, wanted.y_h, wanted.y_c, *kept) if v is not None)),
                scratch=scratch,
                flops=2.0 * count * plan.steps * plan.batch * arrangement.columns * plan.hidden,
                traffic=float(count * plan.steps * per_direction * item),
                label=layer.kind,
                rounds=-(-moments // span),
            )
        )
    return launches


def _codes(plan: _Plan, cell: Cell) -> list[At | Code]:
    rest = plan.batch % plan.tile_rows % plan.row_block or plan.tile_rows % plan.row_block or plan.row_block
    found: list[At | Code] = []
    for phase in (0, len(cell.phases) - 1):
        vectors = plan.arrangement.unit_vectors * len(cell.phases[phase])
        found += [Code(product(cell.element, rows, vectors, paired=cell.paired)) for rows in (plan.row_block, rest)]
    return found
