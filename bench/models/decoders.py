"""Language-model decoders with a key/value cache: GPT-2 small, and a Llama-shaped one of 125 million weights.

Both take any number of new tokens after any number of past ones, so one file serves prefill and decode.
"""

from __future__ import annotations

import math

import numpy as np

from bench.models.blocks import FLOAT, INT64, Net

TOKENS = ["batch", "sequence"]


def gpt2_small() -> Net:
    """12 layers of 768: ``Conv1D`` as Gemm over flattened tokens, tanh GELU, the causal mask cut from a stored one."""
    net = Net("gpt2_small", opset=17)
    layers, width, heads, vocabulary, context = 12, 768, 12, 50257, 1024
    ids, positions, allowed, past = _interface(net, layers, heads, width // heads)
    embedded = net.node("Gather", net.normal(vocabulary, width, scale=0.5), ids)
    hidden = net.add(embedded, net.node("Gather", net.normal(context, width, scale=0.2), positions))
    causal = net.weight(np.tril(np.ones((1, 1, context, context), np.bool_)))
    bias = _padding_bias(net, allowed)
    present: list[tuple[str, str]] = []
    for k in range(layers):
        with net.scope(f"h.{k}"):
            y = _conv1d(net, net.layer_norm(hidden, width), width, 3 * width)
            q, key, value = net.nodes("Split", y, net.ints(width, width, width), results=3, axis=2)
            q, key, value = (_heads(net, x, heads, width // heads) for x in (q, key, value))
            key = net.node("Concat", past[k][0], key, axis=2)
            value = net.node("Concat", past[k][1], value, axis=2)
            present.append((key, value))
            scores = net.node("MatMul", q, net.transpose(key, 0, 1, 3, 2))
            scores = net.node("Div", scores, net.constant(math.sqrt(width // heads)))
            total, new = net.size(key, 2), net.size(q, 2)
            rows = net.slice(causal, net.node("Sub", total, new), total, 2)
            far = net.constant(np.finfo(np.float32).min)
            scores = net.node("Where", net.slice(rows, net.ints(0), total, 3), scores, far)
            weights = net.node("Softmax", net.add(scores, bias), axis=-1)
            mixed = net.transpose(net.node("MatMul", weights, value), 0, 2, 1, 3)
            hidden = net.add(_conv1d(net, _merged(net, mixed, width), width, width), hidden)
            inner = net.gelu_tanh(_conv1d(net, net.layer_norm(hidden, width), width, 4 * width))
            hidden = net.add(hidden, _conv1d(net, inner, 4 * width, width))
    _results(net, net.layer_norm(hidden, width), present, width, vocabulary, heads)
    return net


def llama_125m() -> Net:
    """12 layers of 768: RMS norms, rotary positions, 12 heads over 4 of keys and values, SwiGLU of 2048."""
    net = Net("llama_125m", opset=17)
    layers, width, heads, kv_heads, inside, vocabulary = 12, 768, 12, 4, 2048, 32000
    depth = width // heads
    ids, positions, allowed, past = _interface(net, layers, kv_heads, depth)
    hidden = net.node("Gather", net.normal(vocabulary, width, scale=0.5), ids)
    cos, sin = _rotary_tables(net, positions, depth)
    bias = _causal_bias(net, positions, allowed)
    present: list[tuple[str, str]] = []
    for k in range(layers):
        with net.scope(f"model.layers.{k}"):
            y = net.rms_norm(hidden, width)
            q = _heads(net, net.linear(y, width, width, bias=False), heads, depth)
            key = _heads(net, net.linear(y, width, kv_heads * depth, bias=False), kv_heads, depth)
            value = _heads(net, net.linear(y, width, kv_heads * depth, bias=False), kv_heads, depth)
            q, key = _rotate(net, q, cos, sin, depth), _rotate(net, key, cos, sin, depth)
            key = net.node("Concat", past[k][0], key, axis=2)
            value = net.node("Concat", past[k][1], value, axis=2)
            present.append((key, value))
            key, value = (_repeat(net, x, heads, kv_heads, depth) for x in (key, value))
            scores = net.node("MatMul", q, net.transpose(key, 0, 1, 3, 2))
            scores = net.add(net.mul(scores, net.constant(depth**-0.5)), bias)
            mixed = net.node("MatMul", net.node("Softmax", scores, axis=-1), value)
            mixed = _merged(net, net.transpose(mixed, 0, 2, 1, 3), width)
            hidden = net.add(hidden, net.linear(mixed, width, width, bias=False))
            y = net.rms_norm(hidden, width)
            gate = net.silu(net.linear(y, width, inside, bias=False))
            inner = net.mul(gate, net.linear(y, width, inside, bias=False))
            hidden = net.add(hidden, net.linear(inner, inside, width, bias=False))
    _results(net, net.rms_norm(hidden, width), present, width, vocabulary, kv_heads)
    return net


def _interface(net: Net, layers: int, heads: int, depth: int) -> tuple[str, str, str, list[tuple[str, str]]]:
    ids = net.input("input_ids", TOKENS, INT64)
    allowed = net.input("attention_mask", ["batch", "past_sequence + sequence"], INT64)
    positions = net.input("position_ids", TOKENS, INT64)
    shape = ["batch", heads, "past_sequence", depth]
    past = [
        (net.input(f"past_key_values.{k}.key", shape), net.input(f"past_key_values.{k}.value", shape))
        for k in range(layers)
    ]
    return ids, positions, allowed, past


def _results(net: Net, hidden: str, present: list[tuple[str, str]], width: int, vocabulary: int, heads: int) -> None:
    net.output(net.linear(hidden, width, vocabulary, bias=False), "logits", [*TOKENS, vocabulary])
    shape = ["batch", heads, "past_sequence + sequence", 64]
    for k, (key, value) in enumerate(present):
        net.output(key, f"present.{k}.key", shape)
        net.output(value, f"present.{k}.value", shape)


def _conv1d(net: Net, x: str, inside: int, outside: int) -> str:
    """GPT-2's projection: tokens flattened, a Gemm, and the shape put back."""
    shape = net.node("Concat", net.size(x, 0), net.size(x, 1), net.ints(outside), axis=0)
    w = net.normal(inside, outside, scale=1 / math.sqrt(inside))
    y = net.node("Gemm", net.reshape(x, -1, inside), w, net.around(0.0, outside), alpha=1.0, beta=1.0)
    return net.node("Reshape", y, shape)


def _heads(net: Net, x: str, heads: int, depth: int) -> str:
    shape = net.node("Concat", net.size(x, 0), net.size(x, 1), net.ints(heads), net.ints(depth), axis=0)
    return net.transpose(net.node("Reshape", x, shape), 0, 2, 1, 3)


def _merged(net: Net, x: str, width: int) -> str:
    shape = net.node("Concat", net.size(x, 0), net.size(x, 1), net.ints(width), axis=0)
    return net.node("Reshape", x, shape)


def _padding_bias(net: Net, allowed: str) -> str:
    wide = net.node("Unsqueeze", net.node("Unsqueeze", allowed, net.ints(1)), net.ints(2))
    inverse = net.node("Sub", net.constant(1.0), net.node("Cast", wide, to=FLOAT))
    return net.mul(inverse, net.constant(np.finfo(np.float32).min))


def _causal_bias(net: Net, positions: str, allowed: str) -> str:
    """0 where a position may look and the lowest float where it may not, from the positions themselves."""
    with net.scope("model.mask"):
        total = net.node("Squeeze", net.size(allowed, 1), net.ints(0))
        places = net.node("Range", net.constant(0, np.int64), total, net.constant(1, np.int64))
        own = net.node("Unsqueeze", positions, net.ints(2))
        seen = net.node("LessOrEqual", places, own)
        real = net.node("Cast", net.node("Unsqueeze", allowed, net.ints(1)), to=9)
        both = net.node("Unsqueeze", net.node("And", seen, real), net.ints(1))
        return net.node("Where", both, net.constant(0.0), net.constant(np.finfo(np.float32).min))


def _rotary_tables(net: Net, positions: str, depth: int) -> tuple[str, str]:
    with net.scope("model.rotary_emb"):
        rates = 10000.0 ** -(np.arange(0, depth, 2, dtype=np.float32) / depth)
        places = net.node("Cast", net.node("Unsqueeze", positions, net.ints(1)), to=FLOAT)
        angles = net.transpose(net.node("MatMul", net.weight(rates.astype(np.float32)[None, :, None]), places), 0, 2, 1)
        both = net.node("Concat", angles, angles, axis=-1)
        cos, sin = (net.node("Unsqueeze", net.node(op, both), net.ints(1)) for op in ("Cos", "Sin"))
    return cos, sin


def _rotate(net: Net, x: str, cos: str, sin: str, depth: int) -> str:
    low = net.slice(x, net.ints(0), net.ints(depth // 2), 3)
    high = net.slice(x, net.ints(depth // 2), net.ints(np.iinfo(np.int64).max), 3)
    turned = net.node("Concat", net.node("Neg", high), low, axis=-1)
    return net.add(net.mul(x, cos), net.mul(turned, sin))


def _repeat(net: Net, x: str, heads: int, kv_heads: int, depth: int) -> str:
    """Keys or values for every query head, by Expand, as the exporters of grouped attention write it."""
    total = net.size(x, 2)
    batch = net.size(x, 0)
    parts = [batch, net.ints(kv_heads), net.ints(heads // kv_heads), total, net.ints(depth)]
    wide = net.node("Expand", net.node("Unsqueeze", x, net.ints(2)), net.node("Concat", *parts, axis=0))
    return net.node("Reshape", wide, net.node("Concat", batch, net.ints(heads), total, net.ints(depth), axis=0))
