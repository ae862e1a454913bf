"""The examples learn. Digits are scikit-learn's; where an example wants files that are not part of the repository, the
test writes such files: digits in MNIST's format, and the repository's licence as a text."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[3]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits() -> None:
    assert example("digits").train(epochs=8, progress=False) >= 0.98


def idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


def test_mnist_from_its_files(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    mnist = example("mnist")
    data = load_digits()
    large = np.kron(data.images, np.ones((1, 3, 3))) * 255 / 16  # 24 × 24, and a margin
    images = np.pad(large, ((0, 0), (2, 2), (2, 2)))[:900]
    for part, chosen in (("train", slice(0, 700)), ("test", slice(700, 900))):
        names = mnist.FILES[part]
        idx(tmp_path / names[0], images[chosen])
        idx(tmp_path / names[1], data.target[:900][chosen])
    accuracy, seconds = mnist.train(tmp_path, epochs=4, batch_size=32, progress=False)
    assert accuracy >= 0.9 and seconds > 0
    with pytest.raises(SystemExit, match="is not there"):
        mnist.pictures(tmp_path / "elsewhere", "train")


@pytest.mark.parametrize("how", ["full", "head", "lora"])
def test_a_loaded_model_learns_turned_digits(tmp_path: Path, how: str) -> None:
    before, after = example("finetune").finetune(how, tmp_path / "turned.onnx", epochs=4, progress=False)
    assert before < 0.3
    assert after > before + (0.5 if how == "full" else 0.2)


def test_characters() -> None:
    characters = example("characters")
    text = (ROOT / "LICENSE").read_text()
    trainer, data, loss = characters.train(text, steps=60, width=32, layers=1, batch=8, progress=False)
    assert trainer.history["loss"][0] > 3.5 and loss < 3.4
    written = characters.write(trainer.model, data, "Lic", 5)
    assert len(written) == 8 and set(written) <= set(text)
