"""Convolutions whose filters are larger than their results, with filters that are a tensor of the graph.

The gradient of a convolution by its weights is one: batches are its channels, input channels its images, the output's
gradient its filters, and its few results per image are the taps. What is summed over is long (all pixels of a batch),
so it is one product ``filters x windows``; the windows are copied side by side first. For taps of 3 x 3 Winograd's
algorithm, read backwards, needs no windows and a quarter of the multiplications (``squares_backwards.py``).
"""

from __future__ import annotations

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.conv import squares_backwards
from ranvier.codegen.llvm.conv.shape import ConvShape, triple
from ranvier.codegen.llvm.gemm import matmul
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Expr, Index, Load, Map, Nest, Op, Operand, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_FEWEST = 32  # products summed up for one result; with fewer there is nothing to win


def has_few_outputs(shape: ConvShape) -> bool:
    return shape.group == 1 and shape.taps > shape.pixels and shape.taps * shape.cin >= _FEWEST


def conv_few_outputs(
    x: View, w: View, out: View, shape: ConvShape, isa: Isa, *, threads: int = 1, winograd: bool = False
) -> list[Launch]:
    """``out`` [n, cout, *spatial] of any layout from ``x`` [n, cin, *spatial] and ``w`` [cout, cin, *kernel]."""
    if shape.is_empty:
        return []
    if winograd and (m := squares_backwards.square(shape)) and x.dtype is w.dtype is out.dtype:
        return squares_backwards.launches(x, w, out, shape, isa, threads, m)
    launches: list[Launch] = []
    filters = _spread(w)
    depth = shape.cin * shape.taps
    inner = (shape.cin, *shape.kernel)
    lying = View(w.storage, w.dtype, inner, filters[1:], w.offset).reshaped((depth,))
    if lying is None:
        dense = View.temporary(w.dtype, (*inner, shape.cout))
        order = (*filters[1:], filters[0])
        launches += _copied(View(w.storage, w.dtype, dense.shape, order, w.offset), dense, isa, threads)
        left = View(dense.storage, w.dtype, (shape.cout, depth), (1, shape.cout))
    else:
        left = View(w.storage, w.dtype, (shape.cout, depth), (filters[0], lying.strides[0]), w.offset)
    right = _in_place(x, shape)
    if right is None:
        right, made = _windows(x, shape, isa, threads)
        launches += made
    n, channel, *places = _spread(out)
    sizes: tuple[int, ...] = (*shape.out, shape.n)
    steps: tuple[int, ...] = (*places, n)
    columns = shape.pixels * shape.n
    if right.strides[0] == 1:  # windows whose elements lie side by side are read as rows, in place
        product = View.temporary(out.dtype, (columns, shape.cout))
        launches += matmul(right.transposed((1, 0)), left.transposed((1, 0)), product, isa, threads=threads)
        sizes, steps = (*sizes, shape.cout), (*steps, channel)
    else:
        product = View.temporary(out.dtype, (shape.cout, columns))
        launches += matmul(left, right, product, isa, threads=threads)
        sizes, steps = (shape.cout, *sizes), (channel, *steps)
    target = View(out.storage, out.dtype, sizes, steps, out.offset)
    return [*launches, *_copied(View.dense(product.storage, out.dtype, sizes), target, isa, threads)]


def _spread(view: View) -> tuple[int, ...]:
    """Strides of the first two axes, and of three spatial ones."""
    return (*view.strides[:2], *triple(view.strides[2:], 0))


def _copied(source: View, target: View, isa: Isa, threads: int) -> list[Launch]:
    operands = (Operand(source, source.strides), Operand(target, target.strides))
    copy = Nest(target.shape, operands, (Map(((1, Load(0, source.element)),)),), label="few outputs")
    return nests.launches(copy, isa, threads)


def _in_place(x: View, shape: ConvShape) -> View | None:
    """The one window of every image as a matrix, where it is all of it."""
    if shape.pixels != 1 or shape.begin != (0, 0, 0) or shape.size != shape.kernel or shape.dilations != (1, 1, 1):
        return None
    image, *rest = _spread(x)
    rows = shape.cin * shape.taps
    lying = View(x.storage, x.dtype, (shape.cin, *shape.size), tuple(rest), x.offset).reshaped((rows,))
    if lying is None or 1 not in (image, lying.strides[0]):
        return None
    return View(x.storage, x.dtype, (rows, shape.n), (lying.strides[0], image), x.offset)


def _windows(x: View, shape: ConvShape, isa: Isa, threads: int) -> tuple[View, list[Launch]]:
    """What each filter element meets, [channel and tap, output pixel and image]: along the images where these lie side
    by side, else along the taps."""
    image, channel, *places = _spread(x)
    extents = (shape.cin, *shape.kernel, *shape.out, shape.n)
    rows, columns = shape.cin * shape.taps, shape.pixels * shape.n
    order = (0, 1, 2, 3, 4, 5, 6, 7) if image == 1 else (4, 5, 6, 7, 0, 1, 2, 3)
    made = View.temporary(x.dtype, extents, order)
    strides = (
        channel,
        *(p * d for p, d in zip(places, shape.dilations)),
        *(p * s for p, s in zip(places, shape.strides)),
        image,
    )
    offset = -sum(p * b for p, b in zip(places, shape.begin))
    guard: Expr | None = None
    for k in range(3):
        each = _inside(1 + k, 4 + k, *(numbers[k] for numbers in _sizes(shape)))
        if each is not None:
            guard = each if guard is None else Op("and", (guard, each), DType.bool)
    source = Operand(x, strides, offset, guard=guard)
    nest = Nest(extents, (source, Operand(made, made.strides)), (Map(((1, Load(0, x.element)),)),))
    nest = _reordered(nest, order)  # it runs as the windows lie
    matrix = (columns, 1) if image == 1 else (1, rows)
    return View(made.storage, x.dtype, (rows, columns), matrix), nests.launches(nest, isa, threads)


def _sizes(shape: ConvShape) -> tuple[tuple[int, ...], ...]:
    return shape.size, shape.kernel, shape.out, shape.dilations, shape.strides, shape.begin


def _inside(
    tap: int, pixel: int, size: int, kernel: int, out: int, dilation: int, stride: int, begin: int
) -> Expr | None:
    """Whether a tap of a pixel's window is in the image; None where all are."""
    last = (kernel - 1) * dilation + (out - 1) * stride - begin
    if begin == 0 and last < size:
        return None
    whole = DType.int64

    def times(axis: int, by: int) -> Expr:
        return Op("mul", (Index(axis), Size(by)), whole)

    at = Op("sub", (Op("add", (times(tap, dilation), times(pixel, stride)), whole), Size(begin)), whole)
    found = [Op("ge", (at, Size(0)), DType.bool), Op("lt", (at, Size(size)), DType.bool)]
    return Op("and", (found[0], found[1]), DType.bool)


def _reordered(nest: Nest, order: tuple[int, ...]) -> Nest:
    """The same nest with its axes in another order."""
    place = {axis: k for k, axis in enumerate(order)}

    def moved(e: Expr) -> Expr:
        if isinstance(e, Index):
            return Index(place[e.axis])
        return Op(e.name, tuple(moved(a) for a in e.args), e.dtype) if isinstance(e, Op) else e

    operands = tuple(
        Operand(o.view, tuple(o.strides[a] for a in order), o.offset, guard=None if o.guard is None else moved(o.guard))
        for o in nest.operands
    )
    return Nest(tuple(nest.extents[a] for a in order), operands, nest.stages, label="windows")
