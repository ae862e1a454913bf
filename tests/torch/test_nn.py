"""Modules beside PyTorch's: its state_dict loads as it is, and results, gradients and buffers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import nn  # noqa: E402

RNG = np.random.default_rng(0)
Make = Callable[[Any], Any]  # the same module out of ranvier.nn or torch.nn


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _small_transformer(n: Any) -> Any:
    return n.TransformerEncoder(n.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True), 2)


MODULES: dict[str, tuple[Make, tuple[np.ndarray, ...]]] = {
    "Linear": (lambda n: n.Linear(5, 7), (numbers(3, 4, 5),)),
    "Linear without bias": (lambda n: n.Linear(5, 7, bias=False), (numbers(3, 5),)),
    "Bilinear": (lambda n: n.Bilinear(5, 6, 7), (numbers(3, 5), numbers(3, 6))),
    "Conv1d": (lambda n: n.Conv1d(4, 6, 3, padding="same", dilation=2), (numbers(2, 4, 9),)),
    "Conv2d": (lambda n: n.Conv2d(4, 6, 3, 2, 1, groups=2), (numbers(2, 4, 9, 9),)),
    "Conv2d reflect": (lambda n: n.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (numbers(2, 2, 5, 5),)),
    "Conv3d": (lambda n: n.Conv3d(2, 3, 3), (numbers(2, 2, 5, 5, 5),)),
    "ConvTranspose1d": (lambda n: n.ConvTranspose1d(4, 6, 4, 2, 1), (numbers(2, 4, 5),)),
    "ConvTranspose2d": (lambda n: n.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2), (numbers(2, 4, 5, 5),)),
    "BatchNorm1d": (lambda n: n.BatchNorm1d(4, momentum=None), (numbers(3, 4),)),
    "BatchNorm2d": (lambda n: n.BatchNorm2d(4), (numbers(3, 4, 5, 5),)),
    "LayerNorm": (lambda n: n.LayerNorm((4, 5)), (numbers(3, 4, 5),)),
    "RMSNorm": (lambda n: n.RMSNorm(5), (numbers(3, 4, 5),)),
    "GroupNorm": (lambda n: n.GroupNorm(2, 4), (numbers(3, 4, 5, 5),)),
    "InstanceNorm2d": (lambda n: n.InstanceNorm2d(4, affine=True), (numbers(3, 4, 5, 5),)),
    "Embedding": (lambda n: n.Embedding(10, 4, padding_idx=2), (np.array([[1, 2, 3], [2, 9, 1]]),)),
    "PReLU": (lambda n: n.PReLU(4), (numbers(3, 4, 5),)),
    "MultiheadAttention": (lambda n: n.MultiheadAttention(8, 2), tuple(numbers(5, 3, 8) for _ in range(3))),
    "attention to others": (
        lambda n: n.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True),
        (numbers(3, 5, 8), numbers(3, 6, 6), numbers(3, 6, 4)),
    ),
    "encoder": (_small_transformer, (numbers(3, 5, 8),)),
    "decoder layer": (
        lambda n: n.TransformerDecoderLayer(8, 2, 16, 0.0, norm_first=True),
        (numbers(3, 5, 8), numbers(4, 5, 8)),
    ),
    "RNN": (lambda n: n.RNN(5, 6, 2, bidirectional=True), (numbers(7, 3, 5),)),
    "LSTM": (lambda n: n.LSTM(5, 6, 2, batch_first=True), (numbers(3, 7, 5),)),
    "GRU": (lambda n: n.GRU(5, 6, bidirectional=True), (numbers(7, 3, 5),)),
    "LSTMCell": (lambda n: n.LSTMCell(5, 6), (numbers(3, 5),)),
    "network": (
        lambda n: n.Sequential(
            n.Conv2d(3, 6, 3, padding=1),
            n.BatchNorm2d(6),
            n.SiLU(),
            n.MaxPool2d(2),
            n.Flatten(),
            n.Linear(96, 10),
            n.LogSoftmax(1),
        ),
        (numbers(4, 3, 8, 8),),
    ),
}


def _flat(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [each for part in result for each in _flat(part)]
    return [] if result is None else [result]


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_those_of_pytorch(name: str) -> None:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    ours, theirs = make(nn), make(torch.nn)
    ours.load_state_dict(theirs.state_dict())
    found = _flat(ours(*map(rv.Tensor, inputs)))
    wanted = _flat(theirs(*map(torch.tensor, inputs)))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=2e-5, atol=2e-5)
    weights = [numbers(*each.shape) for each in found]
    sum((a * w).sum() for a, w in zip(found, weights)).backward()  # type: ignore[union-attr]
    sum((b * torch.tensor(w)).sum() for b, w in zip(wanted, weights)).backward()
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for (label, a), b in zip(ours.named_parameters(), theirs.parameters()):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-3, atol=1e-4, err_msg=label)
    saved, other = ours.state_dict(), theirs.state_dict()
    assert list(saved) == list(other)
    for label in saved:
        np.testing.assert_allclose(saved[label].numpy(), other[label].numpy(), rtol=1e-5, atol=1e-6, err_msg=label)


def test_our_values_load_into_pytorch() -> None:
    ours, theirs = nn.LSTM(3, 4), torch.nn.LSTM(3, 4)
    theirs.load_state_dict({name: torch.tensor(value.numpy()) for name, value in ours.state_dict().items()})
    x = numbers(5, 2, 3)
    np.testing.assert_allclose(
        ours(rv.Tensor(x))[0].numpy(), theirs(torch.tensor(x))[0].detach().numpy(), rtol=1e-5, atol=1e-6
    )


def test_masks_are_those_of_pytorch() -> None:
    ours, theirs = (n.MultiheadAttention(8, 2, batch_first=True) for n in (nn, torch.nn))
    ours.load_state_dict(theirs.state_dict())
    x, padding = numbers(2, 5, 8), np.array([[False] * 5, [False, False, False, True, True]])
    ahead = np.triu(np.ones((5, 5), bool), 1)
    for mask in (ahead, np.where(ahead, -1.5, 0.0).astype(np.float32)):
        both = []
        for module, made in ((ours, rv.Tensor), (theirs, torch.tensor)):
            float_padding = made(np.where(padding, -np.inf, 0.0).astype(np.float32))
            given = made(padding) if mask.dtype == bool else float_padding
            y = made(x)
            both.append(module(y, y, y, key_padding_mask=given, attn_mask=made(mask), average_attn_weights=False))
        for a, b in zip(*both):
            np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=2e-5, atol=2e-5)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "max_pool2d": lambda F, x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d": lambda F, x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda F, x: F.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive_max_pool2d": lambda F, x: F.adaptive_max_pool2d(x, 3),
    "interpolate": lambda F, x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "aligned": lambda F, x: F.interpolate(x, size=(5, 9), mode="bilinear", align_corners=True),
    "pixel_shuffle": lambda F, x: F.pixel_shuffle(x, 2),
    "gelu": lambda F, x: F.gelu(x, approximate="tanh"),
    "softplus": lambda F, x: F.softplus(x, 2.0, 1.0),
    "glu": lambda F, x: F.glu(x, 1),
    "normalize": lambda F, x: F.normalize(x, 3.0, 1),
    "causal": lambda F, x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
    "shared": lambda F, x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients_are_those_of_pytorch(name: str) -> None:
    x = numbers(2, 4, 7, 7)
    ours, theirs = nn.Parameter(x), torch.tensor(x, requires_grad=True)
    found, wanted = FUNCTIONS[name](nn.functional, ours), FUNCTIONS[name](torch.nn.functional, theirs)
    np.testing.assert_allclose(found.numpy(), wanted.detach().numpy(), rtol=2e-5, atol=2e-5)
    (found * found).sum().backward()
    (wanted * wanted).sum().backward()
    assert ours.grad is not None
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-3, atol=1e-4)
