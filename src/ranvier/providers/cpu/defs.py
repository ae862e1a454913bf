"""What a partition computes, tensor by tensor, before memory and loops are decided.

Lowering a node appends *definitions*. Each says how one tensor (or a few) comes from others, in one of a handful of
ways; fusion and layout only look at these, never at ONNX operators:

* :class:`Alias`: the same memory seen differently (reshape, transpose, slice …)
* :class:`Pointwise`: an expression of the operands' elements at the same (broadcast) position
* :class:`Moved`: an expression of elements of the operands at computed positions (pad, gather, resize …)
* :class:`Rows`: reductions over some axes and expressions of their results (sum, softmax, layer norm …)
* :class:`Contraction`: a product with accumulators, which can take an epilogue (matmul, convolution …)
* :class:`Joined`: tensors side by side in one (concat)
* :class:`Opaque`: anything else that makes launches of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen.launch import Launch
from ranvier.codegen.loops.ir import Epilogue, Expr, Reduce
from ranvier.codegen.storage import View, row_major
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.records import dataclass
from ranvier.varying import whole

if TYPE_CHECKING:
    from ranvier.providers.cpu.nest_builder import NestBuilder
    from ranvier.providers.cpu.realise import Realiser
    from ranvier.providers.cpu.target import Target

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


class Declined(Exception):
    """A node cannot be lowered for these shapes; the reason is for people."""


class NeedsValue(Exception):
    """Lowering needs the content of a tensor that is not known from shapes alone."""

    def __init__(self, value: Value) -> None:
        super().__init__(f"the content of {value.name!r} is needed to know a shape")
        self.value = value


def broadcast(*shapes: Shape) -> Shape:
    """The shape that all of these broadcast to by NumPy's rule."""
    longest = max(shapes, key=len, default=())
    found = list(longest)
    for shape in shapes:
        if shape is longest:
            continue
        for k, size in enumerate(shape, len(found) - len(shape)):
            if found[k] == 1:
                found[k] = size
            elif size not in (1, found[k]):
                raise ValueError(f"shapes {shapes} do not broadcast")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Use:
    """An operand, seen under another shape before it is broadcast (``[C]`` as ``[C, 1, 1]``)."""

    value: Value
    shape: Shape | None = None


@dataclass(eq=False)
class Def:
    """Tensors made from others; compared by identity."""

    outputs: tuple[Value, ...]
    label: str = field(default="", kw_only=True)

    @property
    def operands(self) -> tuple[Value, ...]:
        raise NotImplementedError

    @property
    def out(self) -> Value:
        return self.outputs[0]


@dataclass(eq=False)
class Alias(Def):
    """``view`` maps the operand's memory to that of the result; None means that no strides can do it: copy first."""

    source: Value
    view: Callable[[View], View | None]
    inverse: Callable[[View], View | None] | None = None  # from the result's memory to the operand's, where one is

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.source,)


@dataclass(eq=False)
class Pointwise(Def):
    uses: tuple[Use, ...]
    compute: Callable[[list[Expr]], Expr]

    @property
    def operands(self) -> tuple[Value, ...]:
        return tuple(u.value for u in self.uses)


@dataclass(eq=False)
class Moved(Def):
    sources: tuple[Value, ...]
    compute: Callable[[NestBuilder, list[View]], Expr]  # over the axes of the result

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.sources


@dataclass
class RowBody:
    """Reductions in order, then one expression per output: ``maps`` at every point, ``finals`` once per row."""

    reduces: list[Reduce]
    maps: dict[int, Expr] = field(default_factory=dict)
    finals: dict[int, Expr] = field(default_factory=dict)


@dataclass(eq=False)
class Rows(Def):
    """Over ``domain``, of which ``axes`` are the row. Outputs in ``finals`` have the domain without the row axes
    (``keepdims``: with size 1)."""

    uses: tuple[Use, ...]
    domain: Shape
    axes: tuple[int, ...]
    build: Callable[[list[Expr]], RowBody]
    mapped: frozenset[int] = frozenset()  # outputs that have the domain's shape
    keepdims: bool = True
    sources: tuple[Value, ...] = ()  # operands that are read at computed positions …
    gather: Callable[[NestBuilder, list[View]], list[Expr]] | None = None  # … by these expressions, after ``uses``

    @property
    def operands(self) -> tuple[Value, ...]:
        return (*(u.value for u in self.uses), *self.sources)


