"""A small run with everything that has a state, for tests that kill it: ``python -m … folder [step to die at]``.

Prints nothing; the final weights are in the last checkpoint of the folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ranvier import nn, optim
from ranvier.tensor.training.data import Batches
from ranvier.tensor.training.loop import Trainer
from ranvier.tensor.training.stopping import EarlyStop

STEPS = 24


def noisy(batch: Any, random: np.random.Generator) -> Any:
    x, y = batch
    return x + random.normal(size=x.shape).astype(np.float32) * 0.01, y


class Dies:
    """Kills its own process as nothing can be caught by."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_step(self, trainer: Any, step: int, values: Any) -> None:
        if step == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, die_at: int | None = None, every: int = 3) -> Trainer:
    random = np.random.default_rng(3)
    x = random.normal(size=(50, 6)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.int64)
    nn.manual_seed(11)
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 2),
    )
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    trainer = Trainer(
        model,
        optimizer,
        nn.functional.cross_entropy,
        metrics=["accuracy"],
        schedule=optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        clip=1.0,
        accumulate=2,
        ema=0.9,
        seed=5,
        folder=folder,
        checkpoint_every=every,
        progress=False,
    )
    trainer.fit(
        Batches((x, y), 8, seed=7, transform=noisy),
        steps=STEPS,
        validation=Batches((x, y), 25, shuffle=False),
        early_stop=EarlyStop(patience=100, restore_best=False),
        callbacks=[] if die_at is None else [Dies(die_at)],
        resume=True,
    )
    return trainer


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
