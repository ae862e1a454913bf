"""Measuring several runtimes fairly on one machine: each in its own process, one at a time, in rotating turns.

A runtime's idle threads may spin for a while after a run and disturb whoever is measured next; so processes that
are not having their turn are stopped altogether where the system can do that.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranvier.cli import exit_codes
from ranvier.errors import RanvierError

_CAN_STOP = hasattr(signal, "SIGSTOP")
_PAUSE = 0.25  # seconds of silence before a turn where processes cannot be stopped
_LEAST_ROUNDS = 3
_WARMING = 0.05  # seconds of runs before the first turn


class RunnerFailed(RanvierError):
    """A runtime could not load or run the model."""

    def __init__(self, name: str, message: str, code: int = exit_codes.RUN_FAILED) -> None:
        super().__init__(f"{name} cannot run this model: {message}")
        self.message = message
        self.exit_code = code


@dataclass(frozen=True)
class Task:
    """What every runtime is given."""

    model: str
    folder: Path  # private; holds the inputs and receives the outputs
    threads: int

    def write_inputs(self, inputs: Mapping[str, Any]) -> None:
        (self.folder / "inputs.pickle").write_bytes(pickle.dumps(dict(inputs)))

    def read_outputs(self, name: str) -> dict[str, Any]:
        found = pickle.loads((self.folder / f"{name}.pickle").read_bytes())
        assert isinstance(found, dict)
        return found


@dataclass
class Measured:
    """One runtime's times: whole, and by round."""

    name: str
    version: str = ""
    import_seconds: float = 0.0
    create_seconds: float = 0.0  # a session from the file
    first_seconds: float = 0.0
    peak_bytes: int = 0  # of memory, beyond what the process held before it made the session
    facts: dict[str, Any] = field(default_factory=dict)
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [s for turn in self.rounds for s in turn]

    @property
    def load_seconds(self) -> float:
        return self.import_seconds + self.create_seconds

    def setup_seconds(self, median: float) -> float:
        """Everything that happens once: making the session, and what the first run takes longer than a later one."""
        return self.create_seconds + max(self.first_seconds - median, 0.0)

    def statistics(self) -> dict[str, float]:
        """The median, its median absolute deviation, quantiles and the number of runs."""
        times = self.seconds
        middle = statistics.median(times)
        return {
            "median_seconds": middle,
            "mad_seconds": statistics.median(abs(s - middle) for s in times),
            "p10_seconds": _quantile(times, 0.1),
            "p90_seconds": _quantile(times, 0.9),
            "min_seconds": min(times),
            "runs": len(times),
        }


class Worker:
    """A process with one runtime in it; stopped except during its turns."""

    def __init__(
        self,
        name: str,
        runner: str,
        task: Task,
        options: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> None:
        """``environment`` is laid over this process's; ``patience`` is how many seconds any answer may take."""
        self.name = name
        self._log = task.folder / f"{name}.log"
        self._patience = patience
        environment = {**os.environ, **(environment or {})}
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[variable] = str(task.threads)
        with self._log.open("wb") as log:
            # -P: a file in the working folder must not take the place of a module of ours
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ranvier.cli.bench_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        try:
            loaded = self._ask(
                do="load",
                name=name,
                runner=runner,
                model=task.model,
                folder=str(task.folder),
                threads=task.threads,
                options=dict(options),
            )
        except BaseException:
            self.close()
            raise
        self.measured = Measured(name, **loaded)
        self._stop()

    def turn(self, seconds: float, warmup: int) -> list[float]:
        """Times of the runs of one turn."""
        self._resume()
        times: list[float] = self._ask(do="turn", seconds=seconds, warmup=warmup)["seconds"]
        self._stop()
        return times

    def write_outputs(self) -> None:
        """Replace the outputs of the first run, which the task holds, by those of a run now."""
        self._resume()
        self._ask(do="again")
        self._stop()

    def _ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = None if self._patience is None else threading.Timer(self._patience, give_up)
        if timer is not None:
            timer.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            if timer is not None:
                timer.cancel()
        if late.is_set():
            raise RunnerFailed(self.name, f"no answer within {self._patience:g} s")
        if not line:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            code = self._process.wait()
            raise RunnerFailed(self.name, f"its process ended with code {code}: {' / '.join(tail) or 'no message'}")
        answer = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            raise RunnerFailed(self.name, error["message"], error["exit_code"])
        return answer

    def _stop(self) -> None:
        if _CAN_STOP:
            self._process.send_signal(signal.SIGSTOP)

    def _resume(self) -> None:
        if _CAN_STOP:
            self._process.send_signal(signal.SIGCONT)
        else:
            time.sleep(_PAUSE)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def take_turns(
    workers: Sequence[Worker],
    *,
    rounds: int | None,
    seconds: float,
    warmup: int,
    progress: Callable[[Sequence[int]], Iterable[int]],
    dropped: Callable[[Worker, RunnerFailed], None] | None = None,
) -> None:
    """Give every worker one turn a round, each round beginning with another one.

    ``seconds`` is what each worker may take in all. Where ``rounds`` is not given it is as many turns as fit, at
    least three and at most twenty, each long enough for several runs where the model is quick. A worker that fails
    is handed to ``dropped`` and has no further turns; without ``dropped`` its error ends everything.
    """
    going = list(workers)

    def turn(worker: Worker, length: float, unmeasured: int) -> list[float]:
        try:
            return worker.turn(length, unmeasured)
        except RunnerFailed as error:
            if dropped is None:
                raise
            going.remove(worker)
            dropped(worker, error)
            return []

    # one run after warming up says how long runs take; the first of all says little, it may have compiled something
    slowest = max((s for w in workers for s in turn(w, _WARMING if warmup else 0.0, warmup)[-1:]), default=0.0)
    count = rounds or max(_LEAST_ROUNDS, min(20, int(seconds / max(slowest, 1e-3))))
    used = dict.fromkeys(workers, 0.0)
    for number in progress(range(count)):
        start = number % max(len(going), 1)
        for worker in going[start:] + going[:start]:
            started = time.perf_counter()
            # after a pause the caches are cold: a turn begins with a run that does not count, where that is cheap
            times = turn(worker, seconds / count, int(slowest < seconds / count))
            if times:
                worker.measured.rounds.append(times)
            used[worker] += time.perf_counter() - started
        if rounds is None and number + 1 >= _LEAST_ROUNDS and max(used.values()) > 2 * seconds:
            break


def speed_ratio(ours: Measured, theirs: Measured) -> dict[str, float]:
    """How many times as fast as a peer: the median over rounds of the ratio within a round, with its spread.

    ``best`` compares the quickest runs. On a busy machine a run that outlasts a time slice is interrupted and a
    shorter one is not, so medians flatter the faster side; where the two ratios differ much, neither is a result.
    """
    ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(ours.rounds, theirs.rounds)]
    return {
        "ratio": statistics.median(ratios),
        "low": _quantile(ratios, 0.1),
        "high": _quantile(ratios, 0.9),
        "best": min(theirs.seconds) / min(ours.seconds),
    }


def _quantile(numbers: Sequence[float], q: float) -> float:
    ordered = sorted(numbers)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
