"""What the GPU suite measures: models with their inputs, their twins in PyTorch, and the least they must compute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import numpy_helper

from bench.models import convolutional, decoders, dense_prediction, encoders, llama, small
from bench.models.narrowed import KINDS, narrowed

Inputs = dict[str, Any]
GIGA = 1e9


@dataclass(frozen=True)
class Case:
    """``model`` writes the ONNX file; ``twin`` makes the module and its arguments from the inputs on the device.

    ``flops`` are those of products and convolutions; the bytes of the weights are counted from the model.
    """

    name: str
    kind: str  # of the floats
    model: Callable[[Path], Path]
    inputs: Callable[[np.random.Generator], Inputs]
    twin: Callable[[Iterator[Any]], Any] | None
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    flops: float
    goal_ms: float | None = None  # None: ahead of torch.compile
    compared: tuple[str, ...] = ()  # outputs, by the order of what the twin returns
    in_place: Mapping[str, str] = field(default_factory=dict)  # outputs that lie where these inputs do
    reread: float = 1.0  # the share of the weights that a call reads: rows of a table are looked up
    alone: bool = False  # the twin says what is right, but PyTorch has no such weights: it is not timed


def cases() -> list[Case]:
    return [
        _resnet(1, 0.45),
        _resnet(32, 1.3),
        _bert(1, 0.55),
        _bert(32, 2.2),
        _llama(16, 0.80),
        _llama(4, 0.40),
        _vit(1),
        _vit(32),
        _gpt2(),
        _unet(),
        _mlp(),
    ]


def weights_of(path: Path) -> Iterator[Any]:
    """The model's weights in the order in which its script made them."""
    if path.with_suffix(".data").exists():
        found = llama.weights(path)
    else:
        import onnx

        found = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    return iter([array for name, array in found.items() if "/weight_" in name])


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "ranvier-gpu-models"


