"""What providers said about graphs, kept so that loading the same model again does not ask again.

It pays for providers that take long to answer, because they ask a library about every node; others answer faster than
a graph can be compared with earlier ones, and are simply asked. So a provider has to say that its claims are dear.

An answer belongs to the graph's structure: operators, attributes, names and types of values, and the content of small
constants. A provider with dear claims must not look at the content of larger ones. A graph that was changed has another
digest, so nothing has to be told about changes.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import KernelError, OutOfMemory, ProviderFailed, ProviderUnavailable, RanvierError
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.logs import warn_once
from ranvier.providers.base import Claim, Decline, ExecutionProvider, GraphView

KEPT = 64  # answers: of a provider about a graph
SMALL = 64  # elements of a constant whose content counts

_FAILURES = (ProviderFailed, ProviderUnavailable, KernelError, OutOfMemory)  # of a provider, not of the request

_Answer = list[tuple[tuple[int, ...], bool, str]]  # positions of nodes, taken?, the note or reason


class ClaimCache:
    """Thread-safe. The answer about the same structure may come from another graph object."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[Any, ...], _Answer] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def claims(
        self, provider: ExecutionProvider, graph: Graph, open_nodes: Sequence[Node] | None = None
    ) -> Iterable[Claim | Decline]:
        """What ``provider.claim`` says about the graph, or about some of its nodes, asked now or earlier.

        A provider that fails to answer declines everything: a flaw of one must not keep the others from working.
        """
        try:
            return list(self._asked(provider, graph, open_nodes))
        except Exception as error:
            if isinstance(error, RanvierError) and not isinstance(error, _FAILURES):
                raise  # options or the model are at fault, and would be elsewhere
            if isinstance(error, ImportError) and (error.name or "").startswith("ranvier."):
                raise  # a flaw of this installation, which nobody would see if the reference did all the work
            reason = f"failed to say what it takes ({type(error).__name__}: {error})"
            warn_once(f"claim {provider.name} {reason}", f"{provider.name} {reason}; others get what there is")
            return [Decline(node, reason) for node in (graph if open_nodes is None else open_nodes)]

    def _asked(
        self, provider: ExecutionProvider, graph: Graph, open_nodes: Sequence[Node] | None
    ) -> Iterable[Claim | Decline]:
        if not provider.capability().dear_claims:
            return provider.claim(GraphView(graph, open_nodes))
        nodes = list(graph)
        answers = _answers(self._found(provider, graph, nodes), nodes)
        if open_nodes is None or len(open_nodes) == len(nodes):
            return answers
        wanted = {id(node) for node in open_nodes}
        kept = [(each, _among(each, wanted)) for each in answers]
        if any(found is None for _, found in kept):  # nodes it takes together, and not all of them are to be had
            return provider.claim(GraphView(graph, open_nodes))
        return [each for each, found in kept if found]

    def _found(self, provider: ExecutionProvider, graph: Graph, nodes: list[Node]) -> _Answer:
        from ranvier.ops import registry as operators  # which takes longer to import than all else that is needed here

        key = (provider.name, type(provider), _options(provider), operators.generation(), digest(graph))
        with self._lock:
            found = self._answers.get(key)
            if found is not None:
                self._answers.move_to_end(key)
                self.hits += 1
        if found is None:
            found = _noted(provider.claim(GraphView(graph)), nodes)
            with self._lock:
                self.misses += 1
                self._answers[key] = found
                while len(self._answers) > self._kept:
                    self._answers.popitem(last=False)
        return found

    def forget(self, name: str | None = None) -> None:
        """Drop the answers of a provider, or all."""
        with self._lock:
            for key in [k for k in self._answers if name is None or k[0] == name]:
                del self._answers[key]

    def __len__(self) -> int:
        return len(self._answers)


def _answers(noted: _Answer, nodes: list[Node]) -> list[Claim | Decline]:
    return [
        Claim(tuple(nodes[k] for k in positions), text) if taken else Decline(nodes[positions[0]], text)
        for positions, taken, text in noted
    ]


def _among(answer: Claim | Decline, wanted: set[int]) -> bool | None:
    """Is the answer about wanted nodes? None: about some, and others too."""
    nodes = answer.nodes if isinstance(answer, Claim) else (answer.node,)
    found = [id(node) in wanted for node in nodes]
    return all(found) if all(found) or not any(found) else None


def _noted(answers: Iterable[Claim | Decline], nodes: list[Node]) -> _Answer:
    index = {id(node): k for k, node in enumerate(nodes)}
    return [
        ((index[id(each.node)],), False, each.reason)
        if isinstance(each, Decline)
        else (tuple(index[id(node)] for node in each.nodes), True, each.note)
        for each in answers
    ]


def _options(provider: ExecutionProvider) -> str:
    return repr(getattr(provider, "options", None))


def digest(graph: Graph) -> str:
    """Equal for graphs that no provider can tell apart by anything but the content of large constants."""
    return hashlib.sha256(repr(_described(graph, functools.cache(str))).encode()).hexdigest()


def _described(graph: Graph, text: Any) -> tuple[Any, ...]:
    return (
        tuple(sorted(graph.opsets.items())),
        [(v.name, text(v.type)) for v in graph.inputs],
        [_node(node, text) for node in graph],
        [v.name for v in graph.outputs],
    )


def _node(node: Node, text: Any) -> tuple[Any, ...]:
    return (
        node.domain,
        node.op,
        node.version,
        node.name,
        [_value(v, text) for v in node.inputs],
        [None if v is None else (v.name, text(v.type), bool(v.uses)) for v in node.outputs],
        [(name, _attribute(value, text)) for name, value in sorted(node.attrs.items())],
    )


def _value(value: Value | None, text: Any) -> Any:
    if value is None:
        return None
    const = value.const
    if const is None or const.size > SMALL:
        return value.name, text(value.type), const is not None
    return value.name, text(value.type), const.numpy().tolist()


def _attribute(value: Any, text: Any) -> Any:
    if isinstance(value, Graph):
        return _described(value, text)
    if isinstance(value, list | tuple):
        return [_attribute(item, text) for item in value]
    if isinstance(value, ConstTensor):
        return str(value.type), value.numpy().tolist() if value.size <= SMALL else None
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist() if value.size <= SMALL else None
    return value


__all__ = ["ClaimCache", "digest"]
