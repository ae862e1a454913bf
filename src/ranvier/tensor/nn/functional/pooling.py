"""Pooling: over windows, and down to given sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor import reductions
from ranvier.tensor.core import Tensor, as_tensor, call
from ranvier.tensor.expr import spec
from ranvier.tensor.manipulate import concat, expand_dims, squeeze
from ranvier.tensor.nn.functional.contraction import Sizes, several


def _windows(
    op: str,
    input: Any,
    kernel_size: Sizes,
    stride: Sizes | None,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    axes: int,
    **attrs: Any,
) -> Tensor:
    own = as_tensor(input)
    single = own.ndim == axes + 1
    x = expand_dims(own, axis=0) if single else own
    if x.ndim != axes + 2:
        raise ShapeMismatch(f"pooling over {axes} axes does not fit a shape of {list(own.shape)}")
    kernel = several(kernel_size, axes, "kernel_size")
    strides = kernel if stride is None else several(stride, axes, "stride")
    pads, dilations = several(padding, axes, "padding"), several(dilation, axes, "dilation")
    sizes = []
    for k in range(axes):
        if 2 * pads[k] > kernel[k]:
            raise InvalidInput(f"a padding of {pads[k]} is more than half a window of {kernel[k]}")
        room = x.shape[2 + k] + 2 * pads[k] - dilations[k] * (kernel[k] - 1) - 1
        if room < 0:
            raise ShapeMismatch(f"a window of {list(kernel)} does not fit into {list(x.shape[2:])}")
        number = (-(-room // strides[k]) if ceil_mode else room // strides[k]) + 1
        if ceil_mode and (number - 1) * strides[k] >= x.shape[2 + k] + pads[k]:
            number -= 1  # a window that begins in the padding is none
        sizes.append(number)
    found = {
        "ceil_mode": int(ceil_mode),
        "dilations": dilations,
        "kernel_shape": kernel,
        "pads": (*pads, *pads),
        "strides": strides,
        **attrs,
    }
    result = call(spec(op, tuple(sorted(found.items()))), (x,), x.dtype, (*x.shape[:2], *sizes))
    return squeeze(result, axis=0) if single else result


def _max_pool(axes: int) -> Callable[..., Tensor]:
    def pool(
        input: Any,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Tensor:
        return _windows("MaxPool", input, kernel_size, stride, padding, dilation, ceil_mode, axes)

    pool.__name__ = pool.__qualname__ = f"max_pool{axes}d"
    pool.__doc__ = "The largest number in each window."
    return pool


def _avg_pool(axes: int) -> Callable[..., Tensor]:
    def pool(
        input: Any,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> Tensor:
        return _windows(
            "AveragePool",
            input,
            kernel_size,
            stride,
            padding,
            1,
            ceil_mode,
            axes,
            count_include_pad=int(count_include_pad),
        )

    pool.__name__ = pool.__qualname__ = f"avg_pool{axes}d"
    pool.__doc__ = "The mean of each window."
    return pool


max_pool1d, max_pool2d, max_pool3d = (_max_pool(n) for n in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (_avg_pool(n) for n in (1, 2, 3))


def _adaptive(input: Any, output_size: Any, axes: int, whole: str, part: Callable[..., Tensor], op: str) -> Tensor:
    own = as_tensor(input)
    if own.ndim not in (axes + 1, axes + 2):
        raise ShapeMismatch(f"pooling over {axes} axes does not fit a shape of {list(own.shape)}")
    given: Sequence[Any] = (output_size,) * axes if isinstance(output_size, int) else tuple(output_size)
    present = own.shape[-axes:]
    sizes = tuple(have if want is None else int(want) for want, have in zip(given, present, strict=True))
    if all(n == 1 for n in sizes) and own.ndim == axes + 2:
        return call(spec(whole), (own,), own.dtype, (*own.shape[:2], *sizes))
    if all(have % want == 0 for have, want in zip(present, sizes)):
        kernel = tuple(have // want for have, want in zip(present, sizes))
        return _windows(op, own, kernel, None, 0, 1, False, axes)
    for k, (have, want) in enumerate(zip(present, sizes)):
        axis = own.ndim - axes + k
        pieces = []
        for n in range(want):  # windows of different lengths, which overlap
            begin, end = n * have // want, -(-(n + 1) * have // want)
            key = (*(slice(None),) * axis, slice(begin, end))
            pieces.append(part(own[key], axis=axis, keepdims=True))
        own = concat(pieces, axis=axis)
    return own


def _adaptive_pool(axes: int, largest: bool) -> Callable[..., Tensor]:
    def pool(input: Any, output_size: Any) -> Tensor:
        if largest:
            return _adaptive(input, output_size, axes, "GlobalMaxPool", reductions.max, "MaxPool")
        return _adaptive(input, output_size, axes, "GlobalAveragePool", reductions.mean, "AveragePool")

    pool.__name__ = pool.__qualname__ = f"adaptive_{'max' if largest else 'avg'}_pool{axes}d"
    pool.__doc__ = "Windows as large as it takes to come to the given sizes."
    return pool


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (_adaptive_pool(n, False) for n in (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (_adaptive_pool(n, True) for n in (1, 2, 3))


_OF_TENSORS = True