def _written(make: Callable[[], Any], name: str, kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import onnx

        path = folder / f"{name}_{kind}.onnx"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            onnx.save(narrowed(make().model(), kind), path)
        return path

    return write


def _floats(rng: np.random.Generator, kind: str, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32).astype(KINDS[kind][1])


def _resnet(batch: int, goal: float) -> Case:
    return Case(
        f"resnet50_b{batch}",
        "fp16",
        _written(convolutional.resnet50, "resnet50", "fp16"),
        lambda rng: {"input": _floats(rng, "fp16", batch, 3, 224, 224)},
        lambda w: _twins().ResNet50(w),
        lambda x: (x["input"],),
        8.2 * GIGA * batch,
        goal,
        ("logits",),
    )


def _bert(batch: int, goal: float) -> Case:
    def inputs(rng: np.random.Generator) -> Inputs:
        mask = np.ones((batch, 128), np.int64)
        mask[:, 120:] = batch == 1  # a batch has padding
        return {
            "input_ids": rng.integers(0, 30522, (batch, 128)),
            "attention_mask": mask,
            "token_type_ids": np.zeros((batch, 128), np.int64),
        }

    return Case(
        f"bert_base_s128_b{batch}",
        "fp16",
        _written(encoders.bert_base, "bert_base", "fp16"),
        inputs,
        lambda w: _twins().Bert(w),
        lambda x: (x["input_ids"], x["attention_mask"], x["token_type_ids"]),
        (2 * 85e6 * 128 + 12 * 4 * 128 * 128 * 768) * batch,
        goal,
        ("last_hidden_state", "pooler_output"),
        reread=85.7 / 109.5,
    )


def _vit(batch: int) -> Case:
    return Case(
        f"vit_b16_b{batch}",
        "fp16",
        _written(lambda: encoders.vit_b16(batch), f"vit_b16_b{batch}", "fp16"),
        lambda rng: {"pixel_values": _floats(rng, "fp16", batch, 3, 224, 224)},
        lambda w: _twins().Vit(w),
        lambda x: (x["pixel_values"],),
        35.1 * GIGA * batch,
        None,
        ("logits",),
    )


def _gpt2() -> Case:
    length = 1024

    def inputs(rng: np.random.Generator) -> Inputs:
        found: Inputs = {
            "input_ids": rng.integers(0, 50257, (1, length)),
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(length)[None],
        }
        for k in range(12):
            for part in ("key", "value"):
                found[f"past_key_values.{k}.{part}"] = np.zeros((1, 12, 0, 64), np.float16)
        return found

    return Case(
        "gpt2_prefill_1024",
        "fp16",
        _written(decoders.gpt2_small, "gpt2_small", "fp16"),
        inputs,
        lambda w: _twins().Gpt2(w),
        lambda x: (x["input_ids"], x["position_ids"]),
        2 * 123.6e6 * length + 12 * 2 * length * length * 768,
        None,
        ("logits",),
    )


def _unet() -> Case:
    return Case(
        "unet_256",
        "fp16",
        _written(dense_prediction.unet_256, "unet_256", "fp16"),
        lambda rng: {"image": _floats(rng, "fp16", 1, 3, 256, 256)},
        lambda w: _twins().Unet(w),
        lambda x: (x["image"],),
        27.2 * GIGA,
        None,
        ("mask",),
    )


def _mlp() -> Case:
    return Case(
        "mlp_b1",
        "fp16",
        _written(small.mlp, "mlp", "fp16"),
        lambda rng: {"x": _floats(rng, "fp16", 1, 784)},
        lambda w: _twins().Mlp(w),
        lambda x: (x["x"],),
        2 * 7.9e6,
        None,
        ("logits",),
    )


def _llama(bits: int, goal: float) -> Case:
    """One token after 2047 others, the cache holding 2048."""
    context = 2048

    def write(folder: Path) -> Path:
        path = folder / ("llama_1b.onnx" if bits == 16 else "llama_1b_int4.onnx")
        return path if path.exists() else llama.write(folder, bits)

    def inputs(rng: np.random.Generator) -> Inputs:
        found: Inputs = {
            "input_ids": rng.integers(0, llama.VOCABULARY, (1, 1)),
            "seqlens_k": np.full(1, context - 1, np.int32),
            "total_sequence_length": np.asarray(context, np.int32),
        }
        for k in range(llama.LAYERS):
            for part in ("key", "value"):
                found[f"past_key_values.{k}.{part}"] = _floats(rng, "bf16", 1, llama.KV_HEADS, context, llama.DEPTH)
        return found

    def arguments(x: Mapping[str, Any]) -> tuple[Any, ...]:
        import torch

        place = torch.full((1,), context - 1, dtype=torch.int64, device=x["input_ids"].device)
        names = [f"past_key_values.{k}" for k in range(llama.LAYERS)]
        return x["input_ids"], place, [(x[f"{n}.key"], x[f"{n}.value"]) for n in names]

    def twin(w: Iterator[Any]) -> Any:
        sizes = (llama.LAYERS, llama.WIDTH, llama.HEADS, llama.KV_HEADS, llama.INSIDE, llama.VOCABULARY)
        return _twins().Llama(w if bits == 16 else _twins().unpacked(w), *sizes)

    kept = {f"present.{k}.{p}": f"past_key_values.{k}.{p}" for k in range(llama.LAYERS) for p in ("key", "value")}
    return Case(
        "llama_1b_decode_ctx2048" + ("" if bits == 16 else "_int4"),
        "bf16",
        write,
        inputs,
        twin,
        arguments,
        2 * 1.24e9,
        goal,
        ("logits",),
        kept,
        reread=1.24 / 1.5 if bits == 16 else 0.7 / 1.23,  # the table is looked up, the head is read
        alone=bits < 16,
    )


def _twins() -> Any:
    from bench.gpu import twins

    return twins
