"""Does a device work while the host does, and do two parts of the host work at the same time?

First two independent branches of six products, one on a simulated accelerator and one on the CPU, placed by the list of
providers and by cost: the second cuts the CPU's part where it waits. Then a branch of products on the CPU provider
beside one of normalisations that is left to the reference, with two threads: in waves each has one of them.

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
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration.lazy import calibrated
from ranvier.runtime.session import Session

SIZE, LENGTH, RUNS = 512, 6, 15
LARGE, PRODUCTS, NORMS = 1024, 5, 24
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


def products_and_norms(products: int, norms: int) -> Graph:
    graph = Graph("products and norms", opsets={"": 21})
    kind = TensorType(DType.float32, (LARGE, LARGE))
    x = graph.add_input("x", kind)
    numbers = np.random.default_rng(0).standard_normal((LARGE, LARGE)) / LARGE**0.5
    weights = graph.add_constant(ConstTensor.of(numbers.astype(np.float32)), "weights")
    ends = [x, x]
    for k in range(products):
        ends[0] = graph.add("MatMul", [ends[0], weights], version=13, name=f"product{k}").output
        ends[0].type = kind
    for k in range(norms):
        ends[1] = graph.add("Softmax", [ends[1]], version=13, name=f"norm{k}").output
        ends[1].type = kind
    total = graph.add("Add", ends, version=14, name="sum").output
    total.type = kind
    graph.outputs = [total]
    return graph


def host_session(policy: str) -> Session:
    config = SessionConfig(
        providers=("cpu", "reference"), policy=policy, pins={"norm*": "reference"}, threads=2, optimization="none"
    )
    if policy == "cost":  # as ``ranvier calibrate`` leaves them
        for name in ("cpu", "reference"):
            calibrated(REGISTRY.get(name), config)
    return Session(products_and_norms(PRODUCTS, NORMS), config)


def compare(made: Mapping[str, Session], size: int) -> None:
    """The time of every session, and how much faster the last is than the one before it."""
    x = np.random.default_rng(1).standard_normal((size, size)).astype(np.float32)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(RUNS + 3):
        for name, each in made.items():  # in turns: whatever else the machine does meets all alike
            started = time.perf_counter()
            each.run({"x": x})
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found[3:]) for name, found in times.items()}
    for name, seconds in medians.items():
        print(f"{name:35} {seconds * 1e3:6.1f} ms")
    first, second = list(medians.values())[-2:]
    least, less = [min(times[name]) for name in list(times)[-2:]]
    print(f"working at the same time is {first / second:.2f} times as fast, by the best runs {least / less:.2f} times")
    print(*list(made.values())[-1].report.together(), sep="\n", end="\n\n")
    for each in made.values():
        each.close()


def main() -> None:
    devices = {
        "both branches on the CPU": session("priority", TOGETHER),
        "apart, part after part": session("priority", APART),
        "apart, the device meanwhile": session("cost", APART),
    }
    compare(devices, SIZE)
    hosts = {"two providers, one after the other": host_session("priority"), "in waves": host_session("cost")}
    predicted = hosts["in waves"].report.predicted
    if predicted is not None:
        print(f"predicted {predicted.seconds * 1e3:.1f} ms instead of {predicted.serial * 1e3:.1f}")
    compare(hosts, LARGE)


if __name__ == "__main__":
    main()
