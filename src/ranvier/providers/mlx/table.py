"""Which operators are lowered to mlx, by whom, and for what: filled by the modules of the families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.graph.types import TensorType
from ranvier.providers.foreign import is_used
from ranvier.records import dataclass

FLOATS = frozenset({DType.float32, DType.float16, DType.bfloat16})
SIGNED = frozenset({DType.int8, DType.int16, DType.int32, DType.int64})
INTEGERS = SIGNED | {DType.uint8, DType.uint16, DType.uint32, DType.uint64}
BOOL = frozenset({DType.bool})
NUMBERS = FLOATS | INTEGERS
ALL = NUMBERS | BOOL

Refusal = Callable[[Node], str | None]


@dataclass
class Call:
    """What a lowering may know beside its operands, and what it wants to be true of them."""

    node: Node
    requirements: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def version(self) -> int:
        return self.node.version

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attrs.get(name, default)

    def require(self, condition: Any, message: str) -> None:
        """``condition`` is a lazy boolean of mlx, looked at when everything has been computed: mlx itself checks no
        index and no divisor. Until then the lowering works with values that do no harm."""
        self.requirements.append((condition, f"{self.node.op}: {message}"))


@dataclass(frozen=True)
class Lowering:
    """``types`` of operands and results. ``host``: operands whose content shapes the result, given as NumPy arrays.
    ``prepares``: what is done to an operand before, once where it is a constant. ``wide``: halves are computed as
    float32. ``numpy``: not for mlx at all; the operator's own body does it, since only sizes are looked at."""

    function: Callable[..., Any]
    since: int
    types: frozenset[DType]
    host: tuple[int, ...]
    refuses: Refusal | None
    prepares: Mapping[int, Callable[[Any, Node], Any]]
    wide: bool
    numpy: bool


_TABLE: dict[str, list[Lowering]] = {}  # the newest version first


def lowers(
    *ops: str,
    since: int = 1,
    types: frozenset[DType] = FLOATS,
    host: tuple[int, ...] = (),
    refuses: Refusal | None = None,
    prepares: Mapping[int, Callable[[Any, Node], Any]] | None = None,
    wide: bool = False,
    numpy: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function ``(call, *operands) -> result or tuple of results`` for operators of the standard."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            entry = Lowering(function, since, types, host, refuses, prepares or {}, wide, numpy)
            _TABLE[op] = sorted([*_TABLE.get(op, ()), entry], key=lambda each: -each.since)
        return function

    return register


def operators() -> frozenset[str]:
    return frozenset(_TABLE)


def lowering_of(node: Node) -> Lowering | None:
    if node.domain:
        return None
    return next((each for each in _TABLE.get(node.op, ()) if each.since <= node.version), None)


def refusal(node: Node) -> str | None:
    """Why a node is not for mlx; None where it is. Its types are known by now."""
    found = lowering_of(node)
    if found is None:
        known = not node.domain and node.op in _TABLE
        return f"version {node.version} of it is not lowered to mlx" if known else "it is not lowered to mlx"
    for position, value in enumerate([*node.inputs, *node.outputs]):
        if value is None or not isinstance(value.type, TensorType) or position in found.host or not is_used(value):
            continue
        dtype = value.type.dtype
        if dtype is DType.float64:
            return "Metal has no float64"
        if dtype is not None and dtype not in found.types:
            return f"it is not lowered to mlx for {dtype}"
        if 0 in (value.type.shape or ()) and not found.numpy:
            return f"{value.name!r} is empty"
    return found.refuses(node) if found.refuses is not None else None


def only_first_result(node: Node) -> str | None:
    """A refusal for those of whose results only the first is lowered."""
    if any(is_used(value) for value in node.outputs[1:]):
        return "only its first result is lowered to mlx"
    return None
