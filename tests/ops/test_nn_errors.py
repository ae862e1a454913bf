"""Bad operands: every error names the operator, what was expected and what came. Empty ones are not bad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.errors import DTypeMismatch, InvalidValue, ResourceLimit, ShapeMismatch
from ranvier.ops.allocation import tensor_limit
from tests.ops.nn_tools import evaluate, ints

IMAGE = np.zeros((1, 4, 5, 5), np.float32)
HEAD = np.zeros((1, 1, 2, 4), np.float32)
BAD_CALLS: list[tuple[type[Exception], str, str, tuple[Any, ...], dict[str, Any]]] = [
    (ShapeMismatch, "MatMul: inner sizes differ", "MatMul", (np.zeros((2, 3)), np.zeros((4, 5))), {}),
    (ShapeMismatch, "MatMul: leading axes", "MatMul", (np.zeros((2, 3, 3)), np.zeros((5, 3, 3))), {}),
    (ShapeMismatch, "Gemm: C .* does not broadcast", "Gemm", (np.zeros((2, 3)), np.zeros((3, 4)), np.zeros(3)), {}),
    (ShapeMismatch, "Gemm: C must be", "Gemm", (np.zeros((2, 3)), np.zeros((3, 4)), np.zeros(4)), {"version": 6}),
    (InvalidValue, "Einsum: .* names 2", "Einsum", (np.zeros(3),), {"equation": "i,j->ij"}),
    (ShapeMismatch, "Einsum: 'j'", "Einsum", (np.zeros((2, 3)), np.zeros((4, 2))), {"equation": "ij,jk"}),
    (InvalidValue, "Einsum: the result", "Einsum", (np.zeros(3),), {"equation": "i->z"}),
    (ShapeMismatch, "Det: needs square", "Det", (np.zeros((2, 3)),), {}),
    (ShapeMismatch, "Conv: .* do not fit 3 group", "Conv", (IMAGE, np.zeros((3, 2, 3, 3), np.float32)), {"group": 3}),
    (ShapeMismatch, "Conv: a window of 7", "Conv", (IMAGE, np.zeros((1, 4, 7, 7), np.float32)), {}),
    (ShapeMismatch, "Conv: bias", "Conv", (IMAGE, np.zeros((2, 4, 1, 1), np.float32), np.zeros(3, np.float32)), {}),
    (InvalidValue, "Conv: auto_pad", "Conv", (IMAGE, np.zeros((2, 4, 1, 1), np.float32)), {"auto_pad": "SAME"}),
    (InvalidValue, "Conv: strides", "Conv", (IMAGE, np.zeros((2, 4, 1, 1), np.float32)), {"strides": (0, 1)}),
    (ShapeMismatch, "ConvTranspose: .* channels", "ConvTranspose", (IMAGE, np.zeros((3, 4, 1, 1), np.float32)), {}),
    (ShapeMismatch, "MaxPool: kernel_shape needs 2", "MaxPool", (IMAGE,), {"kernel_shape": (3,)}),
    (InvalidValue, "MaxPool: pads", "MaxPool", (IMAGE,), {"kernel_shape": (3, 3), "pads": (-1, 0, 0, 0)}),
    (InvalidValue, "MaxUnpool: index 16", "MaxUnpool", (np.zeros((1, 1, 4)), np.full((1, 1, 4), 16)),
     {"kernel_shape": (2,), "strides": (2,)}),
    (ShapeMismatch, "BatchNormalization: var", "BatchNormalization", (IMAGE, *[np.zeros(3, np.float32)] * 4), {}),
    (InvalidValue, "LayerNormalization: axis 4", "LayerNormalization", (IMAGE, np.zeros(5, np.float32)), {"axis": 4}),
    (ShapeMismatch, "GroupNormalization: channels", "GroupNormalization", (IMAGE, IMAGE, IMAGE), {"num_groups": 3}),
    (InvalidValue, "Dropout: ratio", "Dropout", (IMAGE, np.float32(1.5)), {}),
    (ShapeMismatch, "GRU: R must be", "GRU", (np.zeros((2, 1, 3)), np.zeros((1, 12, 3)), np.zeros((1, 12, 5))),
     {"hidden_size": 4}),
    (InvalidValue, "LSTM: unknown activation 'Sinus'", "LSTM",
     (np.zeros((2, 1, 3)), np.zeros((1, 16, 3)), np.zeros((1, 16, 4))), {"activations": ("Sinus", "Tanh", "Tanh")}),
    (InvalidValue, "RNN: sequence_lens", "RNN",
     (np.zeros((2, 1, 3)), np.zeros((1, 4, 3)), np.zeros((1, 4, 4)), None, np.array([3], np.int32)), {}),
    (ShapeMismatch, "Attention: attn_mask", "Attention", (*[HEAD] * 3, np.zeros((3, 2))), {}),
    (InvalidValue, "Attention: past_key", "Attention", (*[HEAD] * 3, None, IMAGE), {}),
    (InvalidValue, "RotaryEmbedding: position 9", "RotaryEmbedding",
     (np.zeros((1, 1, 1, 4), np.float32), *[np.zeros((3, 2), np.float32)] * 2, np.array([[9]])), {}),
    (InvalidValue, "LinearAttention: gated_delta needs decay", "LinearAttention", (*[np.zeros((1, 1, 4))] * 3,),
     {"q_num_heads": 1, "kv_num_heads": 1}),
    (InvalidValue, "Resize: scales must be positive", "Resize", (IMAGE, None, np.array([1, 1, np.nan, 1])), {}),
    (InvalidValue, "Resize: give scales or sizes", "Resize", (IMAGE,), {}),
    (InvalidValue, "Upsample: scales", "Upsample", (IMAGE, np.array([1, 1, 0.5, 1])), {}),
    (DTypeMismatch, "Resize: strings", "Resize", (np.array(["a"], object), None, None, ints(4)), {"mode": "linear"}),
    (InvalidValue, "GridSample: padding_mode", "GridSample", (IMAGE, np.zeros((1, 2, 2, 2))), {"padding_mode": "wrap"}),
    (InvalidValue, "Loss: label 7", "NegativeLogLikelihoodLoss", (np.zeros((2, 3)), ints(0, 7)), {}),
    (InvalidValue, "DFT: axis 2", "DFT", (np.zeros((1, 4, 1)), None, np.array(2)), {}),
    (InvalidValue, "STFT: frame_step 0", "STFT", (np.zeros((1, 8, 1)), np.array(0), None, np.array(4)), {}),
    (InvalidValue, "RoiAlign: image 5", "RoiAlign", (IMAGE, np.zeros((1, 4), np.float32), ints(5)), {}),
    (InvalidValue, "RoiAlign: a region is not finite", "RoiAlign", (IMAGE, np.full((1, 4), np.nan), ints(0)), {}),
    (ShapeMismatch, "Suppression: needs boxes", "NonMaxSuppression", (np.zeros((1, 5, 4)), np.zeros((1, 1, 6))), {}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "name", "inputs", "attrs"), BAD_CALLS, ids=lambda v: str(v)[:40])
def test_bad_operands_are_named(error: type[Exception], message: str, name: str, inputs: Any, attrs: Any) -> None:
    with pytest.raises(error, match=message):
        evaluate(name, *inputs, **attrs)


@pytest.mark.parametrize(
    ("name", "inputs", "attrs"),
    [
        ("Resize", (IMAGE, None, None, ints(1, 4, 1 << 20, 1 << 20)), {}),
        ("AffineGrid", (np.zeros((1, 2, 3), np.float32), ints(1, 1, 1 << 20, 1 << 20)), {}),
        ("HannWindow", (np.array(1 << 40),), {}),
        ("MelWeightMatrix", tuple(np.array(v) for v in (1 << 20, 1 << 30, 16000, 0.0, 8000.0)), {}),
        (
            "Col2Im",
            (np.zeros((1, 4, 1), np.float32), ints(1 << 20, 1 << 20), ints(2, 2)),
            {"strides": (1 << 20, 1 << 20)},
        ),
    ],
)
def test_outputs_sized_by_data_respect_the_limit(name: str, inputs: Any, attrs: Any) -> None:
    with tensor_limit(1 << 24), pytest.raises(ResourceLimit):
        evaluate(name, *inputs, **attrs)


WEIGHTS = np.zeros((6, 4, 3, 3), np.float32)
EMPTY: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    ("MatMul", (np.zeros((0, 3)), np.zeros((3, 4))), {}, (0, 4)),
    ("Conv", (IMAGE[:0], WEIGHTS), {}, (0, 6, 3, 3)),
    ("Conv", (IMAGE[:0], WEIGHTS[:4, :1]), {"group": 4}, (0, 4, 3, 3)),
    ("ConvTranspose", (IMAGE[:0], WEIGHTS[:4]), {}, (0, 4, 7, 7)),
    ("MaxPool", (IMAGE[:0],), {"kernel_shape": (2, 2)}, (0, 4, 4, 4)),
    ("GroupNormalization", (IMAGE[:0], np.ones(4), np.ones(4)), {"num_groups": 2}, (0, 4, 5, 5)),
    ("GRU", (np.zeros((3, 0, 2)), np.zeros((1, 12, 2)), np.zeros((1, 12, 4))), {}, (3, 1, 0, 4)),
    ("LSTM", (np.zeros((0, 2, 2)), np.zeros((1, 16, 2)), np.zeros((1, 16, 4))), {}, (0, 1, 2, 4)),
    ("Attention", (HEAD, HEAD[:, :, :0], HEAD[:, :, :0]), {"is_causal": 1}, (1, 1, 2, 4)),
    ("Resize", (IMAGE[:0], None, np.array([1, 1, 2, 2])), {"mode": "linear"}, (0, 4, 10, 10)),
    ("GridSample", (IMAGE[:0], np.zeros((0, 3, 2, 2))), {}, (0, 4, 3, 2)),
    ("RoiAlign", (IMAGE, np.zeros((0, 4)), ints()), {}, (0, 4, 1, 1)),
    ("NonMaxSuppression", (np.zeros((1, 0, 4)), np.zeros((1, 2, 0)), ints(3)), {}, (0, 3)),
]


@pytest.mark.parametrize(("name", "inputs", "attrs", "shape"), EMPTY)
def test_empty_operands_give_empty_results(name: str, inputs: Any, attrs: Any, shape: tuple[int, ...]) -> None:
    y = evaluate(name, *inputs, **attrs)
    assert y.shape == shape
    assert not y.any()
