"""Runs of nodes as kernels of their own: what the steps of a part become once its sizes are known.

Nodes are defined as for every device, and grouped as there. A node that would have a kernel to itself stays with torch,
whose kernels are compiled already, unless it is a product: then the fastest form is looked for. Whatever has no
definition in loops is torch's.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

from ranvier.codegen.definitions.define import lower_node
from ranvier.codegen.definitions.defs import Alias, Contraction, Declined, Def, NeedsValue
from ranvier.codegen.definitions.exprs import HALVES
from ranvier.codegen.definitions.groups import group
from ranvier.codegen.definitions.lower.index import SHARED
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.reasons import reason_against
from ranvier.codegen.storage import View
from ranvier.codegen.triton.schedule import PROCESSORS
from ranvier.errors import RanvierError
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.logs import logger, warn_once
from ranvier.providers.cuda.attending import attend
from ranvier.providers.cuda.chains import Trial, chain
from ranvier.providers.cuda.choosing import Chooser
from ranvier.providers.cuda.merging import Shelf, merge, pass_on
from ranvier.providers.cuda.patterns import Defines, Steps
from ranvier.providers.cuda.place import Gpu, Place
from ranvier.providers.cuda.products import CudaProducts
from ranvier.providers.cuda.realise import CudaRealiser, LoopStep, NestStep
from ranvier.providers.cuda.steps import Env, NodeStep, Step
from ranvier.providers.cuda.together import gathered

# families whose loops do as well as a library's kernels, and better in company
_FAMILIES = frozenset(
    (
        *("activation", "elementwise", "fused_contrib", "losses", "movement", "narrow_cast", "normalization", "rotary"),
        *("contraction", "convolution", "optimizers", "qlinear", "quantization", "reduction", "views"),
    )
)
_PRODUCTS = frozenset({"contraction", "convolution"})
_BETTER = frozenset({"normalization", "reduction"})  # than a library's kernels, without company too
_LONGEST = 16384  # elements of a row for which that holds
_SEVERAL = 4  # steps of a kind that are worth a kernel for all of them
_WIDE, _HIGH = 64, 64  # the least matrix of which columns are summed
_LONG = 4096  # elements of a sum that is one of few
_MANY = 1024  # rows from which on a norm takes the sums behind a product with it for less than the product does


def problem(place: Place) -> str | None:
    """Why Triton cannot be used here; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not isinstance(place, Gpu) and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no GPU to compile for, and TRITON_INTERPRET is not 1"
    return None


def specialiser(place: Place, wanted: bool | None) -> Specialiser | None:
    """What makes kernels for parts on this device; by itself (``wanted`` is None) where that is a GPU."""
    if wanted is False or (wanted is None and not place.captures):
        return None
    reason = problem(place)
    if reason is None:
        return Specialiser(place)
    if wanted:
        warn_once(f"triton: {reason}", f"no generated kernels on {place.device}: {reason}")
    return None


class Specialiser:
    """``specialise(steps, env, outputs)`` after a first run that left its tensors in ``env``. ``lone``: nodes get a
    kernel even where it would be of that node alone. ``prefer``: the form of products, by the beginning of its name."""

    def __init__(self, place: Place, *, lone: bool = False, prefer: str | None = None) -> None:
        self._place = place
        self._lone = lone
        self._chooser = Chooser(place, prefer)
        self._shelf = Shelf(place)

    def __call__(self, steps: Sequence[Step], env: Env, outputs: Sequence[Value]) -> list[Step]:
        try:
            return self._specialised(steps, env, outputs)
        except RanvierError as error:
            logger.info("a part stays with torch: %s", error)
            return list(steps)

    def _specialised(self, steps: Sequence[Step], env: Env, outputs: Sequence[Value]) -> list[Step]:
        rewritten = Steps(steps, env, outputs)
        pass_on(rewritten)
        merge(rewritten, self._shelf)
        attend(rewritten)
        steps = rewritten.left()
        written = {v for step in steps for v in step.writes}
        read = dict.fromkeys(v for step in steps for v in step.reads)
        inputs = [v for v in [*read, *outputs] if v not in written and v in env.tensors]
        inputs = list(dict.fromkeys(inputs))
        alone = _before_norms(rewritten, steps)
        made = _define(steps, env, inputs, alone)
        given = (inputs, outputs, env.tensors, self._place)
        lonely = set() if self._lone else _without_company(made, steps, outputs)
        together = _together(made, given) if lonely else set()
        while lonely - together:
            alone |= lonely - together
            made = _define(steps, env, inputs, alone)
            lonely = _without_company(made, steps, outputs)
        if not made.loops:
            return list(steps)
        how: dict[str, Any] = {"held": made.held, "chooser": self._chooser, "origin": made.origin}
        realised = chain(CudaRealiser(made.program, *given, **how).run())
        found = gathered([step.printed() if isinstance(step, NestStep) else step for step in realised])
        for step in found:
            if isinstance(step, LoopStep):
                self._chooser.compiles(step.printed)
        self._chooser.start()
        return found


