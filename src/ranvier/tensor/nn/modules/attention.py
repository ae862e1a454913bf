"""Attention with several heads, and the blocks of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ranvier.dtypes import DType
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor import reductions
from ranvier.tensor.core import Tensor, as_tensor, beside
from ranvier.tensor.elementwise import logical_not, where
from ranvier.tensor.manipulate import expand_dims, permute_dims, reshape, squeeze, swapaxes
from ranvier.tensor.nn import functional as F
from ranvier.tensor.nn import init
from ranvier.tensor.nn.functional.attention import attention_with_weights, causal_mask
from ranvier.tensor.nn.functional.shape import parts
from ranvier.tensor.nn.generator import Generator
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.nn.modules.containers import ModuleList
from ranvier.tensor.nn.modules.linear import Linear, empty_parameter
from ranvier.tensor.nn.modules.normalization import LayerNorm
from ranvier.tensor.nn.modules.plain import Dropout
from ranvier.tensor.state import Parameter


class MultiheadAttention(Module):
    """Attention by several heads at once; PyTorch's names of weights.

    Beyond PyTorch's: ``num_kv_heads`` (several heads of the query share one of key and value) and ``rope`` (positions
    as rotations of query and key, with ``rope_base``).
    """

    in_proj_bias: Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        num_kv_heads: int | None = None,
        rope: bool = False,
        rope_base: float = 10000.0,
        dtype: Any = None,
        key: Tensor | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads or num_heads % (num_kv_heads or num_heads):
            raise InvalidInput(f"{embed_dim} numbers do not come apart into {num_heads} heads")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.head_dim = embed_dim // num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.rope, self.rope_base, self.generator = rope, rope_base, generator
        narrow = self.num_kv_heads * self.head_dim
        self._widths = (embed_dim, narrow, narrow)
        self._packed = self.kdim == embed_dim and self.vdim == embed_dim
        keys = init.Keys(key)
        if self._packed:
            self.in_proj_weight = empty_parameter((sum(self._widths), embed_dim), dtype)
            init.xavier_uniform_(self.in_proj_weight, key=keys.next())
        else:
            for name, width, inputs in zip("qkv", self._widths, (embed_dim, self.kdim, self.vdim)):
                weight = empty_parameter((width, inputs), dtype)
                self.register_parameter(f"{name}_proj_weight", weight)
                init.xavier_uniform_(weight, key=keys.next())
        self.register_parameter("in_proj_bias", empty_parameter((sum(self._widths),), dtype) if bias else None)
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype, key=keys.next())
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self._packed and query is key and key is value:
            return list(parts(F.linear(query, self.in_proj_weight, self.in_proj_bias), self._widths))
        if self._packed:
            weights = list(parts(self.in_proj_weight.value, self._widths, axis=0))
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        biases: list[Any] = [None] * 3
        if self.in_proj_bias is not None:
            biases = list(parts(self.in_proj_bias.value, self._widths, axis=0))
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases)]

    def _heads(self, x: Tensor, number: int) -> Tensor:
        batch, length, _ = x.shape
        return permute_dims(reshape(x, (batch, length, number, self.head_dim)), (0, 2, 1, 3))

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """What each place finds, and how much it looks at each other (None without ``need_weights``).

        Masks are PyTorch's: True says who may *not* be looked at, floats are added. ``is_causal`` needs no mask here.
        """
        same = query is key and key is value
        q = as_tensor(query)
        k, v = (q, q) if same else (as_tensor(key), as_tensor(value))
        single = q.ndim == 2
        if single:
            q, k, v = self._all(lambda x: expand_dims(x, axis=0), q, k, v, same)
        elif not self.batch_first:
            q, k, v = self._all(lambda x: swapaxes(x, 0, 1), q, k, v, same)
        batch, length, _ = q.shape
        a, b, c = self._projected(q, k, v)
        heads, looked, seen = self._heads(a, self.num_heads), *(self._heads(x, self.num_kv_heads) for x in (b, c))
        if self.rope:
            heads, looked = (F.rotary_embedding(x, base=self.rope_base) for x in (heads, looked))
        mask = self._mask(attn_mask, key_padding_mask, is_causal, batch, length, looked.shape[-2], heads.dtype)
        found, weights = attention_with_weights(
            heads,
            looked,
            seen,
            mask,
            self.dropout if self.training else 0.0,
            is_causal and mask is None,
            enable_gqa=self.num_kv_heads != self.num_heads,
            generator=self.generator,
        )
        joined = reshape(permute_dims(found, (0, 2, 1, 3)), (batch, length, self.embed_dim))
        out = self.out_proj(joined)
        if single:
            out = squeeze(out, axis=0)
        elif not self.batch_first:
            out = swapaxes(out, 0, 1)
        if not need_weights:
            return out, None
        shown = reductions.mean(weights, axis=1) if average_attn_weights else weights
        return out, squeeze(shown, axis=0) if single else shown

    def _all(
        self, change: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, same: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        changed = change(q)
        return (changed, changed, changed) if same else (changed, change(k), change(v))

    def _mask(
        self, attn_mask: Any, padding: Any, causal: bool, batch: int, rows: int, columns: int, dtype: DType
    ) -> Tensor | None:
        """Both masks as floats to be added, [batch or 1, heads or 1, rows, columns]."""
        found: Tensor | None = None
        if attn_mask is not None:
            found = _added(as_tensor(attn_mask))
            if found.ndim == 3:
                found = reshape(found, (batch, self.num_heads, rows, columns))
            elif found.shape != (rows, columns):
                raise ShapeMismatch(f"a mask of shape {list(found.shape)} for scores of {[rows, columns]}")
        if padding is not None:
            own = _added(as_tensor(padding))
            own = reshape(own, (batch if own.ndim == 2 else 1, 1, 1, columns))
            if causal and found is None:
                found = beside(Tensor(causal_mask(rows, columns)), own)
            found = own if found is None else found + own
        return found

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


def _added(mask: Tensor) -> Tensor:
    return where(logical_not(mask), 0.0, -float("inf")) if mask.dtype is DType.bool else mask


def _activation(given: str | Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    if callable(given):
        return given
    found = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}.get(given)
    if found is None:
        raise InvalidInput(f"the activation is relu, gelu, silu or a function, not {given!r}")
    return found


class TransformerEncoderLayer(Module):
    """Attention and two linear layers, each with a way around it and a norm."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Any], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        dtype: Any = None,
        key: Tensor | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        keys = init.Keys(key)
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype, key=keys.next(), generator=generator
        )
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype=dtype, key=keys.next())
        self.dropout = Dropout(dropout, generator=generator)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype=dtype, key=keys.next())
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.dropout1, self.dropout2 = Dropout(dropout, generator=generator), Dropout(dropout, generator=generator)
        self.norm_first, self.activation = norm_first, _activation(activation)

    def forward(
        self, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        x = as_tensor(src)
        if self.norm_first:
            x = x + self._attended(self.norm1(x), src_mask, src_key_padding_mask, is_causal)
            return x + self._fed(self.norm2(x))
        x = self.norm1(x + self._attended(x, src_mask, src_key_padding_mask, is_causal))
        return self.norm2(x + self._fed(x))  # type: ignore[no-any-return]

    def _attended(self, x: Tensor, mask: Any, padding: Any, causal: bool) -> Tensor:
        found, _ = self.self_attn(
            x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False, is_causal=causal and mask is None
        )
        return self.dropout1(found)  # type: ignore[no-any-return]

    def _fed(self, x: Tensor) -> Tensor:
        inner = self.dropout(self.activation(self.linear1(x)))
        return self.dropout2(self.linear2(inner))  # type: ignore[no-any-return]


class TransformerEncoder(Module):
    """Copies of a layer one after the other."""

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleList(copy.deepcopy(encoder_layer) for _ in range(num_layers))
        self.num_layers = num_layers
        self.norm = norm

    def forward(self, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Tensor:
        x = as_tensor(src)
        for layer in self.layers:
            x = layer(x, mask, src_key_padding_mask, is_causal)
        return x if self.norm is None else self.norm(x)


class TransformerDecoderLayer(Module):
    """Attention to oneself, attention to what an encoder found, and two linear layers."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Any], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        dtype: Any = None,
        key: Tensor | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        keys = init.Keys(key)
        self.self_attn, self.multihead_attn = (
            MultiheadAttention(
                d_model,
                nhead,
                dropout,
                bias,
                batch_first=batch_first,
                dtype=dtype,
                key=keys.next(),
                generator=generator,
            )
            for _ in range(2)
        )
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype=dtype, key=keys.next())
        self.dropout = Dropout(dropout, generator=generator)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype=dtype, key=keys.next())
        self.norm1, self.norm2, self.norm3 = (
            LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype) for _ in range(3)
        )
        self.dropout1, self.dropout2, self.dropout3 = (Dropout(dropout, generator=generator) for _ in range(3))
        self.norm_first, self.activation = norm_first, _activation(activation)

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
    ) -> Tensor:
        x, seen = as_tensor(tgt), as_tensor(memory)

        def to_itself(y: Tensor) -> Any:
            causal = tgt_is_causal and tgt_mask is None
            found, _ = self.self_attn(y, y, y, tgt_key_padding_mask, False, tgt_mask, is_causal=causal)
            return self.dropout1(found)

        def to_memory(y: Tensor) -> Any:
            found, _ = self.multihead_attn(y, seen, seen, memory_key_padding_mask, False, memory_mask)
            return self.dropout2(found)

        def fed(y: Tensor) -> Any:
            return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(y)))))

        for norm, part in zip((self.norm1, self.norm2, self.norm3), (to_itself, to_memory, fed)):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


_OF_TENSORS = True
