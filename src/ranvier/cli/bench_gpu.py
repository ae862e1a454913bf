"""``ranvier bench --suite gpu``: models on a GPU in this runtime and in PyTorch, with the same weights."""

from __future__ import annotations

import datetime
import fnmatch
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import ranvier
from ranvier.cli import exit_codes
from ranvier.cli.options import with_output
from ranvier.cli.render import Output, table
from ranvier.cli.suites.catalogue import builder
from ranvier.cli.versions import ranvier_version
from ranvier.devices import detect_devices
from ranvier.errors import InvalidConfig, ProviderUnavailable

SELF, EAGER, COMPILED = "ranvier", "torch", "torch.compile"
TOLERANCE = {"fp16": 1e-2, "bf16": 6e-2}  # of deep networks in these types, against float64


@click.command()
@click.option("--suite", type=click.Choice(["gpu"]), required=True, help="The suite to measure.")
@click.option("--only", default="*", show_default=True, help="Models whose names fit, by commas, with * and ?.")
@click.option("--device", default="cuda:0", show_default=True, help="cpu tries the suite without a GPU.")
@click.option("--seconds", type=click.FloatRange(min=0.0), default=1.0, show_default=True, help="Per runner and model.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="Measure torch.compile too.")
@click.option("--built", type=click.Path(path_type=Path), help="Where the models are kept.")
@click.option("--output", "target", type=click.Path(path_type=Path), help="Write results here, after every model.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the speeds, as .svg or .png.")
@with_output
def command(
    output: Output,
    suite: str,
    only: str,
    device: str,
    seconds: float,
    compiled: bool,
    built: Path | None,
    target: Path | None,
    plot: Path | None,
) -> None:
    """Measure models on a GPU here and in PyTorch, eager and compiled, on the same weights and inputs.

    Medians by CUDA events of calls that have everything on the device, the runners in turns. Results are compared with
    PyTorch in float64. Exit code 1 when a model failed here or its results are off by more than its type explains.
    """
    measure, cases = _parts()
    torch = importlib.import_module("torch")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ProviderUnavailable("cuda", "torch sees no GPU; --device cpu tries the suite without one")
    chosen = [c for c in cases.cases() if any(fnmatch.fnmatch(c.name, p.strip()) for p in only.split(","))]
    if not chosen:
        raise InvalidConfig(f"no model of the suite fits {only}")
    ceilings = measure.Ceilings(place)
    data: dict[str, Any] = {"suite": suite, **_facts(torch, place), "cases": []}
    data["ceilings"] = {"bytes_per_second": ceilings.bandwidth, "flops_per_second": ceilings.rate}
    folder = built or cases.default_folder()
    how = {"device": device, "seconds": seconds, "compiled": compiled, "folder": str(folder)}
    for case in chosen:
        entry = _apart(case, {**how, "ceilings": data["ceilings"]})
        data["cases"].append(entry)
        output.note(_line(entry))
        if target is not None:
            target.write_text(json.dumps(data, indent=1) + "\n")
    data["summary"] = _summary(data["cases"])
    if target is not None:
        target.write_text(json.dumps(data, indent=1) + "\n")
    if plot is not None:
        from ranvier.cli.plots.gpu_speeds import draw

        draw(data).write(plot)
    if output.json:
        output.emit(data)
    else:
        _show(output, data)
    if data["summary"]["wrong"] or data["summary"]["failed"]:
        raise SystemExit(exit_codes.CHECK_FAILED)


def _apart(case: Any, how: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a case, from a process of its own: what a fault leaves of a GPU's context is no place for others.
    Its caches are empty, so that the time to a first result is what a new machine takes."""
    root = builder()
    assert root is not None
    command = [sys.executable, "-m", "bench.gpu.measure", case.name, json.dumps(how)]
    path = os.pathsep.join([str(Path(ranvier.__file__).parents[1]), str(root), os.environ.get("PYTHONPATH", "")])
    with importlib.import_module("bench.gpu.first_result").empty_caches() as environment:
        environment["PYTHONPATH"] = path
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    why = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("frame #")]
    told = "; ".join(why[-3:])[-1000:] or f"its process ended with {done.returncode}"
    return {"name": case.name, "kind": case.kind, "failed": {"case": told}}


def _parts() -> tuple[Any, Any]:
    """The checkout's scripts, which an installed package does not carry."""
    if importlib.util.find_spec("torch") is None:
        raise ProviderUnavailable("cuda", "the GPU suite needs torch: pip install 'ranvier[cuda]'")
    root = builder()
    if root is None:
        raise InvalidConfig("the GPU suite takes a checkout of the project: its models are built there")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("bench.gpu.measure"), importlib.import_module("bench.gpu.cases")


def _facts(torch: Any, place: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {"ranvier": ranvier_version(), "torch": torch.__version__},
        "device": str(place),
    }
    if importlib.util.find_spec("triton") is not None:
        found["versions"]["triton"] = importlib.import_module("triton").__version__
    if place.type == "cuda":
        found["device"] = torch.cuda.get_device_name(place)
        found["versions"]["cuda"] = torch.version.cuda
        found["driver"] = _driver()
    return found


def _driver() -> str:
    return next((gpu.driver for gpu in detect_devices().gpus if gpu.index == 0), "")


def _time(entry: Mapping[str, Any], runner: str) -> float | None:
    found = entry.get("runners", {}).get(runner, {}).get("median_ms")
    return None if found is None else float(found)


def _summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": [], "failed": [], "missed": [], "geometric_mean": {}}
    for peer in (EAGER, COMPILED):
        ratios = [b / a for c in cases if (a := _time(c, SELF)) and (b := _time(c, peer))]
        if ratios:
            found["geometric_mean"][peer] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    for case in cases:
        ours = _time(case, SELF)
        if ours is None:
            found["failed"].append(case["name"])
            continue
        off = case["runners"][SELF].get("error")
        if off is not None and not off <= TOLERANCE[case["kind"]]:
            found["wrong"].append(case["name"])
        goal = case["goal_ms"] or _time(case, COMPILED)
        if goal is not None and ours > goal:
            found["missed"].append(case["name"])
    return found


def _line(entry: Mapping[str, Any]) -> str:
    times = [
        f"{name} {found['median_ms']:.3f} ms"
        for name, found in entry.get("runners", {}).items()
        if "median_ms" in found
    ]
    failed = [f"{name} failed: {why.splitlines()[0][:200]}" for name, why in entry["failed"].items()]
    return f"{entry['name']}: {', '.join([*times, *failed])}"


def _show(output: Output, data: Mapping[str, Any]) -> None:
    rows = []
    for case in data["cases"]:
        ours = _time(case, SELF)
        texts = [f"{t:.3f}" if (t := _time(case, name)) is not None else "" for name in (SELF, EAGER, COMPILED)]
        ratios = [f"{t / ours:.2f}" if ours and (t := _time(case, name)) else "" for name in (EAGER, COMPILED)]
        goal = f"{case['goal_ms']:.2f}" if case.get("goal_ms") else "ahead"
        floor = f"{case['floor_ms']:.3f}" if case.get("floor_ms") else ""
        off = case.get("runners", {}).get(SELF, {}).get("error")
        rows.append([case["name"], case["kind"], *texts, *ratios, goal, floor, "" if off is None else f"{off:.1e}"])
    columns = [
        "!model",
        "!type",
        f">{SELF} ms",
        ">torch ms",
        ">compile ms",
        ">× torch",
        ">× compile",
        ">goal ms",
        ">floor ms",
    ]
    output.show(table([*columns, ">error"], rows))
    for peer, ratio in data["summary"]["geometric_mean"].items():
        output.show(f"geometric mean: {ratio:.2f} × {peer}")
    for kind in ("missed", "wrong", "failed"):
        if data["summary"][kind]:
            output.show(f"{kind}: {', '.join(data['summary'][kind])}")
