"""Products and convolutions, with PyTorch's layouts of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor, call
from ranvier.tensor.expr import spec
from ranvier.tensor.linalg import einsum
from ranvier.tensor.linalg import matmul as product
from ranvier.tensor.manipulate import astype, expand_dims, reshape, squeeze
from ranvier.tensor.nn.precision import lowered
from ranvier.tensor.types import promoted

Sizes = int | Sequence[int]
_GEMM = spec("Gemm", (("transB", 1),))


def several(value: Sizes, count: int, name: str) -> tuple[int, ...]:
    """A size for each axis; one number stands for all."""
    found = (int(value),) * count if isinstance(value, int) else tuple(int(v) for v in value)
    if len(found) == 1:
        found *= count
    if len(found) != count:
        raise InvalidInput(f"{name} has {len(found)} sizes for {count} axes")
    return found


def _operands(input: Any, weight: Any, bias: Any) -> tuple[Tensor, ...]:
    """In one type: that of autocast, or the common one."""
    own = as_tensor(input), as_tensor(weight), *(() if bias is None else (as_tensor(bias),))
    own = lowered(*own)
    kind = own[0].dtype
    for each in own[1:]:
        kind = promoted(kind, each.dtype)
    return tuple(astype(each, kind) for each in own)


def matmul(input: Any, other: Any) -> Tensor:
    """The product of matrices; in a smaller type inside ``autocast``."""
    return product(*lowered(as_tensor(input), as_tensor(other)))


def linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    """``input @ weight.T + bias``; the weight is [outputs, inputs]. Rows of all batches are one product."""
    operands = _operands(input, weight, bias)
    x, w = operands[:2]
    if w.ndim != 2 or not x.ndim or x.shape[-1] != w.shape[1]:
        raise ShapeMismatch(f"inputs of shape {list(x.shape)} do not fit a weight of {list(w.shape)}")
    lead, outputs = x.shape[:-1], w.shape[0]
    rows = x if x.ndim == 2 else reshape(x, (-1, x.shape[-1]) if x.size else (0, x.shape[-1]))
    found = call(_GEMM, (rows, *operands[1:]), x.dtype, (rows.shape[0], outputs))
    return found if x.ndim == 2 else reshape(found, (*lead, outputs))


def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Tensor:
    """``x1 @ weight[k] @ x2`` for each output k; the weight is [outputs, inputs1, inputs2]."""
    x, y, w = lowered(as_tensor(input1), as_tensor(input2), as_tensor(weight))
    if x.shape[:-1] != y.shape[:-1] or (x.shape[-1], y.shape[-1]) != w.shape[1:]:
        raise ShapeMismatch(f"{list(x.shape)} and {list(y.shape)} do not fit a weight of {list(w.shape)}")
    rows = reshape(x, (-1, x.shape[-1])), reshape(y, (-1, y.shape[-1]))
    found = reshape(einsum("ni,oij,nj->no", rows[0], w, rows[1]), (*x.shape[:-1], w.shape[0]))
    return found if bias is None else found + bias


def _conv(
    input: Any, weight: Any, bias: Any, stride: Sizes, padding: Sizes | str, dilation: Sizes, groups: int, axes: int
) -> Tensor:
    operands = _operands(input, weight, bias)
    x, w = operands[:2]
    single = x.ndim == axes + 1
    if single:
        x = expand_dims(x, axis=0)
    if x.ndim != axes + 2 or w.ndim != axes + 2:
        raise ShapeMismatch(
            f"a convolution over {axes} axes has inputs of {axes + 1} or {axes + 2} dimensions; "
            f"got {list(x.shape)} and a weight of {list(w.shape)}"
        )
    if x.shape[1] != w.shape[1] * groups:
        raise ShapeMismatch(f"{x.shape[1]} channels do not fit a weight of {list(w.shape)} in {groups} groups")
    strides, dilations = several(stride, axes, "stride"), several(dilation, axes, "dilation")
    kernel = w.shape[2:]
    before, after = _padding(padding, kernel, strides, dilations)
    sizes = []
    for k in range(axes):
        room = x.shape[2 + k] + before[k] + after[k] - dilations[k] * (kernel[k] - 1) - 1
        if room < 0:
            raise ShapeMismatch(f"a kernel of {list(kernel)} does not fit into {list(x.shape[2:])}")
        sizes.append(room // strides[k] + 1)
    attrs = (
        ("dilations", dilations),
        ("group", int(groups)),
        ("kernel_shape", kernel),
        ("pads", (*before, *after)),
        ("strides", strides),
    )
    found = call(spec("Conv", attrs), (x, *operands[1:]), x.dtype, (x.shape[0], w.shape[0], *sizes))
    return squeeze(found, axis=0) if single else found


def _padding(
    padding: Sizes | str, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(padding, str):
        if padding == "valid":
            return (0,) * len(kernel), (0,) * len(kernel)
        if padding != "same":
            raise InvalidInput(f"padding is 'valid', 'same' or sizes, not {padding!r}")
        if any(s != 1 for s in strides):
            raise InvalidInput("padding='same' needs a stride of 1")
        total = [d * (k - 1) for d, k in zip(dilations, kernel)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    sizes = several(padding, len(kernel), "padding")
    return sizes, sizes


def conv1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    return _conv(input, weight, bias, stride, padding, dilation, groups, 1)


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    return _conv(input, weight, bias, stride, padding, dilation, groups, 2)


def conv3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    return _conv(input, weight, bias, stride, padding, dilation, groups, 3)


def _conv_transpose(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    padding: Sizes,
    output_padding: Sizes,
    groups: int,
    dilation: Sizes,
    axes: int,
) -> Tensor:
    operands = _operands(input, weight, bias)
    x, w = operands[:2]
    single = x.ndim == axes + 1
    if single:
        x = expand_dims(x, axis=0)
    if x.ndim != axes + 2 or w.ndim != axes + 2 or x.shape[1] != w.shape[0]:
        raise ShapeMismatch(f"inputs of shape {list(x.shape)} do not fit a weight of {list(w.shape)}")
    strides, dilations = several(stride, axes, "stride"), several(dilation, axes, "dilation")
    pads, extra = several(padding, axes, "padding"), several(output_padding, axes, "output_padding")
    kernel = w.shape[2:]
    sizes = [
        (x.shape[2 + k] - 1) * strides[k] - 2 * pads[k] + dilations[k] * (kernel[k] - 1) + extra[k] + 1
        for k in range(axes)
    ]
    attrs = (
        ("dilations", dilations),
        ("group", int(groups)),
        ("kernel_shape", kernel),
        ("output_padding", extra),
        ("pads", (*pads, *pads)),
        ("strides", strides),
    )
    shape = (x.shape[0], w.shape[1] * groups, *sizes)
    found = call(spec("ConvTranspose", attrs), (x, *operands[1:]), x.dtype, shape)
    return squeeze(found, axis=0) if single else found


def conv_transpose1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    return _conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation, 1)


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    return _conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation, 2)


def conv_transpose3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    return _conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation, 3)


_OF_TENSORS = True
