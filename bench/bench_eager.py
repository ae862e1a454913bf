"""What lazy tensors cost: building and running a group of three operators that is compiled already, and its parts.

In turns with the same three operators in NumPy, which runs each by itself.

python bench/bench_eager.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import ranvier as rv
from ranvier.tensor.groups import Walk, groups

ROUNDS, CALLS = 600, 10
SHAPE = (16, 16)


def microseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def main() -> None:
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(SHAPE, np.float32) for _ in range(2))
    x, y = rv.Tensor(a), rv.Tensor(b)
    numpy = rv.numpy

    def build() -> rv.Tensor:
        return numpy.tanh(x * y + x)

    def step(p: rv.Tensor) -> rv.Tensor:
        return ((p @ x - y) ** 2).sum()

    derived = rv.value_and_grad(step)

    def train() -> None:
        _, slope = derived(x)
        (x - 0.1 * slope).numpy()

    walked = Walk([build()._expr])
    build().numpy(), train()
    compiled = groups.made
    (group,) = list(groups._groups.values())[:1]
    arrays = [leaf.array for leaf in walked.leaves]
    calls: dict[str, Callable[[], object]] = {
        "build three operators": build,
        "walk: group and key": lambda: Walk([build()._expr]),
        "run the compiled group": lambda: group.run(arrays),
        "build and run": lambda: build().numpy(),
        "the same in NumPy": lambda: np.tanh(a * b + a),
        "value, gradient and update": train,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(microseconds(call))
    for name, times in found.items():
        print(f"{name:28} median {np.median(times):7.2f} µs  least {min(times):7.2f} µs")
    print(f"groups compiled while measuring: {groups.made - compiled}")


if __name__ == "__main__":
    main()
