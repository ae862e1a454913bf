"""Shapes: flattening, padding, resizing, and changes between pixels and channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor, call, wrapped
from ranvier.tensor.expr import results, spec
from ranvier.tensor.manipulate import astype, reshape
from ranvier.tensor.shapes import count

_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    own = as_tensor(input)
    first, last = start_dim % max(own.ndim, 1), end_dim % max(own.ndim, 1)
    return reshape(own, (*own.shape[:first], count(own.shape[first : last + 1]), *own.shape[last + 1 :]))


def parts(x: Tensor, sizes: int | Sequence[int], axis: int = -1) -> tuple[Tensor, ...]:
    """As many equal parts along an axis, or parts of these sizes: one operator, whose gradient is one too."""
    at = axis % x.ndim
    if isinstance(sizes, int):
        if x.shape[at] % sizes:
            raise ShapeMismatch(f"{x.shape[at]} elements cannot be cut into {sizes} equal parts")
        sizes = [x.shape[at] // sizes] * sizes
    of = spec("Split", (("axis", at),), ((1, tuple(sizes)),), len(sizes))
    kinds = [(x.dtype, (*x.shape[:at], size, *x.shape[at + 1 :])) for size in sizes]
    return tuple(wrapped(each) for each in results(of, (x._expr,), kinds, x._expr.device))


def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """PyTorch's padding: pairs (before, after) from the last axis backwards; negative ones cut."""
    own = as_tensor(input)
    if len(pad) % 2 or len(pad) // 2 > own.ndim:
        raise ShapeMismatch(f"a padding of {list(pad)} does not fit {own.ndim} dimensions")
    if mode not in _MODES:
        raise InvalidInput(f"padding is one of {', '.join(_MODES)}, not {mode!r}")
    pairs = [(0, 0)] * own.ndim
    for k in range(len(pad) // 2):
        pairs[own.ndim - 1 - k] = (int(pad[2 * k]), int(pad[2 * k + 1]))
    shape = tuple(d + a + b for d, (a, b) in zip(own.shape, pairs))
    widths = (*(a for a, _ in pairs), *(b for _, b in pairs))
    of = spec("Pad", (("mode", _MODES[mode]),), ((1, widths),))
    operands = (own,) if mode != "constant" else (own, astype(as_tensor(value or 0.0, own), own.dtype))
    return call(of, operands, own.dtype, shape)


def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """Images [batch, channels, …] in another size: nearest, linear/bilinear/trilinear or bicubic."""
    own = as_tensor(input)
    axes = own.ndim - 2
    if (size is None) == (scale_factor is None):
        raise InvalidInput("one of size and scale_factor is needed")
    if size is not None:
        sizes = (int(size),) * axes if isinstance(size, int) else tuple(int(s) for s in size)
    else:
        scales = (scale_factor,) * axes if isinstance(scale_factor, int | float) else tuple(scale_factor)
        sizes = tuple(int(np.floor(d * s)) for d, s in zip(own.shape[2:], scales))
    shape = (*own.shape[:2], *sizes)
    attrs: dict[str, Any]
    if mode == "nearest":
        attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    elif mode in ("linear", "bilinear", "trilinear", "bicubic"):
        where = "align_corners" if align_corners else "pytorch_half_pixel"
        attrs = {"mode": "cubic" if mode == "bicubic" else "linear", "coordinate_transformation_mode": where}
        if mode == "bicubic":
            attrs["cubic_coeff_a"] = -0.75
    else:
        raise InvalidInput(f"interpolation is nearest, linear, bilinear, trilinear or bicubic, not {mode!r}")
    of = spec("Resize", tuple(sorted(attrs.items())), ((1, None), (2, None), (3, shape)))
    return call(of, (own,), own.dtype, shape)


def pixel_shuffle(input: Any, upscale_factor: int) -> Tensor:
    """Channels as pixels: [batch, c · r², h, w] to [batch, c, h · r, w · r]."""
    own = as_tensor(input)
    n, c, h, w = own.shape
    r = int(upscale_factor)
    if c % (r * r):
        raise ShapeMismatch(f"{c} channels are no multiple of {r * r}")
    of = spec("DepthToSpace", (("blocksize", r), ("mode", "CRD")))
    return call(of, (own,), own.dtype, (n, c // (r * r), h * r, w * r))


_OF_TENSORS = True
