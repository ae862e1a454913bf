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

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ranvier.codegen.launch import Launch
from ranvier.codegen.loops.ir import Epilogue, Expr, Reduce
from ranvier.codegen.storage import View
from ranvier.graph.ir import Value
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.codegen.definitions.nest_builder import NestBuilder

Shape = tuple[int, ...]
# a provider's own: definitions only hand them on
Realiser = Any
Target = Any


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
    that ``rounds`` keeps constants that it arranges for itself in 16 bits where ``Realiser.multiplies`` says so; one
    that ``widens`` computes in float64 what comes as float32, unless ``Realiser.coarse`` says that float32 will do.
    ``positive`` results are never negative. ``about`` is for attempts of the same provider to make one of two.
    """

    sources: tuple[Value, ...]
    realise: Callable[[Realiser, list[View], list[View]], Sequence[Launch]]
    dense: bool = True
    flops: float = 0.0
    narrow: Callable[[Target], str | None] | None = None
    rounds: bool = False
    widens: bool = False
    positive: bool = False
    about: Any = None

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.sources
