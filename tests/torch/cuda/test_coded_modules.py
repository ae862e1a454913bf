"""Modules whose weights are codes, on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import ranvier as rv
from ranvier import nn, optim
from ranvier.quantize import Integers
from tests.tensor.nn import test_experts as experts
from tests.tensor.nn.test_quantized import CODED, Net, expected, moved, numbers, shuffled
from tests.torch.device import DEVICE


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is computed on the device, unless a test says otherwise."""
    device = f'"{DEVICE}"' if DEVICE == "cpu" else DEVICE
    (tmp_path / "ranvier.toml").write_text(f"[provider_options.cuda]\ndevice = {device}\n")
    monkeypatch.setenv("RANVIER_CONFIG", str(tmp_path / "ranvier.toml"))
    with rv.backend("cuda"):
        yield


@pytest.mark.parametrize("kind", ["uint4", "int3", "int8 of rows", "moved groups", "nf4", "float8", "nvfp4", "ternary"])
@pytest.mark.parametrize("rows", [1, 24])
def test_products(there: None, kind: str, rows: int) -> None:
    weight = CODED[kind][1]()
    layer, x = nn.QuantizedLinear(weight), numbers(rows, weight.shape[1])
    compiled = rv.jit(lambda x: layer(x))
    found = compiled(rv.Tensor(x)).numpy()
    np.testing.assert_allclose(found, expected(weight, x), rtol=2e-3, atol=2e-3)


def test_tables(there: None) -> None:
    weight = Integers(4, False, "group", 32, signed=False).quantize(numbers(40, 64))
    table, places = nn.QuantizedEmbedding(weight), np.array([[3, 39], [0, 3]])
    found = rv.jit(lambda x: table(x))(rv.Tensor(places)).numpy()
    np.testing.assert_allclose(found, weight.dequantize()[places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["4 bits", "zeros between codes", "5 bits", "float4", "float8 in squares"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts(there: None, kind: str, tokens: int) -> None:
    """Also with bits and groups that differ between layers."""
    up, gate = (experts.KINDS[kind](experts.INNER, experts.FEATURES) for _ in range(2))
    down = experts.KINDS["2 bits in groups of 16" if kind == "4 bits" else kind](experts.FEATURES, experts.INNER)
    layer = nn.QuantizedExperts(up, down, gate, top_k=experts.CHOSEN)
    x, router = numbers(tokens, experts.FEATURES), numbers(tokens, experts.EXPERTS)
    found = rv.jit(lambda x, r: layer(x, r))(rv.Tensor(x), rv.Tensor(router))
    wanted = experts.plain(x, router, *(experts.decoded(each) for each in (up, down, gate)))
    experts.check(found, wanted, 5e-3)


def test_what_is_beside_codes_learns(there: None) -> None:
    """By the same steps as on the processor."""

    def losses(backend: str) -> list[float]:
        nn.manual_seed(4)
        model: Any = Net()
        nn.quantize_(model, "uint4", keep=["head"])
        rng = np.random.default_rng(1)
        opt = optim.SGD(model.parameters(), lr=0.05)
        x, t = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 96), (8, 10)))

        @rv.jit
        def step(x: rv.Tensor, t: rv.Tensor) -> rv.Tensor:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), t)
            loss.backward()
            opt.step()
            return loss

        with rv.backend(backend):
            return [float(step(rv.Tensor(x), rv.Tensor(t))) for _ in range(4)]

    there, here = losses("cuda"), losses("cpu")
    np.testing.assert_allclose(there, here, rtol=1e-3)
    assert there[-1] < there[0]


def test_moved_channels_of_a_batch(there: None) -> None:
    weight = moved(shuffled(), 32)
    layer, x = nn.QuantizedLinear(weight, numbers(weight.shape[0])), numbers(2, 5, weight.shape[1])
    found = layer(rv.Tensor(x)).numpy()
    assert layer.bias is not None
    np.testing.assert_allclose(found, x @ weight.dequantize().T + layer.bias.numpy(), rtol=2e-3, atol=2e-3)
