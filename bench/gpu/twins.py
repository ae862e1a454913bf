"""The networks of the suite as people write them in PyTorch, filled with the weights of the ONNX models.

Every module takes its weights from an iterator in the order in which the model's script made them, so the two cannot
drift apart unnoticed: a different order gives a different result, and shapes are checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Weights = Iterator[Any]


def tensor(array: Any) -> Tensor:
    """A tensor of the same bits; NumPy has no bfloat16 of its own."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array.view(np.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _take(weights: Weights, *shape: int) -> nn.Parameter:
    found = tensor(next(weights))
    assert tuple(found.shape) == shape, f"the next weight is {tuple(found.shape)}, {shape} is wanted"
    return nn.Parameter(found, requires_grad=False)


def _linear(weights: Weights, inside: int, outside: int, *, bias: bool = True, rows: bool = False) -> nn.Linear:
    """``rows``: the weight lies as PyTorch keeps it (Gemm with transB), else as MatMul does."""
    with torch.device("meta"):
        made = nn.Linear(inside, outside, bias=bias)
    found = _take(weights, outside, inside) if rows else _take(weights, inside, outside)
    made.weight = found if rows else nn.Parameter(found.T.contiguous(), requires_grad=False)
    if bias:
        made.bias = _take(weights, outside)
    return made


def unpacked(weights: Weights) -> Weights:
    """The same with 4-bit weights, each of which is codes around 8 and their scales, as the floats they stand for."""
    for array in weights:
        if array.dtype != np.uint8:
            yield array
            continue
        scales = torch.from_numpy(next(weights).astype(np.float32))[..., None]
        bytes_ = torch.from_numpy(np.array(array))
        codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)
        yield ((codes.float() - 8) * scales).flatten(1).T.contiguous().numpy()


def _norm(weights: Weights, width: int, epsilon: float = 1e-5) -> nn.LayerNorm:
    made = nn.LayerNorm(width, eps=epsilon)
    made.weight, made.bias = _take(weights, width), _take(weights, width)
    return made


def _conv(
    weights: Weights, inside: int, outside: int, kernel: int, stride: int = 1, pad: int | None = None, bias: bool = True
) -> nn.Conv2d:
    border = kernel // 2 if pad is None else pad
    with torch.device("meta"):
        made = nn.Conv2d(inside, outside, kernel, stride, border, bias=bias)
    made.weight = _take(weights, outside, inside, kernel, kernel)
    if bias:
        made.bias = _take(weights, outside)
    return made


class _Unit(nn.Module):
    """A convolution without bias, then batch normalization."""

    def __init__(self, w: Weights, inside: int, outside: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = _conv(w, inside, outside, kernel, stride, bias=False)
        self.norm = nn.BatchNorm2d(outside, eps=1e-3)
        self.norm.weight, self.norm.bias = _take(w, outside), _take(w, outside)
        self.norm.running_mean, self.norm.running_var = _take(w, outside).data, _take(w, outside).data

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class _Bottleneck(nn.Module):
    def __init__(self, w: Weights, inside: int, width: int, stride: int, *, first: bool) -> None:
        super().__init__()
        self.one = _Unit(w, inside, width)
        self.two = _Unit(w, width, width, 3, stride)
        self.three = _Unit(w, width, 4 * width)
        self.beside = _Unit(w, inside, 4 * width, 1, stride) if first else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.two(functional.relu(self.one(x))))
        return functional.relu(self.three(y) + self.beside(x))


