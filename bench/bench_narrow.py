"""What the choice between float32 and bfloat16 is made with (``providers/cpu/narrow/rates.py``), measured.

Convolutions and products in both types, each alone with its operands near: operations a second in float32, how many
times as fast bfloat16 is, and what the numbers in use predict. Then bytes a second of adding a number to a tensor, for
tensors that fit into a core's cache and others. Processor time of one thread counts, the least of many calls in turns:
neighbours on the machine only take turns with it.

    python bench/bench_narrow.py [name …] [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from bench_conv import BF16, F32, LAYERS, Layer, ours
from ranvier.codegen.llvm.isa import Isa, chosen
from ranvier.providers.cpu.narrow.rates import depthwise_pace, window_pace

SMALL = (
    *(Layer(f"1x1 {a}-{b}", 64, a, b) for a, b in ((8, 8), (8, 16), (8, 24), (8, 32), (16, 8), (24, 8), (32, 16))),
    *(Layer(f"1x1 {a}-{b}", 17, a, b) for a, b in ((16, 40), (16, 88), (32, 104), (32, 200), (40, 16), (200, 32))),
    *(Layer(f"dw 3x3 {c}", 48, c, c, 3, 1, c) for c in (8, 16, 24, 32, 48)),
    *(Layer(f"dw 5x5 {c}", 17, c, c, 5, 1, c) for c in (24, 40, 88, 200)),
    Layer("3x3 8-8", 64, 8, 8, 3),
    Layer("3x3 16-16", 64, 16, 16, 3),
    Layer("3x3 16-32 s2", 64, 16, 32, 3, 2),
    Layer("3x3 32-3", 128, 32, 3, 3),
    Layer("3x3 64 in 8 groups", 32, 64, 64, 3, 1, 8),
    Layer("1x1 480-120 of a point", 1, 480, 120),
)


def least(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    found = dict.fromkeys(calls, float("inf"))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or float("inf") in found.values():
        for name, call in calls.items():
            start = time.thread_time()
            call()
            found[name] = min(found[name], time.thread_time() - start)
    return found


def predicted(layer: Layer, isa: Isa) -> float:
    if layer.group == layer.cin:
        wide, narrow = depthwise_pace(BF16, layer.cout)
    else:
        plain = layer.kernel == 3 and layer.stride == layer.group == 1 and min(layer.cin, layer.cout) >= 16
        sizes = layer.kernel**2, layer.cin // layer.group, layer.cout // layer.group
        wide, narrow = window_pace(isa, BF16, *sizes, transformed=plain)
    return narrow / wide


def convolutions(names: list[str], isa: Isa, seconds: float) -> None:
    rng = np.random.default_rng(0)
    print(f"{'layer':26} {'f32 µs':>9} {'bf16 µs':>9} {'GFLOP/s':>8} {'gain':>6} {'predicted':>9}")
    for layer in (*LAYERS, *SMALL):
        if names and not any(n in layer.name for n in names):
            continue
        x, w, bias = layer.tensors(rng)
        runs = {kind.name: ours(layer, x, w, bias, isa, True, kind) for kind in (F32, BF16)}
        found = least({name: call for name, (call, _) in runs.items()}, seconds)
        wide, narrow = found["float32"], found["bfloat16"]
        rate = 2.0 * runs["float32"][1].size * w[0].size / wide / 1e9
        times = f"{wide * 1e6:9.1f} {narrow * 1e6:9.1f} {rate:8.0f}"
        print(f"{layer.name:26} {times} {wide / narrow:6.2f} {predicted(layer, isa):9.2f}", flush=True)


def bytes_a_second(seconds: float) -> None:
    for size in (1 << 18, 1 << 20, 1 << 23, 1 << 25):
        x = np.ones(size // 4, np.float32)
        y = np.zeros_like(x)
        taken = least({"add": lambda x=x, y=y: np.add(x, 1, out=y)}, seconds)["add"]  # type: ignore[misc]
        print(f"{size >> 10:6} KiB read, as many written: {2 * size / taken / 1e9:5.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of layer names")
    parser.add_argument("--seconds", type=float, default=0.5)
    given = parser.parse_args()
    convolutions(given.names, chosen(""), given.seconds)
    bytes_a_second(given.seconds)


if __name__ == "__main__":
    main()