@dataclass(eq=False)
class Contraction(Def):
    """``realise(realiser, views, out, epilogue)`` makes the launches.

    ``fold(strides)`` maps strides over the result's axes to (batch, row, column) strides of an epilogue operand, or
    None where they cannot be expressed. ``order`` is how the result must lie in memory (outermost axis first).

    ``narrow(target)`` says why the product cannot be had with operands of ``target.narrow``, or None where it can. Then
    ``realise`` may be given float32 tensors that are stored so (``View.element`` is float32 still): all operands but
    constants, which it packs as it likes, together; and whatever the operands are, the target and the epilogue's
    operands may be stored in either type. The sum is one of float32, rounded once at the store. A kernel that
    ``rounds`` its operands itself is given them as they are stored, and told by ``Realiser.multiplies`` to what.
    ``pace(target)`` is how fast both products are (``narrow.rates``).
    """

    sources: tuple[Value, ...]
    realise: Callable[[Realiser, list[View], View, Epilogue | None], Sequence[Launch]]
    fold: Callable[[Sequence[int]], tuple[int, int, int] | None]
    order: tuple[int, ...] | None = None
    unit_axis: int | None = None  # the result's axis that must have stride 1
    flops: float = 0.0
    narrow: Callable[[Target], str | None] | None = None
    rounds: bool = False
    pace: Callable[[Target], tuple[float, float]] | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.sources


@dataclass(eq=False)
class Joined(Def):
    sources: tuple[Value, ...]
    axis: int

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.sources


@dataclass(eq=False)
class Opaque(Def):
    """``realise(realiser, views, outs)`` fills dense results; ``dense`` operands are made row-major before.

    ``narrow(target)`` as for a contraction: then operands and results may be stored in 16 bits, each or not. A kernel
    that ``rounds`` keeps constants that it arranges for itself in 16 bits where ``Realiser.multiplies`` says so.
    """

    sources: tuple[Value, ...]
    realise: Callable[[Realiser, list[View], list[View]], Sequence[Launch]]
    dense: bool = True
    flops: float = 0.0
    narrow: Callable[[Target], str | None] | None = None
    rounds: bool = False

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.sources


@dataclass
class Check:
    """A run-time condition: the program stores a nonzero byte into ``flag`` where it is violated."""

    flag: Value
    message: str
    node: str


@dataclass
class Drawn:
    """A tensor that is made anew before every run, by ``make``, and comes into it as an input does."""

    value: Value
    make: Callable[[], Array]


