"""The process that measures one runtime: ``python -m ranvier.cli.bench_worker``.

Orders come as lines of JSON on stdin, answers go back as lines of JSON. Tensors travel in pickle files inside a
private folder that the parent made.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranvier.runtime.worker.process import die_with_parent, private_stdout


def main() -> None:
    die_with_parent()  # between turns this process is stopped, and cannot notice that nobody needs it any more
    answers = os.fdopen(private_stdout(), "w")
    worker: _Worker | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "load":
                worker = _Worker(order)
                answer = worker.loaded
            elif worker is not None and order["do"] == "turn":
                answer = {"seconds": worker.turn(order["seconds"], order["warmup"])}
            elif worker is not None and order["do"] == "again":
                answer = worker.write_outputs()
            else:
                break
        except BaseException as error:
            answer = {"error": _error_facts(error)}
        print(json.dumps(answer), file=answers, flush=True)


class _Worker:
    def __init__(self, order: Mapping[str, Any]) -> None:
        folder = Path(order["folder"])
        inputs = pickle.loads((folder / "inputs.pickle").read_bytes())
        module, name = order["runner"].split(":")
        made_by = getattr(importlib.import_module(module), name)
        shapes = {name: value.shape for name, value in inputs.items() if hasattr(value, "shape")}
        started = time.perf_counter()
        made_by.prepare()
        imported = time.perf_counter()
        before = _start_of_memory()
        creating = time.perf_counter()
        runner = made_by(order["model"], order["threads"], order["options"], shapes)
        created = time.perf_counter()
        outputs = runner.run(inputs)
        first = time.perf_counter() - created
        runner.run(inputs)  # what is kept for reuse is there from the second run on
        peak = _memory("VmHWM") - before
        self._target = folder / f"{order['name']}.pickle"
        self._target.write_bytes(pickle.dumps(outputs))
        self._run = runner.run
        self._inputs = inputs
        self.loaded = {
            "version": runner.version,
            "import_seconds": imported - started,
            "create_seconds": created - creating,
            "first_seconds": first,
            "peak_bytes": peak,
            "facts": runner.facts(),
        }

    def write_outputs(self) -> dict[str, Any]:
        """Outputs of a run as the timed ones were: it may take another way through a runtime than the first."""
        self._target.write_bytes(pickle.dumps(self._run(self._inputs)))
        return {}

    def turn(self, seconds: float, warmup: int) -> list[float]:
        """Run for about ``seconds``, at least once, after some runs that are not timed and take no longer."""
        run, inputs, clock = self._run, self._inputs, time.perf_counter
        end = clock() + seconds
        for _ in range(warmup):
            run(inputs)
            if clock() >= end:
                break
        times: list[float] = []
        end = clock() + seconds
        while True:
            started = clock()
            run(inputs)
            finished = clock()
            times.append(finished - started)
            if finished >= end:
                return times


def _start_of_memory() -> int:
    """Resident bytes now; the high-water mark begins here where the system lets us reset it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    """Bytes of this process as Linux counts them; elsewhere the peak is all there is."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used if sys.platform == "darwin" else used * 1024
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _error_facts(error: BaseException) -> dict[str, Any]:
    from ranvier.cli.exit_codes import describe, exit_code

    return {"type": type(error).__name__, "message": describe(error), "exit_code": exit_code(error)}


if __name__ == "__main__":
    main()
