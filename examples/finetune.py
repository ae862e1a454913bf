"""Teach a loaded ONNX model something new: python examples/finetune.py

The model is the classifier of digits that comes with the package. It has never seen a picture that is turned on its
side, and tells few of those right. Three ways to teach it, each followed by writing an ONNX file and measuring that
file in a session of its own:
    full    all weights learn
    head    only the last layer
    lora    adapters of low rank beside the weights, merged into them at the end
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import ranvier as rv
from ranvier import nn, optim
from ranvier.training import Batches, Trainer

MODEL = Path(rv.__file__).parent / "models" / "digits.onnx"


def turned_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Pictures turned by a quarter: some to learn from, others to test with."""
    data = load_digits()
    x = (np.rot90(data.images, axes=(1, 2)) / 16).astype(np.float32)[:, None]
    y = data.target.astype(np.int64)
    order = np.random.default_rng(1).permutation(len(x))
    known, unseen = np.split(order, [1200])
    return (x[known], y[known]), (x[unseen], y[unseen])


def accuracy(path: Path | str, x: np.ndarray, y: np.ndarray) -> float:
    """The share that a model file tells right."""
    session = rv.load(str(path))
    (scores,) = session.run({"image": x}).values()
    return float(np.mean(scores.argmax(1) == y))


def finetune(how: str, into: Path, epochs: int = 12, progress: bool | None = None) -> tuple[float, float]:
    """Accuracy on turned pictures before and after."""
    known, unseen = turned_digits()
    before = accuracy(MODEL, *unseen)
    model = rv.trainable(MODEL, logits=True)
    if how == "head":
        model.freeze("*").unfreeze("dense2.*")
    elif how == "lora":
        model.lora(rank=8)
    optimizer = optim.AdamW(model.learned(), lr=3e-3)
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, metrics=["accuracy"], progress=progress)
    trainer.fit(Batches(known, 64), epochs=epochs, validation=Batches(unseen, 597, shuffle=False))
    model.export(into)
    return before, accuracy(into, *unseen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--into", type=Path, default=Path("turned.onnx"))
    given = parser.parse_args()
    for how in ("full", "head", "lora"):
        before, after = finetune(how, given.into, given.epochs)
        print(f"{how}: {before:.1%} of turned digits told right before, {after:.1%} after")
