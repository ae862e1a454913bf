"""Training steps on a GPU against PyTorch, as it is and compiled: MLP, LeNet, ResNet-18, transformer, LSTM.

    PYTHONPATH=src python -m bench.gpu.training [--device 0] [--only mlp lenet] [--peers eager compile] [--seconds 4]
                                                [--precision f32|tf32] [--kernels] [--output FILE]

A step is everything: gradients set back, forward, loss, backward, the optimizer. All begin with the same numbers and
learn the same batch, which lies on the device, in turns. ``steps``: back to back, and the device is waited for at the
end of a turn; ``read``: every loss is read. Medians of turns. PyTorch's optimizers are its fused ones; ``compile`` is
``mode="reduce-overhead"``, and the default mode where that fails. Float32 is float32 for all, unless ``tf32`` is asked
for: PyTorch itself would take fewer bits in convolutions.

Each network has a process of its own: a device that is lost does not take the others along. ``--kernels`` lists what
a step of ours is made of. ``--device cpu`` runs all this on the processor: to see that it works, not how fast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.models.training import CASES, Array, Case, compiled_step, torch_network

PEERS = ("eager", "compile")
_LOSSES = 5  # steps whose losses are compared
_TURN_SECONDS = 0.02
Step = Callable[[], Any]  # learns, and gives something whose number is the loss


def configure(device: str, precision: str, folder: str) -> None:
    """Options of the provider, for all sessions that are made."""
    chosen = device if device.isdigit() else f'"{device}"'
    path = Path(folder) / "ranvier.toml"
    path.write_text(f'[provider_options.cuda]\ndevice = {chosen}\nprecision = "{precision}"\n')
    os.environ["RANVIER_CONFIG"] = str(path)


def ours(case: Case, x: Array, t: Array, backend: str = "cuda") -> tuple[Step, dict[str, Array], Any]:
    import ranvier as rv

    rv.set_backend(backend)
    step, first = compiled_step(case)
    given = rv.Tensor(x), rv.Tensor(t)
    return lambda: step(*given), first, step


def told(function: Any) -> dict[str, Any]:
    """Where a compiled function runs, and as what."""
    compiled = next(iter(function._kept.values()))[0]
    session = compiled._session
    return {
        "states_stay": compiled._on_device is not None,
        "parts": [f"{len(p.part.subgraph.nodes)} nodes on {p.part.provider.name}" for p in session._parts],
        "captures": [line for p in session._parts for line in getattr(p.kernel, "graph_report", list)()],
        "steps": _counted([line.rpartition("# ")[2] for p in session._parts for line in p.kernel.source.splitlines()]),
    }


def _counted(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


def theirs(case: Case, x: Array, t: Array, first: dict[str, Array], device: Any, mode: str | None) -> Step:
    """``mode``: of ``torch.compile``; None: as it is."""
    import torch

    model, opt = torch_network(case, first, device)

    def loss_of(x: Any, t: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x), t)

    forward = loss_of if mode is None else torch.compile(loss_of, mode=mode)
    given, wanted = torch.from_numpy(x).to(device), torch.from_numpy(t).to(device)

    def step() -> Any:
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        opt.zero_grad()
        loss = forward(given, wanted)
        loss.backward()
        opt.step()
        return loss.detach()

    return step


def begun(steps: dict[str, Step], name: str, ways: list[Callable[[], Step]]) -> dict[str, Any]:
    """The first of some ways that works, its first losses, and how long that took."""
    problems = []
    for make in ways:
        start = time.perf_counter()
        try:
            step = make()
            losses = [float(step().item()) for _ in range(_LOSSES)]
        except Exception as error:  # a peer that fails must not end the others
            problems.append(f"{type(error).__name__}: {str(error)[:300]}")
            continue
        steps[name] = step
        return {"losses": losses, "seconds_until_ready": time.perf_counter() - start, "problems": problems}
    return {"problems": problems}


def medians(steps: dict[str, Step], seconds: float, wait: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of each, in turns."""
    ways = {"steps": _back_to_back, "read": _reading}
    turns: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in steps}
    counts = dict.fromkeys(steps, 1)
    for name, step in steps.items():
        once = _reading(step, 2, wait)
        counts[name] = max(1, min(200, round(_TURN_SECONDS * 1e3 / once)))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(found["read"] for found in turns.values()):
        for name, step in steps.items():
            for way, run in ways.items():
                turns[name][way].append(run(step, counts[name], wait))
    return {name: {way: statistics.median(found) for way, found in each.items()} for name, each in turns.items()}


def _back_to_back(step: Step, count: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) * 1e3 / count


