"""Which operators have a lowering, and what a lowering must be told before it is chosen."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace

from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.records import dataclass

Key = tuple[str, str]  # domain, operator
Lower = Callable[[NodeView, Definitions], None]
Attempt = Callable[[NodeView, Definitions], bool]
Check = Callable[[Node], str | None]

FLOATS = frozenset({DType.float32, DType.float64, DType.float16, DType.bfloat16})
INTEGERS = frozenset(
    {
        DType.int8,
        DType.int16,
        DType.int32,
        DType.int64,
        DType.uint8,
        DType.uint16,
        DType.uint32,
        DType.uint64,
    }
)
NUMERIC = FLOATS | INTEGERS
BYTES = frozenset({DType.int8, DType.uint8})
ALL = NUMERIC | {DType.bool}
# narrower than what machines compute with: held as one byte per element, converted and moved only
NARROW = frozenset(DType) - ALL - {DType.string, DType.complex64, DType.complex128}


@dataclass(frozen=True)
class Lowering:
    """How one operator is lowered. ``values`` are operands whose content decides shapes or addresses."""

    lower: Lower
    values: tuple[int, ...] = ()
    dtypes: frozenset[DType] = ALL
    check: Check | None = None
    since: int = 1  # versions before this mean something else
    own: bool = False  # the user's, for an operator of the user's
    inlines: str = ""  # what its subgraphs are, where their nodes are lowered with those around


class Lowerings:
    """The lowerings of a package, whose modules are imported when an operator of theirs is asked for.

    ``operators`` lists them by module: names of operators, those of other domains with their domain. What the package
    does not lower, ``parent`` does: a provider's own lowering of an operator goes before the shared one.
    """

    def __init__(self, package: str, operators: Mapping[str, str], parent: Lowerings | None = None) -> None:
        self.package = package
        self.parent = parent
        self.modules = {_key(name): module for module, names in operators.items() for name in names.split()}
        self.users: dict[Key, Lowering] = {}  # of operators that have none here
        self._made: dict[Key, Lowering] = {}

    def lowers(
        self,
        *ops: str,
        domain: str = "",
        values: tuple[int, ...] = (),
        dtypes: frozenset[DType] = ALL,
        check: Check | None = None,
        since: int = 1,
        inlines: str = "",
    ) -> Callable[[Lower], Lower]:
        """Declare the decorated function as the lowering of some operators, which the package's index lists too.

        ``check(node)`` may look at the node's attributes and declared types and return the reason why not.
        """

        def wrap(function: Lower) -> Lower:
            for op in ops:
                self._declare((domain, op), Lowering(function, values, dtypes, check, since, inlines=inlines))
            return function

        return wrap

    def tries(self, *ops: str, domain: str = "") -> Callable[[Attempt], Attempt]:
        """Declare a function that lowers some nodes of these operators and leaves the others, by returning False, to
        the parent's lowering, which also says what nodes there may be."""

        def wrap(function: Attempt) -> Attempt:
            for op in ops:
                shared = self.parent.at((domain, op)) if self.parent is not None else None
                assert shared is not None, f"{op} is not lowered by the parent"
                lower = _first(function, shared.lower)
                self._declare((domain, op), replace(shared, lower=lower))
            return function

        return wrap

    def _declare(self, key: Key, lowering: Lowering) -> None:
        assert key not in self._made, f"{key[1]} is lowered twice: which one counts would depend on imports"
        self._made[key] = lowering

    def operators(self) -> set[Key]:
        """All that have a lowering here or in the parent."""
        return self.modules.keys() | (self.parent.operators() if self.parent is not None else set())

    def table(self) -> dict[Key, Lowering]:
        """The package's own lowerings: every module of it is imported, which a model alone never needs."""
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        if self.parent is not None:
            self.parent.table()
        return self._made

    def find(self, node: Node) -> Lowering | None:
        """The lowering of a node's operator; its module is imported now if it was not before."""
        return self.at((node.domain, node.op))

    def at(self, key: Key) -> Lowering | None:
        found = self._made.get(key)
        if found is not None:
            return found
        if key in self.modules:
            importlib.import_module(f"{self.package}.{self.modules[key]}")
            return self._made[key]
        shared = self.parent.at(key) if self.parent is not None else None
        return shared or self.users.get(key)


def _first(attempt: Attempt, otherwise: Lower) -> Lower:
    def lower(n: NodeView, b: Definitions) -> None:
        if not attempt(n, b):
            otherwise(n, b)

    lower.__module__ = attempt.__module__
    return lower


def _key(name: str) -> Key:
    domain, _, op = name.rpartition("::")
    return domain, op
