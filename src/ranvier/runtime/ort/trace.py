"""A recording as ONNX Runtime writes it: a list of events, for scripts that read its profiles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ranvier.errors import InvalidConfig, ProviderUnavailable
from ranvier.formats.files import write_files
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.ort.providers import ort_name
from ranvier.runtime.profile import Profiler


def ort_trace(profiler: Profiler) -> list[dict[str, Any]]:
    """What ``profiler.trace`` has, by ONNX Runtime's names: nodes are of the category Node, called after themselves and
    ``_kernel_time``, with ``op_name`` and ``provider``; whole runs, and parts whose nodes are told one by one, are of
    the category Session. So the times of the nodes add up. A kernel that stands for several nodes names them all."""
    events: list[dict[str, Any]] = profiler.trace()["traceEvents"]
    rows = [event for event in events if event["ph"] == "M"]
    timed = [event for event in events if event["ph"] != "M"]
    around = profiler._holding()
    found = [{**event, "cat": "__metadata", "ts": 0, "dur": 0} for event in rows]
    for k, event in enumerate(timed):
        args = event["args"]
        if args["op"] == "run":
            found.append({**event, "cat": "Session", "name": "model_run"})
        elif k < len(profiler.events) and id(profiler.events[k]) in around:
            found.append({**event, "cat": "Session"})
        else:
            told = {**args, "op_name": args["op"], "provider": _name(args["provider"])}
            found.append({**event, "cat": "Node", "name": f"{event['name']}_kernel_time", "args": told})
    return found


def save_ort_trace(profiler: Profiler, path: str | os.PathLike[str]) -> None:
    """Perfetto and chrome://tracing open it as well."""
    write_files({Path(path): [json.dumps(ort_trace(profiler)).encode()]})


def _name(provider: str) -> str:
    try:
        return ort_name(REGISTRY.get(provider))
    except (InvalidConfig, ProviderUnavailable):
        return provider  # it is gone


__all__ = ["ort_trace", "save_ort_trace"]
