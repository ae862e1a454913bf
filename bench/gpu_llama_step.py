"""One decoding step of a Llama-shaped model of 1.2 billion weights out of the hand-written kernels, as one CUDA graph.

    PYTHONPATH=src python -m bench.gpu_llama_step [--weights bf16 int4] [--context 2048] [--no-compile] [--output FILE]
    TRITON_INTERPRET=1 PYTHONPATH=src python -m bench.gpu_llama_step --tiny      # on a processor: results, no times

Five launches a layer: norm with query, key and value; rotary embedding, cache and attention; output with residual; norm
with gate and up; down with residual. Peers are torch eager and torch.compile on the same weights and caches. Errors are
against the same step in float64, on random weights and a random cache; those of torch are printed beside ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional

from bench.gpu_timing import captured, fastest, milliseconds
from ranvier.providers.cuda.kernels import few_tokens, int4, w4a16
from ranvier.providers.cuda.kernels.choose import decode_splits, gemv_tile
from ranvier.providers.cuda.kernels.decode_attention import NewToken, Workspace, decode_attention
from ranvier.providers.cuda.kernels.gemv import gated_gemv, gemv
from ranvier.providers.cuda.kernels.jit import Tile

EPS = 1e-5
GOALS = {"bf16": 0.80, "int4": 0.40}
PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
FLOAT_TILES = [Tile(*one) for one in ((2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (4, 512, 2), (8, 512, 2),
                                      (2, 1024, 4, 2), (2, 2048, 4), (4, 2048, 4), (4, 2048, 8))]  # fmt: skip
INT4_TILES = [Tile(*one) for one in ((4, 1024, 1), (8, 1024, 1), (4, 2048, 2), (8, 2048, 2))]
LONG_INT4_TILES = [Tile(*one) for one in ((4, 2048, 2), (8, 2048, 2), (4, 4096, 4), (2, 8192, 8), (4, 8192, 8))]
CUTS = [few_tokens.Cut(*one) for one in ((8, 8), (16, 8), (8, 4, 2), (4, 8))]
LONG_CUTS = [few_tokens.Cut(*one) for one in ((16, 8), (8, 8), (16, 8, 1, 32), (8, 16, 1, 8))]
ATTENTIONS = ((16, 64, 4, False), (32, 64, 4, False), (16, 128, 4, False))


How = Tile | few_tokens.Cut  # which kernel a product gets, and how the work is cut for it


@dataclass(frozen=True)
class Shape:
    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    inner: int = 8192
    vocabulary: int = 128256

    @property
    def dim(self) -> int:
        return self.width // self.heads

    @property
    def rows(self) -> int:
        """Of query, key and value together."""
        return self.width + 2 * self.kv_heads * self.dim


@dataclass
class Layer:
    qkv: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    norm1: torch.Tensor
    norm2: torch.Tensor
    k_cache: torch.Tensor  # [1, positions, kv heads, D]
    v_cache: torch.Tensor


class Model:
    """Weights, caches and tables of angles, random; ``table`` is both the embedding and the head."""

    def __init__(self, shape: Shape, context: int, device: str) -> None:
        self.shape, self.context = shape, context
        room = context + 16

        def matrix(n: int, k: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(n, k, device=device, dtype=torch.float32) * (scale / math.sqrt(k))
            return values.to(torch.bfloat16)

        def gain() -> torch.Tensor:
            return (1.0 + 0.1 * torch.randn(shape.width, device=device)).to(torch.bfloat16)

        def cache() -> torch.Tensor:
            return torch.randn(1, room, shape.kv_heads, shape.dim, device=device).to(torch.bfloat16)

        self.layers = [
            Layer(
                matrix(shape.rows, shape.width),
                matrix(shape.width, shape.width),
                matrix(shape.inner, shape.width),
                matrix(shape.inner, shape.width),
                matrix(shape.width, shape.inner),
                gain(),
                gain(),
                cache(),
                cache(),
            )
            for _ in range(shape.layers)
        ]
        self.table = matrix(shape.vocabulary, shape.width, 4.0)
        self.norm = gain()
        positions = torch.arange(room, dtype=torch.float64)[:, None]
        angles = positions * 500000.0 ** (-torch.arange(0, shape.dim, 2, dtype=torch.float64) / shape.dim)[None]
        self.cos, self.sin = angles.cos().to(torch.float32).to(device), angles.sin().to(torch.float32).to(device)
        self.token = torch.randint(0, shape.vocabulary, (1,), device=device)
        self.lengths = torch.tensor([context], dtype=torch.int32, device=device)  # counts the new token
        self.device = device


class Step:
    """The step out of our kernels; every buffer is there before the first launch."""

    def __init__(self, model: Model, weights: str, *, splits: int, pdl: bool, tiles: dict[str, How]) -> None:
        self.model, self.kind, self.pdl, self.tiles = model, weights, pdl, tiles
        self.early = True
        self.how = (splits, 128, 4, False)  # splits of attention, tokens of a tile, warps, joined in the same launch
        shape, device = model.shape, model.device

        def buffer(n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.full((1, n), float("nan"), dtype=dtype, device=device)

        self.x, self.qkv, self.attended = buffer(shape.width), buffer(shape.rows), buffer(shape.width)
        self.inner, self.logits = buffer(shape.inner), buffer(shape.vocabulary, torch.float32)
        heads = shape.heads
        self.workspace = Workspace.empty(1, heads, shape.kv_heads, shape.dim, max(2, splits), device)
        self.packed: list[dict[str, int4.Int4]] = []
        if weights == "int4":
            for layer in model.layers:
                gate_up = int4.interleaved(quantized(layer.gate), quantized(layer.up))
                self.packed.append(
                    {
                        "qkv": quantized(layer.qkv),
                        "o": quantized(layer.o),
                        "gate_up": gate_up,
                        "down": quantized(layer.down),
                    }
                )
            self.packed.append({"head": quantized(model.table)})

    def product(self, name: str, index: int, tile: How | None = None) -> None:
        """One of the five products of a layer, or the head, with all that rides along."""
        model, pdl = self.model, self.pdl
        tile = tile or self.tiles[name]
        layer = model.layers[min(index, model.shape.layers - 1)]
        x, norm, residual, out = {
            "qkv": (self.x, layer.norm1, None, self.qkv),
            "o": (self.attended, None, self.x, self.x),
            "gate_up": (self.x, layer.norm2, None, self.inner),
            "down": (self.inner, None, self.x, self.x),
            "head": (self.x, model.norm, None, self.logits),
        }[name]
        gated = name == "gate_up"
        around = few_tokens.Around(
            residual=residual, norm=norm, eps=EPS, gated=gated, activation="silu" if gated else "", pdl=pdl
        )
        if self.kind == "int4":
            if isinstance(tile, few_tokens.Cut):
                few_tokens.coded(x, self.packed[index][name], out, around, tile)
            else:
                w4a16.gemv(x, self.packed[index][name], out, tile=tile, **vars(around))
            return
        weight = {"qkv": layer.qkv, "o": layer.o, "down": layer.down, "head": model.table, "gate_up": layer.gate}[name]
        assert isinstance(tile, Tile)
        if gated:
            gated_gemv(x, layer.gate, layer.up, out, norm=norm, eps=EPS, tile=tile, pdl=pdl)
        else:
            gemv(x, (weight,), out, norm=norm, eps=EPS, residual=residual, tile=tile, pdl=pdl)

    def attention(self, index: int) -> None:
        shape, layer = self.model.shape, self.model.layers[index]
        q, k, v = self.qkv.view(-1, shape.dim).split((shape.heads, shape.kv_heads, shape.kv_heads))
        new = NewToken(k[None], v[None], self.model.cos, self.model.sin)
        splits, tokens, warps, fused = self.how
        decode_attention(
            q[None], layer.k_cache, layer.v_cache, self.model.lengths, self.attended.view(1, shape.heads, shape.dim),
            workspace=self.workspace, splits=splits, new=new, tokens=tokens, warps=warps, fused=fused, pdl=self.pdl,
            early=self.early,
        )  # fmt: skip

    def __call__(self) -> torch.Tensor:
        torch.index_select(self.model.table, 0, self.model.token, out=self.x)
        for index in range(self.model.shape.layers):
            self.product("qkv", index)
            self.attention(index)
            for name in ("o", "gate_up", "down"):
                self.product(name, index)
        self.product("head", self.model.shape.layers)
        return self.logits

    def nbytes(self) -> int:
        """What a step has to read: weights and the cache."""
        shape, layer = self.model.shape, self.model.layers[0]
        matrices = (layer.qkv, layer.o, layer.gate, layer.up, layer.down)
        if self.kind == "int4":
            weights = sum(packed.nbytes for part in self.packed for packed in part.values())
        else:
            weights = 2 * (shape.layers * sum(m.numel() for m in matrices) + self.model.table.numel())
        return weights + shape.layers * 2 * 2 * self.model.context * shape.kv_heads * shape.dim


GROUP = 32  # weights under one scale


def quantized(weight: torch.Tensor, group: int = GROUP) -> int4.Int4:
    """Symmetric 4-bit weights: the largest of a group becomes -8 or 8 less one."""
    n, k = weight.shape
    group = min(group, k)
    parts = weight.to(torch.float32).reshape(n, -1, group)
    scales = (parts.abs().amax(-1) / 7.0).clamp_min(1e-8).to(torch.bfloat16)
    codes = (parts / scales.to(torch.float32)[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
    pairs = codes.reshape(n, -1, group // 2, 2).to(torch.uint8)
    return int4.pack(pairs[..., 0] | pairs[..., 1] << 4, scales, k, group)


def reference(model: Model, dtype: torch.dtype, weight: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """The same step in torch, in any precision; ``weight`` is what becomes of a weight first."""
    shape, position = model.shape, model.context - 1
    cos, sin = model.cos[position].to(dtype), model.sin[position].to(dtype)

    def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (shape.width,), gain.to(dtype), EPS)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def step() -> torch.Tensor:
        x = model.table[model.token].to(dtype)
        for layer in model.layers:
            heads = functional.linear(normed(x, layer.norm1), weight(layer.qkv)).view(-1, shape.dim)
            q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads))
            keys, values = layer.k_cache, layer.v_cache
            if dtype != keys.dtype:
                keys, values = keys[:, : model.context].to(dtype), values[:, : model.context].to(dtype)
            keys[0, position], values[0, position] = turned(k), v
            attended = functional.scaled_dot_product_attention(
                turned(q)[None, :, None],
                keys[:, : model.context].transpose(1, 2),
                values[:, : model.context].transpose(1, 2),
                enable_gqa=True,
            )
            x = x + functional.linear(attended.reshape(1, -1), weight(layer.o))
            y = normed(x, layer.norm2)
            inner = functional.silu(functional.linear(y, weight(layer.gate))) * functional.linear(y, weight(layer.up))
            x = x + functional.linear(inner, weight(layer.down))
        return functional.linear(normed(x, model.norm), weight(model.table))

    return step


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square of the error over that of what is exact."""
    wanted = exact.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def exact_step(model: Model, kind: str) -> torch.Tensor:
    def weight(matrix: torch.Tensor) -> torch.Tensor:
        if kind == "bf16":
            return matrix.double()
        out = torch.empty(matrix.shape, dtype=torch.float32, device=matrix.device)
        return w4a16.unpack(quantized(matrix), out).double()

    return reference(model, torch.float64, weight)()  # type: ignore[no-any-return]


