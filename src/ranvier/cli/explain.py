"""``ranvier explain``: what the optimizer did, where every node runs, with the reasons, and what moves between."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ranvier.cli.explain_parts import show_captures, show_declines, show_parts, show_precision, show_transfers
from ranvier.cli.files import write_text
from ranvier.cli.options import Setup, model_argument, session_options, with_output
from ranvier.cli.render import Output, seconds_text, table
from ranvier.errors import InvalidConfig
from ranvier.formats import onnx as onnx_format
from ranvier.passes import default_passes
from ranvier.passes.manager import PassReport, passes_for
from ranvier.runtime.overriding import settle_defaults
from ranvier.runtime.report import NodeReport, Report, joined_text, precision_text, report_for

_GROUPED_FROM = 40  # nodes; beyond this alike placements are shown together


@click.command()
@model_argument
@click.option("--nodes/--groups", "every_node", default=None, help="One line for every node, or alike ones together.")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw the graph by provider into this file; - is stdout.")
@click.option("--html", "page", type=click.Path(path_type=Path), help="The same as a page with search and tables.")
@session_options
@with_output
def command(
    output: Output, model: str, every_node: bool | None, svg: Path | None, page: Path | None, setup: Setup
) -> None:
    """Show what the optimizer did to MODEL, where every node runs, and why; --svg and --html draw it."""
    streams = [str(target) for target in (svg, page)].count("-") + output.json
    if streams > 1:
        raise InvalidConfig("--svg -, --html - and --json: only one of them can go to stdout")
    with setup.open(model, output) as session:
        report = report_for(session, setup.dims(session.graph))
    report.passes = _estimated_passes(model, setup)
    data = report.to_dict()
    _draw(output, data, Path(model).name, svg, page)
    if output.json:
        output.emit({**data, "model": model})
    elif not streams:
        _show(output, report, data, every_node)


def _draw(output: Output, data: dict[str, Any], title: str, svg: Path | None, page: Path | None) -> None:
    from ranvier.cli.plots import placement, placement_page

    for target, draw in ((svg, placement.draw), (page, placement_page.page)):
        if target is None:
            continue
        with output.busy("drawing"):
            text = draw(data, title)
        if str(target) == "-":
            sys.stdout.write(text)
        else:
            write_text(target, text)
            output.note(f"wrote {target}")


def _show(output: Output, report: Report, data: dict[str, Any], every_node: bool | None) -> None:
    _show_passes(output, report)
    single = len(report.nodes) <= _GROUPED_FROM if every_node is None else every_node
    _show_placement(output, report, single=single)
    if report.precision != "float32":
        show_precision(output, report, every=single)
    show_parts(output, data, every=single)
    show_transfers(output, data, every=single)
    show_captures(output, data)
    show_declines(output, data)
    _show_summary(output, report)


def _estimated_passes(model: str, setup: Setup) -> list[PassReport]:
    """What the passes do and gain; a session does not estimate the latter, so they run once more."""
    config = setup.config()
    graph = onnx_format.read(model, limits=config.limits)
    settle_defaults(graph)
    return passes_for(config.optimization, default_passes(), config.disabled_passes).run(graph, config, estimated=True)


def _show_passes(output: Output, report: Report) -> None:
    output.heading(f"passes ({report.optimization}); gain: estimated time saved in a run")
    if not report.passes:
        output.show("none ran")
        return
    rows = []
    for step in report.passes:
        gain = f"{seconds_text(step.gain)}" if abs(step.gain) >= 1e-9 else ""
        rows.append(
            (step.name, seconds_text(step.seconds), step.changes or "", _nodes_text(step), gain, _counted(step.notes))
        )
    output.show(table(["!pass", ">time", ">changes", ">nodes", ">gain", "what it did"], rows))
    declined = [(step.name, reason, count) for step in report.passes for reason, count in step.declined.items()]
    if declined:
        output.heading("left alone")
        output.show(table(["!pass", "what, and why", ">times"], sorted(declined, key=lambda row: -row[2])))


def _nodes_text(step: PassReport) -> str:
    if step.nodes_before == step.nodes_after:
        return str(step.nodes_after)
    return f"{step.nodes_before} → {step.nodes_after}"


def _counted(notes: dict[str, int]) -> str:
    return ", ".join(f"{what} ×{count}" if count > 1 else what for what, count in notes.items())


def _show_placement(output: Output, report: Report, *, single: bool) -> None:
    output.heading("placement")
    if single:
        rows: list[tuple[Any, ...]] = [(n.op, n.name, n.provider, _why(n)) for n in report.nodes]
        output.show(table(["!operator", "node", "!provider", "why"], rows))
        return
    groups: dict[tuple[str, str, str], list[NodeReport]] = {}
    for node in report.nodes:
        groups.setdefault((node.op, node.provider, _why(node)), []).append(node)
    rows = [
        (op, len(nodes), provider, why, ", ".join(n.name for n in nodes[:2]) + (" …" if len(nodes) > 2 else ""))
        for (op, provider, why), nodes in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    output.show(table(["!operator", ">nodes", "!provider", "why", "for example"], rows))


def _why(node: NodeReport) -> str:
    reasons = [f"{provider} declined: {reason}" for provider, reason in node.declined] or ["first asked"]
    if node.note:
        reasons.insert(0, node.note)
    if node.origin:
        reasons.append(f"made by {node.origin}")
    return "; ".join(reasons)


def _show_summary(output: Output, report: Report) -> None:
    output.heading("summary")
    where = ", ".join(f"{count} on {name}" for name, count in report.by_provider().most_common()) or "none"
    output.show(
        f"{report.nodes_loaded} nodes loaded, {len(report.nodes)} after optimization: {where}",
        f"asked in this order: {', '.join(report.providers)}",
        ", ".join(f"{name} {seconds_text(s)}" for name, s in report.seconds.items()),
    )
    if report.constants:
        output.show(report.constants)
    if report.precision != "float32":
        output.show(precision_text(report))
    if report.tuned:
        output.show(f"tuned: {report.tuned} decisions about shapes taken by measurement")
    if report.joined:
        output.show(joined_text(report))
    gain = sum(step.gain for step in report.passes)
    if gain:
        output.show(f"estimated gain of all passes: {seconds_text(gain)} a run")
    for text in report.fallbacks:
        output.show(f"fallback: {text}")
    for text in report.problems:
        output.show(f"type inference: {text}")