class _Defined:
    """The definitions of steps, and from which step each is."""

    def __init__(self, program: Definitions) -> None:
        self.program = program
        self.origin: dict[int, int] = {}  # of definitions, by identity
        self.loops: set[int] = set()  # steps that are defined in loops
        self.held: dict[Value, Any] = {}  # constants in the form that steps want


def _define(steps: Sequence[Step], env: Env, inputs: Sequence[Value], alone: set[int]) -> _Defined:
    program = Definitions(CudaProducts())
    made = _Defined(program)
    for value in inputs:
        program.types[value] = _type(value, env)
    program.known = {v: a for v, a in env.host.items() if v not in program.types}
    for value, array in program.known.items():
        program.types[value] = TensorType(value.type.dtype, array.shape)  # type: ignore[union-attr]
    for k, step in enumerate(steps):
        for value in step.writes:
            if value in env.tensors:
                program.types[value] = _type(value, env)
        start = len(program.defs), len(program.checks), len(program.draws)
        if k not in alone and _defined(step, program, made.held):
            made.loops.add(k)
        else:
            del program.defs[start[0] :], program.checks[start[1] :], program.draws[start[2] :]
            _by_torch(step, program, env)
        made.origin.update((id(each), k) for each in program.defs[start[0] :])
    return made


def _type(value: Value, env: Env) -> TensorType:
    dtype = value.type.dtype if isinstance(value.type, TensorType) else None
    return TensorType(dtype, tuple(env.tensors[value].shape))


def _defined(step: Step, program: Definitions, held: dict[Value, Any]) -> bool:
    if isinstance(step, NodeStep):
        return _in_loops(step, program, held)
    if not isinstance(step, Defines):
        return False
    held.update(step.held)
    for value in step.held:
        program.types[value] = value.type  # type: ignore[assignment]
    program.label = step.label
    try:
        step.define(program)
    except Declined:
        return False
    return True


def _in_loops(step: NodeStep, program: Definitions, held: dict[Value, Any]) -> bool:
    node, drawn = step.node, len(program.draws)
    family = SHARED.modules.get((node.domain, node.op))
    if family not in _FAMILIES or reason_against(node, SHARED) is not None:
        return False
    if any(v not in program.types for v in node.outputs) or any(
        v is not None and v not in program.types and v.const is None for v in node.inputs
    ):
        return False
    if family in _PRODUCTS and program.dtype(node.output) not in HALVES:
        return False
    for value in node.inputs:
        if value is not None and value not in program.types and value.const is not None:
            program.types[value] = value.const.type
    prepared = [(node.input(k), tensor) for k, tensor in step.prepared.items()]
    held.update((v, t) for v, t in prepared if v is not None and tuple(t.shape) == program.shape(v))
    try:
        lower_node(node, program, SHARED)
    except (Declined, NeedsValue, RanvierError):
        return False
    # results of constants alone are there already, where torch made them
    folded = [v for v in node.outputs if program.known.pop(v, None) is not None]
    return len(program.draws) == drawn and not folded


def _by_torch(step: Step, program: Definitions, env: Env) -> None:
    values = tuple(dict.fromkeys(v for v in step.reads if v in program.types))
    results = [v for v in step.writes if v in env.tensors]

    def realise(r: CudaRealiser, views: list[View], outs: list[View]) -> tuple[()]:
        r.by_torch(step, values, views)
        return ()

    program.label = step.label
    outs = [(program.dtype(v), program.shape(v)) for v in results]
    program.opaque(values, realise, outs, results, dense=False)


