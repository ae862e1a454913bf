"""Which operators run on torch, by which function, and for what types: filled by the modules under ``ops``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.providers.cuda.library import TORCH_NAMES, tensor_over, torch_type
from ranvier.providers.foreign import is_used
from ranvier.records import dataclass

HALVES = frozenset({DType.float16, DType.bfloat16})
FLOATS = frozenset({DType.float32, DType.float64}) | HALVES
SIGNED = frozenset({DType.int8, DType.int16, DType.int32, DType.int64})
UNSIGNED = frozenset({DType.uint8, DType.uint16, DType.uint32})
INTEGERS = SIGNED | UNSIGNED  # uint64 has no comparison and no division in torch: each operator says if it takes it
BOOL = frozenset({DType.bool})
NUMBERS = FLOATS | INTEGERS
COMPLEX = frozenset({DType.complex64, DType.complex128})
ALL = NUMBERS | BOOL | {DType.uint64}
ANY = frozenset(TORCH_NAMES)  # for what only moves elements: a carrier does

Refusal = Callable[[Node], str | None]
CONTRIB = "com.microsoft"
ML = "ai.onnx.ml"
TRAINING = "ai.onnx.preview.training"


@dataclass
class Call:
    """What a function may know beside its operands, and what it wants to be true of them."""

    node: Node
    device: Any = None  # torch's, where results are made
    low: Any = None  # torch's type for products of float32 operands, where the session allows fewer bits
    constants: list[Any] | None = None  # tensors that an earlier call with the same sizes made from NumPy arrays
    overwrites: frozenset[int] = frozenset()  # operands in whose memory results may, and should, be put
    requirements: list[tuple[Any, str]] = field(default_factory=list)
    _made: list[Any] = field(default_factory=list)

    @property
    def version(self) -> int:
        return self.node.version

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attrs.get(name, default)

    def flag(self, name: str, default: int = 0) -> bool:
        return bool(self.node.attrs.get(name, default))

    def dtype(self, position: int = 0) -> DType:
        """The element type of a result, by the graph."""
        return _dtype(self.node.outputs[position])

    def result_type(self, position: int = 0) -> Any:
        return torch_type(self.dtype(position))

    def operand_dtype(self, position: int) -> DType:
        value = self.node.input(position)
        assert value is not None
        return _dtype(value)

    def wants(self, position: int) -> bool:
        return position < len(self.node.outputs) and is_used(self.node.outputs[position])

    def constant(self, make: Callable[[], Any]) -> Any:
        """A tensor on the device with the content of an array that follows from sizes alone. It is made once: a copy
        from the host has no place in a captured run."""
        position = len(self._made)
        if self.constants is not None and position < len(self.constants):
            found = self.constants[position]
        else:
            found = tensor_over(np.ascontiguousarray(make())).clone().to(self.device)
        self._made.append(found)
        return found

    @property
    def made(self) -> list[Any]:
        return self._made

    def require(self, condition: Any, message: str) -> None:
        """``condition`` is a boolean on the device, looked at when results leave it: looking at once would stop the
        device, and an index outside of a tensor would leave its context useless. Until then the function works with
        values that do no harm."""
        self.requirements.append((condition, f"{self.node.op}: {message}"))


def _dtype(value: Value) -> DType:
    assert isinstance(value.type, TensorType) and value.type.dtype is not None
    return value.type.dtype


@dataclass(frozen=True)
class Lowering:
    """``types`` of operands and results. ``host``: operands whose content shapes the result, given as NumPy arrays.
    ``prepares``: what is done to an operand before, once where it is a constant. ``wide``: halves are computed as
    float32. ``moves``: elements are only moved, so they come as bits. ``numpy``: only sizes are looked at, so the
    operator's own body does it. ``stops``: why it cannot be captured, where it looks at what the device computed."""

    function: Callable[..., Any]
    since: int
    types: frozenset[DType]
    host: tuple[int, ...]
    refuses: Refusal | None
    prepares: Mapping[int, Callable[[Any, Node], Any]]
    wide: bool
    moves: bool
    numpy: bool
    stops: str


_TABLE: dict[tuple[str, str], list[Lowering]] = {}  # the newest version first


def lowers(
    *ops: str,
    domain: str = "",
    since: int = 1,
    types: frozenset[DType] = FLOATS,
    host: tuple[int, ...] = (),
    refuses: Refusal | None = None,
    prepares: Mapping[int, Callable[[Any, Node], Any]] | None = None,
    wide: bool = False,
    moves: bool = False,
    numpy: bool = False,
    stops: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function ``(call, *operands) -> result or tuple of results`` for operators of a domain."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        entry = Lowering(function, since, types, host, refuses, prepares or {}, wide, moves, numpy, stops)
        for op in ops:
            _TABLE[domain, op] = sorted([*_TABLE.get((domain, op), ()), entry], key=lambda each: -each.since)
        return function

    return register


def withdraw(domain: str, op: str) -> None:
    """Forget an operator, so that it can be declared anew."""
    _TABLE.pop((domain, op), None)


def operators() -> frozenset[str]:
    return frozenset(op for _, op in _TABLE)


def declared() -> frozenset[tuple[str, str]]:
    return frozenset(_TABLE)


def lowering_of(node: Node) -> Lowering | None:
    return next((each for each in _TABLE.get((node.domain, node.op), ()) if each.since <= node.version), None)


def refusal(node: Node) -> str | None:
    """Why a node is not for torch; None where it is. Its types are known by now."""
    found = lowering_of(node)
    if found is None:
        known = (node.domain, node.op) in _TABLE
        return f"version {node.version} of it is not lowered to torch" if known else "it is not lowered to torch"
    for position, value in enumerate([*node.inputs, *node.outputs]):
        if value is None or not isinstance(value.type, TensorType) or position in found.host or not is_used(value):
            continue
        dtype = value.type.dtype
        if dtype is not None and dtype not in found.types:
            return f"it is not lowered to torch for {dtype}"
    return found.refuses(node) if found.refuses is not None else None


_ALIKE = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", *(f"Random{n}" for n in ["Normal", "Uniform", "NormalLike", "UniformLike"])}
)


def draws_alike(node: Node) -> bool:
    """Random operators whose numbers come from the generator on the host."""
    return not node.domain and node.op in _ALIKE


def unknown_types(node: Node) -> str | None:
    """A tensor of a known element type everywhere, or why not."""
    for value in [*node.inputs, *node.outputs]:
        if value is None or not is_used(value):
            continue
        if not isinstance(value.type, TensorType) or value.type.dtype is None:
            return f"the type of {value.name!r} is not known"
        if value.type.dtype not in TORCH_NAMES:
            return f"{value.name!r} is of {value.type.dtype}"
    return None


def only_first_result(node: Node) -> str | None:
    """A refusal for those of whose results only the first is lowered."""
    return "only its first result is lowered to torch" if any(is_used(v) for v in node.outputs[1:]) else None
