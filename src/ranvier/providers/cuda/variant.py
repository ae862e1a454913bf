"""A part for given sizes: what the host knows by then, the steps that are left, and the run as a whole when it repeats.

Everything that follows from sizes and from the contents of shaping operands is found in the first run and kept. So
later runs launch kernels only, and can be captured: one launch for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ranvier.codegen.phases import phase
from ranvier.errors import RanvierError
from ranvier.graph.ir import Value
from ranvier.logs import logger
from ranvier.providers.base import Array
from ranvier.providers.cuda.failures import is_lost
from ranvier.providers.cuda.library import tensor_over, torch
from ranvier.providers.cuda.place import Place, Replay
from ranvier.providers.cuda.steps import Env, HostStep, NodeStep, Step
from ranvier.providers.cuda.together import Overwriting
from ranvier.providers.cuda.transfers import CHECKS, HOST, KIND, SHARED, Checks, checks_of, remember

Specialise = Callable[[Sequence[Step], Env, Sequence[Value]], Sequence[Step]]
Results = tuple[list[Any], Checks | None]
WARM_RUNS = 2  # before a capture: libraries choose kernels and make workspaces in the first ones


class Variant:
    """Made by its first run. ``key`` says for what: sizes and types of tensors, and contents of what shapes them."""

    def __init__(
        self,
        place: Place,
        low: Any,
        outputs: Sequence[Value],
        fixed: Mapping[Value, Any],
        fixed_on_host: Mapping[Value, Array],
        overwritten: frozenset[Value] = frozenset(),
    ) -> None:
        self._place = place
        self._overwritten = overwritten
        self._low = low
        self._outputs = outputs
        self._fixed = fixed
        self._host: dict[Value, Array] = dict(fixed_on_host)
        self._uploaded: dict[Value, Any] = {}  # values of the host that steps read as tensors
        self._constants: dict[Any, list[Any]] = {}
        self.steps: list[Step] = []
        self._frees: list[tuple[Value, ...]] = []
        self._shared: set[Value] = set()
        self._aliases: dict[Value, set[Value]] = {}  # what lies in the memory of operands that are written over
        self.runs = 0
        self.refused = ""  # why it is not captured
        self._lock = threading.Lock()
        self._replay: Replay | None = None
        self._inputs: list[Any] = []  # static memory of a captured run
        self._results: Results = ([], None)

    @property
    def captured(self) -> bool:
        return self._replay is not None

    # -- the first run ------------------------------------------------------------------------------------------------

    def prepare(
        self,
        steps: Sequence[NodeStep | HostStep],
        given: Mapping[Value, Any],
        shaping: Mapping[Value, Array],
        specialise: Specialise | None,
    ) -> Results:
        """Run everything once, and keep what will be the same every time."""
        self._host.update({v: a.copy() for v, a in shaping.items()})
        env = self._env(given)
        left: list[Step] = []
        with phase("first run"):
            for step in steps:
                if isinstance(step, HostStep):
                    step.run(env)
                    continue
                self._bring(step.reads, env)
                step.run(env)
                left.append(step)
            self._bring(self._outputs, env)
        self._constants.update(env.made)
        self.refused = next((f"{step.label}: {step.stops}" for step in left if step.stops), "")
        self._shared = self._aliased(env, given)
        self._aliases = {v: _in_memory_of(v, env) for v in self._overwritten if v in env.tensors}
        results = self._gathered(env)
        with phase("lowering"):
            self.steps = list(left if specialise is None else specialise(left, env, self._outputs))
        self._frees = self._ends(self.steps)
        self.runs = 1
        return results

    def _aliased(self, env: Env, given: Mapping[Value, Any]) -> set[Value]:
        """Outputs in the memory of a weight, of an input or of another output."""
        others = [env.tensors[v] for v in {*self._fixed, *self._uploaded, *given} if v in env.tensors]
        others += [tensor for made in self._constants.values() for tensor in made]
        taken = {tensor.untyped_storage().data_ptr() for tensor in others}
        found: set[Value] = set()
        for value in self._outputs:
            address = env.tensors[value].untyped_storage().data_ptr()
            if address in taken:
                found.add(value)
            taken.add(address)
        return found

    def _env(self, given: Mapping[Value, Any]) -> Env:
        env = Env(self._place.device, self._low, self._host, self._constants)
        env.tensors.update(self._fixed)
        env.tensors.update(self._uploaded)
        env.tensors.update(given)
        env.overwritten = self._overwritten
        return env

    def _bring(self, values: Sequence[Value], env: Env) -> None:
        """Tensors of values that only the host has."""
        for value in values:
            if value not in env.tensors and value in self._host:
                array = self._host[value]
                made = remember(tensor_over(array).clone().to(self._place.device), array)
                self._uploaded[value] = env.tensors[value] = made

    def _ends(self, steps: Sequence[Step]) -> list[tuple[Value, ...]]:
        """Values that nobody reads after each step."""
        last: dict[Value, int] = {}
        for k, step in enumerate(steps):
            for value in (*step.reads, *step.writes):
                last[value] = k
        kept = {*self._outputs, *self._fixed, *self._uploaded}
        ends: list[list[Value]] = [[] for _ in steps]
        for value, k in last.items():
            if value not in kept:
                ends[k].append(value)
        return [tuple(each) for each in ends]

    # -- later runs ---------------------------------------------------------------------------------------------------

    def run(self, given: Mapping[Value, Any], *, capture: bool) -> Results:
        """The results, and the conditions on which they are right."""
        if not capture or self.refused:
            return self._eager(given)
        if self._replay is None:
            with self._lock:
                if self._replay is None and not self.refused:
                    if self.runs < WARM_RUNS:
                        return self._eager(given)
                    self._capture(given)
        return self._again(given) if self._replay is not None else self._eager(given)

    def _eager(self, given: Mapping[Value, Any]) -> Results:
        env = self._env(given)
        for step, ends in zip(self.steps, self._frees):
            step.run(env)
            for value in ends:
                env.tensors.pop(value, None)
        self.runs += 1
        return self._gathered(env)

    def _capture(self, given: Mapping[Value, Any]) -> None:
        order = list(given)
        static = [tensor.clone() for tensor in given.values()]
        bound = dict(zip(order, static))

        def run() -> None:
            self._results = self._eager(bound)

        try:
            with phase("capture"):
                self._replay = self._place.capture(run)
            self._inputs = static
        except RanvierError as error:
            self._refuse(error)
        except RuntimeError as error:
            if is_lost(error):
                raise
            self._refuse(error)

    def tied(
        self,
        given: Mapping[Value, Any],
        replaced: Mapping[int, Value],
        kinds: Sequence[Any] = (),
        *,
        capture: bool,
    ) -> Callable[[], list[Any]]:
        """What runs it on these very tensors. Results that ``replaced`` names are written over operands; what already
        put them there has nothing to do. Conditions are looked at when a result that was made anew leaves the device:
        looking at once would stop it."""
        held: list[Any] = []
        targets = {k: given[value] for k, value in replaced.items()}
        written = {target.untyped_storage().data_ptr() for target in targets.values()}
        places = Overwriting(self.steps, self._outputs, lambda value: self._aliases.get(value, set()))
        places.put({self._outputs[k]: (value, targets[k]) for k, value in replaced.items()})

        def run() -> None:
            results, checks = self._eager(given)
            for k, result in enumerate(results):  # what lies in memory that another result is about to be written to
                if result.untyped_storage().data_ptr() in written and not _same_place(result, targets.get(k)):
                    results[k] = result.clone()
            for k, target in targets.items():
                if not _same_place(results[k], target):
                    target.copy_(results[k])
                results[k] = target
            for k, result in enumerate(results):
                if checks is not None and k not in targets:
                    setattr(result, CHECKS, (checks,))
                if k < len(kinds) and kinds[k] is not None:
                    setattr(result, KIND, kinds[k])
            held[:] = results

        with phase("warm runs"):
            for _ in range(WARM_RUNS):
                run()
        if not capture or self.refused:
            again: Callable[[], None] = run
        else:
            try:
                with phase("capture"):
                    again = self._place.capture(run, apart=True)
            except (RanvierError, RuntimeError) as error:
                if is_lost(error):
                    raise
                self._refuse(error)
                again = run

        def call() -> list[Any]:
            again()
            return held

        return call

    def _refuse(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        self.refused = lines[0] if lines else type(error).__name__
        self._results = ([], None)
        logger.info("a run is not captured: %s", self.refused)

    def _again(self, given: Mapping[Value, Any]) -> Results:
        replay = self._replay
        assert replay is not None
        with self._lock:  # all in one stream, so only the order of launches has to be kept
            for static, tensor in zip(self._inputs, given.values()):
                if tensor is not static:
                    static.copy_(tensor, non_blocking=True)
            replay()
            self.runs += 1
            results, checks = self._results
            found = [result.clone() for result in results]
            return found, None if checks is None else Checks(checks.flags.clone(), checks.messages)

    def _gathered(self, env: Env) -> Results:
        results = [_apart(env.tensors[v]) if v in self._shared else env.tensors[v] for v in self._outputs]
        for result, value in zip(results, self._outputs):
            setattr(result, SHARED, value in self._shared)
        if not env.requirements:
            return results, None
        flags = torch.stack([flag.reshape(()) for flag in env.requirements])
        return results, Checks(flags, tuple(env.messages))


def _apart(tensor: Any) -> Any:
    """The same elements as another tensor: what is noted on a result is no business of others that have the weight."""
    found = tensor.view_as(tensor)
    for name in (HOST, KIND):
        if hasattr(tensor, name):
            setattr(found, name, getattr(tensor, name))
    return found


def _in_memory_of(value: Value, env: Env) -> set[Value]:
    memory = env.tensors[value].untyped_storage().data_ptr()
    found = {other for other, tensor in env.tensors.items() if tensor.untyped_storage().data_ptr() == memory}
    return found - {value}


def _same_place(a: Any, b: Any) -> bool:
    return b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def marked(results: Results, given: Sequence[Any]) -> list[Any]:
    """Results that carry the conditions on which they are right: their own and those of what they were made from."""
    tensors, checks = results
    found = [*checks_of(given), *([checks] if checks is not None else [])]
    if not found:
        return tensors
    own = [tensor.view_as(tensor) if hasattr(tensor, CHECKS) else tensor for tensor in tensors]
    for tensor in own:
        setattr(tensor, CHECKS, tuple(found))
    return own


__all__ = ["WARM_RUNS", "Specialise", "Variant", "marked"]
