"""Which operators have a lowering, and what a lowering must be told before it is chosen."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.providers.cpu.defs import Definitions, NodeView

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
ALL = NUMERIC | {DType.bool}


@dataclass(frozen=True)
class Lowering:
    """How one operator is lowered. ``values`` are operands whose content decides shapes or addresses."""

    lower: Lower
    values: tuple[int, ...] = ()
    dtypes: frozenset[DType] = ALL
    check: Check | None = None
    since: int = 1  # versions before this mean something else


_TABLE: dict[tuple[str, str], Lowering] = {}


def lowers(
    *ops: str,
    domain: str = "",
    values: tuple[int, ...] = (),
    dtypes: frozenset[DType] = ALL,
    check: Check | None = None,
    since: int = 1,
) -> Callable[[Lower], Lower]:
    """Declare the decorated function as the lowering of some operators.

    ``check(node)`` may look at the node's attributes and declared types and return the reason why not.
    """

    def wrap(function: Lower) -> Lower:
        for op in ops:
            _TABLE[domain, op] = Lowering(function, values, dtypes, check, since)
        return function

    return wrap


@functools.cache
def table() -> dict[tuple[str, str], Lowering]:
    """All lowerings; the modules beside this one are imported on the first call."""
    package = importlib.import_module("ranvier.providers.cpu.lower")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return _TABLE


def find(node: Node) -> Lowering | None:
    return table().get((node.domain, node.op))