class Definitions:
    """The definitions of one partition at given shapes, and the helpers lowerings write them with."""

    def __init__(self) -> None:
        self.types: dict[Value, TensorType] = {}
        self.known: dict[Value, Array] = {}
        self.expand: Callable[[Iterable[Node]], None] | None = None  # lowers the nodes of a nested graph too
        self.defs: list[Def] = []
        self.checks: list[Check] = []
        self.draws: list[Drawn] = []
        self.label = ""

    # -- values -----------------------------------------------------------------------------------------------------

    def temp(self, dtype: DType, shape: Sequence[int]) -> Value:
        value = Value("", TensorType(dtype, tuple([whole(d) for d in shape])))
        self.types[value] = value.type  # type: ignore[assignment]
        return value

    def constant(self, array: Any, dtype: DType | None = None) -> Value:
        array = row_major(array)
        tensor = ConstTensor.of(array)
        value = Value("", TensorType(dtype or dtypes.of(array), array.shape))
        value.const = tensor
        self.types[value] = value.type  # type: ignore[assignment]
        return value

    def shape(self, value: Value) -> Shape:
        return self.types[value].shape  # type: ignore[return-value]

    def dtype(self, value: Value) -> DType:
        found = self.types[value].dtype
        assert found is not None
        return found

    def _result(self, out: Value | None, dtype: DType, shape: Sequence[int]) -> Value:
        if out is None:
            return self.temp(dtype, shape)
        self.types[out] = TensorType(dtype, tuple([whole(d) for d in shape]))
        return out

    def _add(self, definition: Def) -> None:
        definition.label = self.label
        self.defs.append(definition)

    # -- definitions ------------------------------------------------------------------------------------------------

    def pointwise(
        self,
        operands: Sequence[Value | Use],
        compute: Callable[[list[Expr]], Expr],
        dtype: DType,
        shape: Sequence[int] | None = None,
        out: Value | None = None,
    ) -> Value:
        """An elementwise tensor; its shape is that of the broadcast operands unless given."""
        uses = tuple(o if isinstance(o, Use) else Use(o) for o in operands)
        if shape is None:
            shapes = [u.shape if u.shape is not None else self.shape(u.value) for u in uses]
            shape = broadcast(*shapes)
        result = self._result(out, dtype, shape)
        self._add(Pointwise((result,), uses, compute))
        return result

    def alias(
        self,
        source: Value,
        view: Callable[[View], View | None],
        shape: Sequence[int],
        out: Value | None = None,
        dtype: DType | None = None,
        inverse: Callable[[View], View | None] | None = None,
    ) -> Value:
        result = self._result(out, dtype or self.dtype(source), shape)
        self._add(Alias((result,), source, view, inverse))
        return result

    def reshape(self, source: Value, shape: Sequence[int], out: Value | None = None) -> Value:
        target = tuple([whole(d) for d in shape])
        have = self.shape(source)
        return self.alias(
            source, lambda view: view.reshaped(target), target, out, inverse=lambda view: view.reshaped(have)
        )

    def transpose(self, source: Value, perm: Sequence[int], out: Value | None = None) -> Value:
        order = tuple(perm)
        have = self.shape(source)
        back = tuple(order.index(axis) for axis in range(len(order)))
        return self.alias(
            source,
            lambda view: view.transposed(order),
            [have[p] for p in order],
            out,
            inverse=lambda view: view.transposed(back),
        )

    def identity(self, source: Value, out: Value | None = None) -> Value:
        return self.alias(source, lambda view: view, self.shape(source), out, inverse=lambda view: view)

    def moved(
        self,
        sources: Sequence[Value],
        compute: Callable[[NestBuilder, list[View]], Expr],
        dtype: DType,
        shape: Sequence[int],
        out: Value | None = None,
    ) -> Value:
        result = self._result(out, dtype, shape)
        self._add(Moved((result,), tuple(sources), compute))
        return result

    def rows(
        self,
        operands: Sequence[Value | Use],
        axes: Sequence[int],
        build: Callable[[list[Expr]], RowBody],
        outs: Sequence[tuple[DType, bool]],  # (element type, has the domain's shape?)
        *,
        domain: Shape | None = None,
        keepdims: bool = True,
        results: Sequence[Value | None] = (),
        sources: Sequence[Value] = (),
        gather: Callable[[NestBuilder, list[View]], list[Expr]] | None = None,
    ) -> list[Value]:
        """Row work over ``axes`` of the operands' broadcast shape (or ``domain``)."""
        uses = tuple(o if isinstance(o, Use) else Use(o) for o in operands)
        if domain is None:
            domain = broadcast(*[u.shape if u.shape is not None else self.shape(u.value) for u in uses])
        row = tuple(sorted(a % max(1, len(domain)) for a in axes))
        reduced = (
            tuple(1 if k in row else d for k, d in enumerate(domain))
            if keepdims
            else tuple(d for k, d in enumerate(domain) if k not in row)
        )
        made: list[Value] = []
        for k, (dtype, mapped) in enumerate(outs):
            given = results[k] if k < len(results) else None
            made.append(self._result(given, dtype, domain if mapped else reduced))
        at_points = frozenset(k for k, (_, mapped) in enumerate(outs) if mapped)
        self._add(Rows(tuple(made), uses, tuple(domain), row, build, at_points, keepdims, tuple(sources), gather))
        return made

    def contraction(
        self,
        sources: Sequence[Value],
        realise: Callable[[Realiser, list[View], View, Epilogue | None], Sequence[Launch]],
        fold: Callable[[Sequence[int]], tuple[int, int, int] | None],
        dtype: DType,
        shape: Sequence[int],
        out: Value | None = None,
        *,
        order: tuple[int, ...] | None = None,
        unit_axis: int | None = None,
        flops: float = 0.0,
        narrow: Callable[[Target], str | None] | None = None,
        rounds: bool = False,
        pace: Callable[[Target], tuple[float, float]] | None = None,
    ) -> Value:
        result = self._result(out, dtype, shape)
        self._add(Contraction((result,), tuple(sources), realise, fold, order, unit_axis, flops, narrow, rounds, pace))
        return result

    def joined(self, sources: Sequence[Value], axis: int, shape: Sequence[int], out: Value | None = None) -> Value:
        result = self._result(out, self.dtype(sources[0]), shape)
        self._add(Joined((result,), tuple(sources), axis))
        return result

    def opaque(
        self,
        sources: Sequence[Value],
        realise: Callable[[Realiser, list[View], list[View]], Sequence[Launch]],
        outs: Sequence[tuple[DType, Sequence[int]]],
        results: Sequence[Value | None] = (),
        *,
        dense: bool = True,
        flops: float = 0.0,
        narrow: Callable[[Target], str | None] | None = None,
        rounds: bool = False,
    ) -> list[Value]:
        made = [
            self._result(results[k] if k < len(results) else None, dtype, shape)
            for k, (dtype, shape) in enumerate(outs)
        ]
        self._add(Opaque(tuple(made), tuple(sources), realise, dense, flops, narrow, rounds))
        return made

    def drawn(self, make: Callable[[], Array], dtype: DType, shape: Sequence[int]) -> Value:
        """A tensor of random numbers, which ``make`` draws before every run."""
        value = self.temp(dtype, shape)
        self.draws.append(Drawn(value, make))
        return value

    def check(self, flag: Value, message: str) -> None:
        """Fail the run with ``message`` where the (one-element bool or uint8) ``flag`` is not zero."""
        self.checks.append(Check(flag, message, self.label))


