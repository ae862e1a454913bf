"""8 bits without samples, on the real models of the CPU suite: how far results move, and how much faster a run is.

    RANVIER_MODELS=folder python -m bench.bench_dynamic [--only PATTERN] [--threads 1,2] [--json]

``ranvier quantize --scheme int8_dynamic``, all layers that it codes, against our own session in float32, and against
what ONNX Runtime's own ``quantize_dynamic`` (a scale for each channel) makes of the model, run by ONNX Runtime, in
turns in one process. Results of both models are compared with those of float32. Models that are quantized already, or
have no layer to quantize, are left out by name; where ONNX Runtime has no such model, its columns are empty.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.quantization import quantize_dynamic
from rich.console import Console
from rich.table import Table

from bench.bench_quantize import coded, of_real_models, sample
from ranvier.cli.suites import catalogue
from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import Quantization, Quantizer, prepared
from ranvier.runtime.quantizing.dynamic import DYNAMIC
from ranvier.runtime.quantizing.report import Difference, difference
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.session import Session

_SAMPLES = 8
_LAYERS = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM")


@dataclass(frozen=True)
class Row:
    """One model at one number of threads; times in milliseconds."""

    model: str
    threads: int
    layers: int
    difference: Difference
    theirs: Difference | None  # of ONNX Runtime's model, where it loads
    before: float
    after: float
    peer: float

    @property
    def speed(self) -> float:
        return self.before / self.after

    @property
    def against(self) -> float:
        return self.peer / self.after


def by_onnxruntime(path: Path, folder: Path, threads: int) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """A run of the model that ONNX Runtime makes."""
    target = folder / f"theirs{threads}.onnx"
    quantize_dynamic(path, target, per_channel=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, dict(feed))


def in_turns(runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Milliseconds of each, medians."""
    for run in runs:
        run()
    found: list[list[float]] = [[] for _ in runs]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found[0]) < 5:
        for times, run in zip(found, runs):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(times) for times in found]


def measure(case: catalogue.Case, options: argparse.Namespace, folder: Path) -> list[Row]:
    assert case.path is not None
    original = onnx_format.read(str(case.path))
    if coded(original):
        raise InvalidConfig("it is quantized already")
    config = SessionConfig.default(threads=max(options.threads))
    graph = prepared(original, config)
    feeds = [sample(graph, case, 1 + k) for k in range(_SAMPLES)]
    made, _ = Quantizer(graph, [], Quantization(DYNAMIC), config).run(force=True)
    compared = [k for k, value in enumerate(graph.outputs) if value.name not in case.random_outputs]

    def kept(rows: Any) -> list[list[Any]]:
        return [[row[k] for k in compared] for row in rows]

    expected = kept(results(graph, feeds, config))
    found = difference(kept(results(made, feeds, config)), expected)
    return [_row(case, made, feeds, threads, found, kept, expected, folder, options) for threads in options.threads]


def _row(
    case: catalogue.Case,
    made: Graph,
    feeds: Sequence[Mapping[str, Any]],
    threads: int,
    found: Difference,
    kept: Callable[[Any], list[list[Any]]],
    expected: list[list[Any]],
    folder: Path,
    options: argparse.Namespace,
) -> Row:
    own, feed = SessionConfig.default(threads=threads), feeds[0]
    onnx_format.save(made, folder / "ours.onnx")
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(Session(path, own)) for path in (case.path, folder / "ours.onnx")]
        runs: list[Callable[[], Any]] = [lambda s=s: s.run(feed) for s in ours]  # type: ignore[misc]
        theirs: Difference | None = None
        try:
            peer = by_onnxruntime(Path(str(case.path)), folder, threads)
            theirs = difference(kept([peer(each) for each in feeds]), expected)
            runs.append(lambda: peer(feed))
        except Exception as error:  # whatever another tool raises
            logging.getLogger(__name__).info("%s: %s", case.name, error)
        before, after, *others = in_turns(runs, options.seconds)
    layers = sum(node.op in _LAYERS for node in made)
    return Row(case.name, threads, layers, found, theirs, before, after, *(others or [math.nan]))


def show(rows: Sequence[Row], left_out: Mapping[str, str]) -> None:
    table = Table(title="8 bits without samples")
    table.add_column("model")
    columns = "threads", "layers", "cosine", "error", "f32 ms", "ms", "faster", "onnxruntime", "its error", "against it"
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        its = "" if row.theirs is None else f"{row.theirs.error:.3g}"
        near = f"{row.difference.cosine:.5f}", f"{row.difference.error:.3g}"
        times = f"{row.before:.3f}", f"{row.after:.3f}", f"{row.speed:.2f}"
        peer = ("", "") if math.isnan(row.peer) else (f"{row.peer:.3f}", f"{row.against:.2f}")
        table.add_row(row.model, str(row.threads), str(row.layers), *near, *times, peer[0], its, peer[1])
    console = Console()
    console.print(table)
    for threads in sorted({row.threads for row in rows}):
        those = [row for row in rows if row.threads == threads]
        both = [row.against for row in those if not math.isnan(row.peer)]
        own = statistics.geometric_mean([row.speed for row in those])
        peer = f", {statistics.geometric_mean(both):.2f} times as fast as ONNX Runtime" if both else ""
        console.print(f"{threads} threads, geometric means: {own:.2f} times as fast as float32{peer}")
    for name, why in left_out.items():
        console.print(f"{name}: {why}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", action="append", default=[], help="patterns of names")
    arguments.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    arguments.add_argument("--seconds", type=float, default=1.0, help="of turns, for each model and number of threads")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    logging.disable(logging.WARNING)

    def in_a_folder(case: catalogue.Case) -> list[Row]:
        with tempfile.TemporaryDirectory() as folder:
            return measure(case, options, Path(folder))

    rows, left_out = of_real_models(options.only, in_a_folder)
    if options.json:
        found = [asdict(row) | {"speed": row.speed, "against": row.against} for row in rows]
        print(json.dumps({"models": found, "left_out": left_out}))
    else:
        show(rows, left_out)


if __name__ == "__main__":
    main()
