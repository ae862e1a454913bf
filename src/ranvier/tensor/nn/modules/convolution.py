"""Convolutions over one, two and three axes, and the transposed ones."""

from __future__ import annotations

import math
from typing import Any

from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.nn import functional as F
from ranvier.tensor.nn import init
from ranvier.tensor.nn.functional.contraction import Sizes, several
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.nn.modules.linear import empty_parameter
from ranvier.tensor.state import Parameter

_PADDING = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class _Conv(Module):
    _axes: int
    _transposed = False
    bias: Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes,
        padding: Sizes | str,
        dilation: Sizes,
        groups: int,
        bias: bool,
        padding_mode: str,
        dtype: Any,
        key: Tensor | None,
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise InvalidInput(f"{in_channels} and {out_channels} channels do not come apart into {groups} groups")
        if padding_mode not in _PADDING:
            raise InvalidInput(f"padding_mode is one of {', '.join(_PADDING)}, not {padding_mode!r}")
        axes = self._axes
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = several(kernel_size, axes, "kernel_size")
        self.stride = several(stride, axes, "stride")
        self.padding = padding if isinstance(padding, str) else several(padding, axes, "padding")
        self.dilation = several(dilation, axes, "dilation")
        self.padding_mode = padding_mode
        channels = (in_channels, out_channels // groups) if self._transposed else (out_channels, in_channels // groups)
        self.weight = empty_parameter((*channels, *self.kernel_size), dtype)
        self.register_parameter("bias", empty_parameter((out_channels,), dtype) if bias else None)
        self.reset_parameters(key)

    def reset_parameters(self, key: Tensor | None = None) -> None:
        keys = init.Keys(key)
        fan_in = init.fans(self.weight.shape)[0]
        bound = 1.0 / math.sqrt(fan_in) if fan_in else 0.0
        init.uniform_(self.weight, -bound, bound, key=keys.next())
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound, key=keys.next())

    def _border(self, input: Any) -> tuple[Any, Any]:
        """The input with its border, and what the convolution itself has to add."""
        if self.padding_mode == "zeros":
            return input, self.padding
        pairs: list[int] = []
        for k in reversed(range(self._axes)):
            if self.padding == "same":
                total = self.dilation[k] * (self.kernel_size[k] - 1)
                pairs += [total // 2, total - total // 2]
            else:
                pairs += [0, 0] if isinstance(self.padding, str) else [self.padding[k]] * 2
        return F.pad(input, pairs, _PADDING[self.padding_mode]), 0

    def extra_repr(self) -> str:
        said = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        if isinstance(self.padding, str) or any(self.padding):
            said += f", padding={self.padding!r}"
        if any(d != 1 for d in self.dilation):
            said += f", dilation={self.dilation}"
        if self.groups != 1:
            said += f", groups={self.groups}"
        if self.bias is None:
            said += ", bias=False"
        return said if self.padding_mode == "zeros" else f"{said}, padding_mode={self.padding_mode}"


class _Forward(_Conv):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        dtype: Any = None,
        key: Tensor | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, dtype, key
        )

    def forward(self, input: Any) -> Tensor:
        x, padding = self._border(input)
        run = (F.conv1d, F.conv2d, F.conv3d)[self._axes - 1]
        return run(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class Conv1d(_Forward):
    """A convolution of [batch, channels, length]."""

    _axes = 1


class Conv2d(_Forward):
    """A convolution of [batch, channels, height, width]."""

    _axes = 2


class Conv3d(_Forward):
    """A convolution of [batch, channels, depth, height, width]."""

    _axes = 3


class _Transposed(_Conv):
    _transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        *,
        dtype: Any = None,
        key: Tensor | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, "zeros", dtype, key
        )
        self.output_padding = several(output_padding, self._axes, "output_padding")

    def forward(self, input: Any) -> Tensor:
        assert not isinstance(self.padding, str)
        run = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self._axes - 1]
        return run(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )


class ConvTranspose1d(_Transposed):
    _axes = 1


class ConvTranspose2d(_Transposed):
    _axes = 2


class ConvTranspose3d(_Transposed):
    _axes = 3


_OF_TENSORS = True
