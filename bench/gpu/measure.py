"""Times of one case by CUDA events: this runtime and PyTorch, eager and compiled, in turns on the same device tensors.

Without a GPU the same code runs on the processor, by the clock: that shows that it works, and nothing about speed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ranvier as rv
from bench.gpu.cases import Case, cases, weights_of
from bench.gpu.first_result import Phases
from bench.gpu.twins import tensor
from bench.gpu_timing import ceilings

OURS, EAGER, COMPILED = "ranvier", "torch", "torch.compile"
_GROUP_SECONDS = 8e-3  # of back-to-back calls that are timed together
Call = Callable[[], Any]


class Ceilings:
    """What the device was seen to do: bytes a second of a large copy, operations a second of a large product."""

    def __init__(self, device: torch.device, known: Mapping[str, float] | None = None) -> None:
        self.bandwidth, self.rate = 0.0, 0.0
        if known is not None:
            self.bandwidth, self.rate = known["bytes_per_second"], known["flops_per_second"]
            return
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.bandwidth, self.rate = ceilings()

    def floor(self, nbytes: float, flops: float) -> float | None:
        """Seconds that no version can be much below; None where nothing was measured."""
        return max(nbytes / self.bandwidth, flops / self.rate) if self.bandwidth else None


def timed(call: Call, count: int, device: torch.device) -> float:
    """Seconds of a call, of ``count`` back to back."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(count):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / count


def prepare_ours(path: Path, case: Case, inputs: Mapping[str, torch.Tensor], device: torch.device) -> tuple[Call, Any]:
    """A call of our session on tensors that stay on the device, and the session."""
    options = {"device": "cpu"} if device.type == "cpu" else {"device": device.index or 0}
    session = rv.load(path, providers=["cuda"], provider_options={"cuda": options}, fallback="off")
    return session.tied(inputs, dict(case.in_place)), session


def prepare_twin(path: Path, case: Case, device: torch.device) -> Any:
    """The module on the device, or None where PyTorch has no such model."""
    if case.twin is None:
        return None
    weights = weights_of(path)
    module = case.twin(weights).eval().to(device)
    assert next(weights, None) is None, f"{case.name}: the twin leaves weights over"
    return module


def reference(module: Any, case: Case, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results in float64, from the same numbers."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    module.double()
    with torch.inference_mode():
        found = module(*case.arguments({k: v.clone() for k, v in wide.items()}))
    results = [each.float() for each in (found if isinstance(found, tuple) else (found,))[: len(case.compared)]]
    return results


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    off = torch.linalg.vector_norm(found.float() - wanted) / torch.linalg.vector_norm(wanted)
    return float(off)


def measure(
    case: Case, folder: Path, limits: Ceilings, device: torch.device, *, seconds: float, compiled: bool
) -> dict[str, Any]:
    """The entry of one case: times of every runner, errors against float64, floor and goal."""
    path = case.model(folder)
    given = {name: tensor(np.asarray(x)).to(device) for name, x in case.inputs(np.random.default_rng(0)).items()}
    calls: dict[str, Call] = {}
    entry: dict[str, Any] = {"name": case.name, "kind": case.kind, "goal_ms": case.goal_ms, "failed": {}, "runners": {}}
    nbytes = path.stat().st_size
    beside = path.with_suffix(".data")
    nbytes = (nbytes + (beside.stat().st_size if beside.exists() else 0)) * case.reread
    nbytes += sum(x.nbytes for name, x in given.items() if name in case.in_place.values())
    entry |= {"bytes": nbytes, "flops": case.flops, "floor_ms": _ms(limits.floor(nbytes, case.flops))}
    wanted = _wanted(path, case, given, device, entry)
    try:
        with Phases() as phases:
            call, session = prepare_ours(path, case, given, device)
            found = call()
            _wait(device)
        entry |= {"first_result_seconds": phases.total, "first_result_phases": phases.seconds}
        entry["captures"] = [each.text for each in session.report.captures()]
        calls[OURS] = call
        if wanted:
            entry["runners"][OURS] = {"error": max(error(found[n], w) for n, w in zip(case.compared, wanted))}
    except Exception as problem:
        entry["failed"][OURS] = f"{type(problem).__name__}: {problem}"[:2000]
    module = None if case.alone else prepare_twin(path, case, device)
    if module is not None:
        _prepare_torch(module, case, given, device, compiled, calls, entry, wanted)
    for name, times in _turns(calls, device, seconds).items():
        entry["runners"].setdefault(name, {})["median_ms"] = statistics.median(times) * 1e3
        entry["runners"][name]["least_ms"] = min(times) * 1e3
    return entry


def _wanted(
    path: Path, case: Case, given: Mapping[str, torch.Tensor], device: torch.device, entry: dict[str, Any]
) -> list[torch.Tensor]:
    module = prepare_twin(path, case, device)
    if module is None:
        return []
    try:
        return reference(module, case, given)
    except torch.cuda.OutOfMemoryError as problem:
        entry["failed"]["reference"] = str(problem)[:200]
        return []


def _prepare_torch(
    module: Any,
    case: Case,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    compiled: bool,
    calls: dict[str, Call],
    entry: dict[str, Any],
    wanted: list[torch.Tensor],
) -> None:
    copies = {k: v.clone() for k, v in given.items()}
    for name in case.in_place.values():  # else a step that writes into what it is given is not captured
        torch._dynamo.mark_static_address(copies[name])
    arguments = case.arguments(copies)
    forms = {EAGER: module}
    if compiled:
        forms[COMPILED] = torch.compile(module, mode="reduce-overhead")
    for name, form in forms.items():

        def call(form: Any = form) -> Any:
            with torch.inference_mode():
                return form(*arguments)

        try:
            start = time.perf_counter()
            found = call()
            _wait(device)
            entry["runners"][name] = {"first_result_seconds": time.perf_counter() - start}
            results = found if isinstance(found, tuple) else (found,)
            if wanted:
                entry["runners"][name]["error"] = max(error(a, b) for a, b in zip(results, wanted))
            calls[name] = call
        except Exception as problem:
            entry["failed"][name] = f"{type(problem).__name__}: {problem}"[:500]


def _turns(calls: Mapping[str, Call], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Every runner in turns, each group of calls long enough to be timed well."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        _wait(device)
        counts[name] = max(1, min(200, round(_GROUP_SECONDS / max(1e-6, timed(call, 3, device)))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    until = time.perf_counter() + seconds * max(1, len(calls))
    names = list(calls)
    while calls and (time.perf_counter() < until or len(found[names[0]]) < 5):
        for name in names:
            found[name].append(timed(calls[name], counts[name], device))
        names.append(names.pop(0))  # nobody is always first
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def main() -> None:
    """``python -m bench.gpu.measure NAME OPTIONS``: the entry of one case as the last line."""
    name, how = sys.argv[1], json.loads(sys.argv[2])
    device = torch.device(how["device"])
    limits = Ceilings(device, how["ceilings"])
    (case,) = [each for each in cases() if each.name == name]
    try:
        entry = measure(case, Path(how["folder"]), limits, device, seconds=how["seconds"], compiled=how["compiled"])
    except Exception as problem:  # told like every other failure
        entry = {"name": name, "kind": case.kind, "failed": {"case": f"{type(problem).__name__}: {problem}"[:1000]}}
    print(json.dumps(entry), flush=True)
    os._exit(0)  # what torch and the driver do at the end has nothing to do with the result


if __name__ == "__main__":
    main()
