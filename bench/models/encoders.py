"""Transformer encoders: BERT-base and MiniLM over tokens, ViT-B/16 over a picture."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bench.models.blocks import FLOAT, INT64, Net

Norm = Callable[[str, int], str]


def bert_base() -> Net:
    """12 layers of 768, as PyTorch exports it at opset 17, with the pooler."""
    net = Net("bert_base", opset=17)
    hidden = _bert(net, layers=12, width=768, heads=12, vocabulary=30522, norm=net.layer_norm)
    first = net.node("Gather", hidden, net.constant(0, np.int64), axis=1)
    pooled = net.node("Tanh", net.gemm(first, 768, 768))
    net.output(hidden, "last_hidden_state", ["batch", "sequence", 768])
    net.output(pooled, "pooler_output", ["batch", 768])
    return net


def minilm_l6() -> Net:
    """6 layers of 384, as exported at opset 13: layer normalization in single steps."""
    net = Net("minilm_l6", opset=13)
    hidden = _bert(net, layers=6, width=384, heads=12, vocabulary=30522, norm=net.layer_norm_chain)
    net.output(hidden, "last_hidden_state", ["batch", "sequence", 384])
    return net


def vit_b16(batch: int = 1) -> Net:
    """ViT-B/16 at 224: patches by a convolution, one projection for queries, keys and values, norms first."""
    net = Net("vit_b16", opset=17)
    width, heads, tokens, classes = 768, 12, 197, 1000
    depth = width // heads
    x = net.input("pixel_values", [batch, 3, 224, 224])
    with net.scope("patch_embed"):
        patches = net.conv(x, 3, width, 16, stride=16, pad=0)
        flat = net.transpose(net.reshape(patches, batch, width, tokens - 1), 0, 2, 1)
    first = net.normal(1, 1, width, scale=0.5)
    if batch > 1:
        first = net.node("Expand", first, net.ints(batch, 1, width))
    sequence = net.node("Concat", first, flat, axis=1)
    hidden = net.add(sequence, net.normal(1, tokens, width, scale=0.2))
    for k in range(12):
        with net.scope(f"blocks.{k}"):
            y = net.linear(net.layer_norm(hidden, width), width, 3 * width)
            y = net.transpose(net.reshape(y, batch, tokens, 3, heads, depth), 2, 0, 3, 1, 4)
            q, key, v = (net.node("Gather", y, net.constant(i, np.int64), axis=0) for i in range(3))
            scores = net.node("MatMul", net.mul(q, net.constant(depth**-0.5)), net.transpose(key, 0, 1, 3, 2))
            mixed = net.node("MatMul", net.node("Softmax", scores, axis=-1), v)
            mixed = net.reshape(net.transpose(mixed, 0, 2, 1, 3), batch, tokens, width)
            hidden = net.add(hidden, net.linear(mixed, width, width))
            inner = net.gelu(net.linear(net.layer_norm(hidden, width), width, 4 * width))
            hidden = net.add(hidden, net.linear(inner, 4 * width, width))
    first = net.node("Gather", net.layer_norm(hidden, width), net.constant(0, np.int64), axis=1)
    net.output(net.gemm(first, width, classes), "logits", [batch, classes])
    return net


def _bert(net: Net, *, layers: int, width: int, heads: int, vocabulary: int, norm: Norm) -> str:
    free = ["batch", "sequence"]
    ids = net.input("input_ids", free, INT64)
    mask = net.input("attention_mask", free, INT64)
    kinds = net.input("token_type_ids", free, INT64)
    with net.scope("embeddings"):
        length = net.size(ids, 1)
        positions = net.slice(net.weight(np.arange(512, dtype=np.int64)[None]), net.ints(0), length, 1)
        words = net.node("Gather", net.normal(vocabulary, width), ids)
        types = net.node("Gather", net.normal(2, width, scale=0.3), kinds)
        places = net.node("Gather", net.normal(512, width, scale=0.3), positions)
        hidden = norm(net.add(net.add(words, types), places), width)
    hidden_part = net.node("Unsqueeze", net.node("Unsqueeze", mask, net.ints(1)), net.ints(2))
    as_float = net.node("Cast", hidden_part, to=FLOAT)
    far = net.constant(np.finfo(np.float32).min)
    bias = net.mul(net.node("Sub", net.constant(1.0), as_float), far)
    for k in range(layers):
        with net.scope(f"encoder.layer.{k}"):
            with net.scope("attention"):
                hidden = norm(net.add(_self_attention(net, hidden, bias, width, heads), hidden), width)
            inner = net.gelu(net.linear(hidden, width, 4 * width))
            hidden = norm(net.add(net.linear(inner, 4 * width, width), hidden), width)
    return hidden


def _self_attention(net: Net, hidden: str, bias: str, width: int, heads: int) -> str:
    depth = width // heads

    def split(x: str, *perm: int) -> str:
        # sizes that were free when the model was traced are looked up again at every use
        shape = net.node("Concat", net.size(x, 0), net.size(x, 1), net.ints(heads), net.ints(depth), axis=0)
        return net.transpose(net.node("Reshape", x, shape), *perm)

    query = split(net.linear(hidden, width, width), 0, 2, 1, 3)
    key = split(net.linear(hidden, width, width), 0, 2, 3, 1)
    value = split(net.linear(hidden, width, width), 0, 2, 1, 3)
    scores = net.node("Div", net.node("MatMul", query, key), net.constant(math.sqrt(depth)))
    weights = net.node("Softmax", net.add(scores, bias), axis=-1)
    mixed = net.transpose(net.node("MatMul", weights, value), 0, 2, 1, 3)
    shape = net.node("Concat", net.size(mixed, 0), net.size(mixed, 1), net.ints(width), axis=0)
    return net.linear(net.node("Reshape", mixed, shape), width, width)
