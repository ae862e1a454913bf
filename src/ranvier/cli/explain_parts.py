"""The tables of ``ranvier explain`` about parts, transfers and reasons; from the same data as its pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ranvier.cli.plots.placement_text import Costs, Data, listed, transfer_size, transfer_title
from ranvier.cli.render import Output, seconds_text, table
from ranvier.graph.svg import one_line, short
from ranvier.runtime.report import Report

_MOST = 20  # lines of a table that need not be whole


def show_parts(output: Output, data: Data, *, every: bool) -> None:
    parts, nodes, costs = data["parts"], data["nodes"], Costs(data)
    predicted = costs.summary(dict.fromkeys(part["provider"] for part in parts))
    output.heading(f"parts; {predicted}" if predicted else "parts")
    rows: list[tuple[Any, ...]] = []
    for p, part in enumerate(parts):
        first = nodes[part["nodes"][0]]
        seconds = costs.part(part["nodes"])
        rows.append(
            (
                p,
                part["provider"],
                len(part["nodes"]),
                "" if seconds is None else seconds_text(seconds),
                first["name"] or first["op"],
                _names(part["inputs"]),
                _names(part["outputs"]),
            )
        )
    _table(output, [">part", "!provider", ">nodes", ">predicted", "first node", "reads", "gives"], rows, every)
    for text in data["together"]:
        output.say(text)


def show_precision(output: Output, report: Report, *, every: bool) -> None:
    """What nodes compute in and results are stored in, alike ones together unless all are asked for."""
    output.heading("precision")
    told = [node for node in report.nodes if node.precision]
    if every:
        rows: list[tuple[Any, ...]] = [(n.op, n.name, n.precision, n.stored, n.precision_why) for n in told]
        _table(output, ["!operator", "node", "computes in", "stored in", "why"], rows, every)
        return
    groups = Counter((n.op, n.precision, n.stored, n.precision_why) for n in told)
    rows = [(op, count, *rest) for (op, *rest), count in groups.most_common()]
    _table(output, ["!operator", ">nodes", "computes in", "stored in", "why"], rows, every)


def show_transfers(output: Output, data: Data, *, every: bool) -> None:
    transfers, costs = data["transfers"], Costs(data)
    if not transfers:
        return
    output.heading("transfers in a run")
    rows: list[tuple[Any, ...]] = []
    for transfer in transfers:
        seconds = costs.transfer(transfer)
        rows.append(
            (
                transfer_title(transfer),
                len(transfer["values"]),
                transfer_size(transfer),
                "" if seconds is None else seconds_text(seconds),
                _names(transfer["values"]),
            )
        )
    _table(output, ["!memories", ">values", ">bytes", ">predicted", "names"], rows, every)


def show_captures(output: Output, data: Data) -> None:
    """Runs that a device launches as a whole, or what forbids that."""
    if data["captures"]:
        output.heading("captured runs")
        rows = [(each["part"], each["provider"], each["text"]) for each in data["captures"]]
        output.show(table([">part", "!provider", "sizes, and how they are launched"], rows))


def show_declines(output: Output, data: Data) -> None:
    """Why providers did not take nodes, alike reasons together."""
    groups = data["declined"]
    if not groups:
        return
    output.heading("declined")
    rows = [
        (g["provider"], g["reason"], g["count"], listed(g["operators"], 4), ", ".join(g["examples"])) for g in groups
    ]
    output.show(table(["!provider", "reason", ">nodes", "operators", "for example"], rows))


def _names(names: Iterable[str]) -> str:
    return listed((short(one_line(name), 40) for name in names), 3)


def _table(output: Output, columns: list[str], rows: list[tuple[Any, ...]], every: bool) -> None:
    """The rows, only the first ones where not every one is asked for; a column without any cell is left out."""
    if not rows:
        output.show("none")
        return
    kept = [k for k in range(len(columns)) if any(row[k] != "" for row in rows)]
    shown = rows if every else rows[:_MOST]
    output.show(table([columns[k] for k in kept], [[row[k] for k in kept] for row in shown]))
    if len(shown) < len(rows):
        output.show(f"and {len(rows) - len(shown):,} more (--nodes lists all)")
