"""Gradients of operators against torch's of what they are defined to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.passes.gradient_tools import Array, Case, op_of, r
from tests.passes.test_differentiate_contrib import fused
from tests.passes.test_differentiate_recurrent import case as layer
from tests.torch.test_gradients_sampling import compare

torch = pytest.importorskip("torch")
F = torch.nn.functional
I64 = np.int64
Theirs = Callable[..., Any]


def heads(x: Any, count: int) -> Any:
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


def merged(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    """By halves; cos and sin are [length, half]."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def grouped(q: Any, k: Any, v: Any) -> Any:
    q, k, v = heads(q, 4), heads(k, 2), heads(v, 2)
    return merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def experts(x: Any, router: Any, first: Any, second: Any) -> Any:
    shares, places = router.softmax(-1).topk(2, -1)
    rows = []
    for token, share, place in zip(x, shares, places):
        rows.append(sum(s * (second[p] @ F.silu(first[p] @ token)) for s, p in zip(share, place)))
    return torch.stack(rows)


def last_first(x: Any) -> Any:
    return x.movedim(-1, 1)


def channels_last(x: Any) -> Any:
    return x.movedim(1, -1)


def resized(*sizes: int, **attrs: Any) -> Any:
    return lambda op, x: op.Resize(x, None, None, np.array([2, 3, *sizes], I64), **attrs)


