"""What a suite found: one document, written after every case, continued after an interruption, summed up at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ranvier.cli import peers
from ranvier.cli.files import write_text
from ranvier.cli.render import plain
from ranvier.cli.suites.measure import BASE, Settings
from ranvier.devices import machine_info
from ranvier.errors import InvalidConfig

FORMAT = 1
UNSTEADY = 1.25  # medians and quickest runs that disagree by more than this were disturbed
SLOW = 0.9  # a model below this speed relative to the base counts as lost
NARROW_ERROR = 0.05  # of the largest value: what a deep network in 16 bits may be off by
_WORST = 5


class Results:
    """The document of one suite; ``path`` is where it is kept, if anywhere."""

    def __init__(self, suite: str, settings: Settings, path: Path | None, *, resume: bool) -> None:
        self._path = path
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "suite": suite,
            "settings": plain(asdict(settings)),
            "machine": plain(machine_info()),
            "cases": [],
        }
        if resume and path is not None and path.exists():
            self._continue(path)

    def _continue(self, path: Path) -> None:
        try:
            earlier = json.loads(path.read_text())
            same = [earlier[key] == self.data[key] for key in ("format", "suite", "settings")]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidConfig(f"--resume: {str(path)!r} holds no results of a suite: {error}") from None
        if not all(same):
            raise InvalidConfig(f"--resume: {str(path)!r} was measured with other settings; take another file")
        self.data["cases"] = earlier["cases"]

    def has(self, name: str) -> bool:
        """Was this case measured to its end?"""
        return any(case["name"] == name for case in self.data["cases"])

    def add(self, case: Mapping[str, Any]) -> None:
        self.data["cases"].append(plain(case))
        self.save()

    def finish(self) -> dict[str, Any]:
        settings = self.data["settings"]
        self.data["summary"] = plain(summary(self.data["cases"], settings["threads"], settings["precision"]))
        self.save()
        return self.data

    def save(self) -> None:
        if self._path is not None:
            write_text(self._path, json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


# -- summing up -----------------------------------------------------------------------------------------------------


def summary(cases: Sequence[Mapping[str, Any]], threads: Iterable[int], precision: str = "float32") -> dict[str, Any]:
    """Per number of threads: geometric means of speeds, models that lose, the worst; then failures and errors."""
    return {
        "threads": [_at(cases, count) for count in threads],
        "models": len(cases),
        "failures": [
            {"case": case["name"], "threads": run["threads"], "runner": runner, "reason": reason}
            for case, run in _runs(cases)
            for runner, reason in run["failed"].items()
        ],
        "unmeasured": {case["name"]: case["problem"] for case in cases if "problem" in case},
        "wrong": [
            {"case": case["name"], "threads": run["threads"], "error": figures["error"]}
            for case, run in _runs(cases)
            for runner, figures in run["runners"].items()
            if runner == peers.SELF and _too_far(figures["error"], _allowed(case, run, precision))
        ],
    }


def _allowed(case: Mapping[str, Any], run: Mapping[str, Any], precision: str) -> float:
    """The largest error that is none: in 16 bits what the format explains, or what the peers have that use it too."""
    if precision == "float32":
        return float(case["tolerance"])
    others = [f["error"] for name, f in run["runners"].items() if name not in (peers.SELF, BASE)]
    return max(float(case["tolerance"]), NARROW_ERROR, *(1.5 * e for e in others if isinstance(e, float)), 0.0)


def _too_far(error: Any, tolerance: float) -> bool:
    return error is not None and not (isinstance(error, int | float) and error <= tolerance)


def _runs(cases: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((case, run) for case in cases for run in case.get("runs", ()))


def _at(cases: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    runs = [(case["name"], run["runners"]) for case, run in _runs(cases) if run["threads"] == threads]
    speeds: dict[str, dict[str, float]] = {}  # "ranvier/onnxruntime" -> case -> ratio
    for name, runners in runs:
        for runner, figures in runners.items():
            for other, ratio in figures["speed"].items():
                if runner == peers.SELF or other == BASE:
                    speeds.setdefault(f"{runner}/{other}", {})[name] = ratio["ratio"]
    ours = speeds.get(f"{peers.SELF}/{BASE}", {})
    ordered = sorted(ours.items(), key=lambda item: item[1])
    pairs = [(r[peers.SELF], r[BASE]) for _, r in runs if peers.SELF in r and BASE in r]
    return {
        "threads": threads,
        "speed": {pair: {"geometric_mean": geometric_mean(s.values()), "models": len(s)} for pair, s in speeds.items()},
        "best": geometric_mean(r[peers.SELF]["speed"][BASE]["best"] for _, r in runs if peers.SELF in r and BASE in r),
        "unsteady": sorted({name for name, runners in runs if _unsteady(runners)}),
        "groups": _by_group(cases, ours),
        "slower": [name for name, ratio in ordered if ratio < SLOW],
        "worst": [{"case": name, "ratio": ratio} for name, ratio in ordered[:_WORST]],
        "setup_cold": geometric_mean(_ratio(a["cold_setup_seconds"], b["setup_seconds"]) for a, b in pairs),
        "setup_cached": geometric_mean(_ratio(a["setup_seconds"], b["setup_seconds"]) for a, b in pairs),
        "errors": _mean_errors(runners for _, runners in runs),
        "more_memory": sum(a["peak_bytes"] > b["peak_bytes"] for a, b in pairs),
        "nodes": _nodes(runners for _, runners in runs),
        "load_average": max(
            (run["load_average"] or 0.0 for _, run in _runs(cases) if run["threads"] == threads), default=0.0
        ),
    }


def _mean_errors(runs: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Geometric means of the errors of each runner over the models for which all have one."""
    found: dict[str, list[float]] = {}
    for runners in runs:
        errors = {name: f["error"] for name, f in runners.items() if name != BASE}
        if errors and all(isinstance(e, float) and 0 < e < math.inf for e in errors.values()):
            for name, error in errors.items():
                found.setdefault(name, []).append(error)
    return {name: geometric_mean(errors) for name, errors in found.items()}


def _unsteady(runners: Mapping[str, Any]) -> bool:
    ratios = [s for figures in runners.values() for s in figures["speed"].values()]
    return any(max(s["ratio"] / s["best"], s["best"] / s["ratio"]) > UNSTEADY for s in ratios)


def _by_group(cases: Iterable[Mapping[str, Any]], speeds: Mapping[str, float]) -> dict[str, float | None]:
    groups: dict[str, list[float]] = {}
    for case in cases:
        if case["name"] in speeds:
            groups.setdefault(case["group"], []).append(speeds[case["name"]])
    return {group: geometric_mean(ratios) for group, ratios in groups.items()}


def _nodes(runs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Nodes by the provider that ran them, over all models."""
    found: dict[str, int] = {}
    for runners in runs:
        for provider, count in runners.get(peers.SELF, {}).get("nodes", {}).items():
            found[provider] = found.get(provider, 0) + count
    return found


def _ratio(a: float, b: float) -> float:
    return a / b if a > 0 and b > 0 else 1.0


def geometric_mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None
