"""``ranvier bench``: this runtime and its peers, measured in the same run."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ranvier.cli import exit_codes, peers, values
from ranvier.cli.inputs import InputRequest, collect
from ranvier.cli.options import Setup, input_options, model_argument, session_options, with_output
from ranvier.cli.render import Output, seconds_text, table
from ranvier.cli.turns import Measured, RunnerFailed, Task, Worker, speed_ratio, take_turns
from ranvier.devices import usable_cores
from ranvier.errors import InvalidConfig, nearest
from ranvier.formats import onnx as onnx_format


class _Bench(click.Command):
    """``--suite`` makes it another command with options of its own: a suite has no one model and no one input."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        chosen = [b for a, b in itertools.pairwise([*args, ""]) if a == "--suite"]
        chosen += [a.partition("=")[2] for a in args if a.startswith("--suite=")]
        if "gpu" in chosen:
            from ranvier.cli.bench_gpu import command as gpu_suite

            return gpu_suite.make_context(info_name, args, parent, **extra)
        if chosen:
            from ranvier.cli.bench_suite import command as suite

            return suite.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Bench)
@click.option(
    "--suite", expose_value=False, metavar="cpu|gpu", help="Many models instead: see bench --suite cpu --help."
)
@model_argument
@input_options
@click.option("--peers", "wanted", default="auto", show_default=True, help="Names by commas, auto (installed) or none.")
@click.option("--rounds", type=click.IntRange(min=1), help="Turns for every runtime.  [default: as the seconds allow]")
@click.option("--seconds", type=click.FloatRange(min=0.0), default=3.0, show_default=True, help="Per runtime, in all.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Runs before the first turn.")
@click.option(
    "--tolerance", type=float, default=1e-3, show_default=True, help="Largest relative difference of outputs."
)
@session_options
@with_output
def command(
    output: Output,
    model: str,
    feed: InputRequest,
    wanted: str,
    rounds: int | None,
    seconds: float,
    warmup: int,
    tolerance: float,
    setup: Setup,
) -> None:
    """Measure MODEL in this runtime and in its peers.

    Every runtime has a process of its own and the same number of threads. They work one at a time, in turns, each
    round beginning with another one, so that whatever else the machine does meets all of them alike. Exit code 1
    when the outputs differ by more than the tolerance.
    """
    config = setup.config()
    chosen, missing = choose_peers(wanted)
    for name in missing:
        output.note(f"{name} is not installed, left out")
    threads = config.threads or usable_cores()
    graph = onnx_format.read(model, limits=config.limits)
    collected = collect(graph, feed, setup.dims(graph))
    if note := collected.note():
        output.note(note)
    options = setup.plain()
    with tempfile.TemporaryDirectory(prefix="ranvier-bench-") as folder, contextlib.ExitStack() as stack:
        task = Task(str(Path(model).resolve()), Path(folder), threads)
        task.write_inputs(collected.values)
        workers, failed = _start(chosen, task, options, stack, output)
        take_turns(
            workers,
            rounds=rounds,
            seconds=seconds,
            warmup=warmup,
            progress=lambda items: output.progress(items, "rounds"),
        )
        measured = {w.name: w.measured for w in workers}
        compared = _compare(task, measured, [v.name for v in graph.outputs], tolerance)
    data = {
        "model": model,
        "threads": threads,
        "inputs": {name: values.type_text(value) for name, value in collected.values.items()},
        "rounds": len(measured[peers.SELF].rounds),
        "runtimes": [_runtime_facts(m) for m in measured.values()],
        "comparisons": compared,
        "failed": failed,
        "not_installed": missing,
    }
    _show(output, data)
    if not all(c["agrees"] for c in compared):
        raise SystemExit(exit_codes.CHECK_FAILED)


def choose_peers(wanted: str) -> tuple[list[str], list[str]]:
    """Peers to measure, and those that were named and are not installed."""
    known = [name for name in peers.KNOWN if name != peers.SELF]
    if wanted == "none":
        return [], []
    names = known if wanted == "auto" else [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise InvalidConfig(f"--peers: unknown peer {name!r}{nearest(name, [*known, 'auto', 'none'])}")
    here = [name for name in names if peers.installed(name)]
    return here, [name for name in names if name not in here]


def _start(
    chosen: Sequence[str], task: Task, options: Mapping[str, Any], stack: contextlib.ExitStack, output: Output
) -> tuple[list[Worker], dict[str, str]]:
    """The processes, loaded; a peer that cannot run the model is left out with the reason, we ourselves may not."""
    workers: list[Worker] = []
    failed: dict[str, str] = {}
    for name in output.progress([peers.SELF, *chosen], "loading"):
        own = name == peers.SELF
        try:
            same = {"precision": options["precision"]} if "precision" in options else {}
            worker = Worker(name, peers.KNOWN[name][1], task, options if own else same)
        except RunnerFailed as error:
            if own:
                raise
            failed[name] = error.message
            output.note(f"{name} cannot run this model: {error.message.splitlines()[0]}")
            continue
        stack.callback(worker.close)
        workers.append(worker)
    return workers, failed


def _compare(
    task: Task, measured: Mapping[str, Measured], names: Sequence[str], tolerance: float
) -> list[dict[str, Any]]:
    ours = task.read_outputs(peers.SELF)
    found = []
    for name, theirs in measured.items():
        if name == peers.SELF:
            continue
        gaps = values.differences(ours, task.read_outputs(name), names)
        worst = max(gaps.values(), default=0.0)
        ratio = speed_ratio(measured[peers.SELF], theirs)
        found.append({"peer": name, **ratio, "largest_relative_difference": worst, "agrees": worst <= tolerance})
    return found


def _runtime_facts(measured: Measured) -> dict[str, Any]:
    return {
        "name": measured.name,
        "version": measured.version,
        "load_seconds": measured.load_seconds,
        "first_run_seconds": measured.first_seconds,
        **measured.statistics(),
    }


def _show(output: Output, data: dict[str, Any]) -> None:
    if output.json:
        output.emit(data)
        return
    compared = {c["peer"]: c for c in data["comparisons"]}
    rows = []
    for each in data["runtimes"]:
        against = compared.get(each["name"])
        rows.append(
            (
                f"{each['name']} {each['version']}",
                seconds_text(each["median_seconds"]),
                f"± {seconds_text(each['mad_seconds'])}",
                f"{seconds_text(each['p10_seconds'])} … {seconds_text(each['p90_seconds'])}",
                each["runs"],
                seconds_text(each["load_seconds"]),
                f"{against['ratio']:.2f}×" if against else "",
                f"{against['largest_relative_difference']:.1e}" if against else "",
            )
        )
    shapes = ", ".join(f"{name} {kind}" for name, kind in data["inputs"].items())
    output.heading(f"{Path(data['model']).name}: {data['threads']} threads, {data['rounds']} rounds, {shapes}")
    output.show(
        table(["!runtime", ">median", ">MAD", ">p10 … p90", ">runs", ">load", ">ranvier's speed", ">difference"], rows),
        "",
    )
    for c in data["comparisons"]:
        word = "as fast as" if c["ratio"] >= 1 else "the speed of"
        output.show(f"ranvier is {c['ratio']:.2f} times {word} {c['peer']} (rounds: {c['low']:.2f} to {c['high']:.2f})")
        if not c["agrees"]:
            gap = c["largest_relative_difference"]
            click.echo(f"error: the outputs differ from {c['peer']}'s by {gap:.3g} of their size", err=True)
