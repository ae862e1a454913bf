"""Transformations of weights: put together first, carried out when somebody reads, and only on what is read.

    weight = apply(checkpoint["proj.weight"], Transpose(), Cast("float16"), Slice((slice(0, 128),)))

A slice moves towards the file through casts, scales and transposes, so a part of a transposed tensor is still read as
that part of the file.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidConfig, WeightError
from ranvier.records import dataclass
from ranvier.weights.conversion import check_convertible, converted, product, rounded_product
from ranvier.weights.stored import (
    Array,
    Selection,
    Stored,
    TensorInfo,
    Weight,
    checked_size,
    combined,
    cut,
    extent,
    full,
    normalised,
)


class Transform(Protocol):
    """One step between the file and the reader."""

    def over(self, weight: Weight) -> Weight: ...


class Quantizer(Protocol):
    """What turns floating-point numbers into codes: any scheme of :mod:`ranvier.quantize` does."""

    def quantize(self, array: Array) -> Any: ...


def apply(weight: Weight, *steps: Transform) -> Weight:
    """``weight`` behind these steps, the first one nearest to the file."""
    for step in steps:
        if isinstance(step, type) or not hasattr(step, "over"):
            raise WeightError(f"tensor {weight.info.name!r}: {step!r} is no transformation such as Transpose()")
        # a part of the codes is a part of those of the whole tensor; nothing else can be done to what a scheme makes
        if isinstance(weight, _Quantized) and not isinstance(step, Slice):
            raise WeightError(f"tensor {weight.info.name!r}: {type(step).__name__} comes after Quantize, the last step")
        weight = step.over(weight)
    return weight


def _whole_numbers(weight: Weight, what: str, given: Any) -> list[int]:
    try:
        return [operator.index(each) for each in given]
    except TypeError:
        raise WeightError(
            f"tensor {weight.info.name!r}: {what} are given as a tuple of whole numbers, not as {given!r}"
        ) from None


def _sized(info: TensorInfo, shape: Sequence[int], dtype: DType | None = None) -> TensorInfo:
    kind = dtype or info.dtype
    return replace(info, shape=tuple(shape), dtype=kind, nbytes=kind.nbytes(math.prod(shape)))


@dataclass(frozen=True)
class Slice:
    """A part: slices as one writes them in brackets."""

    part: Any

    def over(self, weight: Weight) -> Weight:
        chosen = normalised(self.part, weight.info.shape, weight.info.name)
        return _Sliced(_sized(weight.info, tuple(map(extent, chosen))), weight, chosen)


@dataclass(frozen=True)
class _Sliced:
    info: TensorInfo
    inner: Weight
    chosen: Selection

    def read(self, part: Selection | None = None) -> Array:
        return self.inner.read(self.chosen if part is None else combined(self.chosen, part))


@dataclass(frozen=True)
class Transpose:
    """Axes in another order; reversed where none is given."""

    axes: tuple[int, ...] | None = None

    def over(self, weight: Weight) -> Weight:
        rank = len(weight.info.shape)
        given = range(rank)[::-1] if self.axes is None else _whole_numbers(weight, "axes", self.axes)
        axes = tuple(a + rank if a < 0 else a for a in given)
        if sorted(axes) != list(range(rank)):
            raise WeightError(f"tensor {weight.info.name!r} of {rank} axes cannot be transposed by {self.axes}")
        return _Transposed(_sized(weight.info, [weight.info.shape[a] for a in axes]), weight, axes)


@dataclass(frozen=True)
class _Transposed:
    info: TensorInfo
    inner: Weight
    axes: tuple[int, ...]

    def read(self, part: Selection | None = None) -> Array:
        if part is None:
            return self.inner.read().transpose(self.axes)
        before = [slice(None)] * len(self.axes)
        for axis, chosen in zip(self.axes, part):
            before[axis] = chosen
        return self.inner.read(tuple(before)).transpose(self.axes)


@dataclass(frozen=True)
class Reshape:
    """The same elements in another shape; one size may be -1."""

    shape: tuple[int, ...]

    def over(self, weight: Weight) -> Weight:
        count, sizes = weight.info.size, _whole_numbers(weight, "sizes", self.shape)
        known = math.prod(d for d in sizes if d != -1)
        if sizes.count(-1) == 1 and known and count % known == 0:
            sizes[sizes.index(-1)] = count // known
        if any(d < 0 for d in sizes) or math.prod(sizes) != count:
            raise WeightError(
                f"tensor {weight.info.name!r} of shape {list(weight.info.shape)} cannot take shape {list(self.shape)}"
            )
        checked_size(weight.info.name, sizes, weight.info.dtype.bits)  # of nothing there are shapes that no array has
        if isinstance(weight, Stored) and weight.dense:
            # the same bytes seen otherwise, so that parts of it are still parts of the file
            return replace(weight, info=replace(weight.info, shape=tuple(sizes)), strides=())
        return _Reshaped(_sized(weight.info, sizes), weight)


@dataclass(frozen=True)
class _Reshaped:
    info: TensorInfo
    inner: Weight

    def read(self, part: Selection | None = None) -> Array:
        """Of a part, those rows of the other shape that hold its rows."""
        shape, before = self.info.shape, self.inner.info.shape
        if part is None or self.info.size == 1:
            return cut(self.inner.read().reshape(shape), part or ())
        if 0 in map(extent, part):
            return np.empty(tuple(map(extent, part)), self.info.dtype.numpy)
        axis, row = _rows(shape)
        inner_axis, inner_row = _rows(before)
        chosen = part[axis]
        first, last = chosen.start * row, (chosen.start + (extent(chosen) - 1) * chosen.step + 1) * row
        begin = first // inner_row
        rows = slice(begin, -(-last // inner_row), 1)
        data = self.inner.read((*full(before[:inner_axis]), rows, *full(before[inner_axis + 1 :]))).reshape(-1)
        data = data[first - begin * inner_row : last - begin * inner_row]
        found = data.reshape(*shape[:axis], -1, *shape[axis + 1 :])
        return found[(*part[:axis], slice(None, None, chosen.step), *part[axis + 1 :])]


def _rows(shape: Sequence[int]) -> tuple[int, int]:
    """The outermost axis that has several entries, and the number of elements in each of them."""
    axis = next(k for k, d in enumerate(shape) if d > 1)
    return axis, math.prod(shape[axis + 1 :])


@dataclass(frozen=True)
class Cast:
    """Another element type, rounded to the nearest; numbers a float8 or an integer cannot hold become its largest."""

    dtype: Any

    def over(self, weight: Weight) -> Weight:
        target = dtypes.of(self.dtype)
        check_convertible(weight.info.name, weight.info.dtype, target)
        return _Cast(_sized(weight.info, weight.info.shape, target), weight)


@dataclass(frozen=True)
class _Cast:
    info: TensorInfo
    inner: Weight

    def read(self, part: Selection | None = None) -> Array:
        return converted(self.inner.read(part), self.inner.info.dtype, self.info.dtype)


@dataclass(frozen=True)
class Scale:
    """Times a number, or an array that broadcasts against the tensor; the element type stays, as if cast to it. Whole
    numbers times whole ones are exact, or an error where they do not fit."""

    factor: Any

    def over(self, weight: Weight) -> Weight:
        info = weight.info
        try:
            factor = np.asarray(self.factor)
        except ValueError as error:
            raise WeightError(f"tensor {info.name!r} cannot be scaled by what is no array: {error}") from None
        try:
            check_convertible(info.name, dtypes.of(factor.dtype), _wide(info.dtype))
        except (DTypeMismatch, WeightError):
            raise WeightError(
                f"tensor {info.name!r} of {info.dtype} cannot be scaled by numbers of the type {factor.dtype}"
            ) from None
        try:
            fits = np.broadcast_shapes(factor.shape, info.shape) == info.shape
        except ValueError:
            fits = False
        if not fits:
            raise WeightError(
                f"tensor {info.name!r} of shape {list(info.shape)} cannot be scaled by "
                f"an array of shape {list(factor.shape)}"
            )
        return _Scaled(info, weight, factor)


@dataclass(frozen=True)
class _Scaled:
    info: TensorInfo
    inner: Weight
    factor: Array

    def read(self, part: Selection | None = None) -> Array:
        array = self.inner.read(part)
        factor = np.broadcast_to(self.factor, self.info.shape)[part or full(self.info.shape)]
        dtype, wide = self.info.dtype, _wide(self.info.dtype)
        if dtype.is_integer:
            whole = dtypes.of(factor.dtype).is_integer
            return product(self.info.name, array, factor, dtype) if whole else rounded_product(array, factor, dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # as in a cast
            products = array.astype(wide.numpy) * factor.astype(wide.numpy)
        return converted(products, wide, dtype)


def _wide(dtype: DType) -> DType:
    """In which a tensor of a type is multiplied."""
    if dtype.is_complex or dtype is DType.string:
        return dtype
    return DType.float32 if dtype is DType.float32 else DType.float64


@dataclass(frozen=True)
class Quantize:
    """Codes and scales instead of numbers: reading gives what the scheme makes. It is the last step.

    ``info`` stays that of the numbers that are read and coded: how many bytes codes take only the scheme knows.
    """

    scheme: Quantizer

    def over(self, weight: Weight) -> Weight:
        name = weight.info.name
        if isinstance(self.scheme, type):
            raise WeightError(
                f"tensor {name!r}: {self.scheme.__name__} is the class of a scheme; give one of it, as made by "
                f"{self.scheme.__name__}()"
            )
        if not callable(getattr(self.scheme, "quantize", None)):
            raise WeightError(f"tensor {name!r}: {self.scheme!r} is no scheme with a method 'quantize'")
        if not _takes_an_array(self.scheme.quantize):
            raise InvalidConfig(
                f"tensor {name!r}: {type(self.scheme).__name__} quantizes no array by itself, as Gptq and Awq, which "
                "need samples of what a layer reads: load the numbers and call its quantize(weights, moments) with "
                "InputMoments"
            )
        return _Quantized(weight.info, weight, self.scheme)


@dataclass(frozen=True)
class _Quantized:
    info: TensorInfo
    inner: Weight
    scheme: Quantizer

    def read(self, part: Selection | None = None) -> Any:
        """Of a part, what shares scales with it is read and coded too, so that its codes are those of the whole."""
        shape, name = self.info.shape, self.info.name
        if part is None or part == full(shape):
            return self._coded(None)
        wider = tuple(map(_widened, part, _apart(self.scheme, shape), shape))
        made = self._coded(wider)
        if wider == part:
            return made
        from ranvier.quantize.base import Quantized  # here, and below, for the few who quantize what they read

        if not isinstance(made, Quantized) or made.shape != tuple(map(extent, wider)):
            raise WeightError(
                f"tensor {name!r}: {type(made).__name__} of {type(self.scheme).__name__} has no parts as codes of the "
                "tensor's shape have; Slice before Quantize gives codes of a part by itself"
            )
        try:
            return made.part([_within(*each) for each in zip(part, wider)])
        except InvalidConfig as error:
            raise WeightError(
                f"tensor {name!r} cannot be cut behind Quantize: {error}; Slice before Quantize gives codes of a part "
                "by itself"
            ) from None

    def _coded(self, part: Selection | None) -> Any:
        return self.scheme.quantize(np.ascontiguousarray(self.inner.read(part)))


def _takes_an_array(quantize: Any) -> bool:
    """And nothing else; what does not tell may."""
    try:
        inspect.signature(quantize).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _apart(scheme: Quantizer, shape: Sequence[int]) -> tuple[int, ...]:
    """Sides of the blocks that a scheme codes each by itself; of schemes that do not tell it is the whole tensor."""
    from ranvier.quantize.blocks import block_of
    from ranvier.quantize.floats import Float8, Nf4
    from ranvier.quantize.integers import Integers

    whole = tuple(max(1, d) for d in shape)
    row = math.prod(shape[1:])
    if type(scheme) is Nf4 and not scheme.nested and row > 0:  # blocks go on from row to row
        return (math.lcm(row, scheme.group) // row, *shape[1:])
    if type(scheme) is Float8:
        return block_of(shape, scheme.granularity, scheme.axis, scheme.group)
    if type(scheme) is not Integers:
        return whole
    block = block_of(shape, scheme.granularity, scheme.axis, scheme.group)
    if scheme.fit == "minmax":
        return block
    # sums of squares are added up in the same order where rows are whole, and else perhaps not to the last bit
    return (*block[:-1], shape[-1]) if all(side == 1 for side in block[:-1]) else whole


def _widened(part: slice, side: int, size: int) -> slice:
    """A part of an axis, with all of the blocks that it is in."""
    if side == 1:
        return part
    return slice(part.start // side * side, min(size, -(-part.stop // side) * side), 1)


def _within(part: slice, wider: slice) -> slice:
    """Where a part is in what holds it."""
    if part == wider:
        return slice(0, extent(part), 1)
    return slice(part.start - wider.start, part.stop - wider.start, part.step)
