"""Which kernels a run of the suite's models is made of, and what each takes.

PYTHONPATH=src python -m bench.gpu.kernels_of [resnet50_b1 bert* …]
"""

from __future__ import annotations

import fnmatch
import sys
from typing import Any

import numpy as np
import torch

from bench.gpu.cases import cases, default_folder
from bench.gpu.measure import prepare_ours
from bench.gpu.twins import tensor

_SHOWN = 14


def main() -> None:
    patterns = sys.argv[1:] or ["*"]
    device = torch.device("cuda:0")
    for case in cases():
        if not any(fnmatch.fnmatch(case.name, p) for p in patterns):
            continue
        path = case.model(default_folder())
        given = {name: tensor(np.asarray(x)).to(device) for name, x in case.inputs(np.random.default_rng(0)).items()}
        try:
            call, session = prepare_ours(path, case, given, device)
        except Exception as problem:
            print(f"{case.name}: {type(problem).__name__}: {problem}")
            continue
        print(f"{case.name}: {_told(session)}")
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        events = [e for e in profiler.key_averages() if e.device_time_total]
        total, count = sum(e.device_time_total for e in events), sum(e.count for e in events)
        print(f"  {count} kernels, {total / 1e3:.3f} ms in them")
        for each in sorted(events, key=lambda e: -e.device_time_total)[:_SHOWN]:
            print(f"  {each.device_time_total:9.1f} us {each.count:4}  {each.key[:110]}")


def _told(session: Any) -> str:
    parts = session._parts
    return "; ".join(line for part in parts for line in part.kernel.graph_report())


if __name__ == "__main__":
    main()
