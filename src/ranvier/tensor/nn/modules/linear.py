"""Layers with a weight for each pair of input and output, and tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.nn import functional as F
from ranvier.tensor.nn import init
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.state import Parameter


def empty_parameter(shape: tuple[int, ...], dtype: Any) -> Parameter:
    """A parameter whose values come right after."""
    kind = DType.float32 if dtype is None else dtypes.of(dtype)
    return Parameter(Tensor(np.zeros(shape, kind.numpy)))


class Linear(Module):
    """``x @ weight.T + bias``."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dtype: Any = None, key: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = empty_parameter((out_features, in_features), dtype)
        self.bias: Parameter | None
        self.register_parameter("bias", empty_parameter((out_features,), dtype) if bias else None)
        self.reset_parameters(key)

    def reset_parameters(self, key: Tensor | None = None) -> None:
        keys = init.Keys(key)
        bound = 1.0 / math.sqrt(self.in_features) if self.in_features else 0.0
        init.uniform_(self.weight, -bound, bound, key=keys.next())
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound, key=keys.next())

    def forward(self, input: Any) -> Tensor:
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Bilinear(Module):
    """``x1 @ weight[k] @ x2 + bias[k]`` for each output k."""

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: Any = None,
        key: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        self.weight = empty_parameter((out_features, in1_features, in2_features), dtype)
        self.bias: Parameter | None
        self.register_parameter("bias", empty_parameter((out_features,), dtype) if bias else None)
        keys, bound = init.Keys(key), 1.0 / math.sqrt(in1_features)
        for param in self.parameters():
            init.uniform_(param, -bound, bound, key=keys.next())

    def forward(self, input1: Any, input2: Any) -> Tensor:
        return F.bilinear(input1, input2, self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in1_features={self.in1_features}, in2_features={self.in2_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


class Embedding(Module):
    """A table of vectors, looked up by number."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: Any = None,
        key: Tensor | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise InvalidInput(f"padding_idx {padding_idx} is no row of a table of {num_embeddings}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = empty_parameter((num_embeddings, embedding_dim), dtype)
        init.normal_(self.weight, key=init.Keys(key).next())
        if self.padding_idx is not None:
            array = self.weight.numpy().copy()
            array[self.padding_idx] = 0
            self.weight.assign(Tensor(array))

    def forward(self, input: Any) -> Tensor:
        return F.embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


_OF_TENSORS = True
