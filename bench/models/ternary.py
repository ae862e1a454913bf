"""A model of the shape of BitNet b1.58 2B4T with random weights, as a graph of this runtime's own operators.

The architecture is that of the technical report (Ma et al., "BitNet b1.58 2B4T Technical Report", arXiv 2504.12285) and
of the implementation in Hugging Face's transformers: grouped-query attention with rotary embeddings, a feed-forward
layer gated by squared ReLU, RMS normalization before each half of a block and once more before its last projection,
no biases. The head is a ternary layer here, where the real model multiplies by its embedding table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import Symbol, TensorType
from ranvier.ops import complete
from ranvier.ops.own.bitlinear import DOMAIN

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
# what any byte stands for: four codes, of which none is 3
_FOUR = np.array([[k // 3**j % 3 for j in range(4)] for k in np.arange(256) % 81], np.uint8)
_BYTES = (_FOUR << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1, dtype=np.uint8)


@dataclass(frozen=True)
class Shape:
    layers: int = 30
    hidden: int = 2560
    inner: int = 6912
    heads: int = 20
    groups: int = 5
    vocabulary: int = 128256
    theta: float = 500000.0
    room: int = 512  # tokens of the caches

    @property
    def size(self) -> int:
        """Of a head."""
        return self.hidden // self.heads

    @property
    def weights(self) -> int:
        """Ternary ones, of blocks and head."""
        block = self.hidden * (2 * self.hidden + 2 * self.groups * self.size + 3 * self.inner)
        return self.layers * block + self.hidden * self.vocabulary


class _Builder:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.graph = Graph("bitnet", opsets={"": 23, DOMAIN: 1, MICROSOFT: 1})
        self.ops = GraphOps(self.graph, None, "", complete)

    def linear(self, x: Value, k: int, n: int, name: str) -> Value:
        codes = np.take(_BYTES, np.frombuffer(self.rng.bytes(n * k // 4), np.uint8)).reshape(n, k // 4)
        scale = np.float32(1.0 / np.sqrt(k * 2 / 3))
        attrs = {"K": k, "N": n}
        return self.ops.node("BitLinear", [x, codes, scale], attrs, domain=DOMAIN, version=1, name=name).output

    def norm(self, x: Value, width: int) -> Value:
        weight = (1 + 0.1 * self.rng.standard_normal(width)).astype(np.float32)
        return self.ops.RMSNormalization(x, weight, axis=-1, epsilon=1e-5)

    def block(self, x: Value, k: int, position: tuple[Value, Value], tables: tuple[Value, Value]) -> Value:
        s, ops = self.shape, self.ops
        width = s.groups * s.size
        h = self.norm(x, s.hidden)
        q = self.linear(h, s.hidden, s.hidden, f"q{k}")
        key, value = (self.linear(h, s.hidden, width, f"{name}{k}") for name in "kv")
        cache = TensorType(DType.float32, (1, s.groups, s.room, s.size))
        past = [self.graph.add_input(f"{name}{k}", cache) for name in ("past_k", "past_v")]
        attention = ops.node(
            "GroupQueryAttention",
            [q, key, value, *past, *position, *tables],
            {"num_heads": s.heads, "kv_num_heads": s.groups, "do_rotary": 1},
            outputs=3,
            domain=MICROSOFT,
            version=1,
            name=f"attention{k}",
        )
        for name, made in zip(("present_k", "present_v"), attention.outputs[1:]):
            made.name, made.type = f"{name}{k}", cache
            self.graph.outputs.append(made)
        x = ops.Add(x, self.linear(self.norm(attention.output, s.hidden), s.hidden, s.hidden, f"o{k}"))
        h = self.norm(x, s.hidden)
        gate = ops.Relu(self.linear(h, s.hidden, s.inner, f"gate{k}"))
        gated = ops.Mul(ops.Mul(gate, gate), self.linear(h, s.hidden, s.inner, f"up{k}"))
        return ops.Add(x, self.linear(self.norm(gated, s.inner), s.inner, s.hidden, f"down{k}"))


def bitnet(shape: Shape | None = None, seed: int = 0) -> Graph:
    """Inputs: ``tokens`` [1, T], ``last`` (int32 [1], the position of the last token), ``total`` (int32, tokens with
    those in the caches) and caches. Outputs: ``logits`` of the last token, and caches."""
    s = shape or Shape()
    b = _Builder(s, seed)
    tokens = b.graph.add_input("tokens", TensorType(DType.int64, (1, Symbol("T"))))
    last = b.graph.add_input("last", TensorType(DType.int32, (1,)))
    total = b.graph.add_input("total", TensorType(DType.int32, (1,)))
    table = (b.rng.standard_normal((s.vocabulary, s.hidden), np.float32)).astype(np.float16)
    angles = np.arange(s.room)[:, None] * s.theta ** (-np.arange(0, s.size, 2) / s.size)
    tables = tuple(b.ops.constant(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    x = b.ops.Cast(b.ops.Gather(table, tokens, axis=0), to=DType.float32.onnx)
    for k in range(s.layers):
        x = b.block(x, k, (last, total), (tables[0], tables[1]))
    end = b.ops.Gather(x, np.array([-1]), axis=1)
    logits = b.linear(b.norm(end, s.hidden), s.hidden, s.vocabulary, "head")
    logits.name = "logits"
    b.graph.outputs.insert(0, logits)
    return b.graph


def caches(shape: Shape) -> dict[str, Array]:
    room = (1, shape.groups, shape.room, shape.size)
    return {f"past_{name}{k}": np.zeros(room, np.float32) for k in range(shape.layers) for name in "kv"}


class Decoder:
    """A session with caches of its own, which each step writes in place."""

    def __init__(self, session: Any, shape: Shape) -> None:
        self.session, self.past = session, caches(shape)
        self.into = {name.replace("past", "present"): array for name, array in self.past.items()}

    def step(self, tokens: list[int], before: int) -> Array:
        """Logits after these tokens, with ``before`` tokens in the caches."""
        total = before + len(tokens)
        feeds = {
            "tokens": np.array([tokens], np.int64),
            "last": np.array([total - 1], np.int32),
            "total": np.array([total], np.int32),
            **self.past,
        }
        logits: Array = self.session.run(feeds, into=self.into)["logits"]
        return logits
