"""A Llama-shaped decoder of 1.2 billion weights as generators export it: grouped attention over a cache that is written
in place, rotary positions inside it, residual sums inside the norms; weights of 16 or of 4 bits.

The weights lie beside the file: together they are larger than a protobuf message may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench.models.blocks import Array, Net

MICROSOFT = "com.microsoft"
LAYERS, WIDTH, HEADS, KV_HEADS, INSIDE, VOCABULARY, CONTEXT = 16, 2048, 32, 8, 8192, 128256, 4096
DEPTH = WIDTH // HEADS
GROUP = 32  # weights that share a scale
BF16 = TensorProto.BFLOAT16


@dataclass(frozen=True)
class Sizes:
    """Of a model; a head has ``width / heads`` elements. ``context`` is how many positions have angles."""

    layers: int = LAYERS
    width: int = WIDTH
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    inside: int = INSIDE
    vocabulary: int = VOCABULARY
    context: int = CONTEXT

    @property
    def depth(self) -> int:
        return self.width // self.heads


class _Large(Net):
    """Weights go into a file as they are made."""

    def __init__(self, name: str, data: Path) -> None:
        super().__init__(name, opset=17)
        self._data = data
        self._file = data.open("wb")
        self._pool = self._rng.standard_normal(1 << 22, np.float32)

    def drawn(self, *shape: int, scale: float) -> Array:
        """Numbers from a pool that is drawn once, from another place each time: a billion would take long."""
        size = math.prod(shape)
        start = int(self._rng.integers(self._pool.size))
        repeated = np.resize(np.roll(self._pool, -start), size)
        return (repeated * np.float32(scale)).astype(ml_dtypes.bfloat16).reshape(shape)

    def weight(self, array: Array, kind: str = "weight") -> str:
        if array.nbytes < 4096:
            return super().weight(array, kind)
        name = self._fresh(kind)
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, fact in (("location", self._data.name), ("offset", self._file.tell()), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(fact))
        self._file.write(array.tobytes())
        self._file.write(bytes(-self._file.tell() % 4096))
        self._weights.append(tensor)
        return name

    def save(self, path: Path) -> None:
        self._file.close()
        onnx.save(self.model(), path)


def write(folder: Path, bits: int = 16, sizes: Sizes | None = None) -> Path:
    """The model as ``llama_1b.onnx`` or ``llama_1b_int4.onnx`` with its weights beside it, or a smaller one like it."""
    name = "llama_1b" if bits == 16 else "llama_1b_int4"
    path = folder / f"{name}.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    net = _Large(name, path.with_suffix(".data"))
    _build(net, bits, sizes or Sizes())
    net.save(path)
    return path


def _build(net: _Large, bits: int, sizes: Sizes) -> None:
    width, inside, heads, kv_heads = sizes.width, sizes.inside, sizes.heads, sizes.kv_heads
    ids = net.input("input_ids", ["batch", "sequence"], TensorProto.INT64)
    lengths = net.input("seqlens_k", ["batch"], TensorProto.INT32)
    total = net.input("total_sequence_length", [], TensorProto.INT32)
    cache: list[int | str] = ["batch", kv_heads, "cache", sizes.depth]
    past = [
        (net.input(f"past_key_values.{k}.key", cache, BF16), net.input(f"past_key_values.{k}.value", cache, BF16))
        for k in range(sizes.layers)
    ]
    table = net.drawn(sizes.vocabulary, width, scale=1.0)
    hidden = net.node("Gather", net.weight(table), ids)
    cos, sin = _angles(net, sizes)
    present: list[list[str]] = []
    y = net.node("SimplifiedLayerNormalization", hidden, _scale(net, width), axis=-1, epsilon=1e-5)
    for k in range(sizes.layers):
        with net.scope(f"model.layers.{k}"):
            q, key, value = (_linear(net, y, width, n * sizes.depth, bits) for n in (heads, kv_heads, kv_heads))
            mixed, *kept = net.nodes(
                "GroupQueryAttention",
                *(q, key, value, *past[k], lengths, total, cos, sin),
                results=3,
                domain=MICROSOFT,
                num_heads=heads,
                kv_num_heads=kv_heads,
                do_rotary=1,
                rotary_interleaved=0,
                scale=sizes.depth**-0.5,
            )
            present.append(kept)
            hidden, y = _added(net, hidden, _linear(net, mixed, width, width, bits), width)
            gate = net.silu(_linear(net, y, width, inside, bits))
            inner = net.mul(gate, _linear(net, y, width, inside, bits))
            hidden, y = _added(net, hidden, _linear(net, inner, inside, width, bits), width)
    logits = _packed(net, y, table) if bits == 4 else net.node("MatMul", y, net.weight(np.ascontiguousarray(table.T)))
    net.output(logits, "logits", ["batch", "sequence", sizes.vocabulary], BF16)
    for k, (key, value) in enumerate(present):
        net.output(key, f"present.{k}.key", cache, BF16)
        net.output(value, f"present.{k}.value", cache, BF16)


def _scale(net: _Large, width: int) -> str:
    return net.weight((1 + net.drawn(width, scale=0.1).astype(np.float32)).astype(ml_dtypes.bfloat16))


def _added(net: _Large, hidden: str, update: str, width: int) -> tuple[str, str]:
    """The sum that goes on, and it normalized."""
    y, _, _, total = net.nodes(
        "SkipSimplifiedLayerNormalization",
        hidden,
        update,
        _scale(net, width),
        results=4,
        domain=MICROSOFT,
        epsilon=1e-5,
    )
    return total, y


def _angles(net: _Large, sizes: Sizes) -> tuple[str, str]:
    rates = 500000.0 ** -(np.arange(0, sizes.depth, 2) / sizes.depth)
    angles = np.arange(sizes.context)[:, None] * rates[None]
    cos, sin = (net.weight(f(angles).astype(ml_dtypes.bfloat16)) for f in (np.cos, np.sin))
    return cos, sin


def _linear(net: _Large, x: str, inside: int, outside: int, bits: int) -> str:
    # rows of the output lie together, as checkpoints keep them
    rows = net.drawn(outside, inside, scale=1 / math.sqrt(inside))
    if bits == 4:
        return _packed(net, x, rows)
    return net.node("MatMul", x, net.weight(np.ascontiguousarray(rows.T)))


def _packed(net: _Large, x: str, rows: Array) -> str:
    """Groups of weights as codes of 4 bits around 8, with a scale each."""
    outside, inside = rows.shape
    groups = rows.astype(np.float32).reshape(outside, inside // GROUP, GROUP)
    scales = (np.abs(groups).max(axis=2) / 7).astype(ml_dtypes.bfloat16)
    codes = np.clip(np.rint(groups / scales.astype(np.float32)[..., None]) + 8, 0, 15).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return net.node(
        "MatMulNBits",
        *(x, net.weight(packed), net.weight(scales)),
        domain=MICROSOFT,
        K=inside,
        N=outside,
        bits=4,
        block_size=GROUP,
    )


def weights(path: Path) -> dict[str, Any]:
    """Arrays by name, without copying them: for a twin in another framework."""
    model = onnx.load(path, load_external_data=False)
    beside = path.with_suffix(".data")  # empty where all weights are small
    data: Array = np.memmap(beside, np.uint8, "r") if beside.stat().st_size else np.empty(0, np.uint8)
    found: dict[str, Any] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            found[tensor.name] = numpy_helper.to_array(tensor)
            continue
        facts = {entry.key: entry.value for entry in tensor.external_data}
        start = int(facts["offset"])
        raw = data[start : start + int(facts["length"])]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        found[tensor.name] = raw.view(dtype).reshape(tuple(tensor.dims))
    return found
