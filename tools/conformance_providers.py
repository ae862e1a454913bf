"""Runs the standard's own test cases through every provider that has to be named, and writes what came of it into
docs/conformance.md, below the table of ``make conformance``.

Use: ``make conformance-providers``, or ``python tools/conformance_providers.py [PROVIDER ...]`` for some of them; the
lines of the others stay as they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ranvier as rv  # noqa: E402
from ranvier.errors import ProviderUnavailable  # noqa: E402
from ranvier.providers.registry import REGISTRY  # noqa: E402
from tests.conformance.cases import WAITING, Case, all_cases, check  # noqa: E402
from tests.conformance.deviations import DEVIATIONS  # noqa: E402

PROVIDERS = ("onnxruntime", "openvino", "mlx", "sim", "remote")
HEADING = "## Providers that have to be named"
ROW = "| provider | seen | cases | all nodes there | some there | none there | as reference | otherwise | fell back |"
ABOUT = f"""{HEADING}

Each takes what it can and the reference the rest, without optimization; the reference alone is the oracle. Every node
that a provider leaves has a reason (`ranvier explain`). *Fell back*: cases in which it claimed a node and then failed.
Written by `make conformance-providers`.

{ROW}
|{"---|" * (ROW.count("|") - 1)}
"""


def outcome(case: Case, provider: str, options: dict[str, Any]) -> list[str]:
    """What is counted about a case."""
    model = case.model()
    with rv.load(model, optimization="none", providers=["reference"]) as oracle:
        wanted = [(inputs, list(oracle.run(inputs).values())) for inputs, _ in case.data(model)]
    with rv.load(model, optimization="none", providers=[provider, "reference"], **options) as session:
        taken = [node.provider == provider for node in session.report.nodes]
        found = ["all" if taken and all(taken) else "some" if any(taken) else "none"]
        try:
            for inputs, expected in wanted:
                check(list(session.run(inputs).values()), expected, case)
            found.append("same")
        except AssertionError:
            found.append("otherwise")
        if session.report.fallbacks:
            found.append("fell back")
    return found


def row(provider: str) -> tuple[str, list[str]] | None:
    """A line of the table, and the cases that nobody listed; None where the provider cannot be had."""
    with ExitStack() as stack:
        options: dict[str, Any] = {}
        if provider == "remote":
            from ranvier.runtime.worker.network import Worker, WorkerSettings

            worker = Worker(WorkerSettings(providers=("reference",)))
            stack.callback(worker.close, 0.1)
            options = {"provider_options": {"remote": {"address": worker.address}}}
        else:
            try:
                REGISTRY.get(provider)
            except ProviderUnavailable:
                return None
        cases = [case for case in all_cases() if case.kind != "light" and case.name not in WAITING]
        counts: Counter[str] = Counter()
        unlisted: list[str] = []
        for case in track(cases, provider):
            found = outcome(case, provider, options)
            counts.update(found)
            if "otherwise" in found and case.name not in DEVIATIONS.get(provider, {}):
                unlisted.append(case.name)
    try:
        name = f"{provider} {importlib.metadata.version(provider)}"
    except importlib.metadata.PackageNotFoundError:
        name = provider
    cells = [counts[key] for key in ("all", "some", "none", "same", "otherwise", "fell back")]
    return f"| {name} | {date.today()} | {len(cases)} | " + " | ".join(map(str, cells)) + " |", unlisted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("providers", nargs="*", metavar="PROVIDER")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "conformance.md")
    arguments = parser.parse_args()
    for name in arguments.providers:
        if name not in PROVIDERS:
            parser.error(f"no provider {name!r} here (known: {', '.join(PROVIDERS)})")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    text = arguments.output.read_text() if arguments.output.exists() else ""
    before, _, section = text.partition(HEADING)
    lines = {line.split()[1]: line for line in section.splitlines() if line.startswith("| ") and line != ROW}
    unlisted: list[str] = []
    for provider in arguments.providers or PROVIDERS:
        found = row(provider)
        if found is not None:
            lines[provider], others = found
            unlisted += [f"{provider}: {name}" for name in others]
    listed = [(provider, *item) for provider in PROVIDERS for item in DEVIATIONS.get(provider, {}).items()]
    reasons = [f"- `{name}` on {provider}: {reason}" for provider, name, reason in listed]
    table = "\n".join(lines[name] for name in PROVIDERS if name in lines)
    parts = [f"{before.rstrip()}\n\n{ABOUT}{table}\n", "Otherwise:\n", "\n".join(reasons) or "- none"]
    arguments.output.write_text("\n".join(parts) + "\n")
    if unlisted:
        sys.exit("computed otherwise and not listed in tests/conformance/deviations.py: " + ", ".join(unlisted))


if __name__ == "__main__":
    main()
