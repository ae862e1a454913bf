"""A decode step of language models, one token after a past of some: how near it comes to reading its weights once.

    python -m bench.bench_decode [--models llama_125m] [--precision f32 bf16] [--threads 1 2] [--json]

Ours, ONNX Runtime (float32) and a loop that only reads as many bytes, with as many threads, are called in turns; the
median of the time of a turn and of the least count. "of reading" is what the reading loop takes of our step: one means
that nothing but weights costs anything. The past is read too and counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from rich.console import Console
from rich.table import Table

import ranvier as rv
from bench.models import make
from ranvier.codegen.llvm import peaks
from ranvier.codegen.llvm.isa import available

Array = np.ndarray[Any, Any]
ITEM = {"f32": 4, "bf16": 2}


def feeds(model: onnx.ModelProto, past: int) -> dict[str, Array]:
    """One new token after ``past`` others."""
    rng = np.random.default_rng(0)
    sizes = {"batch": 1, "sequence": 1, "past_sequence": past, "past_sequence + sequence": past + 1}
    made: dict[str, Array] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or sizes[d.dim_param] for d in kind.shape.dim]
        if value.name == "attention_mask":
            made[value.name] = np.ones(shape, np.int64)
        elif kind.elem_type == onnx.TensorProto.INT64:
            made[value.name] = np.full(shape, past if value.name == "position_ids" else 5, np.int64)
        else:
            made[value.name] = rng.standard_normal(shape).astype(np.float32)
    return made


def weights_read(model: onnx.ModelProto) -> int:
    """Elements of weights that a step multiplies by; of tables it looks up a row only."""
    looked_up = {name for node in model.graph.node if node.op_type in ("Gather", "Slice") for name in node.input[:1]}
    return sum(
        int(np.prod(each.dims))
        for each in model.graph.initializer
        if len(each.dims) == 2 and each.name not in looked_up and each.data_type == onnx.TensorProto.FLOAT
    )


def peer(data: bytes, threads: int, given: dict[str, Array]) -> Callable[[], object]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(["logits"], given)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, precision: str, threads: int, past: int, seconds: float) -> dict[str, Any]:
    model = make(name)
    given, data = feeds(model, past), model.SerializeToString()
    nbytes = weights_read(model) * ITEM[precision] + sum(x.nbytes for x in given.values() if x.dtype == np.float32)
    session = rv.load(data, providers=["cpu"], threads=threads, precision=precision)
    reading = peaks.read_loop(available()[0], nbytes, threads)
    other = peer(data, threads, given)
    calls: dict[str, Callable[[], float]] = {
        "ours": lambda: timed(lambda: session.run(given, outputs=["logits"])),
        "onnxruntime": lambda: timed(other),
        "reading": reading,
    }
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {each: [] for each in calls}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for each, call in calls.items():
            taken[each].append(call())
    rounds = list(zip(*taken.values()))
    session.close()
    return {
        "model": name,
        "precision": precision,
        "threads": threads,
        "MB": nbytes / 1e6,
        "ms": statistics.median(taken["ours"]) * 1e3,
        "least_ms": min(taken["ours"]) * 1e3,
        "of_reading": statistics.median(read / ours for ours, _, read in rounds),
        "of_reading_least": min(taken["reading"]) / min(taken["ours"]),
        "onnxruntime": statistics.median(other / ours for ours, other, _ in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["llama_125m", "gpt2_small"])
    parser.add_argument("--precision", nargs="+", default=["f32", "bf16"], choices=sorted(ITEM))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--past", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    table = Table(title=f"decode, one token after {given.past}")
    for column in ("model", "weights", "threads", "read MB", "ms", "least", "of reading", "by least", "x onnxruntime"):
        table.add_column(column, justify="left" if column in ("model", "weights") else "right")
    rows = []
    for name in given.models:
        for precision in given.precision:
            for threads in given.threads:
                r = measure(name, precision, threads, given.past, given.seconds)
                rows.append(r)
                times = f"{r['ms']:.2f}", f"{r['least_ms']:.2f}"
                shares = f"{100 * r['of_reading']:.0f} %", f"{100 * r['of_reading_least']:.0f} %"
                table.add_row(
                    name, precision, str(threads), f"{r['MB']:.0f}", *times, *shares, f"{r['onnxruntime']:.2f}"
                )
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(table)


if __name__ == "__main__":
    main()
