"""Products of matrices as operators of the graph; decompositions by NumPy on the host, at once and without gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor, beside, both, call
from ranvier.tensor.elementwise import abs as absolute
from ranvier.tensor.elementwise import conj, multiply, not_equal, sqrt, square, subtract
from ranvier.tensor.elementwise import pow as power
from ranvier.tensor.expr import spec
from ranvier.tensor.host import hosted, hosted_several
from ranvier.tensor.manipulate import astype, broadcast_to, matrix_transpose, permute_dims, reshape, stack, take
from ranvier.tensor.reductions import max as largest
from ranvier.tensor.reductions import min as smallest
from ranvier.tensor.reductions import sum as summed
from ranvier.tensor.shapes import axes_of, broadcast, count, reduced
from ranvier.tensor.types import COMPLEX, FLOATS, kind_of, promoted

_MATMUL = spec("MatMul")
_INTEGERS = (DType.int8, DType.int16, DType.uint8, DType.uint16)


def matmul(x1: Any, x2: Any, /) -> Tensor:
    """The product of matrices: the last two axes; those before them are broadcast."""
    if type(x1) is not Tensor:
        x1 = as_tensor(x1, x2 if type(x2) is Tensor else None)
    if type(x2) is not Tensor:
        x2 = as_tensor(x2, x1)
    x, y = x1, x2
    a, b = x._expr.shape, y._expr.shape
    shape = _product_shape(a, b)
    dtype = promoted(x.dtype, y.dtype)
    if dtype in COMPLEX:
        return hosted(np.matmul, x, y)
    if dtype is DType.bool:
        raise DTypeMismatch("matmul is not defined for bool")
    if a[-1] == 0:
        return broadcast_to(as_tensor(0, astype(x, dtype)), shape)
    work = DType.int32 if dtype in _INTEGERS else dtype  # the operator has no smaller ones; their low bits are the same
    found = call(_MATMUL, (astype(x, work), astype(y, work)), work, shape)
    return astype(found, dtype)


def _product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if not a or not b:
        raise ShapeMismatch("matmul needs operands with dimensions; multiply by a number with *")
    if a[-1] != b[-2 if len(b) > 1 else 0]:
        raise ShapeMismatch(f"matrices of shapes {list(a)} and {list(b)} cannot be multiplied")
    lead = broadcast(a[:-2], b[:-2])
    return (*lead, *(a[-2:-1] if len(a) > 1 else ()), *(b[-1:] if len(b) > 1 else ()))


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Tensor:
    """The inner product along an axis."""
    x, y = as_tensor(x1), as_tensor(x2)
    at = index(axis)
    if x.shape[at] != y.shape[at]:
        raise ShapeMismatch(f"axis {at} differs: shapes {list(x.shape)} and {list(y.shape)}")
    found = multiply(conj(x), y)
    return summed(found, axis=at, dtype=found.dtype)


def tensordot(x1: Any, x2: Any, /, *, axes: int | Sequence[Any] = 2) -> Tensor:
    """The sum of products over some axes of both."""
    x, y = as_tensor(x1), as_tensor(x2)
    if isinstance(axes, int):
        mine, theirs = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
    else:
        first, second = axes
        mine = axes_of(tuple(first) if isinstance(first, tuple | list) else (first,), x.ndim)
        theirs = axes_of(tuple(second) if isinstance(second, tuple | list) else (second,), y.ndim)
    if [x.shape[k] for k in mine] != [y.shape[k] for k in theirs]:
        raise ShapeMismatch(f"axes {list(mine)} of {list(x.shape)} and {list(theirs)} of {list(y.shape)} differ")
    left = [k for k in range(x.ndim) if k not in mine]
    right = [k for k in range(y.ndim) if k not in theirs]
    inner = count(tuple(x.shape[k] for k in mine))
    rows, columns = tuple(x.shape[k] for k in left), tuple(y.shape[k] for k in right)
    a = reshape(permute_dims(x, (*left, *mine)), (count(rows), inner))
    b = reshape(permute_dims(y, (*theirs, *right)), (inner, count(columns)))
    return reshape(matmul(a, b), (*rows, *columns))


def einsum(equation: str, *operands: Any) -> Tensor:
    """Products and sums written with letters for axes."""
    own = [as_tensor(x) for x in operands]
    dtype = own[0].dtype
    for x in own[1:]:
        dtype = promoted(dtype, x.dtype)
    own = [astype(x, dtype) for x in own]
    try:
        shape = np.einsum(equation, *[np.broadcast_to(np.float32(0), x.shape) for x in own], optimize=False).shape
    except ValueError as error:
        raise InvalidInput(f"einsum {equation!r}: {error}") from None
    if dtype in COMPLEX:
        return hosted(lambda *arrays: np.einsum(equation, *arrays), *own)
    return call(spec("Einsum", (("equation", equation),)), tuple(own), dtype, shape)


def outer(x1: Any, x2: Any, /) -> Tensor:
    x, y = as_tensor(x1), as_tensor(x2)
    if x.ndim != 1 or y.ndim != 1:
        raise ShapeMismatch("outer is of two vectors")
    return multiply(reshape(x, (-1, 1)) if x.size else reshape(x, (0, 1)), y)


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Tensor:
    """The vector that is orthogonal to both, along an axis of three."""
    x, y, _, shape = both(x1, x2)
    at = index(axis)
    if x.shape[at] != 3 or y.shape[at] != 3:
        raise ShapeMismatch(f"cross is of vectors of three, got shapes {list(x.shape)} and {list(y.shape)}")
    at += 0 if at >= 0 else len(shape)
    x, y = broadcast_to(x, shape), broadcast_to(y, shape)
    lead = (slice(None),) * at
    a, b = [x[(*lead, k)] for k in range(3)], [y[(*lead, k)] for k in range(3)]
    pairs = ((1, 2), (2, 0), (0, 1))
    return stack([subtract(multiply(a[i], b[j]), multiply(a[j], b[i])) for i, j in pairs], axis=at)


def diagonal(x: Any, /, *, offset: int = 0) -> Tensor:
    """The diagonals of matrices."""
    own = as_tensor(x)
    if own.ndim < 2:
        raise ShapeMismatch(f"a matrix has two dimensions or more, got shape {list(own.shape)}")
    rows, columns = own.shape[-2:]
    i = np.arange(rows)
    j = i + offset
    inside = (j >= 0) & (j < columns)
    places = Tensor((i[inside] * columns + j[inside]).astype(np.int64))
    flat = reshape(own, (*own.shape[:-2], rows * columns))
    return take(flat, places, axis=own.ndim - 2)


def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Tensor:
    return summed(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Tensor:
    """The length of vectors, by the norm of this order."""
    own = as_tensor(x)
    axes = axes_of(axis, own.ndim)
    size = absolute(own)
    if not axes:
        return astype(not_equal(own, 0), size.dtype) if ord == 0 else size
    if ord == math.inf:
        return largest(size, axis=axes, keepdims=keepdims)
    if ord == -math.inf:
        return smallest(size, axis=axes, keepdims=keepdims)
    if ord == 0:
        return summed(astype(not_equal(own, 0), size.dtype), axis=axes, keepdims=keepdims)
    if ord == 1:
        return summed(size, axis=axes, keepdims=keepdims)
    if ord == 2:
        return sqrt(summed(square(size), axis=axes, keepdims=keepdims))
    return power(summed(power(size, float(ord)), axis=axes, keepdims=keepdims), 1.0 / ord)


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Tensor:
    """The size of matrices, by the norm of this name or order."""
    own = as_tensor(x)
    if own.ndim < 2:
        raise ShapeMismatch(f"a matrix has two dimensions or more, got shape {list(own.shape)}")
    rows, columns = own.ndim - 2, own.ndim - 1
    if ord == "fro":
        return vector_norm(own, axis=(rows, columns), keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        along, over = (rows, columns) if abs(ord) == 1 else (columns, rows)
        total = summed(absolute(own), axis=along, keepdims=True)
        found = (largest if ord > 0 else smallest)(total, axis=over, keepdims=True)
        return found if keepdims else reshape(found, reduced(own.shape, (rows, columns), False))
    if ord in (2, -2, "nuc"):
        return hosted(np.linalg.norm, own, ord=ord, axis=(-2, -1), keepdims=keepdims)
    raise InvalidInput(f"no norm of matrices is called {ord!r}")


def matrix_power(x: Any, n: int, /) -> Tensor:
    """A matrix multiplied by itself; negative: its inverse."""
    own = as_tensor(x)
    _square(own)
    times = index(n)
    if times < 0:
        own, times = inv(own), -times
    found: Tensor | None = None
    while times:
        if times & 1:
            found = own if found is None else matmul(found, own)
        times >>= 1
        own = matmul(own, own) if times else own
    if found is None:
        return broadcast_to(beside(Tensor(np.eye(own.shape[-1], dtype=own.dtype.numpy)), own), own.shape)
    return found


def det(x: Any, /) -> Tensor:
    """The determinants of matrices."""
    own = as_tensor(x)
    _square(own)
    if own.dtype not in FLOATS or not own.size:
        return hosted(np.linalg.det, own)
    return call(spec("Det"), (own,), own.dtype, own.shape[:-2])


# -- decompositions -------------------------------------------------------------------------------------------------


class EighResult(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


class QRResult(NamedTuple):
    Q: Tensor
    R: Tensor


class SVDResult(NamedTuple):
    U: Tensor
    S: Tensor
    Vh: Tensor


class SlogdetResult(NamedTuple):
    sign: Tensor
    logabsdet: Tensor


def cholesky(x: Any, /, *, upper: bool = False) -> Tensor:
    found = hosted(np.linalg.cholesky, _floats(x))
    return matrix_transpose(conj(found)) if upper else found


def eigh(x: Any, /) -> EighResult:
    return EighResult(*hosted_several(np.linalg.eigh, _square(_floats(x))))


def eigvalsh(x: Any, /) -> Tensor:
    return hosted(np.linalg.eigvalsh, _square(_floats(x)))


def inv(x: Any, /) -> Tensor:
    return hosted(np.linalg.inv, _square(_floats(x)))


def matrix_rank(x: Any, /, *, rtol: Any = None) -> Tensor:
    own = _floats(x)
    limit = None if rtol is None else np.asarray(rtol)
    return hosted(np.linalg.matrix_rank, own, rtol=limit)


def pinv(x: Any, /, *, rtol: Any = None) -> Tensor:
    own = _floats(x)
    limit = max(own.shape[-2:]) * float(np.finfo(own.dtype.numpy).eps) if rtol is None else np.asarray(rtol)
    return hosted(np.linalg.pinv, own, rtol=limit)


def qr(x: Any, /, *, mode: str = "reduced") -> QRResult:
    if mode not in ("reduced", "complete"):
        raise InvalidInput(f"mode is 'reduced' or 'complete', not {mode!r}")
    return QRResult(*hosted_several(np.linalg.qr, _floats(x), mode=mode))


def slogdet(x: Any, /) -> SlogdetResult:
    return SlogdetResult(*hosted_several(np.linalg.slogdet, _square(_floats(x))))


def solve(x1: Any, x2: Any, /) -> Tensor:
    """The solutions of linear equations: one right side where the second has one dimension."""
    x, y = _square(_floats(x1)), _floats(x2)
    dtype = promoted(x.dtype, y.dtype)
    x, y = astype(x, dtype), astype(y, dtype)
    if y.ndim == 1:
        found = hosted(np.linalg.solve, x, reshape(y, (*y.shape, 1)))
        return reshape(found, found.shape[:-1])
    return hosted(np.linalg.solve, x, y)


def svd(x: Any, /, *, full_matrices: bool = True) -> SVDResult:
    return SVDResult(*hosted_several(np.linalg.svd, _floats(x), full_matrices=full_matrices))


def svdvals(x: Any, /) -> Tensor:
    return hosted(np.linalg.svdvals, _floats(x))


def _floats(x: Any) -> Tensor:
    own = as_tensor(x)
    if kind_of(own.dtype) < 2:
        raise DTypeMismatch(f"decompositions are of floats, not {own.dtype}")
    return own


def _square(x: Tensor) -> Tensor:
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeMismatch(f"a square matrix is needed, got shape {list(x.shape)}")
    return x


_OF_TENSORS = True
