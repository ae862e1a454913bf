"""Loading safetensors against the library of the format: time and peak memory.

    python -m bench.bench_weights --gigabytes 2

Each loader runs in a process of its own, in turns; every number is summed, so a mapped file has to be read as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_TENSORS = 64


def write(path: Path, gigabytes: float) -> None:
    from ranvier.weights import save_safetensors

    each = int(gigabytes * 2**30 / _TENSORS / 4 / 1024)
    rng = np.random.default_rng(0)
    block = rng.standard_normal((each, 1024)).astype(np.float32)
    save_safetensors(path, {f"layer.{k}": block for k in range(_TENSORS)})


def load(which: str, path: str) -> dict[str, Any]:
    if which == "ranvier":
        from ranvier.weights import WeightLoader

        loader = WeightLoader(offline=True)
    else:
        import safetensors.numpy
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    arrays: Any = loader.load_many(path) if which == "ranvier" else safetensors.numpy.load_file(path)
    loaded = time.perf_counter() - start
    total = sum(float(array.sum(dtype=np.float64)) for array in arrays.values())
    looked = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    anonymous = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line
    )
    return {"load": loaded, "read": looked, "grown_mb": grown / 1024, "private_mb": anonymous / 1024, "total": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(load(*options.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        write(path, options.gigabytes)
        found: dict[str, list[dict[str, Any]]] = {"ranvier": [], "safetensors": []}
        for _ in range(options.rounds):
            for which, results in found.items():
                command = [sys.executable, "-m", "bench.bench_weights", "--one", which, str(path)]
                results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        assert len({r["total"] for results in found.values() for r in results}) == 1
    for which, results in found.items():
        middle = {key: statistics.median(r[key] for r in results) for key in ("load", "read", "grown_mb", "private_mb")}
        print(f"{which:12} load {middle['load']:7.3f} s  load and read {middle['read']:7.3f} s  "
              f"grown {middle['grown_mb']:7.0f} MB  private {middle['private_mb']:7.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