def tuned(step: Step, kind: str) -> dict[str, How]:
    """For every product the tile that is fastest over the weights of all layers, which no cache holds."""
    found: dict[str, How] = {}
    for name in PRODUCTS:
        indices = [step.model.shape.layers] if name == "head" else range(step.model.shape.layers)

        def launch(tile: How, name: str = name, indices: Any = indices) -> Callable[[], None]:
            return lambda: [step.product(name, i, tile) for i in indices] and None

        few_bits = LONG_INT4_TILES if name == "down" else INT4_TILES
        tried: list[How] = [*CUTS, *LONG_CUTS, *few_bits] if kind == "int4" else list(FLOAT_TILES)
        tile, took, seen = fastest(tried, launch)
        print(f"  {name:8} {took * 1e3 / len(indices):7.2f} us each  {tile}", flush=True)
        for other, how in seen.items():
            print(f"      {other}: {how}")
        found[name] = tile
    return found


def measured(model: Model, kind: str, bandwidth: float) -> dict[str, Any]:
    shape = model.shape
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits = decode_splits(1, shape.kv_heads, model.context, processors)
    sizes = {"down": shape.inner}
    kinds = dict.fromkeys(PRODUCTS, "float") | {"gate_up": "gated"} if kind == "bf16" else dict.fromkeys(PRODUCTS, kind)
    outputs = {"head": shape.vocabulary}
    tiles: dict[str, How] = {
        n: gemv_tile(kinds[n], sizes.get(n, shape.width), n=outputs.get(n, shape.width)) for n in PRODUCTS
    }
    step = Step(model, kind, splits=splits, pdl=False, tiles=tiles)
    row: dict[str, Any] = {"weights": kind, "context": model.context, "goal_ms": GOALS[kind]}
    row["floor_ms"] = step.nbytes() / bandwidth * 1e3
    exact = exact_step(model, kind)
    row["error"] = off(step(), exact)
    row["by_table_ms"] = milliseconds(captured(step).replay)
    step.tiles = tuned(step, kind)
    row["tiles"] = {name: str(tile) for name, tile in step.tiles.items()}
    row["tuned_ms"] = milliseconds(captured(step).replay)

    def tried(name: str) -> None:
        """With launches that wait, and with launches that start early."""
        try:
            row[f"{name}_ms"] = milliseconds(captured(step).replay)
            step.pdl = True
            step.logits.fill_(float("nan"))
            row[f"{name}_pdl_ms"] = milliseconds(captured(step).replay)
            row[f"{name}_pdl_error"] = off(step.logits, exact)
        except Exception as error:  # a tile that does not fit, or a driver without such edges in graphs
            torch.cuda.synchronize()
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
        step.pdl = False

    for how in ATTENTIONS:
        step.how = how
        step.workspace = Workspace.empty(1, shape.heads, shape.kv_heads, shape.dim, how[0], model.device)
        tried(f"splits_{how[0]}_tokens_{how[1]}" + "_apart" * (not how[3]))
    step.early = False
    tried("attention_not_early")
    step.early = True
    for cut, long in itertools.product(CUTS, LONG_CUTS) if kind == "int4" else ():
        step.tiles = {name: long if name == "down" else cut for name in PRODUCTS}
        tried(f"all_{cut.warps}_{cut.stages}_{cut.resident}_down_{long.warps}_{long.stages}_{long.steps}")
    times = [v for name, v in row.items() if name.endswith("_ms") and name not in ("goal_ms", "floor_ms") and v]
    row["best_ms"] = min(times)
    row["of_floor"] = row["floor_ms"] / row["best_ms"]
    return row