class ResNet50(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.stem = _Unit(w, 3, 64, 7, 2)
        blocks, channels = [], 64
        for number, (width, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
            for k in range(depth):
                blocks.append(_Bottleneck(w, channels, width, 2 if k == 0 and number else 1, first=k == 0))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = _linear(w, channels, 1000, rows=True)

    def forward(self, input: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.stem(input)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class _BertLayer(nn.Module):
    def __init__(self, w: Weights, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (_linear(w, width, width) for _ in range(4))
        self.norm1 = _norm(w, width)
        self.up, self.down = _linear(w, width, 4 * width), _linear(w, 4 * width, width)
        self.norm2 = _norm(w, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = self.norm1(self.out(mixed.transpose(1, 2).flatten(2)) + x)
        return self.norm2(self.down(functional.gelu(self.up(x))) + x)


class Bert(nn.Module):
    def __init__(self, w: Weights, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        next(w)  # the positions themselves
        self.words, self.kinds, self.places = _take(w, 30522, width), _take(w, 2, width), _take(w, 512, width)
        self.norm = _norm(w, width)
        self.layers = nn.ModuleList(_BertLayer(w, width, heads) for _ in range(layers))
        self.pooler = _linear(w, width, width, rows=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = functional.embedding(input_ids, self.words) + functional.embedding(token_type_ids, self.kinds)
        x = self.norm(x + self.places[: input_ids.shape[1]])
        bias = (1 - attention_mask.to(x.dtype))[:, None, None] * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return x, torch.tanh(self.pooler(x[:, 0]))


class _VitLayer(nn.Module):
    def __init__(self, w: Weights, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = _norm(w, width)
        self.qkv, self.out = _linear(w, width, 3 * width), _linear(w, width, width)
        self.norm2 = _norm(w, width)
        self.up, self.down = _linear(w, width, 4 * width), _linear(w, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.patches = _conv(w, 3, 768, 16, 16, 0)
        self.first, self.places = _take(w, 1, 1, 768), _take(w, 1, 197, 768)
        self.layers = nn.Sequential(*(_VitLayer(w, 768, 12) for _ in range(12)))
        self.norm = _norm(w, 768)
        self.head = _linear(w, 768, 1000, rows=True)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


class _GptLayer(nn.Module):
    def __init__(self, w: Weights, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = _norm(w, width)
        self.qkv, self.out = _linear(w, width, 3 * width), _linear(w, width, width)
        self.norm2 = _norm(w, width)
        self.up, self.down = _linear(w, width, 4 * width), _linear(w, 4 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")), k, v


class Gpt2(nn.Module):
    """The prefill: every token at once, keys and values handed out for the cache."""

    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.words, self.places = _take(w, 50257, 768), _take(w, 1024, 768)
        next(w)  # the causal mask
        self.layers = nn.ModuleList(_GptLayer(w, 768, 12) for _ in range(12))
        self.norm = _norm(w, 768)
        self.head = _linear(w, 768, 50257, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        x = functional.embedding(input_ids, self.words) + functional.embedding(position_ids, self.places)
        kept: list[Tensor] = []
        for layer in self.layers:
            x, k, v = layer(x)
            kept += [k, v]
        return self.head(self.norm(x)), *kept


class Unet(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        widths = [32, 64, 128, 256]
        inside = 3
        down = []
        for width in widths:
            down.append(self._double(w, inside, width))
            inside = width
        self.down = nn.ModuleList(down)
        self.bottom = self._double(w, 256, 512)
        ups, doubles = [], []
        for width in reversed(widths):
            with torch.device("meta"):
                up = nn.ConvTranspose2d(2 * width, width, 2, 2)
            up.weight, up.bias = _take(w, 2 * width, width, 2, 2), _take(w, width)
            ups.append(up)
            doubles.append(self._double(w, 2 * width, width))
        self.ups, self.doubles = nn.ModuleList(ups), nn.ModuleList(doubles)
        self.last = _conv(w, 32, 1, 1)

    @staticmethod
    def _double(w: Weights, inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(_conv(w, inside, outside, 3), nn.ReLU(), _conv(w, outside, outside, 3), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        skips, x = [], image
        for level in self.down:
            skips.append(level(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, double in zip(self.ups, self.doubles):
            x = double(torch.cat([up(x), skips.pop()], 1))
        return torch.sigmoid(self.last(x))


class Mlp(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        sizes = [784, 2048, 2048, 1024, 10]
        self.layers = nn.ModuleList(_linear(w, a, b, rows=True) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return self.layers[-1](x)


class _LlamaLayer(nn.Module):
    def __init__(self, w: Weights, width: int, heads: int, kv_heads: int, inside: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.depth = heads, kv_heads, width // heads
        sizes = [(width, width), (width, kv_heads * self.depth), (width, kv_heads * self.depth), (width, width)]
        self.q, self.k, self.v, self.out = (_linear(w, a, b, bias=False) for a, b in sizes)
        self.norm1 = _take(w, width)
        self.gate, self.up = (_linear(w, width, inside, bias=False) for _ in range(2))
        self.down = _linear(w, inside, width, bias=False)
        self.norm2 = _take(w, width)

    def forward(
        self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, place: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (each(y).unflatten(-1, (-1, self.depth)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        mixed = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = functional.rms_norm(x, x.shape[-1:], self.norm1, 1e-5)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return x, functional.rms_norm(x, x.shape[-1:], self.norm2, 1e-5)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Llama(nn.Module):
    """One decode step over a cache of fixed size, written in place; the weights of the ONNX model by their order."""

    def __init__(self, w: Weights, layers: int, width: int, heads: int, kv_heads: int, inside: int, words: int) -> None:
        super().__init__()
        self.words = _take(w, words, width)
        for name in ("cos", "sin"):
            self.register_buffer(name, tensor(next(w)))
        self.norm = _take(w, width)
        self.layers = nn.ModuleList(_LlamaLayer(w, width, heads, kv_heads, inside) for _ in range(layers))
        self.head = _linear(w, width, words, bias=False)

    def forward(self, input_ids: Tensor, place: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = functional.embedding(input_ids, self.words)
        y = functional.rms_norm(x, x.shape[-1:], self.norm, 1e-5)
        cos, sin = self.cos[place], self.sin[place]
        seen = (torch.arange(cache[0][0].shape[2], device=x.device) <= place)[None, None, None]
        for layer, (keys, values) in zip(self.layers, cache):
            x, y = layer(x, y, cos, sin, keys, values, place, seen)
        return self.head(y)
