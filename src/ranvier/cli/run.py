"""``ranvier run``: run a model once or a few times, and show or keep what comes out."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click

from ranvier.cli import values
from ranvier.cli.inputs import InputRequest, collect
from ranvier.cli.options import Setup, input_options, model_argument, session_options, with_output
from ranvier.cli.render import Output, seconds_text, table
from ranvier.runtime.session import Session


@click.command()
@model_argument
@input_options
@click.option("-o", "--save", "target", type=click.Path(path_type=Path), help="Write outputs: .npz, .npy or a folder.")
@click.option("--output", "names", multiple=True, metavar="NAME", help="Compute only this output; repeatable.")
@click.option("--print/--no-print", "shown", default=True, help="Show the outputs.  [default: print]")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="How often to run.")
@session_options
@with_output
def command(
    output: Output,
    model: str,
    feed: InputRequest,
    target: Path | None,
    names: tuple[str, ...],
    shown: bool,
    repeat: int,
    setup: Setup,
) -> None:
    """Run MODEL and show its outputs.

    \b
    ranvier run model.onnx                                     random values for all inputs
    ranvier run model.onnx -i data=cat.png --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225
    ranvier run model.onnx --inputs batch.npz -o outputs.npz
    ranvier run model.onnx -i tokens=random:1x12 -i mask=mask.npy --repeat 20

    Without any input all of them are random; with some, the others must be given too unless --random fills them.
    """
    session = setup.open(model, output)
    collected = collect(session.interface, feed, setup.dims(session.graph))
    if note := collected.note():
        output.note(note)
    results, seconds = _timed(session, collected.values, names, repeat, output)
    written = values.save(results, target) if target is not None else []
    latency = _latency(seconds)
    if output.json:
        output.emit(
            {
                "model": model,
                "inputs": {
                    name: {"source": collected.sources[name], "type": values.type_text(value)}
                    for name, value in collected.values.items()
                },
                "outputs": {name: values.describe(value) for name, value in results.items()} if shown else {},
                "latency_seconds": latency,
                "nodes_by_provider": session.report.by_provider(),
                "files": written,
            }
        )
        return
    if shown:
        _show(output, results)
    output.show(_latency_text(latency, session))
    for path in written:
        output.note(f"wrote {path}")


def _timed(
    session: Session, inputs: dict[str, Any], names: tuple[str, ...], repeat: int, output: Output
) -> tuple[dict[str, Any], list[float]]:
    seconds: list[float] = []
    results: dict[str, Any] = {}
    for _ in output.progress(range(repeat), "running"):
        started = time.perf_counter()
        results = session.run(inputs, names or None)
        seconds.append(time.perf_counter() - started)
    return results, seconds


def _latency(seconds: list[float]) -> dict[str, Any]:
    """The first run plans memory and touches the weights; the others say what a run costs."""
    later = seconds[1:]
    found: dict[str, Any] = {"runs": len(seconds), "first": seconds[0]}
    if later:
        found |= {"median": statistics.median(later), "min": min(later), "max": max(later)}
    return found


def _latency_text(latency: dict[str, Any], session: Session) -> str:
    where = ", ".join(f"{count} nodes on {name}" for name, count in session.report.by_provider().items()) or "no nodes"
    first = f"{seconds_text(latency['first'])} for the first run"
    if "median" not in latency:
        return f"{first}  ({where})"
    others = f"then {seconds_text(latency['median'])} (median of {latency['runs'] - 1})"
    return f"{first}, {others}  ({where})"


def _show(output: Output, results: dict[str, Any]) -> None:
    rows = []
    for name, value in results.items():
        facts = values.describe(value)
        numbers = [values.number_text(facts.get(key)) for key in ("min", "mean", "max")]
        rows.append([name, facts["type"], *numbers, values.head_text(value)])
    output.show(table(["output", "!type", ">min", ">mean", ">max", "values"], rows), "")
    for name, value in results.items():
        for row, best in enumerate(values.top_classes(value)):
            which = f" [{row}]" if value.size > value.shape[-1] else ""
            ranked = ", ".join(f"{k} ({p:.1%})" for k, p in best)
            output.show(f"most probable classes of {name}{which}: {ranked}", "")
