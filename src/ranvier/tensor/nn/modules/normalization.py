"""Normalization layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor
from ranvier.tensor.manipulate import expand_dims, squeeze
from ranvier.tensor.nn import functional as F
from ranvier.tensor.nn import init
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.nn.modules.linear import empty_parameter
from ranvier.tensor.state import Parameter, State


def _gains(module: Module, shape: tuple[int, ...], weight: bool, bias: bool, dtype: Any) -> None:
    module.register_parameter("weight", init.ones_(empty_parameter(shape, dtype)) if weight else None)  # type: ignore[arg-type]
    module.register_parameter("bias", empty_parameter(shape, dtype) if bias else None)


class _BatchNorm(Module):
    _ranks: tuple[int, ...] = ()
    weight: Parameter | None
    bias: Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        _gains(self, (num_features,), affine, affine, dtype)
        tracked = track_running_stats
        kind = empty_parameter((1,), dtype).dtype.numpy
        self.register_buffer("running_mean", State(np.zeros(num_features, kind)) if tracked else None)
        self.register_buffer("running_var", State(np.ones(num_features, kind)) if tracked else None)
        self.register_buffer("num_batches_tracked", State(np.zeros((), np.int64)) if tracked else None)

    def forward(self, input: Any) -> Tensor:
        x = as_tensor(input)
        if x.ndim not in self._ranks:
            raise ShapeMismatch(f"{type(self).__name__} takes {self._ranks} dimensions; got shape {list(x.shape)}")
        momentum: Any = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.assign(self.num_batches_tracked + 1)
            if momentum is None:  # the mean over all batches
                momentum = 1.0 / self.num_batches_tracked.value.astype("float32")
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            momentum,
            self.eps,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}"
        )


class BatchNorm1d(_BatchNorm):
    """Channels of [batch, channels] or [batch, channels, length] normalized over all else."""

    _ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Channels of [batch, channels, height, width] normalized over all else."""

    _ranks = (4,)


class BatchNorm3d(_BatchNorm):
    """Channels of [batch, channels, depth, height, width] normalized over all else."""

    _ranks = (5,)


class LayerNorm(Module):
    """The last axes normalized."""

    weight: Parameter | None
    bias: Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        _gains(self, self.normalized_shape, elementwise_affine, elementwise_affine and bias, dtype)

    def forward(self, input: Any) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class RMSNorm(Module):
    """The last axes over the square root of their mean square."""

    weight: Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        gains = empty_parameter(self.normalized_shape, dtype)
        self.register_parameter("weight", gains if elementwise_affine else None)
        init.ones_(gains)

    def forward(self, input: Any) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GroupNorm(Module):
    """Groups of channels normalized."""

    weight: Parameter | None
    bias: Parameter | None

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, dtype: Any = None
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ShapeMismatch(f"{num_channels} channels do not come apart into {num_groups} groups")
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        _gains(self, (num_channels,), affine, affine, dtype)

    def forward(self, input: Any) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


class _InstanceNorm(Module):
    _rank = 0
    weight: Parameter | None
    bias: Parameter | None

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False, *, dtype: Any = None
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        _gains(self, (num_features,), affine, affine, dtype)

    def forward(self, input: Any) -> Tensor:
        x = as_tensor(input)
        if x.ndim not in (self._rank, self._rank - 1):
            raise ShapeMismatch(f"{type(self).__name__} takes {self._rank} dimensions; got shape {list(x.shape)}")
        if x.ndim == self._rank:
            return F.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)
        one = expand_dims(x, axis=0)
        return squeeze(F.instance_norm(one, weight=self.weight, bias=self.bias, eps=self.eps), axis=0)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


class InstanceNorm1d(_InstanceNorm):
    """Each channel of each example normalized, over [batch, channels, length]."""

    _rank = 3


class InstanceNorm2d(_InstanceNorm):
    """Each channel of each example normalized, over [batch, channels, height, width]."""

    _rank = 4


class InstanceNorm3d(_InstanceNorm):
    """Each channel of each example normalized, over [batch, channels, depth, height, width]."""

    _rank = 5


_OF_TENSORS = True
