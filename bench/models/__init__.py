"""Models for the benchmark suite: architectures that matter, built here with seeded random weights.

``python -m bench.models --out FOLDER`` writes them; a model whose script has not changed is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.models import convolutional, decoders, dense_prediction, encoders, light, quantized, small
from bench.models.blocks import Net

BUILT: dict[str, Callable[[], Net]] = {
    "bert_base": encoders.bert_base,
    "minilm_l6": encoders.minilm_l6,
    "vit_b16": encoders.vit_b16,
    "gpt2_small": decoders.gpt2_small,
    "llama_125m": decoders.llama_125m,
    "mobilenet_v2": convolutional.mobilenet_v2,
    "mobilenet_v3_large": convolutional.mobilenet_v3_large,
    "efficientnet_b0": convolutional.efficientnet_b0,
    "convnext_tiny": convolutional.convnext_tiny,
    "yolo_640": dense_prediction.yolo_640,
    "unet_256": dense_prediction.unet_256,
    "lstm_2layer": small.lstm_2layer,
    "mlp": small.mlp,
}


def names() -> list[str]:
    """Every model that can be written: the built ones, the light ones of the onnx package, and 8-bit ones."""
    return [*BUILT, *light.names(), *quantized.names()]


def make(name: str) -> Any:
    """A model as a ``ModelProto``."""
    if name in quantized.names():
        return quantized.quantized(name, make)
    return BUILT[name]().model() if name in BUILT else light.filled(name)