def _reading(step: Step, count: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step().item()
    return (time.perf_counter() - start) * 1e3 / count


def kernels(step: Step, wait: Callable[[], None]) -> list[str]:
    """What one step is made of on the device, the longest first."""
    import torch

    wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        wait()
    events = [e for e in profiler.key_averages() if e.device_time_total]
    total, count = sum(e.device_time_total for e in events), sum(e.count for e in events)
    lines = [f"{count} kernels, {total / 1e3:.3f} ms in them"]
    for each in sorted(events, key=lambda e: -e.device_time_total)[:30]:
        lines.append(f"{each.device_time_total:9.1f} us {each.count:4}  {each.key[:120]}")
    return lines


def measured(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    on_gpu = args.device.isdigit()
    device = torch.device("cuda", int(args.device)) if on_gpu else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision == "tf32"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    x, t = case.batch(np.random.default_rng(0))
    steps: dict[str, Step] = {}
    found: dict[str, Any] = {}
    kept: list[Any] = []
    start: dict[str, Array] = {}

    def own() -> Step:
        step, first, function = ours(case, x, t)
        start.update(first)
        kept.append(function)
        return step

    found["ranvier"] = begun(steps, "ranvier", [own])
    if kept and "ranvier" in steps:
        found["ranvier"] |= told(kept[0])
    modes: dict[str, list[str | None]] = {"eager": [None], "compile": ["reduce-overhead", "default"]}
    for peer in args.peers if start else ():
        ways = [lambda mode=mode: theirs(case, x, t, start, device, mode) for mode in modes[peer]]
        found[peer] = begun(steps, peer, ways)
    for name, each in medians(steps, args.seconds, wait).items():
        found[name]["milliseconds"] = each
    for peer in args.peers:
        if "losses" in found.get(peer, {}) and "losses" in found["ranvier"]:
            off = np.abs(np.subtract(found[peer]["losses"], found["ranvier"]["losses"]))
            found[peer]["losses_differ_by"] = float(off.max())
    if args.kernels and on_gpu and "ranvier" in steps:
        found["kernels"] = {name: kernels(step, wait) for name, step in steps.items()}
    return found


def show(found: dict[str, dict[str, Any]], peers: list[str]) -> dict[str, float]:
    """A table, and how many times ours the peers take, as geometric means."""
    rates: dict[str, list[float]] = {}
    for name, each in found.items():
        own = each.get("ranvier", {}).get("milliseconds")
        line = f"{name:12}" + ("  ranvier failed" if own is None else f"  {own['steps']:8.3f} {own['read']:8.3f} ms")
        for peer in peers:
            took = each.get(peer, {}).get("milliseconds")
            if took is None or own is None:
                line += f" | {peer} -"
                continue
            line += f" | {peer} {took['steps']:.3f} {took['read']:.3f}"
            for way in ("steps", "read"):
                rates.setdefault(f"{peer}, {way}", []).append(took[way] / own[way])
            line += f" ({took['steps'] / own['steps']:.2f} x, {took['read'] / own['read']:.2f} x)"
        problems = [p for who in ("ranvier", *peers) for p in each.get(who, {}).get("problems", ())]
        print(line + (f"  {each['error']}" if "error" in each else "") + "".join(f"\n    {p}" for p in problems))
        for who, lines in each.get("kernels", {}).items():
            print(f"  {who}", *lines, sep="\n    ")
    means = {key: math.exp(statistics.fmean(map(math.log, values))) for key, values in rates.items()}
    print("geometric means: " + ", ".join(f"{key} {value:.2f} x" for key, value in means.items()))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="0", help="the number of a GPU, or cpu")
    parser.add_argument("--only", nargs="+", default=[c.name for c in CASES], choices=[c.name for c in CASES])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--precision", choices=["f32", "tf32"], default="f32")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--output", "--json", type=Path)
    parser.add_argument("--patience", type=float, default=240.0, help="seconds after which a network is given up")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (case,) = [c for c in CASES if c.name == args.only[0]]
        with tempfile.TemporaryDirectory() as folder:
            configure(args.device, args.precision, folder)
            print(json.dumps(measured(case, args)))
        return
    found: dict[str, dict[str, Any]] = {}
    for name in args.only:
        command = [sys.executable, "-m", "bench.gpu.training", "--child", "--only", name, "--peers", *args.peers]
        command += ["--device", args.device, "--seconds", str(args.seconds), "--precision", args.precision]
        print(name, file=sys.stderr, flush=True)
        try:
            made = subprocess.run(
                command + ["--kernels"] * args.kernels,
                capture_output=True,
                text=True,
                timeout=args.patience,
            )
            found[name] = json.loads(made.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            found[name] = {"error": f"not done after {args.patience:g} s"}
        except (IndexError, ValueError):
            found[name] = {"error": made.stderr.strip()[-1500:]}
        if args.output:
            args.output.write_text(json.dumps({"cases": found, "options": _plain(args)}, indent=1))
    means = show(found, args.peers)
    if args.output:
        args.output.write_text(
            json.dumps({"cases": found, "geometric_means": means, "options": _plain(args)}, indent=1)
        )


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "child"}


if __name__ == "__main__":
    main()
