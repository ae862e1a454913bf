"""Checkpoints: everything comes back, none is half there, damaged ones are passed over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ranvier.errors import InvalidConfig, WeightError
from ranvier.tensor.training.checkpoints import Checkpoints, read


def tensors(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "weight": random.normal(size=(3, 4)).astype(np.float32),
        "key": random.integers(0, 1 << 32, 2, dtype=np.uint32),
        "scalar": np.array(seed, np.int64),
        "empty": np.zeros((0, 2)),
    }


def test_everything_comes_back(tmp_path: Path) -> None:
    saved = tensors(1)
    Checkpoints(tmp_path).save(12, saved, {"epoch": 3, "rate": 0.1, "names": ["a", None]})
    found = Checkpoints(tmp_path).latest()
    assert found is not None and found.step == 12
    assert found.facts == {"epoch": 3, "rate": 0.1, "names": ["a", None], "step": 12}
    assert found.tensors.keys() == saved.keys()
    for name, array in saved.items():
        assert found.tensors[name].dtype == array.dtype
        assert found.tensors[name].tobytes() == array.tobytes() and found.tensors[name].shape == array.shape


def test_the_package_of_the_format_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    path = Checkpoints(tmp_path).save(1, tensors(2), {})
    found = safetensors.load_file(path)
    assert all(np.array_equal(found[name], array) for name, array in tensors(2).items())


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    keeper = Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 20, 100):
        keeper.save(step, tensors(step), {})
    assert [p.name for p in keeper.paths()] == ["step-0000000100.safetensors", "step-0000000020.safetensors"]
    with pytest.raises(InvalidConfig):
        Checkpoints(tmp_path, keep=0)


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").latest() is None


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    keeper = Checkpoints(tmp_path)
    keeper.save(1, tensors(1), {})
    path = keeper.save(2, tensors(2), {})
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) * 2 // 3]
    elif damage == "flip":
        data[-5] ^= 1
    else:
        data = bytearray()
    path.write_bytes(data)
    with pytest.raises(WeightError):
        read(path)
    found = keeper.latest()
    assert found is not None and found.step == 1


_WRITER = """
import sys
import numpy as np
from ranvier.tensor.training.checkpoints import Checkpoints
keeper = Checkpoints(sys.argv[1], keep=2)
for step in range(1, 1 << 30):
    keeper.save(step, {"w": np.full(1 << 18, step, np.int64)}, {"of": step})
    print(step, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_one(tmp_path: Path) -> None:
    for turn in range(3):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(2 + turn):
                child.stdout.readline()
            os.kill(child.pid, signal.SIGKILL)
        found = Checkpoints(tmp_path).latest()
        assert found is not None
        assert (found.tensors["w"] == found.step).all() and found.facts["of"] == found.step
    Checkpoints(tmp_path, keep=1).save(10**9, {}, {})
    assert [p.name for p in tmp_path.iterdir()] == [f"step-{10**9:010d}.safetensors"]
