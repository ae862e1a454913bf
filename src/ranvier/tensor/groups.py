"""Computing what is wanted: the expressions behind it become a group, and equal groups are compiled once.

A group is looked up by its structure: operators with their attributes, element types, shapes and wiring. Numbers are
no part of it (they are inputs), so a loop over equal shapes compiles in its first round only. What somebody still
needs along the way, and what shares most of the work, is computed with it rather than again later.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from sys import getrefcount
from typing import Any

from ranvier.config import SessionConfig
from ranvier.devices import Device
from ranvier.errors import RanvierError
from ranvier.graph.ir import Graph
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.fallback import FAILURES
from ranvier.runtime.plan import Plan
from ranvier.runtime.preferred import preferred
from ranvier.runtime.session import Session
from ranvier.tensor.building import graph_of
from ranvier.tensor.expr import Array, Expr, fetch, is_variable, line_of
from ranvier.tensor.stored import constant_behind, constant_of

_KEPT = 512  # compiled groups
DEEPEST = 1000  # operators in a row; deeper expressions are computed as they are made


class Group:
    """One structure, compiled. The plan is called directly; where that way is not open, or fails, the session is."""

    __slots__ = ("_plan", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self._plan: Plan = session.bind()

    def run(self, arrays: list[Array]) -> Sequence[Array]:
        try:
            found = self._plan.run_directly(arrays)
        except FAILURES:
            found = None  # the session knows who else can do it
        if found is None:
            found = list(self.session.run(dict(zip(self.session.signature.required, arrays))).values())
        return found


class Cache:
    """Groups by structure, the ones used last; thread-safe. Two threads that need the same one may both make it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: OrderedDict[Any, Group] = OrderedDict()
        self._lock = threading.Lock()
        self.made = 0

    def find(self, key: Any) -> Group | None:
        with self._lock:
            found = self._groups.get(key)
            if found is not None:
                self._groups.move_to_end(key)
            return found

    def keep(self, key: Any, group: Group) -> None:
        with self._lock:
            self.made += 1
            self._groups[key] = group
            while len(self._groups) > self._size:
                self._groups.popitem(last=False)  # its session ends with the last run that uses it

    def clear(self) -> None:
        with self._lock:
            self._groups.clear()

    def __len__(self) -> int:
        return len(self._groups)


groups = Cache(_KEPT)


class Walk:
    """The expressions behind some others, operands first, with the key of their structure.

    ``outputs`` are those that are wanted and those that anybody outside refers to: a user through a tensor, or another
    expression that will be computed later. References are counted by Python already, so this costs nothing to keep.
    """

    __slots__ = ("_read", "absent", "key", "leaves", "order", "outputs")

    def __init__(self, wanted: Iterable[Expr], read: Container[Expr] = ()) -> None:
        self._read = read  # numbers that are at hand
        self.absent: list[Expr] = []  # others that are to be read first; the walk stands for nothing then
        self.order: list[Expr] = []
        self.leaves: list[Expr] = []
        first = dict.fromkeys(wanted)  # in their order: equal structures shall have equal keys
        key, numbers, uses = self._visit(first)
        self.outputs: list[Expr] = []
        chosen: list[int] = []
        for number, expr in zip(numbers, self.order):
            # four of the references are ours: in `order`, of the loop, of its pair, and of the call that counts them
            if expr in first or (getrefcount(expr) > uses[number] + 4 and expr.spec[3] == 1):  # type: ignore[index]
                self.outputs.append(expr)
                chosen.append(number)
        self.key = (tuple(key), tuple(chosen))

    def _visit(self, first: dict[Expr, None]) -> tuple[list[Any], list[int], list[int]]:
        """The key, the numbers of the expressions in ``order``, and how often each number is used as an operand."""
        order, leaves = self.order, self.leaves
        key: list[Any] = []
        numbers: dict[Expr, int] = {}
        own: list[int] = []
        uses: list[int] = []
        pending = list(first)
        while pending:
            expr = pending[-1]
            if expr in numbers:
                pending.pop()
                continue
            if expr.array is not None:
                pending.pop()
                numbers[expr] = len(uses)
                uses.append(0)
                leaves.append(expr)
                key.append(expr.dtype)
                key.append(expr.shape)
                continue
            inputs = expr.inputs
            if not inputs and expr not in self._read and constant_behind(expr) is not None:
                pending.pop()
                numbers[expr] = len(uses)
                uses.append(0)
                self.absent.append(expr)
                continue
            if not inputs and fetch(expr):
                continue  # and is a leaf now
            ready = True
            for operand in inputs:
                if operand not in numbers:
                    pending.append(operand)
                    ready = False
            if not ready:
                continue
            pending.pop()
            number = numbers[expr] = len(uses)
            uses.append(0)
            own.append(number)
            order.append(expr)
            key.append(expr.spec)
            for operand in inputs:
                number = numbers[operand]
                key.append(number)
                uses[number] += 1
            for each in expr.together:
                other = each()
                if other is not None and other.array is None and other not in first:
                    first[other] = None
                    pending.insert(0, other)
        return key, own, uses


def realise(wanted: Iterable[Expr]) -> None:
    """Compute the arrays of these expressions, all of them in one group for each device."""
    missing = [expr for expr in wanted if expr.array is None and not fetch(expr)]
    while missing:
        device = missing[0].device
        _realise([expr for expr in missing if expr.device is device or expr.device == device], device)
        missing = [expr for expr in missing if expr.array is None]


# While a thread looks at expressions, none may become a computed one; they are run without it.
_looking = threading.Lock()


def _realise(wanted: list[Expr], device: Device | None) -> None:
    graph: Graph | None = None
    read: dict[Expr, Array] = {}
    while True:
        with _looking:
            wanted = [expr for expr in wanted if expr.array is None]
            if not wanted:
                return  # another thread was faster
            walk = Walk(wanted, read)
            if not walk.absent:
                key = (walk.key, device, preferred())
                group = groups.find(key)
                if group is None:
                    graph = graph_of(walk.leaves, walk.order, walk.outputs)
                break
        # while nobody waits: reading takes long, and who reads may compute with tensors
        read |= {expr: constant_of(expr).numpy() for expr in walk.absent}
    try:
        if group is None:
            assert graph is not None
            group = Group(Session(graph, config_for(device)))
            groups.keep(key, group)
        results = group.run([leaf.array for leaf in walk.leaves])  # type: ignore[misc]
    except RanvierError as error:
        _tell_lines(error, walk)
        raise
    with _looking:
        for expr, array in zip(walk.outputs, results):
            array.flags.writeable = False
            expr.array = array
            trace = expr.trace
            if trace is None or not trace.active:
                expr.release()
            elif is_variable(expr):
                expr.release()
                expr.trace = trace


def _tell_lines(error: RanvierError, walk: Walk) -> None:
    """Where in the user's program the operations stand that were being computed."""
    lines = dict.fromkeys(line_of(expr) for expr in walk.order)
    error.add_note("while computing what these lines ask for: " + ", ".join(list(lines)[-6:]))


def config_for(device: Device | None) -> SessionConfig | None:
    """The session's options: of this machine all providers are asked; of another device, those that are on it."""
    if device is None:
        return None
    names = [name for name in REGISTRY.available() if REGISTRY.get(name).device == device]
    return SessionConfig(providers=tuple(dict.fromkeys([*preferred(), *names])), fallback="off")


_OF_TENSORS = True
