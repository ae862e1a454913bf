"""A two-layer LSTM over tokens, and a plain multi-layer perceptron."""

from __future__ import annotations

import itertools
import math

import numpy as np

from bench.models.blocks import GAIN, INT64, Net


def lstm_2layer() -> Net:
    """Embedding of 256, two layers of 512, a class from the last step; states made in the graph as PyTorch does."""
    net = Net("lstm_2layer", opset=14)
    width, hidden, classes = 256, 512, 64
    ids = net.input("tokens", ["batch", "sequence"], INT64)
    x = net.transpose(net.node("Gather", net.normal(10000, width), ids), 1, 0, 2)
    state_shape = net.node("Concat", net.ints(1), net.size(ids, 0), net.ints(hidden), axis=0)
    zero = net.node("ConstantOfShape", state_shape)
    inside = width
    last = ""
    for k in range(2):
        with net.scope(f"lstm.{k}"):
            w = net.normal(1, 4 * hidden, inside, scale=1 / math.sqrt(inside))
            r = net.normal(1, 4 * hidden, hidden, scale=1 / math.sqrt(hidden))
            bias = net.weight(np.zeros((1, 8 * hidden), np.float32))
            sequence, last, _ = net.nodes("LSTM", x, w, r, bias, "", zero, zero, results=3, hidden_size=hidden)
            x = net.node("Squeeze", sequence, net.ints(1))
            inside = hidden
    final = net.node("Squeeze", last, net.ints(0))
    net.output(net.gemm(final, hidden, classes), "logits", ["batch", classes])
    return net


def mlp() -> Net:
    """784 to 2048, 2048, 1024 and 10, with ReLU."""
    net = Net("mlp", opset=13)
    x = net.input("x", ["batch", 784])
    sizes = [784, 2048, 2048, 1024]
    for inside, outside in itertools.pairwise(sizes):
        x = net.node("Relu", net.gemm(x, inside, outside, gain=GAIN["relu"]))
    net.output(net.gemm(x, sizes[-1], 10), "logits", ["batch", 10])
    return net
