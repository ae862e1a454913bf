"""Layers of experts in few bits: ours against ONNX Runtime's QMoE, in turns in one process.

    python -m bench.bench_experts [--tokens 1 4 16 128] [--experts 32] [--choices 4] [--hidden 2048] [--inner 1024]
                                  [--bits 4] [--threads 1] [--seconds 2] [--json]

A layer is swiglu of two parts in pairs, as gpt-oss has it, codes in blocks of 32 with scales of float32, and tokens
that choose at random. Activations are taken as they are ("exact": accuracy level 0) or as codes of 8 bits ("int8":
level 4). Least times of all turns are compared. For one token it is said how fast weights were read: those of the
experts that were visited.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import ranvier as rv

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
BLOCK = 32
_BESIDE = 0.02  # seconds of a turn that do not count: threads of the other runtime still look for work
_IN_A_ROW = 8  # runs that do


class Layer:
    """The weights of all experts, and the model that they are in."""

    def __init__(self, experts: int, choices: int, hidden: int, inner: int, bits: int) -> None:
        self.experts, self.choices, self.hidden, self.inner, self.bits = experts, choices, hidden, inner, bits
        rng = np.random.default_rng(0)

        def linear(n: int, k: int) -> list[Array]:
            codes = rng.integers(0, 256, (experts, n, k * bits // 8), dtype=np.uint8)
            scales = rng.uniform(0.001, 0.01, (experts, n, k // BLOCK)).astype(np.float32)
            return [codes, scales, rng.standard_normal((experts, n)).astype(np.float32)]

        self.stored = [*linear(2 * inner, hidden), *linear(hidden, inner)]

    @property
    def visited_bytes(self) -> int:
        """Codes and scales that one token meets."""
        weights = 3 * self.hidden * self.inner * self.choices
        return weights * self.bits // 8 + 4 * weights // BLOCK

    def model(self, exact: bool) -> bytes:
        names = ["fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias"]
        attrs: dict[str, Any] = {
            "k": self.choices,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": 1.702,
            "activation_beta": 1.0,
            "swiglu_limit": 7.0,
            "normalize_routing_weights": 1,
            "expert_weight_bits": self.bits,
            "block_size": BLOCK,
        }
        if not exact:  # older releases do not know the attribute
            attrs["accuracy_level"] = 4
        node = helper.make_node("QMoE", ["x", "router", *names], ["y"], domain=MICROSOFT, **attrs)
        kind = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            [node],
            "experts",
            [
                helper.make_tensor_value_info("x", kind, ["tokens", self.hidden]),
                helper.make_tensor_value_info("router", kind, ["tokens", self.experts]),
            ],
            [helper.make_tensor_value_info("y", kind, ["tokens", self.hidden])],
            [onnx.numpy_helper.from_array(x, name) for name, x in zip(names, self.stored, strict=True)],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def measure(layer: Layer, exact: bool, threads: int, tokens: list[int], seconds: float) -> list[dict[str, Any]]:
    data = layer.model(exact)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = rv.load(data, providers=["cpu"], threads=threads)
    peer = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    found = []
    for count in tokens:
        rng = np.random.default_rng(count)
        feeds = [
            {
                "x": rng.standard_normal((count, layer.hidden)).astype(np.float32),
                "router": rng.standard_normal((count, layer.experts)).astype(np.float32),
            }
            for _ in range(8)
        ]
        one, other = next(iter(session.run(feeds[0]).values())), peer.run(None, feeds[0])[0]
        runners: list[Callable[[dict[str, Array]], Any]] = [session.run, lambda feed: peer.run(None, feed)]
        least = [float("inf"), float("inf")]
        end = time.perf_counter() + seconds
        for feed in itertools.cycle(feeds):
            if time.perf_counter() > end and least[1] < float("inf"):
                break
            for k, run in enumerate(runners):
                until = time.perf_counter() + _BESIDE
                while time.perf_counter() < until:
                    run(feed)
                for _ in range(_IN_A_ROW):
                    start = time.perf_counter()
                    run(feed)
                    least[k] = min(least[k], time.perf_counter() - start)
        found.append(
            {
                "tokens": count,
                "how": "exact" if exact else "int8",
                "threads": threads,
                "us": {"ours": least[0] * 1e6, "onnxruntime": least[1] * 1e6},
                "ratio": least[1] / least[0],
                "gbps": layer.visited_bytes / least[0] / 1e9 if count == 1 else None,
                "difference": float(np.abs(one - other).max() / np.abs(other).max()),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--only", choices=("exact", "int8"))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number of tokens")
    parser.add_argument("--json", action="store_true", help="at the end, instead of lines")
    given = parser.parse_args()
    layer = Layer(given.experts, given.choices, given.hidden, given.inner, given.bits)
    all_found = []
    if not given.json:
        print(f"{given.choices} of {given.experts} experts, {given.hidden} x {given.inner}, {given.bits} bits")
        print(f"{'tokens':>6} {'how':>6} {'thr':>4} {'ours us':>9} {'onnxruntime':>12} {'GB/s':>6} {'difference':>11}")
    for threads, exact in itertools.product(given.threads, (True, False)):
        if given.only and exact != (given.only == "exact"):
            continue
        for one in measure(layer, exact, threads, given.tokens, given.seconds):
            all_found.append(one)
            if not given.json:
                rate = "" if one["gbps"] is None else f"{one['gbps']:.1f}"
                print(
                    f"{one['tokens']:>6} {one['how']:>6} {threads:>4} {one['us']['ours']:>9.0f} "
                    f"{one['ratio']:>10.2f} x {rate:>6} {one['difference']:>11.0e}",
                    flush=True,
                )
    if given.json:
        print(json.dumps(all_found, indent=1))


if __name__ == "__main__":
    main()
