"""One signature of a jitted function: its graph, compiled, and what goes in and comes out of a call.

No memory is allocated for states from call to call. A new value is written over the old one where that has been read
by then, which the compiled program knows; otherwise two buffers take turns. A buffer that somebody else still looks at
is left to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranvier.devices import Device
from ranvier.errors import InvalidConfig, RanvierError, TracingError
from ranvier.ops.pulse import watching
from ranvier.runtime.fallback import FAILURES
from ranvier.runtime.plan import Plan
from ranvier.runtime.session import Session
from ranvier.tensor.building import lowered
from ranvier.tensor.core import IDENTITY, Tensor, wrapped
from ranvier.tensor.expr import CALL, CUSTOM, INPUT, Array, Expr, applied, fetch, known, line_of, spec
from ranvier.tensor.groups import config_for, realise
from ranvier.tensor.resident import DeviceRun, device_run, tell
from ranvier.tensor.state import State
from ranvier.tensor.stored import constant_behind
from ranvier.tensor.symbolic import SYMBOL, Differs, Family, Traced
from ranvier.tensor.tracing import Tracing

# what the caller gets for a tensor of the result: a result of the graph, an argument as it came, or a fixed value
_RESULT, _ARGUMENT, _FIXED = range(3)


class _Place:
    """Stands for a tensor in the tree that a function returned."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Behind:
    """The expressions behind some others down to placeholders and numbers, operands first."""

    __slots__ = ("constants", "order", "placeholders")

    def __init__(self, wanted: Sequence[Expr], tracing: Tracing) -> None:
        self.order: list[Expr] = []
        self.constants: list[Expr] = []
        self.placeholders: set[Expr] = set()
        seen: set[Expr] = set()
        pending = list(reversed(wanted))
        while pending:
            expr = pending[-1]
            if expr in seen:
                pending.pop()
                continue
            # in this order: another thread may fetch it meanwhile
            if constant_behind(expr) is not None or fetch(expr) or expr.array is not None:
                self.constants.append(expr)
            elif expr.spec is not None and expr.spec[0] == INPUT:
                if expr.spec[1][0][1] is not tracing:
                    raise TracingError(f"a tensor of another jitted function is used in this one{_made(expr)}")
                self.placeholders.add(expr)
            else:
                missing = [x for x in expr.inputs if x not in seen]
                if missing:
                    pending += reversed(missing)
                    continue
                self.order.append(expr)
            pending.pop()
            seen.add(expr)


def _own(expr: Expr) -> Expr:
    """An argument that nobody can change: arrays of others are copied."""
    array = expr.array
    if array is None or not array.flags.writeable:
        return expr
    array = array.copy()
    array.flags.writeable = False
    return known(array, expr.dtype, expr.device)


def _made(expr: Expr) -> str:
    line = line_of(expr)
    return f" ({line})" if line else ""


class Relatives:
    """Signatures of a function that differ in sizes only: from the second one on they may share a graph."""

    def __init__(self) -> None:
        self._run: Traced | None = None  # that has a graph of its own
        self._family: tuple[Family, Session] | None = None

    def find(self, run: Traced, name: str, device: Device | None) -> tuple[Session, Plan, bool] | None:
        """The graph of all sizes, its plan for this one, and whether it was made just now; None where the function
        does not do the same for all."""
        made = self._family is None
        try:
            if self._family is None:
                if self._run is None:
                    return None
                family = Family(self._run, run)
                self._family = family, Session(family.graph(name), config_for(device))
            family, session = self._family
            return session, session.bind(**{SYMBOL: family.size_of(run)}), made
        except Differs:
            return None
        except RanvierError:  # what a graph of open sizes cannot be; that of these sizes says it if it is wrong too
            self._family = None
            return None

    def keep(self, run: Traced) -> None:
        if self._run is None:
            self._run = run