IMAGE = r(2, 3, 5, 6)
PIXELS = r(2, 4, 5, 4)  # channels last
CODES = np.random.default_rng(0).integers(0, 256, (3, 1, 8)).astype(np.uint8)
SCALES = r(3, 1, low=0.5)
LEVELS = np.stack([CODES & 15, CODES >> 4], -1).reshape(3, 16).astype(np.float64) - 8
PLACES = np.array([0, 3, 1], I64)
ANGLES = [r(5, 2, seed=1), r(5, 2, seed=2)]
CASES: dict[str, tuple[Case, Theirs]] = {
    "Inverse": (Case(fused("Inverse"), [r(2, 3, 3) + 3 * np.eye(3)]), torch.linalg.inv),
    "Rfft": (
        Case(fused("Rfft", signal_ndim=2), [r(2, 4, 6)], shape=(2, 4, 4, 2)),
        lambda x: torch.view_as_real(torch.fft.rfft2(x)),
    ),
    "Irfft": (
        Case(fused("Irfft", signal_ndim=1), [r(2, 4, 2)], shape=(2, 6)),
        lambda x: torch.fft.irfft(torch.view_as_complex(x)),
    ),
    "ComplexMulConj": (
        Case(fused("ComplexMulConj"), [r(2, 3, 2), r(3, 2)]),
        lambda x, y: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y).conj()),
    ),
    "CDist": (Case(fused("CDist", metric="euclidean"), [r(3, 4), r(2, 4, seed=1)]), torch.cdist),
    "UnfoldTensor": (
        Case(fused("UnfoldTensor", dim=1, size=3, step=2), [r(2, 7, 2)], shape=(2, 3, 2, 3)),
        lambda x: x.unfold(1, 3, 2),
    ),
    "BiasSoftmax": (
        Case(fused("BiasSoftmax", axis=2, is_inner_broadcast=0), [r(2, 3, 4), r(1, 3, 4)]),
        lambda x, bias: F.softmax(x + bias, -1),
    ),
    "GatedRMSNorm": (
        Case(fused("GatedRMSNorm"), [r(2, 6), r(6), r(2, 6, seed=1)]),
        lambda x, scale, gate: F.rms_norm(x, (6,), scale, 1e-5) * F.silu(gate),
    ),
    "GroupNorm": (
        Case(fused("GroupNorm", groups=2, activation=1), [PIXELS, r(4), r(4, seed=1)]),
        lambda x, w, bias: channels_last(F.silu(F.group_norm(last_first(x), 2, w, bias))),
    ),
    "NhwcConv": (
        Case(fused("NhwcConv", pads=[1, 1, 1, 1], strides=[2, 1]), [PIXELS, r(3, 2, 3, 4), r(3)]),
        lambda x, w, bias: channels_last(F.conv2d(last_first(x), last_first(w), bias, (2, 1), 1)),
    ),
    "ConvTranspose to a shape": (
        Case(op_of("ConvTranspose", strides=[2, 2], output_shape=[9, 11]), [r(1, 2, 5, 6), r(2, 3, 3, 3), r(3)],
             shape=(1, 3, 9, 11)),
        lambda x, w, bias: F.conv_transpose2d(x, w, bias, 2, padding=1),
    ),
    "AffineGrid": (
        Case(op_of("AffineGrid"), [r(2, 2, 3)], [np.array([2, 3, 4, 5], I64)], shape=(2, 4, 5, 2)),
        lambda theta: F.affine_grid(theta, [2, 3, 4, 5], align_corners=False),
    ),
    "Resize": (
        Case(resized(7, 9, mode="linear", coordinate_transformation_mode="align_corners"), [IMAGE]),
        lambda x: F.interpolate(x, (7, 9), mode="bilinear", align_corners=True),
    ),
    "Resize cubic": (
        Case(resized(8, 3, mode="cubic"), [IMAGE]),
        lambda x: F.interpolate(x, (8, 3), mode="bicubic", align_corners=False),
    ),
    "Resize without aliases": (
        Case(resized(3, 4, mode="linear", antialias=1, exclude_outside=1), [IMAGE]),
        lambda x: F.interpolate(x, (3, 4), mode="bilinear", antialias=True),
    ),
    "Resize to the nearest": (
        Case(resized(8, 4, coordinate_transformation_mode="asymmetric", nearest_mode="floor"), [IMAGE]),
        lambda x: F.interpolate(x, (8, 4), mode="nearest"),
    ),
    **{
        f"Einsum {equation}": (
            Case(op_of("Einsum", equation=equation), [r(*each, seed=k) for k, each in enumerate(shapes)], shape=shape),
            lambda *given, equation=equation: torch.einsum(equation, *given),
        )
        for equation, shapes, shape in (
            ("bii->bi", [(2, 3, 3)], (2, 3)),
            ("...ij,...jk->...ik", [(1, 2, 3), (4, 3, 2)], (4, 2, 2)),
            ("iij,jk->k", [(2, 2, 3), (3, 2)], (2,)),
        )
    },
    "GroupQueryAttention": (
        Case(fused("GroupQueryAttention", 0, 3, (0, 1, 2, None, None, 3, 4), num_heads=4, kv_num_heads=2),
             [r(2, 5, 16), r(2, 5, 8, seed=1), r(2, 5, 8, seed=2)],
             [np.array([4, 4], np.int32), np.array(5, np.int32)]),
        grouped,
    ),
    "RotaryEmbedding": (
        Case(fused("RotaryEmbedding", order=(0, 3, 1, 2)), [r(1, 2, 3, 4), *ANGLES], [PLACES[None]]),
        lambda x, cos, sin: turned(x, cos[PLACES], sin[PLACES]),
    ),
    "MatMulNBits": (
        Case(fused("MatMulNBits", order=(0, 2, 1), K=16, N=3, block_size=16), [r(2, 16), SCALES], [CODES], (2, 3)),
        lambda x, scales: x @ (torch.tensor(LEVELS) * scales).T,
    ),
    "MoE": (
        Case(fused("MoE", order=(0, 1, 2, None, 3), k=2, activation_type="silu"),
             [r(5, 4), r(5, 3, seed=9), r(3, 6, 4, seed=1), r(3, 4, 6, seed=2)]),
        experts,
    ),
    "TensorScatter": (
        Case(op_of("TensorScatter", axis=1), [r(2, 5, 3), r(2, 2, 3)], [np.array([3, 1], I64)]),
        lambda past, update: torch.stack(
            [past[n].index_copy(0, torch.arange(2) + start, update[n]) for n, start in enumerate((3, 1))]
        ),
    ),
    "OneHot": (
        Case(lambda op, values, at: op.node("OneHot", [at, np.array(4, I64), values], {}).output, [r(2)],
             [np.array([1, 3, 0], I64)]),
        lambda values: torch.where(F.one_hot(torch.tensor([1, 3, 0]), 4) == 1, values[1], values[0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    compare(*CASES[name])


def torch_layer(kind: str, given: list[Any], ways: int, lengths: list[int] | None, **options: Any) -> Any:
    """The result ``[length, ways, batch, hidden]`` of torch's layer. Its gates stand in another order than the
    standard's, and its batch of sequences of several lengths is packed."""
    x, w, r_, bias = given
    size = r_.shape[2]
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[kind]
    rows = torch.cat([torch.arange(k * size, (k + 1) * size) for k in order])
    module = getattr(torch.nn, kind)(x.shape[2], size, bidirectional=ways == 2, dtype=torch.float64, **options)
    halves = bias.reshape(ways, 2, -1)
    named = {}
    for way in range(ways):
        end = "_reverse" if way else ""
        named[f"weight_ih_l0{end}"], named[f"weight_hh_l0{end}"] = w[way][rows], r_[way][rows]
        named[f"bias_ih_l0{end}"], named[f"bias_hh_l0{end}"] = halves[way, 0][rows], halves[way, 1][rows]
    entering = x
    if lengths is not None:
        entering = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    y, _ = torch.func.functional_call(module, named, (entering,))
    if lengths is not None:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=x.shape[0])
    return y.reshape(*y.shape[:2], ways, size).transpose(1, 2)


LAYERS: dict[str, tuple[Case, str, int, list[int] | None, dict[str, Any]]] = {
    "RNN relu": (layer("RNN", activations=["Relu"]), "RNN", 1, None, {"nonlinearity": "relu"}),
    "RNN of lengths": (layer("RNN", lengths=[3, 2]), "RNN", 1, [3, 2], {}),
    "GRU of lengths": (
        layer("GRU", lengths=[2, 3], direction="bidirectional", linear_before_reset=1), "GRU", 2, [2, 3], {}
    ),
    "LSTM of lengths": (layer("LSTM", lengths=[3, 1], direction="bidirectional"), "LSTM", 2, [3, 1], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    case, kind, ways, lengths, options = LAYERS[name]
    compare(case, lambda *given: torch_layer(kind, list(given), ways, lengths, **options))


def test_layer_with_the_batch_first() -> None:
    case = layer("LSTM", layout=1)

    def theirs(x: Any, *rest: Any) -> Any:
        return torch_layer("LSTM", [x.transpose(0, 1), *rest], 1, None).permute(2, 0, 1, 3)

    compare(case, theirs)


def test_a_region() -> None:
    """The mean of samples of one region, which torch finds at the same points of a grid."""
    image: Array = r(1, 2, 6, 7)
    box = np.array([[1.3, 0.9, 5.2, 4.8]])
    case = Case(
        op_of("RoiAlign", output_height=2, output_width=2, sampling_ratio=2), [image, box], [np.array([0], I64)],
        shape=(1, 2, 2, 2),
    )  # fmt: skip

    def theirs(x: Any, rois: Any) -> Any:
        steps = (torch.arange(4, dtype=torch.float64) + 0.5) / 4
        left, top, right, bottom = (rois[0] - 0.5).unbind()
        across, down = left + steps * (right - left), top + steps * (bottom - top)
        places = torch.stack(torch.meshgrid(across / 3 - 1, down / 2.5 - 1, indexing="xy"), -1)
        samples = F.grid_sample(x, places[None], align_corners=True)
        return F.avg_pool2d(samples, 2)

    compare(case, theirs)