def _together(made: _Defined, given: tuple[Any, ...]) -> set[int]:
    """Steps whose loops can be done together with those of others although each is needed elsewhere too."""
    trial = Trial(made.program, *given, held=made.held, origin=made.origin)
    return {k for step in chain(trial.run()) if isinstance(step, NestStep) and step.chained for k in step.origin}


def _without_company(made: _Defined, steps: Sequence[Step], outputs: Sequence[Value]) -> set[int]:
    """Steps in loops none of which is computed together with another step's; views cost nothing and may stay."""
    flags = [check.flag for check in made.program.checks]
    accompanied: set[int] = set()
    kernels: dict[int, int] = {}
    for each in group(made.program, [*outputs, *flags]):
        from_steps = {made.origin[id(d)] for d in each.defs}
        if len(from_steps) > 1:
            accompanied |= from_steps
        elif not _is_view(each.defs):
            (k,) = from_steps
            kernels[k] = kernels.get(k, 0) + 1
    products = {made.origin[id(d)] for d in made.program.defs if isinstance(d, Contraction)}
    alone = {k for k in kernels if k in made.loops and k not in accompanied and k not in products}
    return {k for k in alone if not _is_better(steps[k], made.program)} - _like_many(alone, steps, outputs)


def _like_many(alone: set[int], steps: Sequence[Step], outputs: Sequence[Value]) -> set[int]:
    """Steps that do the same to other operands than several others, for results that nobody waits for: one launch for
    all of them, later."""
    kinds: dict[object, set[int]] = {}
    for k in alone:
        step = steps[k]
        if not isinstance(step, NodeStep) or any(v not in outputs for v in step.writes):
            continue
        if SHARED.modules.get((step.node.domain, step.node.op)) == "elementwise":
            kinds.setdefault((step.node.op, str(step.node.output.type)), set()).add(k)
    return {k for same in kinds.values() if len(same) >= _SEVERAL for k in same}


def _is_better(step: Step, program: Definitions) -> bool:
    if not isinstance(step, NodeStep):
        return True
    node = step.node
    shape = program.shape(node.output)
    if _sums_much(node, program):
        return True
    in_family = SHARED.modules.get((node.domain, node.op)) in _BETTER
    return in_family and bool(shape) and 1 < max(shape) <= _LONGEST and program.dtype(node.output) in HALVES


def _sums_much(node: Node, program: Definitions) -> bool:
    """Sums of many rows, as of a bias's gradients, or few sums of many elements each: they are made in parts by so many
    programs as there is room for, which libraries are not good at."""
    source = node.input(0)
    if node.op not in ("ReduceSum", "ReduceMean") or node.domain or source is None:
        return False
    given, left = program.shape(source), program.shape(node.output)
    results = math.prod(left)
    if not program.dtype(source).is_float or not results or not given:
        return False
    each = math.prod(given) // results
    columns = results == given[-1] >= _WIDE and left[-1] == given[-1] and each >= _HIGH
    return columns or (1 < results <= PROCESSORS and each >= _LONG)


def _before_norms(found: Steps, steps: Sequence[Step]) -> set[int]:
    """Products of many rows with sums behind them that only a norm reads."""
    alone: set[int] = set()
    for k, step in enumerate(steps):
        if not isinstance(step, NodeStep) or step.node.op not in ("MatMul", "Gemm") or step.node.domain:
            continue
        tensor = found.tensor(step.node.output)
        if tensor is None or tensor.ndim < 2 or tensor.numel() < _MANY * tensor.shape[-1]:
            continue
        last = step.node.output
        while (added := found.only_user(last, "Add")) is not None:
            last = added.output
        if last is not step.node.output and found.only_user(last, "LayerNormalization") is not None:
            alone.add(k)
    return alone


def _is_view(defs: Sequence[Def]) -> bool:
    return all(isinstance(d, Alias) for d in defs)


__all__ = ["Specialiser", "problem", "specialiser"]
