"""Attention blocks whose Q, K and V are one step, against the same blocks with three products.

    python bench/bench_qkv.py [--only NAME] [--types f32 bf16] [--threads 1 2] [--seconds 3]

A block is a norm, the three projections, attention and the projection of its result beside a residual; a model is four
of them. Both forms run in turns in one process: the least of all times, and the median of the ratios of turns. One
thread is timed on its core, so that neighbours who take the core away do not count; several need a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

import ranvier as rv
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
BLOCKS = 4


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    hidden: int
    heads: int
    kv_heads: int
    bias: bool = True
    past: int = 0
    codes: bool = False  # weights of 8 bits, activations rounded to 8 bits as they come


CASES = (
    Case("BERT-base s128", 128, 768, 12, 12),
    Case("BERT-base s8", 8, 768, 12, 12),
    Case("BERT-base s512", 512, 768, 12, 12),
    Case("MiniLM s32", 32, 384, 12, 12),
    Case("ViT-B 197", 197, 768, 12, 12),
    Case("Llama-like 125 M, prefill 128", 128, 768, 12, 4, False),
    Case("Llama-like 125 M, decode", 1, 768, 12, 4, False, 128),
    Case("Llama-like 1 B, prefill 128", 128, 2048, 32, 8, False),
    Case("Llama-like 1 B, decode", 1, 2048, 32, 8, False, 128),
    Case("BERT-base s128, 8 bits", 128, 768, 12, 12, False, 0, True),
)


def model(case: Case) -> bytes:
    rng = np.random.default_rng(0)
    size = case.hidden // case.heads
    widths = (case.hidden, case.kv_heads * size, case.kv_heads * size)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, case.rows, case.hidden])]

    def const(name: str, array: Array) -> str:
        weights.append(numpy_helper.from_array(array, name))
        return name

    def projected(x: str, rows: int, width: int, name: str) -> str:
        if case.codes:
            codes = const(f"{name}.w", rng.integers(-127, 128, (rows, width)).astype(np.int8))
            nodes.append(helper.make_node("MatMulInteger", [f"{x}.codes", codes, f"{x}.zero"], [f"{name}.sums"]))
            nodes.append(helper.make_node("Cast", [f"{name}.sums"], [f"{name}.wide"], to=TensorProto.FLOAT))
            step = const(f"{name}.step", np.float32(1e-3).reshape(()))
            nodes.append(helper.make_node("Mul", [f"{x}.scale", step], [f"{name}.scale"]))
            nodes.append(helper.make_node("Mul", [f"{name}.wide", f"{name}.scale"], [name]))
            return name
        weight = const(f"{name}.w", (rng.standard_normal((rows, width)) / np.sqrt(rows)).astype(np.float32))
        nodes.append(helper.make_node("MatMul", [x, weight], [f"{name}.product" if case.bias else name]))
        if case.bias:
            bias = const(f"{name}.b", rng.standard_normal(width).astype(np.float32))
            nodes.append(helper.make_node("Add", [f"{name}.product", bias], [name]))
        return name

    def coded(x: str) -> None:
        if case.codes:
            nodes.append(helper.make_node("DynamicQuantizeLinear", [x], [f"{x}.codes", f"{x}.scale", f"{x}.zero"]))

    x = "x"
    for k in range(BLOCKS):
        scale = const(f"{k}.scale", np.ones(case.hidden, np.float32))
        nodes.append(helper.make_node("LayerNormalization", [x, scale], [f"{k}.norm"]))
        coded(f"{k}.norm")
        given = [projected(f"{k}.norm", case.hidden, w, f"{k}.{n}") for n, w in zip("qkv", widths)]
        if case.past:
            past = [f"{k}.past_k", f"{k}.past_v"]
            shape = [1, case.kv_heads, case.past, size]
            inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in past]
            given += ["", *past]
        nodes.append(
            helper.make_node("Attention", given, [f"{k}.seen"], q_num_heads=case.heads, kv_num_heads=case.kv_heads)
        )
        coded(f"{k}.seen")
        out = projected(f"{k}.seen", case.hidden, case.hidden, f"{k}.out")
        nodes.append(helper.make_node("Add", [x, out], [f"{k}.x"]))
        x = f"{k}.x"
    outputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, case.rows, case.hidden])]
    graph = helper.make_graph(nodes, "blocks", inputs, outputs, weights)
    made: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]).SerializeToString()
    return made


def measure(case: Case, precision: str, threads: int, seconds: float) -> tuple[float, float, float]:
    """Microseconds of a block with three products, and how many times as fast one step is: by the least times, and by
    the median of turns."""
    data = model(case)
    rng = np.random.default_rng(1)
    how = {"providers": ["cpu"], "threads": threads, "precision": precision}
    sessions = [rv.load(data, provider_options={"cpu": {"joined_products": on}}, **how) for on in (False, True)]
    given = {
        i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(np.float32)
        for i in onnx.load_model_from_string(data).graph.input
    }
    results = [next(iter(session.run(given).values())) for session in sessions]
    assert np.array_equal(*results), f"{case.name}: results differ"
    taken: tuple[list[float], list[float]] = ([], [])
    clock = time.thread_time if threads == 1 else time.perf_counter
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken[0]) < 3:
        for k in (0, 1) if len(taken[0]) % 2 else (1, 0):
            start = clock()
            sessions[k].run(given)
            taken[k].append(clock() - start)
    for session in sessions:
        session.close()
    ratio = statistics.median(a / b for a, b in zip(*taken))
    return min(taken[0]) * 1e6 / BLOCKS, min(taken[0]) / min(taken[1]), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="")
    parser.add_argument("--types", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    table = Table(title="Q, K and V as one step")
    for column in ("block", "type", "threads", "µs apart", "x by least", "x by median"):
        table.add_column(column, justify="left" if column in ("block", "type") else "right")
    for case in CASES:
        if given.only not in case.name:
            continue
        for precision in given.types[:1] if case.codes else given.types:
            for threads in given.threads:
                us, least, median = measure(case, precision, threads, given.seconds)
                kind = "int8" if case.codes else precision
                table.add_row(case.name, kind, str(threads), f"{us:.0f}", f"{least:.3f}", f"{median:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