class NodeView:
    """One node as its lowering sees it: static types, attributes, and the operands whose content is known."""

    __slots__ = ("_defs", "attrs", "inputs", "node", "op", "outputs", "version")

    def __init__(self, node: Node, defs: Definitions) -> None:
        self.node = node
        self.op = node.op
        self.version = node.version
        self.attrs: Mapping[str, Any] = node.attrs
        self.inputs = node.inputs
        self.outputs = node.outputs
        self._defs = defs

    def has(self, k: int) -> bool:
        return k < len(self.inputs) and self.inputs[k] is not None

    def wants(self, k: int) -> bool:
        """Is output ``k`` there and used?"""
        return k < len(self.outputs) and (bool(self.outputs[k].uses) or self.outputs[k].is_graph_output)

    def input(self, k: int) -> Value:
        value = self.inputs[k]
        assert value is not None
        return value

    def type(self, k: int) -> TensorType:
        return self._defs.types[self.input(k)]

    def shape(self, k: int) -> Shape:
        return self._defs.shape(self.input(k))

    def rank(self, k: int) -> int:
        return len(self.shape(k))

    def dtype(self, k: int) -> DType:
        return self._defs.dtype(self.input(k))

    def out_shape(self, k: int = 0) -> Shape:
        return self._defs.shape(self.outputs[k])

    def out_dtype(self, k: int = 0) -> DType:
        return self._defs.dtype(self.outputs[k])

    def attr(self, name: str, default: Any = None) -> Any:
        found = self.attrs.get(name)
        return default if found is None else found

    def known(self, k: int) -> Array | None:
        """The content of operand ``k`` where it is a constant or follows from shapes."""
        if not self.has(k):
            return None
        value = self.input(k)
        if value.const is not None:
            return value.const.numpy()
        return self._defs.known.get(value)

    def need(self, k: int) -> Array:
        found = self.known(k)
        if found is None:
            raise NeedsValue(self.input(k))
        return found

    def ints(self, k: int) -> tuple[int, ...]:
        """The content of an integer operand as a flat tuple; NeedsValue where it is not known."""
        return tuple([whole(x) for x in np.ravel(self.need(k))])

    def axes(self, k: int = 1, attribute: str = "axes") -> tuple[int, ...] | None:
        """Axes from the operand (newer versions) or the attribute; None where neither is given."""
        if self.has(k):
            return self.ints(k)
        found = self.attrs.get(attribute)
        return None if found is None else tuple(int(a) for a in found)
