"""8-bit static quantization of the real models of the CPU suite: how far results move, and how much faster a run is.

    RANVIER_MODELS=folder python -m bench.bench_quantize [--only PATTERN] [--threads 1,2] [--json]

Ranges come from samples that are not those results are compared on. A model keeps the goal for accuracy where the
cosine is at least 0.999 or the largest entry the same in 99 % of all places, and the goal for speed where a run is 1.5
times as fast as our own in float32. What is not coded in 8 bits has 16-bit activations, or is computed in bfloat16,
where that is faster and results allow it (``--rest``), with some nodes in float32 if need be; how fast the original is
in bfloat16 stands beside it. Layers are those with codes of 8 bits, those of 16 behind a plus, and all that could have
some. Models that are quantized already, or have no layer to quantize, are left out by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.photographs import photograph
from ranvier.cli.suites import catalogue, feeds
from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, RanvierError
from ranvier.formats import onnx as onnx_format
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import Quantization, Quantizer, prepared
from ranvier.runtime.quantizing.forms import fastest
from ranvier.runtime.quantizing.report import Difference, difference
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.session import Session

COSINE, AGREEMENT, SPEED = 0.999, 0.99, 1.5
R = TypeVar("R")
_PICTURE = 28  # pixels along the shorter side, at least
_LEAST_SAMPLES = 16
_SAMPLES = {0.004: 256, 0.016: 128, 0.064: 32}  # by seconds of a run: steps, so that every run looks at the same ones
UNSEEN = 1000  # first seed of the samples that results are compared on
_CODES = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"})


@dataclass(frozen=True)
class Quantized:
    """One model at one number of threads; ``layers``: with codes of 8 bits, of 16, and all that could have some."""

    model: str
    threads: int
    layers: tuple[int, int, int]
    difference: Difference
    rest: str  # the precision of what is not coded
    before: float  # milliseconds of a run in float32
    narrow: float  # in bfloat16
    after: float
    kept: int = 0  # nodes that sessions in bfloat16 leave in float32
    search: float = 0.0  # seconds

    @property
    def speed(self) -> float:
        return self.before / self.after


def accurate(found: Difference) -> bool:
    return found.cosine >= COSINE or (found.agreement is not None and found.agreement >= AGREEMENT)


def coded(graph: Graph) -> bool:
    return any(node.op in _CODES for node in graph)


def sample(graph: Graph, case: catalogue.Case, seed: int) -> dict[str, Any]:
    """Inputs as the suite makes them; for models that read pictures, photographs in the same range instead of noise."""
    found = feeds.make(graph, case.inputs, seed)
    for name, array in found.items():
        if array.ndim == 4 and array.shape[1] in (1, 3) and min(array.shape[2:]) >= _PICTURE:
            uniform = re.match(r"uniform(?:\((.*), (.*)\))?", case.inputs.get(name, ""))
            low, high = (float(end or k) for k, end in enumerate(uniform.groups())) if uniform else (-2.0, 2.0)
            picture = photograph(array.shape, np.random.default_rng(seed), unseen=seed >= UNSEEN)
            found[name] = (low + (high - low) * picture).astype(array.dtype)
    return found


def affordable(graph: Graph, feed: Mapping[str, Any], config: SessionConfig) -> int:
    """How many samples: more of them say more about a model whose runs are short."""
    with Session(copied(graph), config) as session:
        (seconds,) = fastest([session], feed, 0.1)
    return next((count for limit, count in _SAMPLES.items() if seconds < limit), _LEAST_SAMPLES)


def said(name: str, start: float) -> Callable[[str], None]:
    """What is being done, on a terminal: a search takes minutes."""

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{name}, {time.perf_counter() - start:.0f} s: {text}", end="", file=sys.stderr, flush=True)

    return tell


def measure(case: catalogue.Case, options: argparse.Namespace) -> list[Quantized]:
    original = onnx_format.read(str(case.path))
    if coded(original):
        raise InvalidConfig("it is quantized already")
    config = SessionConfig.default(threads=max(options.threads))
    graph = prepared(original, config)
    count = options.samples or affordable(graph, sample(graph, case, 1), config)
    known = [sample(graph, case, 1 + k) for k in range(count)]
    unseen = [sample(graph, case, UNSEEN + k) for k in range(count)]
    wanted = None if options.all else COSINE
    how = Quantization(ranges=options.ranges, cosine=wanted, seconds=options.search, rest=options.rest, timed=True)
    start = time.perf_counter()
    made, report = Quantizer(graph, known, how, config, said(case.name, start)).run(force=True)
    search = time.perf_counter() - start
    compared = [k for k, value in enumerate(graph.outputs) if value.name not in case.random_outputs]
    way = {"precision": report.precision, "keep_f32": report.keep_f32}
    running = config.updated(**way)
    both = (made, running), (graph, config)
    pair = ([[row[k] for k in compared] for row in results(each, unseen, own)] for each, own in both)
    found = difference(*pair)
    schemes = [layer.scheme for layer in report.layers]
    layers = len(schemes) - schemes.count("float32") - schemes.count("int16"), schemes.count("int16"), len(schemes)
    rows = []
    for threads in options.threads:
        own = SessionConfig.default(threads=threads)
        narrow, last = own.updated(precision="bf16"), own.updated(**way)
        with contextlib.ExitStack() as stack:
            graphs = (onnx_format.read(str(case.path)), own), (onnx_format.read(str(case.path)), narrow), (made, last)
            sessions = [stack.enter_context(Session(copied(each), one)) for each, one in graphs]
            times = [1e3 * each for each in fastest(sessions, unseen[0], options.seconds)]
        kept = len(report.keep_f32)
        before, fewer, after = times
        rows.append(Quantized(case.name, threads, layers, found, report.precision, before, fewer, after, kept, search))
    return rows


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def show(rows: Sequence[Quantized], left_out: Mapping[str, str]) -> None:
    table = Table(title="8-bit static quantization")
    columns = "model", "threads", "layers", "rest", "cosine", "same largest", "f32 ms", "bf16 ms", "ms", "faster"
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_column("")
    table.add_column("search s", justify="right")
    for row in rows:
        agreement, cosine = row.difference.agreement, row.difference.cosine
        same = "" if agreement is None else f"{agreement:.1%}"
        missed = [
            what for what, kept in (("accuracy", accurate(row.difference)), ("speed", row.speed >= SPEED)) if not kept
        ]
        times = *(f"{each:.3f}" for each in (row.before, row.narrow, row.after)), f"{row.speed:.2f}"
        few, more, every = row.layers
        count = f"{few}+{more}/{every}" if more else f"{few}/{every}"
        rest = f"{row.rest}, {row.kept} f32" if row.kept else row.rest
        table.add_row(
            row.model,
            str(row.threads),
            count,
            rest,
            f"{cosine:.5f}",
            same,
            *times,
            ", ".join(missed) or "ok",
            f"{row.search:.0f}",
        )
    console = Console()
    console.print(table)
    for threads in sorted({row.threads for row in rows}):
        those = [row for row in rows if row.threads == threads]
        console.print(
            f"{threads} threads: {mean([row.speed for row in those]):.2f} times as fast in the geometric mean, "
            f"{sum(accurate(row.difference) for row in those)} of {len(those)} accurate, "
            f"{sum(row.speed >= SPEED for row in those)} fast enough, "
            f"{sum(accurate(row.difference) and row.speed >= SPEED for row in those)} both"
        )
    for name, why in left_out.items():
        console.print(f"{name}: {why}")


def of_real_models(only: Sequence[str], measure: Callable[[catalogue.Case], list[R]]) -> tuple[list[R], dict[str, str]]:
    """What is measured of the models there are, and why of others not, by their names."""
    rows: list[R] = []
    left_out: dict[str, str] = {}
    for case in catalogue.cases(["real"], only, Path()):
        if case.path is None:
            left_out[case.name] = case.missing
            continue
        try:
            rows += measure(case)
        except RanvierError as error:
            left_out[case.name] = str(error).splitlines()[0]
    return rows, left_out


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", action="append", default=[], help="patterns of names")
    arguments.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    arguments.add_argument("--samples", type=int, default=0, help="by how long a run takes unless given")
    arguments.add_argument("--ranges", default="best")
    arguments.add_argument(
        "--rest", default="best", help="what becomes of what is not coded: float32, int16, bf16 or best"
    )
    arguments.add_argument("--all", action="store_true", help="quantize every layer, whatever it does to results")
    arguments.add_argument("--search", type=float, default=150.0, help="seconds in which a form is looked for, about")
    arguments.add_argument("--seconds", type=float, default=2.0, help="of turns, for each model and number of threads")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    rows, left_out = of_real_models(options.only, lambda case: measure(case, options))
    if options.json:
        found = [asdict(row) | {"speed": row.speed, "accurate": accurate(row.difference)} for row in rows]
        print(json.dumps({"models": found, "left_out": left_out}))
    else:
        show(rows, left_out)


if __name__ == "__main__":
    main()
