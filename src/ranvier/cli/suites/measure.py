"""One case of a suite at one number of threads: every runner loaded, measured in turns, and compared."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.cli import peers, values
from ranvier.cli.suites import feeds
from ranvier.cli.suites.catalogue import Case
from ranvier.cli.turns import Measured, RunnerFailed, Task, Worker, speed_ratio, take_turns
from ranvier.errors import RanvierError
from ranvier.formats import onnx as onnx_format

BASE = "onnxruntime"  # whose outputs are the reference, and whose speed is 1
CACHE_VARIABLE = "RANVIER_CACHE_DIR"


@dataclass(frozen=True)
class Settings:
    """How a suite is measured; results made under different settings are not mixed."""

    runners: tuple[str, ...]
    threads: tuple[int, ...]
    rounds: int | None
    seconds: float  # of turns, for each runner
    warmup: int
    patience: float  # seconds that any single answer of a runner may take
    seed: int = 0
    precision: str = "float32"  # of this runtime and of peers that have a choice; the base's is always float32


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs made, and what its file tells."""

    case: Case
    path: Path
    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]  # those that can be compared
    weight_bytes: int
    nodes: int


def prepare(case: Case, seed: int) -> Prepared:
    """Read the model once here: its interface decides the inputs, and its file is in the page cache for everyone."""
    if case.path is None or not case.path.is_file():
        raise RanvierError(case.missing or f"there is no file {case.path}")
    graph = onnx_format.read(str(case.path))
    return Prepared(
        case,
        case.path.resolve(),
        feeds.make(graph, case.inputs, seed),
        tuple(v.name for v in graph.outputs if v.name not in case.random_outputs),
        graph.constant_bytes(),
        len(graph),
    )


def measure(prepared: Prepared, threads: int, settings: Settings) -> dict[str, Any]:
    """The figures of every runner, and why others have none."""
    found: dict[str, Any] = {"threads": threads, "load_average": _load_average(), "runners": {}, "failed": {}}
    with tempfile.TemporaryDirectory(prefix="ranvier-suite-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        task = Task(str(prepared.path), folder, threads)
        task.write_inputs(prepared.inputs)
        if settings.precision == "fp16":
            values.save(prepared.inputs, _sample(folder))
        workers: list[Worker] = []
        cold: dict[str, Measured] = {}

        def dropped(worker: Worker, error: RunnerFailed) -> None:
            found["failed"][worker.name] = error.message

        for runner in settings.runners:
            try:
                worker = _start(runner, task, settings, cold)
            except RunnerFailed as error:
                found["failed"][runner] = error.message
                continue
            stack.callback(worker.close)
            workers.append(worker)
        if workers:
            take_turns(
                workers,
                rounds=settings.rounds,
                seconds=settings.seconds,
                warmup=settings.warmup,
                progress=_silently,
                dropped=dropped,
            )
        errors = _errors(task, workers, found["failed"], prepared)
        measured = {w.name: w.measured for w in workers if w.name not in found["failed"]}
        for runner, each in measured.items():
            found["runners"][runner] = {
                **_figures(each, cold.get(runner)),
                **_against(each, measured),
                **errors.get(runner, {"error": None, "cosine": None}),
            }
    return found


def _sample(folder: Path) -> Path:
    """Where inputs lie for those who want to see some before they are given any."""
    return folder / "sample.npz"


def _start(runner: str, task: Task, settings: Settings, cold: dict[str, Measured]) -> Worker:
    """A process ready for its turns. Ours is started twice: without anything in its cache of kernels, then with it."""

    def start() -> Worker:
        kind = peers.KNOWN[runner][1]
        return Worker(runner, kind, task, options, environment=environment, patience=settings.patience)

    options = {} if settings.precision == "float32" or runner == BASE else {"precision": settings.precision}
    if runner == peers.SELF and settings.precision == "fp16":  # does nothing before it knows how large values become
        options["calibration"] = str(_sample(task.folder))
    environment = {CACHE_VARIABLE: str(task.folder / "kernels")} if runner == peers.SELF else {}
    if runner == peers.SELF:
        first = start()
        cold[runner] = first.measured
        first.close()
    return start()


def _figures(measured: Measured, cold: Measured | None) -> dict[str, Any]:
    times = measured.statistics()
    median = times["median_seconds"]
    figures = {
        "version": measured.version,
        **times,
        "round_medians": [statistics.median(turn) for turn in measured.rounds],
        "import_seconds": measured.import_seconds,
        "create_seconds": measured.create_seconds,
        "first_seconds": measured.first_seconds,
        "setup_seconds": measured.setup_seconds(median),
        "peak_bytes": measured.peak_bytes,
        **measured.facts,
    }
    if cold is not None:
        figures["cold_create_seconds"] = cold.create_seconds
        figures["cold_setup_seconds"] = cold.setup_seconds(median)
        figures["peak_bytes"] = max(cold.peak_bytes, measured.peak_bytes)  # compiling may need more than running
    return figures


def _against(measured: Measured, others: Mapping[str, Measured]) -> dict[str, Any]:
    """Speed relative to every other runner, within rounds."""
    ratios = {name: speed_ratio(measured, other) for name, other in others.items() if other is not measured}
    return {"speed": ratios}


def _errors(
    task: Task, workers: Sequence[Worker], failed: dict[str, str], prepared: Prepared
) -> dict[str, dict[str, float | None]]:
    """By runner, the larger error of its first run and of one after the timed ones, both against the base's first."""
    going = [w for w in workers if w.name not in failed]
    if all(w.name != BASE for w in going):
        return {}
    expected = task.read_outputs(BASE)
    found: dict[str, dict[str, float | None]] = {}
    for worker in going:
        first = task.read_outputs(worker.name)
        try:
            worker.write_outputs()
        except RunnerFailed as error:
            failed[worker.name] = error.message
            continue
        both = (first, task.read_outputs(worker.name))
        found[worker.name] = {
            "error": max(largest_error(outputs, expected, prepared) for outputs in both),
            "cosine": None if prepared.case.any_order else values.cosine(both[1], expected, prepared.outputs),
        }
    return found


def largest_error(ours: Mapping[str, Any], expected: Mapping[str, Any], prepared: Prepared) -> float:
    """The largest difference in any output, relative to the largest magnitude in that output."""
    if prepared.case.any_order:
        ours, expected = ({name: np.sort(x, axis=None) for name, x in each.items()} for each in (ours, expected))
    return max(values.differences(ours, expected, prepared.outputs).values(), default=0.0)


def _silently(items: Sequence[int]) -> Iterable[int]:
    return items


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
