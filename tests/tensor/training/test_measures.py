"""Metrics, trackers, records, curves and progress."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import InvalidConfig
from ranvier.tensor.training import run_record
from ranvier.tensor.training.history import History
from ranvier.tensor.training.metrics import F1, Accuracy, metrics_of
from ranvier.tensor.training.plots import LivePlot, draw
from ranvier.tensor.training.progress import Lines, duration
from ranvier.tensor.training.stopping import EarlyStop
from ranvier.tensor.training.trackers import JsonLines, trackers_of


def measured(metric: Any, *batches: tuple[Any, Any]) -> float:
    metric.reset()
    for outputs, targets in batches:
        metric.update(np.array(outputs), np.array(targets))
    return float(metric.value())


def test_accuracy_over_unequal_batches() -> None:
    first = ([[1, 0], [0, 1], [0, 1]], [0, 1, 0])
    second = ([[0.0, 2.0]], [1])
    assert measured(Accuracy(), first, second) == pytest.approx(3 / 4)


def test_accuracy_of_probabilities_yes_and_no_and_best_ones() -> None:
    assert measured(Accuracy(), ([[0.9, 0.1], [0.2, 0.8]], [[1.0, 0.0], [0.6, 0.4]])) == 0.5
    assert measured(Accuracy(), ([1.0, -1.0, 2.0, -3.0], [1, 0, 0, 0])) == 0.75
    assert measured(Accuracy(2), ([[3, 2, 1], [3, 2, 1]], [1, 2])) == 0.5


def test_f1_is_that_of_scikit_learn() -> None:
    f1_score = pytest.importorskip("sklearn.metrics").f1_score
    random = np.random.default_rng(0)
    scores, classes = random.normal(size=(60, 4)), random.integers(0, 4, 60)
    found = measured(F1(), (scores[:20], classes[:20]), (scores[20:], classes[20:]))
    assert found == pytest.approx(f1_score(classes, scores.argmax(1), average="macro"))


def test_metrics_by_name_and_by_function() -> None:
    mse, own = metrics_of(["mse"])[0], metrics_of({"bias": lambda y, t: np.asarray(y) - t})[0]
    assert measured(mse, ([1.0, 2.0], [0.0, 0.0]), ([3.0], [0.0])) == pytest.approx(14 / 3)
    assert measured(own, ([1.0, 2.0], [0.0, 0.0])) == pytest.approx(1.5)
    with pytest.raises(InvalidConfig, match="did you mean 'accuracy'"):
        metrics_of(["acuracy"])


def test_early_stop_counts_looks_without_gain() -> None:
    stop = EarlyStop("validation_accuracy", patience=2, least=0.01)
    best = [stop.look({"validation_accuracy": v}) for v in (0.5, 0.6, 0.605, 0.7, 0.7)]
    assert best == [True, True, False, True, False] and not stop.due
    again = EarlyStop("validation_accuracy", patience=2, least=0.01)
    again.restore(json.loads(json.dumps(stop.state())))
    assert not again.look({"validation_accuracy": 0.7}) and again.due
    with pytest.raises(InvalidConfig, match="validation_accuracy"):
        stop.look({"loss": 1.0})


def test_lines_of_a_killed_run_are_not_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "m" / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.begin({})
    for step in range(5):
        tracker.log(step, {"loss": float(step)})
    path.write_text(path.read_text() + '{"step": 5, "lo')
    again = JsonLines(path)
    again.begin({"resumed_at": 2})
    again.log(3, {"loss": 30.0})
    again.end("finished")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 30.0},
    ]


def test_trackers_by_name() -> None:
    own = JsonLines("x")
    assert trackers_of(None) == [] and trackers_of([own, [own]]) == [own, own]
    with pytest.raises(InvalidConfig, match="no tracker"):
        trackers_of("nobody")


def test_a_record_can_be_read_again(tmp_path: Path) -> None:
    facts = run_record.record(7, {"rate": 0.1, "loss": test_trackers_by_name, "sizes": (1, 2), "n": np.float32(2)})
    run_record.save(tmp_path / "run", facts)
    found = json.loads((tmp_path / "run" / run_record.FILE).read_text())
    assert found["seed"] == 7 and found["versions"]["numpy"] == np.__version__
    assert found["configuration"] == {"rate": 0.1, "loss": "test_trackers_by_name", "sizes": [1, 2], "n": 2.0}


def test_differences_name_what_changed() -> None:
    found = run_record.differences({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}})
    assert found == ["b.c was 2 and is 4"]


def test_history_survives_a_checkpoint() -> None:
    history = History()
    for step in range(3):
        history.add(step, {"loss": 1 / 3**step})
    history.add(2, {"validation_loss": 0.5})
    assert History.of(history.arrays()).curves == history.curves
    assert history.best("loss") == 1 / 9 and history.last("validation_loss") == 0.5


def test_curves_are_drawn(tmp_path: Path) -> None:
    curves = {
        "loss": [(k, 2.0 / (k + 1)) for k in range(2000)],
        "validation_loss": [(k, 2.1 / (k + 1)) for k in range(0, 2000, 500)],
        "validation_accuracy": [(500, float("nan")), (1000, 0.5)],
    }
    text = draw(curves, "a run").svg()
    assert "validation loss 0.001" in text and "accuracy" in text and "NaN" not in text
    for name in ("run.svg", "run.html"):
        plot = LivePlot(tmp_path / name, every=1e9)
        plot.update(curves, "a run")
        first = (tmp_path / name).read_text()
        plot.update({"loss": [(0, 1.0)]}, "a run")  # too soon
        assert (tmp_path / name).read_text() == first
        plot.update({"loss": [(0, 1.0)]}, "a run", last=True)
        assert (tmp_path / name).read_text() != first
    assert 'http-equiv="refresh"' not in (tmp_path / "run.html").read_text()
    with pytest.raises(InvalidConfig):
        LivePlot(tmp_path / "run.pdf")


def test_progress_as_lines() -> None:
    stream = io.StringIO()
    lines = Lines(stream, every=0.0)
    lines.begin(10, 4)
    lines.step(5, 1, {"loss": 0.25})
    assert stream.getvalue().startswith("step 5/10, epoch 2, ") and "loss 0.25" in stream.getvalue()
    assert [duration(s) for s in (8.2, 125, 12000)] == ["8 s", "2 min 5 s", "3 h 20 min"]
