"""What one call costs: ``run()`` of a model with a single small node, here and in ONNX Runtime, in turns.

And what a plan adds to that: the same plan of one part, against its provider's kernel called directly with arrays made
for it; both make the output anew each time.

python bench/bench_overhead.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import ranvier as rv

ROUNDS, CALLS = 300, 200


def model() -> bytes:
    shape = [1, 16]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(made.SerializeToString())


def microseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def direct(session: rv.Session, x: np.ndarray) -> Callable[[], object]:
    """The provider's own kernel, made for these sizes, without a plan around it."""
    (part,) = session._parts
    types = {value: value.type for value in session.graph.values()}
    kernel = part.kernel.bind(types, {})
    assert kernel is not None and not kernel.workspace
    return lambda: kernel.call([x], [np.empty((1, 16), np.float32)], 0)


def main() -> None:
    source = model()
    inputs = {"x": np.ones((1, 16), np.float32)}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    peer = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    session, drop_in = rv.load(source), rv.InferenceSession(source)
    plan, values = session.bind(), [inputs["x"]]
    calls: dict[str, Callable[[], object]] = {
        "kernel of the provider": direct(session, inputs["x"]),
        "plan of one part": lambda: plan.run_directly(values),
        "ranvier": lambda: session.run(inputs),
        "ranvier as InferenceSession": lambda: drop_in.run(None, inputs),
        "onnxruntime": lambda: peer.run(None, inputs),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(microseconds(call))
    for name, times in found.items():
        print(f"{name:28} median {np.median(times):6.2f} µs  least {min(times):6.2f} µs")
    plain, planned = (min(found[name]) for name in ("kernel of the provider", "plan of one part"))
    print(f"{'added by the plan':28} {planned - plain:.2f} µs")


if __name__ == "__main__":
    main()
