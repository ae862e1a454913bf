"""Builds a random graph from a tape: a list of small numbers, each of which decides one question.

Every node is evaluated as it is added: operands always fit, and numbers stay in a range in which rounding errors do
not grow. Results that an arithmetic pass may round differently are marked; operators that jump (comparisons, casts to
integers, rounding) only read unmarked ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranvier.errors import RanvierError
from ranvier.graph import ConstTensor, Graph, Node, Value
from ranvier.ops import NEWEST
from ranvier.ops.proto import schema_of
from ranvier.passes.evaluate import Evaluator

LARGEST = 50.0  # of any element
BIGGEST = 4096  # elements of any tensor


@dataclass
class Known:
    """A value together with what it holds for the inputs at hand."""

    value: Value
    array: np.ndarray
    exact: bool  # no pass may change a bit of it


class Tape:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.at = 0

    @property
    def ended(self) -> bool:
        return self.at >= len(self.numbers)

    def below(self, count: int) -> int:
        number = 0 if self.ended else self.numbers[self.at]
        self.at += 1
        return number % count

    def pick(self, items: Any) -> Any:
        return items[self.below(len(items))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == 1


class Builder:
    """Adds nodes to a graph as its tape says."""

    def __init__(self, tape: Tape, graph: Graph, known: list[Known]) -> None:
        self.tape = tape
        self.graph = graph
        self.known = known
        self.env = {k.value: k.array for k in known}

    # -- operands -----------------------------------------------------------------------------------------------------

    def choose(self, fits: Callable[[Known], bool] = lambda k: True) -> Known | None:
        """An earlier value that fits, late ones first for small numbers: chains are more interesting than fans."""
        found = [k for k in reversed(self.known) if fits(k)]
        return self.tape.pick(found) if found else None

    def floats(self, rank: int | None = None, exact: bool = False) -> Known | None:
        return self.choose(
            lambda k: k.array.dtype == np.float32 and rank in (None, k.array.ndim) and (k.exact or not exact)
        )

    def constant(self, array: Any) -> Known:
        array = np.asarray(array)
        return Known(self.graph.add_constant(ConstTensor.of(array)), array, True)

    def weights(self, *shape: int) -> Known:
        """Multiples of 1/4, so that many sums and products are exact."""
        rng = np.random.default_rng(self.tape.below(1000))
        return self.constant((rng.integers(-4, 5, shape) / 4).astype(np.float32))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def add(
        self,
        op: str,
        *operands: Known | None,
        version: int = 0,
        outputs: int = 1,
        rounds: bool = False,
        **attrs: Any,
    ) -> list[Known]:
        """A node and its results; none, and no node, where the operands do not fit or the numbers leave the range."""
        while operands and operands[-1] is None:
            operands = operands[:-1]
        version = version or schema_of("", op, NEWEST).since_version
        values = [None if k is None else k.value for k in operands]
        node = self.graph.add(op, values, attrs, outputs, version=version, name=f"n{len(self.graph)}")
        env = {**self.env, **{k.value: k.array for k in operands if k is not None}}
        self.graph.outputs = list(node.outputs)  # all results are wanted
        try:
            results = Evaluator(1000).node(node, env)
        except RanvierError:
            results = ()
        self.graph.outputs = []
        if len(results) < outputs or not all(_tame(r) for r in results):
            self.graph.remove(node)
            return []
        exact = not rounds and all(k is None or k.exact for k in operands) and not _captures_rounded(node, self.known)
        made = [Known(v, r, exact) for v, r in zip(node.outputs, results)]
        self.known.extend(made)
        self.env.update((k.value, k.array) for k in made)
        return made

    def outputs(self) -> list[Known]:
        """What nobody reads becomes an output, and some inner values too."""
        made = [k for k in self.known if k.value.producer is not None and k.value.producer.graph is self.graph]
        if not made:
            made = self.add("Identity", self.known[0])
        chosen = [k for k in made if not k.value.uses]
        for _ in range(self.tape.below(4)):
            candidate = self.tape.pick(made)
            if all(candidate is not k for k in chosen):
                chosen.append(candidate)
        self.graph.outputs = [k.value for k in chosen]
        return chosen


def _tame(result: Any) -> bool:
    if not isinstance(result, np.ndarray) or result.size > BIGGEST:
        return False
    if result.dtype.kind == "f":
        return bool(np.all(np.isfinite(result)) and np.all(np.abs(result) <= LARGEST))
    return True


def _captures_rounded(node: Node, known: list[Known]) -> bool:
    if not node.has_subgraphs:
        return False
    captured = {id(v) for v in node.captures()}
    return any(id(k.value) in captured and not k.exact for k in known)
