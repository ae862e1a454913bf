"""Breaks real models in thousands of ways and reports every outcome that is neither a result nor a typed error.

Use: ``python tools/fuzz.py --count 20000``; ``--seconds 600`` ends it by the clock; ``--seed 7 --replay 123`` runs one
mutation of one campaign in this process, with everything on the screen; ``--save FOLDER`` keeps what was found as
``.onnx`` files beside what became of them.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import onnx  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from ranvier.errors import RanvierError  # noqa: E402
from tests.faults import corpus, worker  # noqa: E402
from tests.faults.campaign import Finding, Tally, run_batch  # noqa: E402
from tests.faults.mutate import Mutation, mutate  # noqa: E402

BATCH = 500  # mutations in one process


def campaign(args: argparse.Namespace, folder: Path, console: Console) -> Tally:
    """All batches, one after the other; what is found is saved at once."""
    total = Tally()
    started = time.monotonic()
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = [TextColumn(c) if isinstance(c, str) else c for c in columns]
    with Progress(*bars, console=console) as progress:
        task = progress.add_task("mutations", total=args.count)
        for start in range(args.start, args.start + args.count, BATCH):
            if args.seconds is not None and time.monotonic() - started > args.seconds:
                break
            end = min(start + BATCH, args.start + args.count)
            done = start - args.start

            def advance(count: int, done: int = done) -> None:
                progress.update(task, completed=done + count)

            with tempfile.TemporaryDirectory() as work:
                found = run_batch(folder, args.seed, start, end, Path(work), progress=advance)
            for finding in found.findings:
                console.print(f"[red]{finding.what.strip().splitlines()[-1]}[/red] (--replay {finding.index})")
                _save(finding, folder, args.save)
            total.outcomes += found.outcomes
            total.findings += found.findings
            total.slowest = sorted([*total.slowest, *found.slowest], reverse=True)[:5]
            total.growth = max(total.growth, found.growth)
            progress.update(task, completed=end - args.start)
    return total


def _save(finding: Finding, folder: Path, target: Path | None) -> None:
    if target is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    mutation = mutate(corpus.read(folder), finding.seed, finding.index)
    stem = target / f"{finding.seed}-{finding.index}-{mutation.name}"
    stem.with_suffix(".onnx").write_bytes(mutation.model)
    stem.with_suffix(".txt").write_text(f"{describe(mutation)}\n\n{finding}\n")


def describe(mutation: Mutation) -> str:
    steps = ", ".join(mutation.steps)
    return f"{mutation.name} with {steps}, at optimization level {mutation.optimization}, {len(mutation.model)} bytes"


def replay(args: argparse.Namespace, folder: Path, console: Console) -> int:
    """One mutation in this process; 0 where its outcome is a good one."""
    mutation = mutate(corpus.read(folder), args.seed, args.replay)
    console.print(describe(mutation))
    try:
        console.print(onnx.printer.to_text(onnx.ModelProto.FromString(mutation.model)), markup=False)
    except Exception as error:  # broken models are what this is about
        console.print(f"(it cannot be printed: {error})", markup=False)
    faulthandler.dump_traceback_later(worker.CASE_SECONDS, exit=True)
    try:
        worker.run(mutation, folder)
    except RanvierError:
        console.print(traceback.format_exc(), markup=False)
        return 0
    console.print("it ran")
    return 0


def table(tally: Tally) -> Table:
    rows = Table("outcome", "count", title=f"{tally.count:,} mutations")
    for name, count in tally.outcomes.most_common():
        rows.add_row(name, f"{count:,}")
    rows.add_row("[red]neither result nor typed error[/red]", f"{len(tally.findings):,}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the campaign")
    parser.add_argument("--count", type=int, default=20_000, help="mutations to try")
    parser.add_argument("--start", type=int, default=0, help="first mutation of the campaign")
    parser.add_argument("--seconds", type=float, help="begin no new batch after this time")
    parser.add_argument("--save", type=Path, help="folder for the models that were found")
    parser.add_argument("--replay", type=int, metavar="INDEX", help="run this one mutation here")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with console.status("collecting models"):
            corpus.write(folder)
        if args.replay is not None:
            return replay(args, folder, console)
        tally = campaign(args, folder, console)
    console.print(table(tally))
    slowest = ", ".join(f"{seconds:.1f} s (--replay {index})" for seconds, index in tally.slowest)
    console.print(f"slowest: {slowest}; memory kept: {tally.growth / 1e6:.0f} MB")
    for finding in tally.findings:
        console.print(str(finding), markup=False)
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
