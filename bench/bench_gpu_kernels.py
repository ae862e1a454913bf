"""The hand-written kernels by themselves: checked against float64, then timed beside torch and against the floor.

    PYTHONPATH=src python -m bench.bench_gpu_kernels [--only w4a16 gemv] [--no-compile] [--seconds 150] [--output FILE]
    TRITON_INTERPRET=1 PYTHONPATH=src python -m bench.bench_gpu_kernels --tiny     # on a processor: results, no times

Results are poisoned before each check and inputs are random. A time is that of replaying a CUDA graph over as many
copies of the tensors as do not fit the caches, divided by their number; the floor is the larger of bytes over the speed
of a copy and operations over the rate of a large bf16 product (those of 8 bits count half), both measured first. Of
each kernel a few tiles are tried, the best is printed. A case that fails says so, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from bench.gpu_kernel_cases import FAMILIES, TINY, Case, Sizes
from bench.gpu_timing import ceilings, replayed


def over_copies(launch: Callable[[int], object], copies: int) -> Callable[[], None]:
    def all_of_them() -> None:
        for i in range(copies):
            launch(i)

    return all_of_them


def checked(case: Case, row: dict[str, Any]) -> list[Any]:
    """Candidates that run and are right."""
    good = []
    row["failed"] = {}
    for candidate in case.candidates:
        try:
            error = case.error(candidate)
        except Exception as problem:  # a tile that does not fit must not end the others
            row["failed"][str(candidate)] = f"{type(problem).__name__}: {problem}"[:300]
            continue
        row["error"] = max(row.get("error", 0.0), error) if error <= case.tolerance else row.get("error", 0.0)
        if error <= case.tolerance:
            good.append(candidate)
        else:
            row["failed"][str(candidate)] = f"error {error:.2e}, allowed {case.tolerance:.0e}"
    return good


def timed(case: Case, row: dict[str, Any], good: list[Any], compiled: bool) -> None:
    times = {}
    for candidate in good:
        run = over_copies(lambda i, c=candidate: case.launch(c, i), case.copies)  # type: ignore[misc]
        try:
            times[str(candidate)] = replayed(run, least=8.0) / case.copies
        except Exception as problem:
            row["failed"][str(candidate)] = f"{type(problem).__name__}: {problem}"[:300]
    row["candidates_us"] = {name: took * 1e3 for name, took in times.items()}
    if times:
        row["best"] = min(times, key=lambda name: times[name])
        row["us"] = times[row["best"]] * 1e3
        row["of_floor"] = row["floor_us"] / row["us"]
    for name, peer in case.peers.items():
        row[f"{name}, us"] = peer_time(peer, case.copies, row, name)
        if compiled and name in case.compiled:
            fast = torch.compile(peer, dynamic=False)
            row[f"{name}, compiled, us"] = peer_time(lambda _, fast=fast: fast(0), 1, row, name)  # type: ignore[misc]


def peer_time(peer: Callable[[int], object], copies: int, row: dict[str, Any], name: str) -> float | None:
    try:
        return replayed(over_copies(peer, copies), least=8.0) / copies * 1e3
    except Exception as problem:
        torch.cuda.synchronize()
        row["failed"][name] = f"{type(problem).__name__}: {problem}"[:300]
        return None


def printed(row: dict[str, Any]) -> None:
    if "us" in row:
        peers = "  ".join(f"{n[:-4]} {v:.2f}" for n, v in row.items() if n.endswith(", us") and v)
        line = f"{row['us']:8.2f} us, floor {row['floor_us']:8.2f}: {row['of_floor']:4.0%}  {row['best']}  {peers}"
    else:
        line = "right" if "error" in row and row.get("good") else "FAILED"
    print(f"{row['name']:58} error {row.get('error', float('nan')):.1e}  {line}")
    for name, why in row["failed"].items():
        print(f"    {name}: {why}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of families")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which cases are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    device = "cpu" if chosen.tiny else "cuda"
    record: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "cases": [], "left_out": []}
    speed, rate = 0.0, 0.0
    if not chosen.tiny:
        speed, rate = ceilings()
        record |= {"device": torch.cuda.get_device_name(0), "copy_TB_s": speed / 1e12, "bf16_TFLOP_s": rate / 1e12}
        print(f"{record['device']}: copy {speed / 1e12:.2f} TB/s, bf16 {rate / 1e12:.0f} TFLOP/s")
    began = time.monotonic()
    for family in FAMILIES:
        if chosen.only and not any(part in family.__name__ for part in chosen.only):
            continue
        for case in family(TINY if chosen.tiny else Sizes(), device, chosen.tiny):
            spent = time.monotonic() - began
            if spent > chosen.seconds:
                record["left_out"].append(case.name)
                continue
            row: dict[str, Any] = {"name": case.name, "bytes": case.nbytes, "flops": case.flops, "copies": case.copies}
            good = checked(case, row)
            row["good"] = len(good)
            if not chosen.tiny:
                row["floor_us"] = max(case.nbytes / speed, case.flops / rate) * 1e6
                timed(case, row, good, not chosen.no_compile and spent < 0.7 * chosen.seconds)
            printed(row)
            record["cases"].append(row)
            if chosen.output:
                chosen.output.write_text(json.dumps(record, indent=1))
    print(f"{time.monotonic() - began:.0f} s" + (f", left out: {record['left_out']}" if record["left_out"] else ""))
    if any(not row["good"] for row in record["cases"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
