"""The tables of a suite, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.cli import peers
from ranvier.cli.render import Output, bytes_text, seconds_text, table
from ranvier.cli.suites.measure import BASE
from ranvier.cli.suites.results import SLOW, UNSTEADY


def show(output: Output, data: Mapping[str, Any]) -> None:
    """Every model at every number of threads, then the summary."""
    runners: Sequence[str] = data["settings"]["runners"]
    for threads in data["settings"]["threads"]:
        rows = [
            _row(case, run, runners)
            for case in data["cases"]
            for run in case.get("runs", ())
            if run["threads"] == threads
        ]
        output.heading(f"{_threads(threads)}: {len(rows)} models")
        output.show(table(_columns(runners), rows), "")
        if data["settings"]["precision"] != "float32":
            _show_errors(output, data, threads, runners)
        if len(runners) > 1:
            output.show(f"peak memory in the order {', '.join(runners)}")
    show_summary(output, data)


def _show_errors(output: Output, data: Mapping[str, Any], threads: int, runners: Sequence[str]) -> None:
    """How far each runner is from the base, which computes in float32: the price of the precision."""
    others = [name for name in runners if name != BASE]
    rows = []
    for case in data["cases"]:
        for run in case.get("runs", ()):
            if run["threads"] == threads:
                found = [run["runners"].get(name) for name in others]
                errors = ["" if f is None or f["error"] is None else _error(f["error"]) for f in found]
                angles = ["" if f is None or f["cosine"] is None else f"{f['cosine']:.6f}" for f in found]
                rows.append([case["name"], *errors, *angles])
    output.heading(f"{_threads(threads)}: errors in {data['settings']['precision']} against {BASE} in float32")
    columns = ["!model", *(f">{name}: error" for name in others), *(f">{name}: cosine" for name in others)]
    output.show(table(columns, rows), "")


def _columns(runners: Sequence[str]) -> list[str]:
    own = peers.SELF in runners
    against = (
        [f">× {other}" for other in runners if other != peers.SELF]
        if own
        else [f">{r} × {BASE}" for r in runners if r != BASE]
    )
    columns = ["!model", *(f">{name}" for name in runners), *against, ">error"]
    setup = f"set-up: cold | cached | {BASE}" if own else f"set-up: {' | '.join(runners)}"
    return [*columns, f">{setup}", ">peak memory", ">weights", *([">on cpu"] if own else [])]


def _row(case: Mapping[str, Any], run: Mapping[str, Any], runners: Sequence[str]) -> list[str]:
    found = run["runners"]
    own = found.get(peers.SELF)
    times = [seconds_text(found[r]["median_seconds"]) if r in found else "failed" for r in runners]
    if peers.SELF in runners:
        against = [_times(own["speed"].get(other) if own else None) for other in runners if other != peers.SELF]
        main, setup = own, _setup(own, found.get(BASE))
    else:
        against = [_times(found[r]["speed"].get(BASE) if r in found else None) for r in runners if r != BASE]
        main = next((found[r] for r in runners if r in found and r != BASE), None)
        setup = " | ".join(seconds_text(found[r]["setup_seconds"]) for r in runners if r in found)
    error = "" if main is None or main["error"] is None else _error(main["error"])
    memory = " | ".join(bytes_text(found[r]["peak_bytes"]) for r in runners if r in found)
    cells = [case["name"], *times, *against, error, setup, memory, bytes_text(case["weight_bytes"])]
    return [*cells, _share(own["nodes"]) if own else ""] if peers.SELF in runners else cells


def _setup(own: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> str:
    """Cold, cached, and the base's."""
    parts = [] if own is None else [own["cold_setup_seconds"], own["setup_seconds"]]
    if base is not None:
        parts.append(base["setup_seconds"])
    return " | ".join(seconds_text(s) for s in parts)


def _share(nodes: Mapping[str, int]) -> str:
    """The part of the nodes that compiled code runs."""
    return f"{nodes.get('cpu', 0) / max(sum(nodes.values()), 1):.0%}"


def _times(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['ratio']:.2f}"


def _error(error: float | str) -> str:
    return error if isinstance(error, str) else f"{error:.1e}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def show_summary(output: Output, data: Mapping[str, Any]) -> None:
    found = data["summary"]
    for name, reason in found["unmeasured"].items():
        output.show(f"{name} was not measured: {reason}")
    for each in found["failures"]:
        output.show(
            f"{each['runner']} failed on {each['case']} ({_threads(each['threads'])}): {_first(each['reason'])}"
        )
    for each in found["wrong"]:
        output.show(
            f"WRONG: {each['case']} ({_threads(each['threads'])}) differs from {BASE} by {_error(each['error'])}"
        )
    for at in found["threads"]:
        output.heading(_threads(at["threads"]))
        for pair, speed in at["speed"].items():
            runner, other = pair.split("/")
            output.show(
                f"{runner} has {speed['geometric_mean']:.3f} times the speed of {other} "
                f"(geometric mean of {speed['models']} models)"
            )
        if at["best"] is not None:
            output.show(f"by the quickest runs instead of medians: {at['best']:.3f} times {BASE}")
        if at["unsteady"]:
            output.show(
                f"UNSTEADY: for {len(at['unsteady'])} models medians and quickest runs disagree by more than "
                f"{UNSTEADY} times (load average up to {at['load_average']:.1f}); these figures are no results"
            )
        if len(at["groups"]) > 1:
            output.show("by group: " + ", ".join(f"{group} {mean:.3f}" for group, mean in at["groups"].items()))
        if at["worst"]:
            worst = ", ".join(f"{w['case']} {w['ratio']:.2f}" for w in at["worst"])
            output.show(f"{len(at['slower'])} models under {SLOW} times {BASE}; the lowest: {worst}")
        if data["settings"]["precision"] != "float32" and at["errors"]:
            means = ", ".join(f"{name} {mean:.1e}" for name, mean in at["errors"].items() if mean is not None)
            output.show(f"errors in {data['settings']['precision']} against {BASE} (geometric means): {means}")
        if at["setup_cold"] is not None:
            output.show(
                f"set-up against {BASE}'s: {at['setup_cold']:.2f} times cold, {at['setup_cached']:.2f} times cached; "
                f"more memory at the peak for {at['more_memory']} models"
            )
        if at["nodes"]:
            where = ", ".join(f"{count} on {name}" for name, count in sorted(at["nodes"].items()))
            output.show(f"nodes: {where}")


def _first(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
