"""8-bit models in the form exporters write: float operators between QuantizeLinear and DequantizeLinear.

ONNX Runtime's own tool makes them from models of this package, calibrated on a few random samples: filters and weights
signed and one scale per output channel, activations unsigned or signed. What a model computes is worthless either
way; how fast 8-bit layers run, and whether runtimes agree on them, can be seen all the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter

Sample = dict[str, Any]
_SAMPLES = 3
_OPSET = 17  # scales along an axis came with 13


def _picture(name: str) -> Callable[[np.random.Generator], Sample]:
    return lambda rng: {name: rng.standard_normal((1, 3, 224, 224)).astype(np.float32)}


def _sentence(rng: np.random.Generator) -> Sample:
    tokens = rng.integers(0, 30522, (1, 128))
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}


# what is quantized, and what it is calibrated on
_FLOAT: dict[str, tuple[str, Callable[[np.random.Generator], Sample]]] = {
    "resnet50": ("light_resnet50", _picture("gpu_0/data_0")),
    "mobilenet_v2": ("mobilenet_v2", _picture("input")),
    "bert_base": ("bert_base", _sentence),
}
_SIGNS = ("u8", "s8")


def names() -> list[str]:
    return [f"{model}_qdq_{sign}" for model in _FLOAT for sign in _SIGNS]


def quantized(name: str, make: Callable[[str], Any]) -> Any:
    """The model ``name``; ``make`` gives the float one it comes from."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model, _, sign = name.partition("_qdq_")
    source, sample = _FLOAT[model]
    with tempfile.TemporaryDirectory() as folder:
        plain, prepared, result = (Path(folder) / f"{part}.onnx" for part in ("plain", "prepared", "result"))
        onnx.save(onnx.version_converter.convert_version(make(source), _OPSET), plain)
        # normalizations go into the filters before them, where they are before quantization everywhere
        quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            result,
            _Samples(sample),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8 if sign == "u8" else QuantType.QInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(result)


class _Samples:
    """What the tool calls a CalibrationDataReader."""

    def __init__(self, sample: Callable[[np.random.Generator], Sample]) -> None:
        rng = np.random.default_rng(5)
        self._rest: Iterator[Sample] = iter([sample(rng) for _ in range(_SAMPLES)])

    def get_next(self) -> Sample | None:
        return next(self._rest, None)
