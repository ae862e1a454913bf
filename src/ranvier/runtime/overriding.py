"""Inputs that have a default, and the runs that give them.

A file may list every weight among its inputs. Hardly anybody gives one, and weights that could be others at each run
can neither be folded nor packed. So a session takes the defaults for constants, and a run that does give some of them
is another session's: made of the model as it was, with those as inputs, when the first such run comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ranvier.graph.defaults import can_settle, settle
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.ops import annotate

if TYPE_CHECKING:
    from ranvier.runtime.session import Session


class Overriding:
    """The model as it was loaded, while ``graph`` itself loses the inputs that are constants to most runs."""

    def __init__(self, graph: Graph, make: Callable[[Graph], Session]) -> None:
        self.graph = copied(graph)
        self.settled = frozenset(settle_defaults(graph))
        self._make = make
        self._lock = threading.Lock()
        self._open = frozenset[str]()  # the inputs that the session below takes
        self._session: Session | None = None

    def session_for(self, inputs: Any) -> tuple[Session, dict[str, Any]] | None:
        """Who runs this call, and with what, where it gives something that is a constant otherwise."""
        if not isinstance(inputs, Mapping) or self.settled.isdisjoint(inputs):
            return None
        given = self.settled.intersection(inputs)
        with self._lock:
            if self._session is None or not given <= self._open:
                # who gives others than before may go on doing so: all of them are inputs then
                self._replace(given if self._session is None else self.settled)
            assert self._session is not None
            session, missing = self._session, self._open - given
        return session, {**inputs, **{name: self.graph.defaults[name].numpy() for name in missing}}

    def optimized(self) -> Graph:
        """The graph, optimized for whatever may be given, with the inputs and the defaults that the model has."""
        with self._lock:
            if self._session is None or self._open != self.settled:
                self._replace(self.settled)
            assert self._session is not None
            graph = copied(self._session.graph)
        graph.defaults = dict(self.graph.defaults)
        return graph

    def _replace(self, names: frozenset[str]) -> None:
        graph = copied(self.graph)
        settle_defaults(graph, but=names)
        for name in names:
            del graph.defaults[name]
        # the one before is not closed: another thread may be about to run it. It goes when nobody holds it
        self._session, self._open = self._make(graph), names

    def made(self) -> list[Session]:
        """The other session, where there has been need of one."""
        with self._lock:
            return [] if self._session is None else [self._session]

    def __str__(self) -> str:
        count = len(self.settled)
        what = "1 input with a default is a constant" if count == 1 else f"{count} inputs with defaults are constants"
        return f"{what}; runs that give {'it' if count == 1 else 'one'} are compiled apart"


def overriding(graph: Graph, make: Callable[[Graph], Session]) -> Overriding | None:
    """Takes the inputs that have defaults out of ``graph``, where it has some."""
    return Overriding(graph, make) if any(can_settle(graph, value) for value in graph.inputs) else None


def settle_defaults(graph: Graph, but: frozenset[str] = frozenset()) -> list[str]:
    """Makes constants of the inputs that have defaults, and tells their names."""
    found = [value for value in graph.inputs if value.name not in but and can_settle(graph, value)]
    for value in found:
        settle(graph, value)
    if found:
        graph.metadata["problems"] = annotate(graph)  # shapes that they decide are known now
    return [value.name for value in found]


__all__ = ["Overriding", "overriding", "settle_defaults"]
