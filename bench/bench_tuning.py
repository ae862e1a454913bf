"""What tuning gains over the defaults: models of the CPU suite, tuned for a while, then run in turns with untuned ones.

    RANVIER_MODELS=FOLDER python -m bench.bench_tuning [NAME …] [--groups real] [--seconds 30] [--threads 1] [--json]

A gain of 1.10 means that the defaults need a tenth more time. Tables are kept in a folder of this run alone, so that
nothing measured before takes part. The median over models is what the rules of the planners are judged by.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import ranvier as rv
from ranvier.cli.suites.catalogue import GROUPS, Case, cases
from ranvier.cli.suites.measure import prepare
from ranvier.codegen.llvm import cache
from ranvier.errors import RanvierError
from ranvier.runtime.tuning import tune

TURNS = 2.0  # seconds in which tuned and untuned take turns


def gain(case: Case, seconds: float, threads: int) -> dict[str, Any]:
    """How much longer the defaults take than what tuning chose."""
    ready = prepare(case, 0)
    given = dict(ready.inputs)
    with rv.load(ready.path, providers=["cpu"], threads=threads) as session:
        found = tune(session, given, seconds=seconds)
    sessions = {
        name: rv.load(
            ready.path, providers=["cpu"], threads=threads, provider_options={"cpu": {"tuned": name == "tuned"}}
        )
        for name in ("tuned", "default")
    }
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(given)
    until = time.perf_counter() + TURNS
    while time.perf_counter() < until:
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(given)
            taken[name].append(time.perf_counter() - start)
    for session in sessions.values():
        session.close()
    return {
        "model": case.name,
        "gain": statistics.median(d / t for d, t in zip(taken["default"], taken["tuned"])),
        "by_least": min(taken["default"]) / min(taken["tuned"]),
        "changed": sum(1 for each in found.outcomes if each.chosen),
        "decisions": len(found.outcomes),
        "finished": found.finished,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="patterns of model names")
    parser.add_argument("--groups", nargs="+", default=["real"], choices=GROUPS)
    parser.add_argument("--built", type=Path, default=Path("models"), help="where built models are")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tuning, for each model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    chosen = [case for case in cases(asked.groups, asked.names, asked.built) if case.path and case.path.is_file()]
    rows: list[dict[str, Any]] = []
    console = Console(stderr=asked.json)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[cache.FOLDER] = folder
        for case in track(chosen, "tuning", console=console):
            try:
                rows.append(gain(case, asked.seconds, asked.threads))
            except RanvierError as error:
                console.print(f"{case.name}: {error}")
    middle = {key: statistics.median(row[key] for row in rows) for key in ("gain", "by_least")}
    if asked.json:
        print(
            json.dumps({"threads": asked.threads, "seconds": asked.seconds, "models": rows, "median": middle}, indent=1)
        )
        return
    table = Table(title=f"default over tuned, {asked.threads} thread(s), {asked.seconds:g} s of tuning each")
    for column in ("model", "gain", "by least times", "decisions changed"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in sorted(rows, key=lambda r: -r["gain"]):
        all_tried = "" if row["finished"] else " (not all tried)"
        changed = f"{row['changed']} of {row['decisions']}{all_tried}"
        table.add_row(row["model"], f"{row['gain']:.3f}", f"{row['by_least']:.3f}", changed)
    table.add_row("median", f"{middle['gain']:.3f}", f"{middle['by_least']:.3f}", "")
    console.print(table)


if __name__ == "__main__":
    main()
