"""``ranvier cache``: the compiled kernels kept on disk."""

from __future__ import annotations

import time
from typing import Any

import click

from ranvier.cli.options import with_output
from ranvier.cli.render import Output, bytes_text, facts, table
from ranvier.codegen.llvm import cache, peaks

_DAY = 86400.0
_AGES = (("today", 1.0), ("this week", 7.0), ("this month", 31.0), ("longer ago", float("inf")))  # up to how many days


@click.command()
@click.option("--clear", is_flag=True, help="Delete everything in it.")
@with_output
def command(output: Output, clear: bool) -> None:
    """Show where compiled kernels are kept, how many there are and when they were used last.

    A kernel found there needs no compiling. The folder is shared by all processes, stays below its limit by itself,
    and may be deleted at any time.
    """
    data = cache_facts()
    if clear:
        data["deleted"] = delete_all()
    if output.json:
        output.emit(data)
    else:
        _show(output, data)


def cache_facts() -> dict[str, Any]:
    """Location, limit, and entries by the time of their last use."""
    disk = cache.current()
    data: dict[str, Any] = {"enabled": disk is not None, "location": None, "limit_bytes": cache.limit_bytes()}
    entries = [] if disk is None else disk.entries()
    now = time.time()
    ages = {name: {"entries": 0, "bytes": 0} for name, _ in _AGES}
    for entry in entries:
        name = next(name for name, days in _AGES if (now - entry.used) / _DAY <= days)
        ages[name]["entries"] += 1
        ages[name]["bytes"] += entry.nbytes
    return data | {
        "location": None if disk is None else str(disk.folder),
        "entries": len(entries),
        "bytes": sum(e.nbytes for e in entries),
        "by_last_use": ages,
    }


def delete_all() -> dict[str, int]:
    disk = cache.current()
    count, nbytes = (0, 0) if disk is None else disk.clear()
    peaks.forget()
    return {"entries": count, "bytes": nbytes}


def _show(output: Output, data: dict[str, Any]) -> None:
    if not data["enabled"]:
        output.show(f"kernels are not kept: {cache.SWITCH} is off, or there is no home folder")
        return
    if deleted := data.get("deleted"):
        output.show(f"deleted {deleted['entries']:,} kernels, {bytes_text(deleted['bytes'])}, from {data['location']}")
        return
    output.show(
        facts(
            [
                ("location", data["location"]),
                ("kernels", f"{data['entries']:,}"),
                ("size", f"{bytes_text(data['bytes'])} of at most {bytes_text(data['limit_bytes'])}"),
            ]
        )
    )
    if data["entries"]:
        rows = [(age, f"{f['entries']:,}", bytes_text(f["bytes"])) for age, f in data["by_last_use"].items()]
        output.show("", table(["!last used", ">kernels", ">size"], rows))
