"""``ranvier profile``: where the time of a run goes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranvier.cli.files import write_text
from ranvier.cli.inputs import InputRequest, collect
from ranvier.cli.options import Setup, input_options, model_argument, session_options, with_output
from ranvier.cli.render import Output, bytes_text, seconds_text, table
from ranvier.devices import usable_cores
from ranvier.errors import RanvierError
from ranvier.runtime.profile import Event, KernelRecord, Profiler

if TYPE_CHECKING:
    from ranvier.codegen.llvm.peaks import Peaks


@click.command()
@model_argument
@input_options
@click.option("-o", "--trace", type=click.Path(path_type=Path), help="Write a trace for ui.perfetto.dev.")
@click.option("--timeline", type=click.Path(path_type=Path), help="Draw the median run over time: .svg or .png.")
@click.option(
    "--roofline", type=click.Path(path_type=Path), help="Draw rates against the machine's peaks: .svg or .png."
)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Runs to record.")
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Runs before them.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many slow nodes to list.")
@session_options
@with_output
def command(
    output: Output,
    model: str,
    feed: InputRequest,
    trace: Path | None,
    timeline: Path | None,
    roofline: Path | None,
    repeat: int,
    warmup: int,
    top: int,
    setup: Setup,
) -> None:
    """Run MODEL with the profiler and show where the time goes."""
    session = setup.open(model, output)
    collected = collect(session.interface, feed, setup.dims(session.graph))
    if note := collected.note():
        output.note(note)
    for _ in output.progress(range(warmup), "warming up"):
        session.run(collected.values)
    with session.profile() as profiler:
        for _ in output.progress(range(repeat), "profiling"):
            session.run(collected.values)
    records = profiler.records()
    pictures = {"trace": trace, "timeline": timeline, "roofline": roofline}
    data = {
        "model": model,
        "runs": repeat,
        **_times(profiler.events),
        "operators": [
            {
                "op": row.op,
                "provider": row.provider,
                "calls_per_run": row.calls / repeat,
                "seconds_per_run": row.seconds / repeat,
                "share": row.share,
            }
            for row in profiler.summary()
        ],
        "transfers": [
            {
                "from": way.source,
                "to": way.target,
                "transfers_per_run": way.transfers / repeat,
                "values_per_run": way.values / repeat,
                "bytes_per_run": way.bytes / repeat,
                "seconds_per_run": way.seconds / repeat,
            }
            for way in profiler.transfers()
        ],
        "slowest_nodes": _slowest(records, profiler.events, repeat)[:top],
        **{name: None if path is None else str(path) for name, path in pictures.items()},
    }
    _draw(profiler, records, Path(model).name, timeline, roofline, session.config.threads, output)
    if trace is not None:
        write_text(trace, json.dumps(profiler.trace()))
    if output.json:
        output.emit(data)
        return
    _show(output, data)
    for name, path in pictures.items():
        if path is not None:
            output.note(f"wrote {path}" + ("; open it in https://ui.perfetto.dev" if name == "trace" else ""))


def _draw(
    profiler: Profiler,
    records: Sequence[KernelRecord],
    title: str,
    timeline: Path | None,
    roofline: Path | None,
    threads: int | None,
    output: Output,
) -> None:
    from ranvier.cli.plots import roofline as rooflines
    from ranvier.cli.plots import timeline as timelines

    if timeline is not None:
        start, end = _median_run(profiler.runs())
        timelines.draw(title, records, start, end).write(timeline)
    if roofline is not None:
        counts = {1, threads or usable_cores()} if any(r.threads > 1 for r in records) else {1}
        with output.busy("measuring this machine's peaks"):
            roofs = {count: found for count in sorted(counts) if (found := _peaks(count)) is not None}
        rooflines.draw(title, records, roofs).write(roofline)


def _median_run(runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sorted(runs, key=lambda run: run[1] - run[0])[(len(runs) - 1) // 2]


def _peaks(threads: int) -> Peaks | None:
    """Measured rates of this machine, or None where no code can be generated for it."""
    from ranvier.codegen.llvm import isa, peaks

    try:
        return peaks.peaks(isa.host(), threads, refresh=True)
    except (RanvierError, RuntimeError, OSError):
        return None


def _times(events: Sequence[Event]) -> dict[str, float]:
    """Whole runs, and the part of them that no kernel accounts for."""
    runs = [(e.end - e.start) / 1e9 for e in events if e.op == "run"]
    kernels = sum((e.end - e.start) / 1e9 for e in events if e.op != "run")
    whole = sum(runs)
    # kernels inside bodies of control flow are counted again in the node around them
    return {
        "median_seconds": statistics.median(runs) if runs else 0.0,
        "outside_kernels_seconds": max(whole - kernels, 0.0) / max(len(runs), 1),
    }


def _slowest(records: Sequence[KernelRecord], events: Sequence[Event], runs: int) -> list[dict[str, Any]]:
    """Kernels by what they stand for, with their rates; the longest first."""
    from ranvier.cli.plots.roofline import points

    shapes = {(e.name, e.op): list(e.shapes) for e in events}
    return [
        {
            "name": p.label,
            "op": p.kernel,
            "provider": p.provider,
            "seconds_per_run": p.seconds / runs,
            "share": p.share,
            "gflops": p.gflops,
            "gbs": p.gbs,
            "inputs": shapes.get((p.label, p.kernel), []),
        }
        for p in points(records)
    ]


def _show(output: Output, data: dict[str, Any]) -> None:
    output.heading(f"by operator, per run (mean of {data['runs']})")
    rows = [
        (o["op"], o["provider"], f"{o['calls_per_run']:g}", seconds_text(o["seconds_per_run"]), f"{o['share']:.1%}")
        for o in data["operators"]
    ]
    output.show(table(["!operator", "!provider", ">calls", ">time", ">share"], rows))
    _show_transfers(output, data["transfers"])
    output.heading("slowest nodes")
    slow = [
        (
            n["name"],
            n["op"],
            seconds_text(n["seconds_per_run"]),
            f"{n['gflops']:.3g}" if n["gflops"] else "",
            f"{n['gbs']:.3g}" if n["gbs"] else "",
            ", ".join(n["inputs"]),
        )
        for n in data["slowest_nodes"]
    ]
    output.show(table(["node", "!operator", ">time", ">GFLOP/s", ">GB/s", "inputs"], slow))
    output.show(
        f"\n{seconds_text(data['median_seconds'])} a run (median), "
        f"{seconds_text(data['outside_kernels_seconds'])} of it outside kernels"
    )


def _show_transfers(output: Output, ways: Sequence[dict[str, Any]]) -> None:
    if not ways:
        return
    output.heading("transfers, per run")
    rows = [
        (
            f"{way['from']} → {way['to']}",
            f"{way['transfers_per_run']:g}",
            f"{way['values_per_run']:g}",
            bytes_text(way["bytes_per_run"]),
            seconds_text(way["seconds_per_run"]),
            f"{way['bytes_per_run'] / max(way['seconds_per_run'], 1e-9) / 1e9:.3g}",
        )
        for way in ways
    ]
    output.show(table(["!memories", ">transfers", ">values", ">bytes", ">time", ">GB/s"], rows))
