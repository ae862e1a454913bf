"""``ranvier bench --suite cpu``: many models, this runtime and its peers, in one document and one picture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ranvier.cli import exit_codes, peers
from ranvier.cli.options import with_output
from ranvier.cli.render import Output, bytes_text, seconds_text, table
from ranvier.cli.suites import catalogue
from ranvier.cli.suites.catalogue import GROUPS, Case
from ranvier.cli.suites.measure import Settings, measure, prepare
from ranvier.cli.suites.results import Results
from ranvier.cli.suites.show import show
from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, RanvierError, nearest

SUITES = ("cpu", "gpu")  # the other has a command of its own


def _split(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _counts(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    parts = _split(ctx, option, text)
    if not parts or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,2", param=option)
    return tuple(dict.fromkeys(int(p) for p in parts))


@click.command()
@click.option("--suite", type=click.Choice(SUITES), required=True, help="The suite to measure.")
@click.option(
    "--models", callback=_split, default="all", show_default=True, help="Groups: real, light, built, int8, all."
)
@click.option("--only", callback=_split, metavar="PATTERN,…", help="Only models whose names fit, with * and ?.")
@click.option("--runners", callback=_split, default="ranvier,onnxruntime,openvino", show_default=True)
@click.option("--threads", callback=_counts, default="1,2", show_default=True, help="Numbers of threads, by commas.")
@click.option("--rounds", type=click.IntRange(min=1), help="Turns for every runner.  [default: as the seconds allow]")
@click.option("--seconds", type=click.FloatRange(min=0.0), default=4.0, show_default=True, help="Per runner and model.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Runs before the first turn.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0.1),
    default=120.0,
    show_default=True,
    help="Seconds a runner may take to load a model, or for a turn, before it is given up.",
)
@click.option("--precision", default="float32", show_default=True, help="Of this runtime and OpenVINO: bf16, fp16.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@click.option("--output", "target", type=click.Path(path_type=Path), help="Write results here, after every model.")
@click.option("--resume", is_flag=True, help="Keep what the file of --output already holds.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the speeds, as .svg or .png.")
@click.option("--built", type=click.Path(path_type=Path), help="Where models built here are kept.")
@click.option("--list", "only_list", is_flag=True, help="Show the models with their inputs, and measure nothing.")
@with_output
def command(
    output: Output,
    suite: str,
    models: tuple[str, ...],
    only: tuple[str, ...],
    runners: tuple[str, ...],
    target: Path | None,
    resume: bool,
    plot: Path | None,
    built: Path | None,
    only_list: bool,
    budget: float,
    **given: Any,
) -> None:
    """Measure many models in this runtime and in its peers.

    Every runner has a process of its own; they work one at a time, in turns, each round beginning with another one.
    A model or a runner that fails is reported and the others go on. Exit code 1 when this runtime failed on a
    model or gave other results than ONNX Runtime.
    """
    folder = built or catalogue.default_folder()
    chosen = catalogue.cases(_groups(models), only, folder)
    if only_list:
        _list(output, chosen)
        return
    if resume and target is None:
        raise InvalidConfig("--resume needs --output FILE: that is what it continues")
    given["precision"] = SessionConfig().updated(precision=given["precision"]).precision
    settings = Settings(_runners(runners, output), patience=budget, **given)
    results = Results(suite, settings, target, resume=resume)
    todo = [case for case in chosen if not results.has(case.name)]
    with output.busy("building models"):
        problem = catalogue.build(todo, folder)
    if problem:
        output.note(problem)
    with _progress(output, len(todo) * len(settings.threads)) as step:
        for case in todo:
            results.add(_measure_case(case, settings, step))
    data = results.finish()
    if plot is not None:
        from ranvier.cli.plots.speeds import draw

        draw(data).write(plot)
    if output.json:
        output.emit(data)
    else:
        show(output, data)
        for name in filter(None, (target, plot)):
            output.note(f"wrote {name}")
    found = data["summary"]
    if found["wrong"] or any(f["runner"] == peers.SELF for f in found["failures"]):
        raise SystemExit(exit_codes.CHECK_FAILED)


def _groups(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name != "all" and name not in GROUPS:
            raise InvalidConfig(f"--models: no group {name!r}{nearest(name, [*GROUPS, 'all'])}")
    return GROUPS if "all" in names else names


def _runners(names: tuple[str, ...], output: Output) -> tuple[str, ...]:
    """Those that are installed; one that does not exist is an error."""
    for name in names:
        if name not in peers.KNOWN:
            raise InvalidConfig(f"--runners: unknown runner {name!r}{nearest(name, peers.KNOWN)}")
    here = tuple(name for name in dict.fromkeys(names) if peers.installed(name))
    for name in names:
        if name not in here:
            output.note(f"{name} is not installed, left out (pip install 'ranvier[bench]')")
    if not here:
        raise InvalidConfig("--runners: none of them is installed")
    return here


def _measure_case(case: Case, settings: Settings, step: Callable[[str, str], None]) -> dict[str, Any]:
    """The entry of one model: figures for every number of threads, or the reason why there are none."""
    entry: dict[str, Any] = {"name": case.name, "group": case.group, "tolerance": case.tolerance}
    try:
        prepared = prepare(case, settings.seed)
    except (RanvierError, OSError, MemoryError) as error:
        for _ in settings.threads:
            step(case.name, "not measured")
        return {**entry, "problem": str(error)}
    entry |= {
        "weight_bytes": prepared.weight_bytes,
        "nodes": prepared.nodes,
        "inputs": {name: f"{x.dtype}{list(x.shape)}" for name, x in prepared.inputs.items()},
        "runs": [],
    }
    for threads in settings.threads:
        run = measure(prepared, threads, settings)
        entry["runs"].append(run)
        times = [f"{name} {seconds_text(f['median_seconds'])}" for name, f in run["runners"].items()]
        times += [f"{name} failed" for name in run["failed"]]
        step(f"{case.name} ×{threads}", ", ".join(times))
    return entry


@contextlib.contextmanager
def _progress(output: Output, total: int) -> Iterator[Callable[[str, str], None]]:
    """Called after each measurement: moves a bar on a terminal, writes a line elsewhere."""
    if output.preset == "quiet" or not sys.stderr.isatty():
        done = 0

        def line(name: str, result: str) -> None:
            nonlocal done
            done += 1
            output.note(f"[{done}/{total}] {name}: {result}")

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(name: str, result: str) -> None:
            bar.console.print(f"{name}: {result}", markup=False, highlight=False)
            bar.advance(task)

        yield advance


def _list(output: Output, chosen: list[Case]) -> None:
    rows: list[dict[str, Any]] = []
    for case in chosen:
        here = case.path is not None and case.path.is_file()
        rows.append(
            {
                "name": case.name,
                "group": case.group,
                "path": str(case.path) if case.path is not None else None,
                "bytes": case.path.stat().st_size if here and case.path is not None else None,
                "inputs": case.inputs,
                "missing": "" if here or case.group != "real" else case.missing,
            }
        )
    if output.json:
        output.emit({"cases": rows})
        return
    texts = [
        (
            row["name"],
            row["group"],
            bytes_text(row["bytes"]) if row["bytes"] is not None else "missing" if row["missing"] else "to be built",
            "; ".join(f"{name} {kind}" for name, kind in row["inputs"].items()) or "random",
        )
        for row in rows
    ]
    output.show(table(["!model", "!group", ">file", "inputs"], texts))
