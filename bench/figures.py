"""Numbers that a benchmark measured, with the bounds they should stay under: as a table for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass
class Figure:
    """One measured number and the bound it should stay under."""

    name: str
    value: float
    unit: str
    target: float | None = None

    @property
    def holds(self) -> bool:
        return self.target is None or self.value < self.target


def show(figures: Sequence[Figure], title: str) -> None:
    table = Table(title=title)
    for column, justify in (("what", "left"), ("measured", "right"), ("target", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for f in figures:
        value = f"{f.value:.3g} {f.unit}" if f.unit else f"{f.value:,.0f}"
        target = "" if f.target is None else f"< {f.target:g} {f.unit}"
        table.add_row(f.name, value, target, "" if f.target is None else "ok" if f.holds else "missed")
    Console().print(table)


def main(description: str | None, measure: Callable[[int], list[Figure]], what: str = "") -> None:
    """The command line of a benchmark over a graph of so many nodes."""
    arguments = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    arguments.add_argument("--nodes", type=int, default=10_000)
    arguments.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = arguments.parse_args()
    figures = measure(options.nodes)
    if options.json:
        print(json.dumps({"nodes": options.nodes, "figures": [asdict(f) | {"holds": f.holds} for f in figures]}))
        return
    show(figures, f"graph of {options.nodes:,} nodes{what}")
