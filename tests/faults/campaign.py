"""Runs mutations in processes of their own, and says which of them crashed, hung or raised something untyped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    """A mutation whose outcome was neither a result nor a RanvierError."""

    seed: int
    index: int
    what: str

    def __str__(self) -> str:
        return f"seed {self.seed}, mutation {self.index}:\n{self.what}"


@dataclass
class Tally:
    """What became of the mutations."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest: list[tuple[float, int]] = field(default_factory=list)  # (seconds, index)
    growth: int = 0  # bytes that stayed in memory between a quarter and the end of the run

    @property
    def count(self) -> int:
        return sum(self.outcomes.values()) + len(self.findings)


def run_batch(
    folder: Path,
    seed: int,
    start: int,
    end: int,
    work: Path,
    *,
    seconds: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tally:
    """Mutations ``start`` to ``end`` of campaign ``seed``; ``folder`` holds the corpus, ``work`` takes the journal.

    A process that dies is replaced by one that goes on behind the case that killed it.
    """
    tally = Tally()
    attempt = 0
    while start < end:
        journal = work / f"{seed}-{start}-{attempt}.jsonl"
        journal.touch()
        attempt += 1
        stderr, code = _run_worker(folder, journal, seed, start, end, seconds, progress)
        last = _read_journal(journal, seed, tally)
        if code == 0:
            return tally
        if last is None:  # it did not get as far as the first case: that is no finding about a model
            raise RuntimeError(f"the worker ended with {code} before it began:\n{stderr}")
        tally.findings.append(Finding(seed, last, f"the process ended with {code}\n{stderr[-4000:]}"))
        start = last + 1
    return tally


def _run_worker(
    folder: Path,
    journal: Path,
    seed: int,
    start: int,
    end: int,
    seconds: float | None,
    progress: Callable[[int], None] | None,
) -> tuple[str, int]:
    command = [sys.executable, "-m", "tests.faults.worker", str(folder), str(journal), *map(str, (seed, start, end))]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    # one thread: many workers share the machine, and thread stacks count against the bound on memory
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OPENBLAS_NUM_THREADS": "1"}
    with open(journal.with_suffix(".stderr"), "w+") as errors:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            waited = 0.0
            while True:
                try:
                    process.wait(0.5)
                    break
                except subprocess.TimeoutExpired:
                    waited += 0.5
                    if progress is not None:
                        progress(_done(journal))
                    if seconds is not None and waited > seconds:
                        process.kill()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        errors.seek(0)
        return errors.read(), process.returncode


def _done(journal: Path) -> int:
    with journal.open() as lines:
        return sum('"at"' in line for line in lines)


def _read_journal(journal: Path, seed: int, tally: Tally) -> int | None:
    """Add what the journal says; returns the last case that was begun."""
    last: int | None = None
    memory: dict[str, int] = {}
    for line in journal.read_text().splitlines():
        entry = json.loads(line)
        if "at" in entry:
            last = entry["at"]
        elif "memory" in entry:
            memory[entry["memory"]] = entry["rss"]
        elif "failure" in entry:
            tally.findings.append(Finding(seed, entry["index"], entry["failure"]))
        else:
            tally.outcomes[entry["outcome"]] += 1
            tally.slowest = sorted([*tally.slowest, (entry["seconds"], entry["index"])], reverse=True)[:5]
    if len(memory) == 2:
        tally.growth = max(tally.growth, memory["after"] - memory["before"])
    return last
