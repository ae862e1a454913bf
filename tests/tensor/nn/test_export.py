"""Modules written as ONNX models compute the same, in other sizes too, and keep the names of their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier import nn
from ranvier.errors import InvalidInput, NotSupported

RNG = np.random.default_rng(4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(self.table(x)).mean(1)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(36, 5)
    )


MODELS: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "images": (images, (2, 3, 8, 8), False),
    "sequences": (lambda: nn.LSTM(5, 6, 2, batch_first=True), (2, 7, 5), False),
    "tokens": (Encoder, (2, 7), True),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_computes_the_same(name: str, tmp_path: Path) -> None:
    make, shape, whole = MODELS[name]
    model, path = make(), tmp_path / "model.onnx"

    def example(*shape: int) -> np.ndarray:
        return RNG.integers(0, 10, shape) if whole else RNG.standard_normal(shape).astype(np.float32)

    rv.export(model, rv.Tensor(example(*shape)), path, input_names=["x"], dynamic_axes={"x": {0: "batch"}})
    assert model.training  # exporting is for inference, and leaves the model as it was
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    names = {each.name for each in proto.graph.initializer}
    assert {each for each, _ in model.named_parameters()} <= names
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    session = rv.load(path)
    model.eval()
    for batch in (shape[0], 5):
        x = example(batch, *shape[1:])
        wanted = model(rv.Tensor(x))
        found = next(iter(session.run({"x": x}).values()))
        np.testing.assert_allclose(
            found, (wanted[0] if isinstance(wanted, tuple) else wanted).numpy(), rtol=1e-4, atol=1e-5
        )


def test_functions_fixed_sizes_and_several_results() -> None:
    weight = nn.Parameter(np.full((3, 2), 2.0, np.float32), name="w")
    graph = rv.export(
        lambda a, b: (a @ weight, {"sum": a.sum() + b}),
        (rv.Tensor(np.ones((4, 3), np.float32)), rv.Tensor(1.0)),
        output_names=["product", "total"],
    )
    assert [value.name for value in graph.inputs] == ["input0", "input1"]
    assert "w" in graph.constants and [value.name for value in graph.outputs] == ["product", "total"]
    assert graph.outputs[0].type.shape == (4, 2)


def test_what_fits_one_size_only_is_named() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = rv.Tensor(np.zeros((2, 4, 8), np.float32))

    def causal(x: rv.Tensor) -> rv.Tensor:
        return model(x, x, x, need_weights=False, is_causal=True)[0]

    rv.export(causal, x, dynamic_axes={"input": {0: "batch"}})
    with pytest.raises(NotSupported, match=r"depends on the sizes of the inputs|one size of the inputs"):
        rv.export(causal, x, dynamic_axes={"input": {1: "length"}})
    with pytest.raises(InvalidInput, match="'y' is no input"):
        rv.export(causal, x, dynamic_axes={"y": {0: "batch"}})
    with pytest.raises(InvalidInput, match="has no axis 3"):
        rv.export(causal, x, dynamic_axes={"input": {3: "batch"}})