class Compiled:
    """A traced function that can be called again while what it saw of Python's values is still so."""

    def __init__(
        self, tracing: Tracing, arguments: int, result: Any, name: str, relatives: Relatives | None = None
    ) -> None:
        self._guards = [(holder, attribute, value) for (holder, attribute), value in tracing.guards.items()]
        self._outputs: dict[Expr, int] = {}
        self._arguments = {expr: k for k, expr in enumerate(tracing.inputs[:arguments])}
        self._places: list[tuple[int, Any]] = []
        self._tree = self._taken_apart(result)
        self._single = isinstance(self._tree, _Place) and self._places[0][0] == _RESULT
        self._assigned = [(state, self._place(expr)) for state, expr in tracing.states.items()]
        self._grads = [
            (parameter, None if grad is None else self._place(grad._expr)) for parameter, grad in tracing.grads.items()
        ]
        outputs = self._wanted = list(self._outputs)
        self._derived = [expr.trace is not None and expr.trace.active for expr in outputs]
        self._types = [expr.dtype for expr in outputs]
        self._device = outputs[0].device if outputs else None
        behind = self._behind = Behind(outputs, tracing)
        used = behind.placeholders
        self._given = [k for expr, k in self._arguments.items() if expr in used]
        self._states = [state for state, expr in tracing.read_states.items() if expr in used]
        self._old_grads = [parameter for parameter, expr in tracing.read_grads.items() if expr in used]
        self._leaves = [
            *(tracing.inputs[k] for k in self._given),
            *(tracing.read_states[state] for state in self._states),
            *(tracing.read_grads[parameter] for parameter in self._old_grads),
        ]
        # a gradient written by hand refers to the run in which it was made: the function is run as it is then
        self.inline = any(self._derived) and any(
            expr.spec[0] == CUSTOM and not expr.spec[1][0][1].replayable for expr in behind.order if expr.spec
        )
        self.shared = False  # its graph was compiled for others before
        self._session: Session | None = None
        self._plan: Plan | None = None
        if outputs and not self.inline:
            self._session, self._plan = self._prepared(name, relatives or Relatives())
        # whether something that is returned or assigned refers to the arguments
        self._holding = any(self._derived) or any(how == _ARGUMENT for how, _ in self._all_places())
        self.lasting = bool(self._assigned or self._grads) and not self.inline  # it changes states
        self._states_read, self._grads_read = frozenset(self._states), frozenset(self._old_grads)
        first = len(self._given)
        self._reading = self._kept_for(self._assigned, {x: first + k for k, x in enumerate(self._states)})
        first += len(self._states)
        self._reading_grads = self._kept_for(self._grads, {x: first + k for k, x in enumerate(self._old_grads)})
        self._name = name
        self._returned = sorted({which for how, which in self._places if how == _RESULT})
        self._on_device = self._device_run()

    def _device_run(self) -> DeviceRun | None:
        """The run that keeps states on a device, where the function is all there."""
        if self._session is None or any(self._derived[which] for which in self._returned):
            return None
        inputs = [
            *([None] * len(self._given)),
            *((x, False) for x in self._states),
            *((x, True) for x in self._old_grads),
        ]
        outputs: list[tuple[State, bool] | None] = [None] * len(self._wanted)
        assigned = [
            *((x, False, place) for x, place in self._assigned),
            *((x, True, place) for x, place in self._grads),
        ]
        for state, grad, place in assigned:
            if place is not None and place[0] == _RESULT:
                if outputs[place[1]] is not None:
                    return None  # two states of one value
                outputs[place[1]] = (state, grad)
        return device_run(self._session, self._name, inputs, outputs, self._types, self._device)

    def _kept_for(self, assigned: Sequence[tuple[Any, tuple[int, Any] | None]], inputs: dict[Any, int]) -> set[Any]:
        """The states whose old value must stay while the new one is written."""
        derived = any(how == _RESULT and self._derived[which] for how, which in self._places)
        if self._plan is None or derived:  # what is derived later may need them as they were
            return set(inputs)
        replaced = ((x, place[1]) for x, place in assigned if x in inputs and place is not None and place[0] == _RESULT)
        return {state for state, which in replaced if not self._plan.may_overwrite(which, inputs[state])}

    def _prepared(self, name: str, relatives: Relatives) -> tuple[Session, Plan]:
        """The session, of its own or shared with calls that differ in a size, and its plan."""
        run = Traced(self._leaves, self._behind.constants, self._behind.order, self._wanted)
        shared = relatives.find(run, name, self._device)
        if shared is not None:
            self.shared = not shared[2]
            return shared[:2]
        session = self._compiled(run, name)
        relatives.keep(run)
        return session, session.bind()

    def _compiled(self, run: Traced, name: str) -> Session:
        graph, values = lowered(run.leaves, run.order, run.constants)
        graph.name = name
        graph.outputs = [values[expr] for expr in run.wanted]
        try:
            return Session(graph, config_for(self._device))
        except RanvierError as error:
            lines = dict.fromkeys(line_of(expr) for expr in self._behind.order)
            error.add_note(f"while compiling {name}, of which these lines are a part: {', '.join(list(lines)[-6:])}")
            raise

    # -- what a function returned -----------------------------------------------------------------------------------

    def _taken_apart(self, tree: Any) -> Any:
        if isinstance(tree, State):
            return tree
        if isinstance(tree, Tensor):
            self._places.append(self._place(tree._expr))
            return _Place(len(self._places) - 1)
        if isinstance(tree, dict):
            return type(tree)((key, self._taken_apart(each)) for key, each in tree.items())
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*(self._taken_apart(each) for each in tree))
        if isinstance(tree, list | tuple):
            return type(tree)(self._taken_apart(each) for each in tree)
        return tree

    def _place(self, expr: Expr) -> tuple[int, Any]:
        if expr.array is not None:
            return _FIXED, expr
        if expr in self._arguments:
            return _ARGUMENT, self._arguments[expr]
        return _RESULT, self._outputs.setdefault(expr, len(self._outputs))

    def _all_places(self) -> list[tuple[int, Any]]:
        grads = [place for _, place in self._grads if place is not None]
        return [*self._places, *(place for _, place in self._assigned), *grads]

    def _put_together(self, tree: Any, tensors: list[Tensor]) -> Any:
        if isinstance(tree, _Place):
            return tensors[tree.number]
        if isinstance(tree, dict):
            return type(tree)((key, self._put_together(each, tensors)) for key, each in tree.items())
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*(self._put_together(each, tensors) for each in tree))
        if isinstance(tree, list | tuple):
            return type(tree)(self._put_together(each, tensors) for each in tree)
        return tree

    # -- calls ------------------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether what it saw of Python's values is as it was."""
        return all(getattr(holder, attribute) == value for holder, attribute, value in self._guards)

    def arena_bytes(self) -> int:
        """The memory that a call works in, besides arguments, states and results."""
        return 0 if self._plan is None else self._plan.memory.arena

    def call(self, given: list[Expr]) -> Any:
        """The function's result, and states as it left them."""
        if self._holding:
            given = [_own(expr) for expr in given]
        if self._on_device is not None:
            arguments = self._arrays([given[k] for k in self._given])
            try:
                self._on_device.prepare(arguments)
            except (InvalidConfig, *FAILURES) as error:
                tell(self._name, str(error))
                self._on_device = None
            else:
                return self._called_there(self._on_device.call(arguments, self._returned), given)
        into = None
        if self.lasting:
            realise([each._held for each in self._states if each._held.array is None])
            into = self._memory()  # before their values have other names
        inputs = [given[k] for k in self._given]
        if self._states:
            inputs += [state._held for state in self._states]
        if self._old_grads:
            inputs += [parameter._grad._expr for parameter in self._old_grads]  # type: ignore[union-attr]
        arrays = self._arrays(inputs)
        results = self._run(arrays, into) if self._session is not None else []
        for array in results:
            array.flags.writeable = False
        if self._single and not self._derived[0]:
            returned: Any = wrapped(known(results[0], self._types[0], self._device))
        else:
            tensors = [self._tensor(how, which, given, inputs, results) for how, which in self._places]
            returned = self._put_together(self._tree, tensors)
        if self.lasting:
            del inputs, arrays  # which would count as somebody who looks at the states
            self._keep(given, results)
        return returned

    def _arrays(self, exprs: list[Expr]) -> list[Array]:
        arrays = [x.array for x in exprs]
        if any(x is None for x in arrays):
            realise([x for x in exprs if x.array is None])
            arrays = [x.array for x in exprs]
        return arrays  # type: ignore[return-value]

    def _called_there(self, made: dict[int, Expr], given: list[Expr]) -> Any:
        """The result of a call on a device, which has given states their new values."""
        for state, (how, which) in self._assigned:
            if how != _RESULT:
                state.put(which.array if how == _FIXED else given[which].array)
        for parameter, place in self._grads:
            if place is None:
                parameter._grad = None
            elif place[0] != _RESULT:
                parameter.put_grad(place[1].array if place[0] == _FIXED else given[place[1]].array)
        if self._single:
            return wrapped(made[0])
        tensors = [
            wrapped(made[which] if how == _RESULT else which if how == _FIXED else given[which])
            for how, which in self._places
        ]
        return self._put_together(self._tree, tensors)

    def _run(self, arrays: list[Array], into: list[Array | None] | None) -> Sequence[Array]:
        assert self._plan is not None and self._session is not None
        try:
            found = self._plan.run_directly(arrays, into)
        except FAILURES:
            found = None  # the session knows who else can do it
        if found is None:
            names = self._session.output_names
            read = set(map(id, arrays))  # others may write a result before they have read everything
            into = [None if id(array) in read else array for array in into or ()]
            offered = {name: array for name, array in zip(names, into) if array is not None}
            made = self._session.run(dict(zip(self._session.signature.required, arrays)), into=offered or None)
            found = list(made.values())
        return found

    def _tensor(self, how: int, which: Any, given: list[Expr], inputs: list[Expr], results: Sequence[Array]) -> Tensor:
        if how == _ARGUMENT:
            return wrapped(given[which])
        if how == _FIXED:
            return wrapped(which)
        if not self._derived[which]:
            return wrapped(known(results[which], self._types[which], self._device))
        array = results[which]
        of = spec(CALL, (("of", self), ("index", which)))
        made = applied(of, tuple(inputs), self._types[which], array.shape, self._device)
        made.array = array
        return wrapped(made)

    def write_out(self, expr: Expr) -> None:
        """Let a result of a call be what the function computed, step by step, so that it can be derived."""
        assert expr.spec is not None
        made = dict(zip(self._leaves, expr.inputs))
        made.update((each, each) for each in self._behind.constants)
        for each in self._behind.order:
            assert each.spec is not None
            operands = tuple([made[x] for x in each.inputs])
            made[each] = applied(each.spec, operands, each.dtype, each.shape, each.device)
        expr.inputs = (made[self._wanted[expr.spec[1][1][1]]],)
        expr.spec = IDENTITY

    # -- states -----------------------------------------------------------------------------------------------------

    def _memory(self) -> list[Array | None]:
        """Where new values are written: over the present one where it is not needed by then and nobody else holds it,
        else over an earlier one."""
        into: list[Array | None] = [None] * len(self._wanted)
        whole = watching() is None  # else a run may end halfway
        for state, (how, which) in self._assigned:
            if how == _RESULT:
                into[which] = state.take_memory(keep=state in (self._reading if whole else self._states_read))
        for parameter, place in self._grads:
            if place is not None and place[0] == _RESULT:
                into[place[1]] = parameter.take_grad_memory(
                    keep=parameter in (self._reading_grads if whole else self._grads_read)
                )
        return into

    def _keep(self, given: list[Expr], results: Sequence[Array]) -> None:
        """Let states have their new values."""
        for state, (how, which) in self._assigned:
            array = results[which] if how == _RESULT else which.array if how == _FIXED else given[which].array
            state.put(array)
        for parameter, place in self._grads:
            if place is None:
                parameter._grad = None
                continue
            how, which = place
            array = results[which] if how == _RESULT else which.array if how == _FIXED else given[which].array
            parameter.put_grad(array)


_OF_TENSORS = True
