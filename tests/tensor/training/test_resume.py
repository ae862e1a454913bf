"""A run that was killed, as often as one likes, ends with the same bits as one that was not."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ranvier.errors import InvalidConfig
from ranvier.tensor.training.checkpoints import Checkpoints, Saved
from tests.tensor.training import resumed_run

ROOT = Path(__file__).parents[3]


def end_of(folder: Path) -> Saved:
    found = Checkpoints(folder / "checkpoints").latest()
    assert found is not None and found.step == resumed_run.STEPS
    return found


def child(folder: Path, *args: str) -> int:
    command = [sys.executable, "-m", "tests.tensor.training.resumed_run", str(folder), *args]
    return subprocess.run(command, cwd=ROOT, timeout=120).returncode


def test_killed_at_random_steps(tmp_path: Path) -> None:
    resumed_run.run(tmp_path / "whole")
    draw = random.Random(20)
    steps = sorted(draw.sample(range(1, resumed_run.STEPS), 3))
    for step in steps:
        assert child(tmp_path / "killed", str(step)) == -signal.SIGKILL
    assert child(tmp_path / "killed") == 0
    whole, killed = end_of(tmp_path / "whole"), end_of(tmp_path / "killed")
    assert whole.tensors.keys() == killed.tensors.keys()
    different = [n for n, array in whole.tensors.items() if array.tobytes() != killed.tensors[n].tobytes()]
    assert different == []
    assert whole.facts == killed.facts
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "killed")]
    assert lines[0] == lines[1]


def test_everything_that_has_a_state_is_in_a_checkpoint(tmp_path: Path) -> None:
    trainer = resumed_run.run(tmp_path)
    saved = end_of(tmp_path)
    for name, state in trainer.model.state_dict().items():
        assert np.array_equal(saved.tensors[f"model.{name}"], state.numpy())
    assert {"generator", "optimizer.state.0.exp_avg", "average.averages.0", "history.loss"} <= saved.tensors.keys()
    assert saved.facts["parts"].keys() == {"optimizer", "schedule", "average"}
    assert len(trainer.history["loss"]) == resumed_run.STEPS


def test_another_run_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed_run.run(tmp_path)
    before = resumed_run.Batches

    def others(*args, **options):
        return before(*args, **{**options, "seed": 8})

    monkeypatch.setattr(resumed_run, "Batches", others)
    with pytest.raises(InvalidConfig, match=r"data\.seed was 7 and is 8"):
        resumed_run.run(tmp_path)
