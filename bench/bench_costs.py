"""What a run is predicted to take against what it takes: models of the suite, provider ``cpu``, one thread.

python bench/bench_costs.py [--models real,light,built] [--only PATTERN] [--seconds 0.5] [--built FOLDER] [--fresh]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from ranvier.cli.suites import catalogue
from ranvier.cli.suites.measure import prepare
from ranvier.config import SessionConfig
from ranvier.dtypes import of
from ranvier.errors import RanvierError
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops import TypeInference
from ranvier.runtime.calibration.lazy import calibrated, kept
from ranvier.runtime.calibration.model import MachineCosts
from ranvier.runtime.predicted import Prediction, predict
from ranvier.runtime.session import Session


def known_for(session: Session, inputs: dict[str, object]) -> TypeInference:
    """The types of all values for these inputs: known here, unlike when a session is made."""
    values, dims = session.signature.bind(session.signature.named(inputs))
    types = [
        TensorType(of(x), x.shape) if isinstance(x, np.ndarray) else v.type
        for v, x in zip(session.signature.inputs, values)
    ]
    inference = TypeInference(dims, annotated=True)
    inference.run(session.graph, types)
    return inference


def measured(session: Session, inputs: dict[str, object], seconds: float) -> float:
    """The shortest of many runs, as a calibration takes it: others on the machine only add.

    With one thread the time of that thread counts, not that of others which the system let run meanwhile.
    """
    session.run(inputs)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        begin = time.thread_time()
        session.run(inputs)
        times.append(time.thread_time() - begin)
    return min(times)


def by_class(session: Session, prediction: Prediction, types: dict[Value, Type | None]) -> str:
    """The classes that are predicted to take most, in microseconds."""
    model = MachineCosts(session.providers, {}, types)
    total: dict[str, float] = {}
    for node, options in zip(session.graph, prediction.options):
        taken = next((o.seconds for o in options if o.reason == "chosen"), None) or 0.0
        kind = node.op if node.has_subgraphs else model.work(node).kind
        total[kind] = total.get(kind, 0.0) + taken
    most = sorted(total.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{kind} {seconds * 1e6:.0f}" for kind, seconds in most)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="real,light,built")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--built", type=Path, default=None)
    parser.add_argument("--fresh", action="store_true", help="calibrate first")
    given = parser.parse_args()
    config = SessionConfig(threads=1)
    folder = given.built or catalogue.default_folder()
    patterns = [pattern for pattern in given.only.split(",") if pattern]
    ratios: list[float] = []
    for case in catalogue.cases(given.models.split(","), patterns, folder):
        if case.path is None or not case.path.is_file():
            continue
        try:
            inputs = dict(prepare(case, 0).inputs)
            with Session(str(case.path), config) as session:
                if not ratios:
                    measured_before = kept(session.providers, config)
                    for provider in session.providers:
                        if given.fresh or provider.name not in measured_before:
                            calibrated(provider, config)
                known = known_for(session, inputs)
                partitioning, figures = session._compiled.partitioning, kept(session.providers, config)
                guess = predict(partitioning, session.providers, figures, known)
                seconds = measured(session, inputs, given.seconds)
                ratios.append(guess.seconds / seconds)
                print(
                    f"{case.name:28} predicted {guess.seconds * 1e3:9.3f} ms  measured {seconds * 1e3:9.3f} ms"
                    f"  ratio {ratios[-1]:5.2f}  {by_class(session, guess, known.types)}",
                    flush=True,
                )
        except RanvierError as error:
            print(f"{case.name:28} {error}")
    off = [abs(ratio - 1) for ratio in ratios]
    if off:
        middle = statistics.median(ratios)
        print(f"{len(off)} models: off by {statistics.median(off):.0%} at the median; median ratio {middle:.2f}")


if __name__ == "__main__":
    main()
