"""Runs the standard's own test cases and writes the table in docs/conformance.md.

Use: ``make conformance``, or ``python tools/conformance_table.py [--peers]`` for the columns of other runtimes that
are installed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import onnx
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ranvier as rv  # noqa: E402
from conformance_providers import HEADING  # noqa: E402
from tests.conformance.cases import KINDS, LEFT_OUT, WAITING, Case, all_cases, check  # noqa: E402

Runner = Callable[[onnx.ModelProto, list[Any]], list[Any]]


def ranvier_with(provider: str, level: str) -> Runner:
    """What the provider declines is run by the reference."""

    def run(model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
        with rv.load(model, providers=list(dict.fromkeys([provider, "reference"])), optimization=level) as session:
            return list(session.run(inputs).values())

    return run


def onnxruntime_runner() -> Runner | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    onnxruntime.set_default_logger_severity(4)

    def run(model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        return session.run(None, dict(zip(names, inputs)))

    return run


def standard_runner(model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model)
    return evaluator.run(None, dict(zip(evaluator.input_names, inputs)))


def passes(case: Case, run: Runner) -> str | None:
    """None, or what went wrong."""
    try:
        model = case.model()
        for inputs, expected in case.data(model):
            check(list(run(model, inputs)), expected, case)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also run onnxruntime and onnx.reference, where installed")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "conformance.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    runners: dict[str, Runner] = {
        f"ranvier {provider}, {level}": ranvier_with(provider, level)
        for provider in ("cpu", "reference")
        for level in ("none", "aggressive")
    }
    if arguments.peers:
        peer = onnxruntime_runner()
        if peer is not None:
            import onnxruntime

            runners[f"onnxruntime {onnxruntime.__version__}"] = peer
        runners[f"onnx.reference {onnx.__version__}"] = standard_runner
    cases = all_cases()
    totals = Counter(case.kind for case in cases)
    passed: dict[str, Counter[str]] = {name: Counter() for name in runners}
    failures: list[tuple[str, str, str]] = []
    for case in track(cases, "cases"):
        for name, run in runners.items():
            problem = passes(case, run)
            if problem is None:
                passed[name][case.kind] += 1
            elif name.startswith("ranvier"):
                failures.append((case.name, name, problem))

    lines = [
        "# Conformance",
        "",
        f"The test cases that onnx {onnx.__version__} carries, strict on value, shape and element type, through the",
        "normal session, by provider and optimization. What `cpu` declines, `reference` runs in the same session.",
        f"Written by `make conformance` on {date.today().isoformat()}.",
        "",
        "| cases | total | " + " | ".join(runners) + " |",
        "|---|---|" + "---|" * len(runners),
    ]
    for kind in KINDS:
        counts = " | ".join(str(passed[name][kind]) for name in runners)
        lines.append(f"| {kind} | {totals[kind]} | {counts} |")
    sums = " | ".join(f"**{sum(passed[name].values())}**" for name in runners)
    lines += [f"| **all** | **{sum(totals.values())}** | {sums} |", ""]
    lines += ["Left out:", ""]
    lines += [f"- {len(LEFT_OUT)} cases `test_bernoulli*`: {next(iter(LEFT_OUT.values()))}.", ""]
    lines += ["Not passing:", ""]
    reported = dict.fromkeys((name, WAITING.get(name, problem)) for name, _, problem in failures)
    lines += [f"- `{name}`: {reason}" for name, reason in reported] or ["- none"]
    before = arguments.output.read_text() if arguments.output.exists() else ""
    _, heading, others = before.partition(HEADING)  # which belongs to another tool
    arguments.output.write_text("\n".join(lines) + "\n" + (f"\n{heading}{others}" if heading else ""))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