def peers(model: Model, compiled: bool) -> dict[str, Any]:
    plain = reference(model, torch.bfloat16, lambda w: w)
    exact = exact_step(model, "bf16")
    row: dict[str, Any] = {"torch_error": off(plain(), exact), "torch_eager_ms": milliseconds(plain)}
    row["torch_graph_ms"] = milliseconds(captured(plain).replay)
    if compiled:
        for layer in model.layers:  # or the caches, which are written, would keep the step out of a graph
            for tensor in vars(layer).values():
                torch._dynamo.mark_static_address(tensor)
        try:
            fast = torch.compile(plain, mode="reduce-overhead")
            for _ in range(3):
                row["torch_compile_error"] = off(fast(), exact)
            row["torch_compile_ms"] = milliseconds(fast)
        except Exception as error:
            row["torch_compile_failed"] = f"{type(error).__name__}: {error}"[:200]
    return row


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1e3)


def tiny() -> None:
    """Results of a small model, where there is no GPU."""
    model = Model(Shape(layers=2, width=64, heads=8, kv_heads=2, inner=128, vocabulary=96), 40, "cpu")
    for kind in GOALS:
        tiles = {name: Tile(16, 256, 1) for name in PRODUCTS}
        exact = exact_step(model, kind)
        print(f"{kind}: error {off(Step(model, kind, splits=2, pdl=False, tiles=tiles)(), exact):.2e}")
    plain = reference(model, torch.bfloat16, lambda w: w)()
    print(f"torch in bf16: error {off(plain, exact_step(model, 'bf16')):.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    if chosen.tiny:
        tiny()
        return
    speed = bandwidth()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_TB_s": speed / 1e12,
        "steps": [],
    }
    model = Model(Shape(), chosen.context, "cuda")
    with torch.inference_mode():
        for kind in chosen.weights:
            record["steps"].append(measured(model, kind, speed))
            print(json.dumps(record["steps"][-1], indent=2), flush=True)
            if chosen.output:
                chosen.output.write_text(json.dumps(record, indent=2))
        record["peers"] = peers(model, not chosen.no_compile)
    print(json.dumps(record["peers"], indent=2))
    if chosen.output:
        chosen.output.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
