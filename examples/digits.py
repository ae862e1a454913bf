"""Learn the handwritten digits that come with scikit-learn (1,797 pictures of 8 × 8): python examples/digits.py

Above 98 % of the pictures it has never seen are told right, within seconds.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

from ranvier import nn, optim
from ranvier.training import Batches, Trainer


def pictures(share: float = 0.8) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(pictures, digits) to learn from, and others to test with."""
    data = load_digits()
    x, y = (data.images / 16).astype(np.float32)[:, None], data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    known, unseen = np.split(order, [int(len(x) * share)])
    return (x[known], y[known]), (x[unseen], y[unseen])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(epochs: int = 15, folder: str | None = None, plot: str | None = None, progress: bool | None = None) -> float:
    """The share of unseen pictures that are told right."""
    known, unseen = pictures()
    nn.manual_seed(0)
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    data = Batches(known, 64, seed=1, drop_last=True)
    trainer = Trainer(
        model,
        optimizer,
        nn.functional.cross_entropy,
        metrics=["accuracy"],
        schedule=optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(data)),
        clip=1.0,
        folder=folder,
        plot=plot,
        progress=progress,
    )
    tests = Batches(unseen, 360, shuffle=False)
    trainer.fit(data, epochs=epochs, validation=tests, resume=folder is not None)
    return trainer.evaluate(tests)["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--folder", help="keep checkpoints here, and go on from the last one")
    parser.add_argument("--plot", help="draw curves into this file (.png, .svg, .html)")
    given = parser.parse_args()
    print(f"{train(given.epochs, given.folder, given.plot):.2%} of unseen pictures are told right")
