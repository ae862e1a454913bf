"""Training steps against PyTorch, as it is and compiled, and tinygrad: MLP, LeNet, ResNet-18, transformer, LSTM.

    python -m bench.bench_training [--threads 1 2] [--only mlp lenet] [--peers eager compile tinygrad] [--seconds 8]
                                   [--clock wall|cores] [--json FILE]

A step is everything: gradients set back, forward, loss, backward, the optimizer. All begin with the same numbers and
learn the same batch in turns, several steps a turn; the shortest step counts, because others use the machine too.
PyTorch's optimizers are its fused ones. Each number of threads has a process of its own that steps on so many cores.
Losses of the first steps are compared. ``compile`` needs a C++ compiler; tinygrad needs clang (``CC=`` says which), and
runs its steps under TinyJit. Peers that are not installed are left out.

``--clock cores`` shows the time that the process had on cores instead. On a busy machine only that can be believed, and
for one thread only: by the clock, a step that fits between two interruptions seems many times as fast as a longer one.
It counts double where a peer waits in a loop for a thread of its own, as tinygrad does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.models.training import CASES, Array, Case, compiled_step, torch_network

Step = Callable[[], float]
PEERS = ("eager", "compile", "tinygrad")
GOALS = {"eager": 1.2, "compile": 1.0, "tinygrad": 10.0}
_LOSSES = 4  # steps whose losses are compared


def ours(case: Case, x: Array, t: Array) -> tuple[Step, dict[str, Array]]:
    import ranvier as rv

    step, first = compiled_step(case)
    given = rv.Tensor(x), rv.Tensor(t)
    return lambda: step(*given).item(), first


def torch_steps(case: Case, x: Array, t: Array, first: dict[str, Array], compiled: bool) -> Step:
    import torch

    model, opt = torch_network(case, first)

    def loss_of(x: Any, t: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x), t)

    forward = torch.compile(loss_of) if compiled else loss_of
    given, wanted = torch.from_numpy(x), torch.from_numpy(t)

    def step() -> float:
        opt.zero_grad()
        loss = forward(given, wanted)
        loss.backward()
        opt.step()
        return float(loss.item())

    return step


def shortest(steps: dict[str, Step], seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """The shortest step of each in milliseconds, by the clock and in time of the process on its cores, in turns. A turn
    begins with a step that does not count: threads of the one before may still be looking for work."""
    wall, cores = (dict.fromkeys(steps, math.inf) for _ in range(2))
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 2:
        rounds += 1
        for name, step in steps.items():
            time.sleep(0.01)
            begun, count = time.perf_counter(), 0
            if wall[name] < 500 or rounds == 1:
                step()
            while count < 3 or time.perf_counter() - begun < 0.1:
                started, used = time.perf_counter(), time.process_time()
                step()
                wall[name] = min(wall[name], (time.perf_counter() - started) * 1e3)
                cores[name] = min(cores[name], (time.process_time() - used) * 1e3)
                count += 1
                if wall[name] > 1000:
                    break
    return wall, cores


def measured(case: Case, threads: int, peers: list[str], seconds: float) -> dict[str, Any]:
    cores = os.sched_getaffinity(0)
    x, t = case.batch(np.random.default_rng(0))
    steps: dict[str, Step] = {}
    own, first = ours(case, x, t)  # compiled by its first call
    losses: dict[str, list[float]] = {}
    ready: dict[str, float] = {}

    def begin(name: str, step: Callable[[], Step]) -> None:
        begun = time.perf_counter()
        steps[name] = step()
        losses[name] = [steps[name]() for _ in range(_LOSSES)]
        ready[name] = time.perf_counter() - begun

    for peer in peers:  # with all cores, because compilers of peers take long
        if peer == "tinygrad":
            from bench.models.training_tinygrad import tinygrad_steps

            begin(peer, lambda: tinygrad_steps(case, x, t, first))
        else:
            begin(peer, lambda peer=peer: torch_steps(case, x, t, first, peer == "compile"))  # type: ignore[misc]
    os.sched_setaffinity(0, sorted(cores)[:threads])
    begin("ranvier", lambda: own)
    wall, on_cores = shortest(dict(sorted(steps.items(), key=lambda each: each[0] != "ranvier")), seconds)
    os.sched_setaffinity(0, cores)
    off = {p: float(np.max(np.abs(np.subtract(losses[p], losses["ranvier"])))) for p in peers}
    return {
        "milliseconds": wall,
        "milliseconds_on_cores": on_cores,
        "losses": losses["ranvier"],
        "losses_differ_by": off,
        "seconds_until_ready": ready,
    }


def child(threads: int, names: list[str], peers: list[str], seconds: float) -> dict[str, Any]:
    """The cases with so many threads, in this process."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(threads)
    found = {}
    for case in CASES:
        if case.name in names:
            print(f"{case.name}, {threads} threads", file=sys.stderr, flush=True)
            found[case.name] = measured(case, threads, peers, seconds)
    return found


def installed(peers: list[str]) -> list[str]:
    where = {"eager": "torch", "compile": "torch", "tinygrad": "tinygrad"}
    return [p for p in peers if importlib.util.find_spec(where[p])]


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def shown(found: dict[str, dict[str, Any]], peers: list[str], clock: str) -> dict[str, float]:
    console, means = Console(), {}
    key = {"wall": "milliseconds", "cores": "milliseconds_on_cores"}[clock]
    for threads, cases in found.items():
        table = Table(title=f"training steps, {threads} thread(s): ms ({clock}), and how many times ours")
        for column in ("network", "ranvier", *peers, "losses differ by"):
            table.add_column(column, justify="left" if column == "network" else "right")
        for name, each in cases.items():
            times, off = each[key], each["losses_differ_by"]
            cells = [f"{times[p]:.2f} ({times[p] / times['ranvier']:.2f} x)" for p in peers]
            table.add_row(name, f"{times['ranvier']:.2f}", *cells, f"{max(off.values(), default=0.0):.1e}")
        for peer in peers:
            rates = [c[key][peer] / c[key]["ranvier"] for c in cases.values()]
            means[f"{peer}, {threads}"] = geometric(rates)
        cells = [f"{means[f'{p}, {threads}']:.2f} x (goal {GOALS[p]:g})" for p in peers]
        table.add_row("geometric mean", "", *cells, "")
        console.print(table)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=[c.name for c in CASES], choices=[c.name for c in CASES])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clock", choices=["wall", "cores"], default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    peers = installed(args.peers)
    if args.child:
        print(json.dumps(child(args.child, args.only, peers, args.seconds)))
        return
    found = {}
    for threads in args.threads:
        command = [sys.executable, "-m", "bench.bench_training", "--child", str(threads), "--only", *args.only]
        command += ["--peers", *peers, "--seconds", str(args.seconds)]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "THREADS": str(threads)}
        made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
        found[str(threads)] = json.loads(made.stdout.splitlines()[-1])
    means = shown(found, peers, args.clock)
    if args.json:
        args.json.write_text(json.dumps({"cases": found, "geometric_means": means}, indent=1))


if __name__ == "__main__":
    main()
