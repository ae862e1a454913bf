"""Which operators have a lowering, and what a lowering must be told before it is chosen."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable

from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.providers.cpu.defs import Definitions, NodeView
from ranvier.providers.cpu.lower.index import MODULES
from ranvier.records import dataclass

Lower = Callable[[NodeView, Definitions], None]
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


_TABLE: dict[tuple[str, str], Lowering] = {}
OWN: dict[tuple[str, str], Lowering] = {}  # of operators that have none here; see custom/lowering.py


def lowers(
    *ops: str,
    domain: str = "",
    values: tuple[int, ...] = (),
    dtypes: frozenset[DType] = ALL,
    check: Check | None = None,
    since: int = 1,
) -> Callable[[Lower], Lower]:
    """Declare the decorated function as the lowering of some operators, which ``index`` lists too.

    ``check(node)`` may look at the node's attributes and declared types and return the reason why not.
    """

    def wrap(function: Lower) -> Lower:
        for op in ops:
            assert (domain, op) not in _TABLE, f"{op} is lowered twice: which one counts would depend on imports"
            _TABLE[domain, op] = Lowering(function, values, dtypes, check, since)
        return function

    return wrap


@functools.cache
def table() -> dict[tuple[str, str], Lowering]:
    """All lowerings: every module beside this one is imported, which a model alone never needs."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return _TABLE


def find(node: Node) -> Lowering | None:
    """The lowering of a node's operator; its module is imported now if it was not before."""
    key = (node.domain, node.op)
    found = _TABLE.get(key)
    if found is None and key in MODULES:
        importlib.import_module(f"{__package__}.{MODULES[key]}")
        found = _TABLE[key]
    return found or OWN.get(key)
