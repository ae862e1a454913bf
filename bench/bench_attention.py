"""Attention and recurrent layers, our kernels against ONNX Runtime's, one thread each.

    python bench/bench_attention.py [--seconds 2] [--only NAME] [--isa avx2]

Both run in turns in one process; the minimum of many short repetitions counts. Times are those of the thread on its
core, so that neighbours who take the core away do not count.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from ranvier import dtypes
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.attention import attention
from ranvier.codegen.llvm.isa import Isa, chosen
from ranvier.codegen.llvm.program import ABSOLUTE, NativeProgram, Placement
from ranvier.codegen.llvm.recurrent import Layer, Operands, Results, recurrent
from ranvier.codegen.storage import Storage, View

Array = np.ndarray[Any, Any]


@dataclass
class Contest:
    """The same computation twice, and the work in it."""

    name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    flops: float
    bytes: float


def aligned(array: Array) -> Array:
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    found = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def view_of(array: Array) -> View:
    storage = Storage("input", array.nbytes, array=array)
    return View.dense(storage, dtypes.of(array), array.shape)


def prepared(launches: Sequence[Launch], isa: Isa) -> Callable[[], object]:
    """Launches as one native call, with memory for whatever they mention."""
    keep: dict[Storage, Array] = {}
    for launch in launches:
        for buffer in launch.buffers:
            storage = getattr(buffer, "storage", None)
            if storage is None or storage in keep:
                continue
            given = storage.array
            if storage.kind == "temp" or given is None:
                given = aligned(np.zeros(storage.nbytes, np.uint8))
            elif storage.kind == "const":
                given = aligned(given)
            keep[storage] = given
    places = {storage: Placement(ABSOLUTE, array.ctypes.data) for storage, array in keep.items()}
    program = NativeProgram(launches, places, isa, bases=2)

    def call() -> object:
        program.run([], [], 0)
        return keep

    return call


def session(nodes: list[onnx.NodeProto], inputs: dict[str, Array], constants: dict[str, Array], output: str) -> Any:
    import onnxruntime as ort

    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    made = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: made.run([output], inputs)


def attention_contest(
    name: str, isa: Isa, batch: int, heads: int, kv_heads: int, queries: int, keys: int, size: int, *, causal: bool
) -> Contest:
    rng = np.random.default_rng(0)
    scale = 1 / np.sqrt(size)
    new = [(heads, queries), (kv_heads, keys), (kv_heads, keys)]
    if queries == keys:  # projections as they leave their products: [batch, time, heads * size]
        arrays = [aligned(rng.standard_normal((batch, t, h * size)).astype(np.float32)) for h, t in new]
        q, k, v = (_heads(view_of(a), h) for a, (h, _) in zip(arrays, new))
        out = aligned(np.zeros((batch, queries, heads * size), np.float32))
        target = _heads(view_of(out), heads)
        inputs = dict(zip(("q", "k", "v"), arrays))
        attributes = {"num_heads": heads, "unidirectional": int(causal)}
        nodes = [helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", **attributes)]
        peer = session(nodes, inputs, {}, "y")
    else:  # a cache of keys and values: the chain of products that exporters write
        arrays = [aligned(rng.standard_normal((batch, h, t, size)).astype(np.float32)) for h, t in new]
        q, k, v = (view_of(a) for a in arrays)
        out = aligned(np.zeros((batch, heads, queries, size), np.float32))
        target = view_of(out)
        group = heads // kv_heads
        turned = np.ascontiguousarray(arrays[1].swapaxes(2, 3))
        inputs = {"q": arrays[0].reshape(batch, kv_heads, group * queries, size), "k": turned, "v": arrays[2]}
        nodes = [
            helper.make_node("MatMul", ["q", "k"], ["s"]),
            helper.make_node("Mul", ["s", "scale"], ["scaled"]),
            helper.make_node("Softmax", ["scaled"], ["p"], axis=-1),
            helper.make_node("MatMul", ["p", "v"], ["y"]),
        ]
        peer = session(nodes, inputs, {"scale": np.array(scale, np.float32)}, "y")
    launches = attention(q, k, v, target, isa, scale=float(scale), causal=causal)
    ours = prepared(launches, isa)
    ours()
    np.testing.assert_allclose(out.reshape(-1), peer()[0].reshape(-1), rtol=1e-3, atol=1e-4)
    flops = 4.0 * batch * heads * queries * keys * size * (0.5 if causal and queries == keys else 1)
    return Contest(name, ours, peer, flops, float(sum(a.nbytes for a in arrays)))


def lstm_contest(name: str, isa: Isa, steps: int, batch: int, width: int, hidden: int, directions: int) -> Contest:
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Array:
        return np.asarray(rng.standard_normal(shape) / np.sqrt(hidden), np.float32)

    x = aligned(random(steps, batch, width))
    fixed = {"w": random(directions, 4 * hidden, width), "r": random(directions, 4 * hidden, hidden)}
    fixed["b"] = random(directions, 8 * hidden)
    direction = "bidirectional" if directions == 2 else "forward"
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=hidden, direction=direction)
    peer = session([node], {"x": x}, fixed, "y")
    out = aligned(np.zeros((steps, directions, batch, hidden), np.float32))
    w, r, b = (View.constant(a, dtypes.DType.float32) for a in fixed.values())
    launches = recurrent(Layer("LSTM", direction), Operands(view_of(x), w, r, b), Results(view_of(out)), isa)
    ours = prepared(launches, isa)
    ours()
    np.testing.assert_allclose(out, peer()[0], rtol=1e-3, atol=1e-4)
    weights = float(fixed["w"].size + fixed["r"].size)
    return Contest(name, ours, peer, 2.0 * steps * batch * weights, 4.0 * steps * fixed["r"].size)


def _heads(view: View, heads: int) -> View:
    batch, time_, width = view.shape
    split = view.reshaped((batch, time_, heads, width // heads))
    assert split is not None
    return split.transposed((0, 2, 1, 3))


def measured(contest: Contest, seconds: float) -> tuple[float, float]:
    """Best seconds of ours and of the peer, taken in turns."""
    best = [float("inf"), float("inf")]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for k, function in enumerate((contest.ours, contest.peer)):
            for _ in range(10):
                start = time.thread_time_ns()
                function()
                best[k] = min(best[k], (time.thread_time_ns() - start) / 1e9)
    return best[0], best[1]


def contests(isa: Isa) -> list[functools.partial[Contest]]:
    cases: list[tuple[str, tuple[int, ...], bool]] = [
        ("BERT-base 128", (1, 12, 12, 128, 128, 64), False),
        ("MiniLM 32", (1, 12, 12, 32, 32, 32), False),
        ("BERT-base 512", (1, 12, 12, 512, 512, 64), False),
        ("GPT-2 prefill 512 causal", (1, 12, 12, 512, 512, 64), True),
        ("ViT-B/16 197", (1, 12, 12, 197, 197, 64), False),
        ("head 128, 256 tokens", (1, 8, 8, 256, 256, 128), False),
        ("GPT-2 decode, past 512", (1, 12, 12, 1, 513, 64), False),
        ("Llama GQA decode, past 2048", (1, 32, 8, 1, 2048, 128), False),
    ]
    layers: list[tuple[str, tuple[int, ...]]] = [
        ("LSTM 100 steps, 128 to 256", (100, 1, 128, 256, 1)),
        ("LSTM the same, batch 8", (100, 8, 128, 256, 1)),
        ("LSTM bidirectional, batch 1", (100, 1, 128, 256, 2)),
        ("LSTM 100 steps, 64 to 64", (100, 1, 64, 64, 1)),
    ]
    return [
        *(functools.partial(attention_contest, n, isa, *shape, causal=causal) for n, shape, causal in cases),
        *(functools.partial(lstm_contest, n, isa, *shape) for n, shape in layers),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="time per contest")
    parser.add_argument("--only", default="", help="contests whose name contains this")
    parser.add_argument("--isa", default="", help="instruction set, the best one by default")
    options = parser.parse_args()
    table = Table("contest", "ours µs", "ONNX Runtime µs", "ratio", "GFLOP/s", "GB/s")
    for make in contests(chosen(options.isa)):
        if options.only.lower() not in str(make.args[0]).lower():
            continue
        contest = make()
        ours, peer = measured(contest, options.seconds)
        rates = (f"{contest.flops / ours / 1e9:.0f}", f"{contest.bytes / ours / 1e9:.1f}")
        table.add_row(contest.name, f"{ours * 1e6:.1f}", f"{peer * 1e6:.1f}", f"{peer / ours:.2f}", *rates)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
