"""Calibrations on disk: they come back as they were, broken files count as absent, writers leave each other alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ranvier.codegen.llvm import cache
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration import store
from ranvier.runtime.calibration.table import Figures, interpolated

FIGURES = Figures(
    "cpu",
    launch=2e-6,
    node=1e-7,
    points={"product float32": ((1e5, 1e-6), (1e8, 1e-3)), "elementwise float32": ((1e6, 5e-5),)},
    inward=(1e-5, 8e9),
    outward=(2e-5, 4e9),
    quick=True,
    seconds=0.4,
    iteration=3e-6,
    provisional=2,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(store, "_read", {})
    return tmp_path / "calibration"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would begin."""
    monkeypatch.setattr(store, "_read", {})


def test_figures_come_back_as_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store.key_of(REGISTRY.get("cpu"), 1)
    assert store.load(key) is None
    assert store.save(key, FIGURES)
    forget(monkeypatch)
    assert store.load(key) == FIGURES
    assert store.load(store.key_of(REGISTRY.get("cpu"), 2)) is None  # another number of threads
    assert [figures for _, figures in store.entries()] == [FIGURES]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"launch": 2e-06', '"launch": -1'),
        lambda text: text.replace('"launch": 2e-06', '"launch": "soon"'),
        lambda text: text.replace('"launch": 2e-06', '"launch": NaN'),
        lambda text: text.replace('"points"', '"pointy"'),
        lambda text: text.replace('"threads": 1', '"threads": 7'),
        lambda text: "\x00" * 100,
    ],
)
def test_a_broken_file_counts_as_absent(damage: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store.key_of(REGISTRY.get("cpu"), 1)
    store.save(key, FIGURES)
    (file,) = folder.glob("*.json")
    before = file.read_text()
    file.write_text(damage(before))  # type: ignore[operator]
    assert file.read_text() != before
    forget(monkeypatch)
    assert store.load(key) is None
    store.save(key, FIGURES)
    forget(monkeypatch)
    assert store.load(key) == FIGURES


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file"))
    monkeypatch.setattr(store, "_read", {})
    key = store.key_of(REGISTRY.get("cpu"), 1)
    assert not store.save(key, FIGURES)
    assert store.load(key) == FIGURES  # for this process
    assert store.entries() == []


def test_clear_forgets_one_provider_or_all(folder: Path) -> None:
    store.save(store.key_of(REGISTRY.get("cpu"), 1), FIGURES)
    store.save(store.key_of(REGISTRY.get("cpu"), 2), FIGURES)
    store.save(store.key_of(REGISTRY.get("reference"), 1), FIGURES)
    assert store.clear("cpu") == 2
    assert store.load(store.key_of(REGISTRY.get("cpu"), 1)) is None
    assert store.clear() == 1
    assert store.entries() == []


def test_secrets_are_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ranvier.providers.remote.provider import RemoteOptions, RemoteProvider

    provider = RemoteProvider(RemoteOptions(address="127.0.0.1:9", token="very secret"))
    store.save(store.key_of(provider, 1), FIGURES)
    (file,) = folder.glob("*.json")
    assert "very secret" not in file.read_text()
    assert "127.0.0.1:9" in file.read_text()


_WRITER = """
import sys
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration import store
from ranvier.runtime.calibration.table import Figures
key = store.key_of(REGISTRY.get("reference"), 1)
for k in range(60):
    points = {"product float32": tuple((float(n), float(sys.argv[1])) for n in range(1, 400))}
    assert store.save(key, Figures("reference", launch=float(sys.argv[1]), points=points))
    store._read.clear()
    found = store.load(key)
    assert found is not None and found.points["product float32"][0][1] == found.launch
"""


def test_writers_do_not_disturb_each_other(folder: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(number)]) for number in (1, 2, 3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(list(folder.iterdir())) == 1  # nothing unfinished is left
    data = json.loads(next(folder.glob("*.json")).read_text())
    assert data["figures"]["launch"] in (1.0, 2.0, 3.0)


def test_times_between_points_follow_a_straight_line_on_logarithmic_scales() -> None:
    points = [(10.0, 1.0), (1000.0, 100.0), (100000.0, 1000.0)]
    assert interpolated(points, 10.0) == 1.0
    assert math.isclose(interpolated(points, 100.0), 10.0)
    assert math.isclose(interpolated(points, 10000.0), math.sqrt(100.0 * 1000.0))
    assert interpolated(points, 1.0) == 0.1  # beyond the ends the rate stays
    assert interpolated(points, 1e6) == 1e4
    assert interpolated(points, 0.0) == 0.0


def test_a_class_that_was_not_measured_has_no_time() -> None:
    assert FIGURES.time("conv.dense", "float32", 1e6) is None
    assert FIGURES.time("product", "float64", 1e5) == 1e-6  # the type that was measured stands in
    assert FIGURES.time("product", "float32", 1.0) == FIGURES.node
