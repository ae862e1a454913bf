"""Does a device work while the host does? Two independent branches of six products, one on a simulated accelerator and
one on the CPU, placed by the list of providers and by cost: the second cuts the CPU's part where it waits.

    python bench/bench_overlap.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.runtime.session import Session

SIZE, LENGTH, RUNS = 512, 6, 15
DEVICE = {"gflops": 100.0, "latency": 0.0, "bandwidth": 1e10}
APART = {"device*": "sim", "host*": "cpu", "sum": "cpu"}
TOGETHER = {"device*": "cpu", "host*": "cpu", "sum": "cpu"}


def two_branches() -> Graph:
    graph = Graph("branches", opsets={"": 21})
    kind = TensorType(DType.float32, (SIZE, SIZE))
    x = graph.add_input("x", kind)
    numbers = np.random.default_rng(0).standard_normal((SIZE, SIZE)) / SIZE**0.5
    weights = graph.add_constant(ConstTensor.of(numbers.astype(np.float32)), "weights")
    ends = []
    for name in ("device", "host"):
        value = x
        for k in range(LENGTH):
            value = graph.add("MatMul", [value, weights], version=13, name=f"{name}{k}").output
            value.type = kind
        ends.append(value)
    total = graph.add("Add", ends, version=14, name="sum").output
    total.type = kind
    graph.outputs = [total]
    return graph


def session(policy: str, pins: Mapping[str, str]) -> Session:
    """One thread here, so that there is a core for the process that plays the accelerator."""
    config = SessionConfig(
        providers=("sim", "cpu", "reference"),
        policy=policy,
        pins=dict(pins),
        threads=1,
        optimization="none",
        provider_options={"sim": DEVICE},
    )
    return Session(two_branches(), config)


def main() -> None:
    x = np.random.default_rng(1).standard_normal((SIZE, SIZE)).astype(np.float32)
    made = {
        "both branches on the CPU": session("priority", TOGETHER),
        "apart, part after part": session("priority", APART),
        "apart, the device meanwhile": session("cost", APART),
    }
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(RUNS + 3):
        for name, each in made.items():  # in turns: whatever else the machine does meets all alike
            started = time.perf_counter()
            each.run({"x": x})
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found[3:]) for name, found in times.items()}
    for name, seconds in medians.items():
        print(f"{name:30} {seconds * 1e3:6.1f} ms")
    first, second = list(medians.values())[1:]
    print(f"working at the same time is {first / second:.2f} times as fast")
    for each in made.values():
        each.close()


if __name__ == "__main__":
    main()
