"""Ternary products against litespark-inference and ONNX Runtime's 2-bit MatMulNBits; a model of BitNet 2B4T's shape.

    python -m bench.bench_bitnet [--seconds 4] [--only products|model] [--threads 2] [--layers 30]

Products: one thread each, in turns in one process, several calls a turn; the shortest call counts, in time of the
thread on its core, so that neighbours who take the core away do not count. Every one starts from float tokens. Results
are held against integers worked out by NumPy: ours must be equal to them after the last rounding; ONNX Runtime scales
tokens by block and is only close. Calls follow each other, as in a loop over one layer; then, in columns of their own,
with as much other memory read before each as a layer of a large model finds its weights behind: what is read again and
again is partly found in the second-level cache. For one token, what a plain loop takes that only reads as many bytes
as our kernel, the same ones every time, stands beside. litespark-inference is left out where it is not installed (its
wheel is built with g++; with LITESPARK_BUILD_AMX=1 its matrix-unit kernel, which is off by default, is measured too; on
x86 without AVX-512 VBMI and VNNI it runs its kernels for AVX2, which it must have been built for:
LITESPARK_KERNEL_TIER=avx2 when it is installed).

The model: random weights, 128 tokens of prompt and steps of one token behind them; wall time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # litespark's threads, before it is loaded

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

import ranvier as rv
from bench.models.ternary import Decoder, Shape, bitnet
from ranvier.codegen.llvm import peaks
from ranvier.codegen.llvm.isa import host, host_features
from ranvier.codegen.llvm.ternary import form_of
from ranvier.codegen.storage import aligned_empty
from ranvier.ops.own.bitlinear import DOMAIN, pack_codes, quantized_tokens

Array = np.ndarray[Any, Any]
Runner = Callable[[], Array]
PRODUCTS = ((1, 2048, 2048), (1, 2560, 6912), (1, 6912, 2560), (128, 2048, 2048), (128, 2560, 6912))
SCALE = np.float32(0.5)
BLOCK = 64
READING = "only reading"
OTHER_BYTES = 16 << 20  # read between calls: more than a core's own caches hold


def one_layer(x: Array, op: str, n: int, stored: dict[str, Array], domain: str, **attrs: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *stored], ["y"], domain=domain, N=n, **attrs)],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (x.shape[0], n))],
        [numpy_helper.from_array(v, name) for name, v in stored.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def ours(x: Array, codes: Array) -> Runner:
    n, k = codes.shape[0], x.shape[1]
    model = one_layer(x, "BitLinear", n, {"codes": codes, "scale": np.asarray(SCALE)}, DOMAIN, K=k)
    session = rv.load(model, providers=["cpu"], threads=1)
    return lambda: np.asarray(session.run({"x": x})["y"])


def onnxruntime_bits(x: Array, codes: Array) -> Runner:
    import onnxruntime

    n, k = codes.shape[0], x.shape[1]
    blocks = k // BLOCK
    stored = {
        "b": codes.reshape(n, blocks, BLOCK // 4),
        "scales": np.full((n, blocks), SCALE),
        "zeros": np.full((n, -(-blocks // 4)), 0b01010101, np.uint8),
    }
    # level 4: tokens in 8 bits too, the fastest it has
    attrs = {"K": k, "bits": 2, "block_size": BLOCK, "accuracy_level": 4}
    model = one_layer(x, "MatMulNBits", n, stored, "com.microsoft", **attrs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: np.asarray(session.run(None, {"x": x})[0])


def litespark(x: Array, codes: Array) -> dict[str, Runner]:
    """Its kernels for one token, and for many: those take 64 at a time."""
    if not all(host_features().get(name) for name in ("avx512vnni", "avx512vbmi")):
        # its kernels for AVX-512 are built for both of these, and taken by any processor with AVX-512
        os.environ.setdefault("LITESPARK_KERNEL_TIER", "avx2")
    try:
        import litespark_inference.torchless.kernel as kernel
    except ImportError:
        return {}
    m, k = x.shape
    n = codes.shape[0]
    # at cache lines: its matrix-unit kernel takes half as long then
    tokens, steps = aligned_empty((m, k), np.dtype(np.int8)), np.empty(m, np.float32)
    out = aligned_empty((m, n), np.dtype(np.float32))

    def one() -> Array:
        step = kernel.quantize_activation(x[0], tokens[0])
        kernel.matmul_packed_m1(tokens[0], codes, float(SCALE), step, out[0])
        return out

    def many(multiply: Callable[..., Any], weights: Array) -> Runner:
        def run() -> Array:
            kernel.quantize_activation_batched(x, tokens, steps)
            for first in range(0, m, 64):
                part = slice(first, first + 64)
                multiply(tokens[part], steps[part], weights, float(SCALE), out[part])
            return out

        return run

    if m == 1:
        return {"litespark": one}
    try:
        kernel.quantize_activation_batched(x, tokens, steps)
    except AttributeError:  # its library for NEON has no code for several tokens
        return {}
    found = {"litespark": many(kernel.matmul_packed_mT, codes)}
    if kernel.has_amx():
        bytes_ = aligned_empty((k // 4, n, 4), np.dtype(np.int8))
        kernel.transpose_packed_to_amx_vnni(codes, bytes_, n, k)
        found["litespark, AMX"] = many(kernel.matmul_amx_mT_padded, bytes_)
    return found


def packed_bytes(m: int, k: int, n: int) -> int:
    """Of the weights as our kernel reads them."""
    return int(k * n * form_of(host(), m, k, n, k * n).bits / 8)


def in_turns(
    runners: dict[str, Runner], seconds: float, reading: Callable[[], float] | None = None
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """The shortest time of each, in seconds, called again and again, and with other memory read before each call; of
    ``reading``, which measures itself, the former alone."""
    again = dict.fromkeys([*runners, *([READING] if reading else [])], float("inf"))
    behind = dict.fromkeys(again, float("inf"))
    other = np.ones(OTHER_BYTES // 8)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in runners.items():
            run()  # what the others left in the caches is gone after it
            for best, between in ((again, False), (behind, True)):
                for _ in range(4):
                    if between:
                        other.sum()
                    start = time.thread_time()
                    run()
                    taken = time.thread_time() - start
                    if taken > 0:  # on some virtual machines the clock of a thread stands still now and then
                        best[name] = min(best[name], taken)
        for _ in range(4 if reading else 0):
            assert reading is not None
            again[READING] = min(again[READING], reading())
    return {name: (again[name], behind[name]) for name in again}


def products(seconds: float, console: Console) -> None:
    after = "behind other memory"
    columns = ("tokens x K x N", "who", "µs", "ours is faster by", "weights, GB/s", f"µs {after}", f"faster by {after}")
    table = Table(*columns, "largest difference, relative")
    rng = np.random.default_rng(0)
    for m, k, n in PRODUCTS:
        w, x = rng.integers(-1, 2, (n, k)).astype(np.int8), rng.standard_normal((m, k)).astype(np.float32)
        codes = pack_codes(w)
        tokens, by = quantized_tokens(x)
        exact = (tokens.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32) * (SCALE / by)
        runners = {"ours": ours(x, codes), "onnxruntime": onnxruntime_bits(x, codes), **litespark(x, codes)}
        errors = {name: float(np.abs(run() - exact).max() / np.abs(exact).max()) for name, run in runners.items()}
        assert errors["ours"] == 0, "our results are not the exact ones"
        nbytes = packed_bytes(m, k, n)
        times = in_turns(runners, seconds, peaks.read_loop(host(), nbytes, 1, again=True) if m == 1 else None)
        for name, (taken, behind) in times.items():
            rate = (nbytes if name in ("ours", READING) else codes.nbytes) / taken / 1e9
            row = [f"{taken * 1e6:.0f}", f"{taken / times['ours'][0]:.2f}", f"{rate:.1f}"]
            row += ["-"] * 3 if name == READING else [f"{behind * 1e6:.0f}", f"{behind / times['ours'][1]:.2f}"]
            table.add_row(f"{m} x {k} x {n}", name, *row, *([f"{errors[name]:.1g}"] if name in errors else []))
    console.print(table)


def model(shape: Shape, threads: int, seconds: float, console: Console) -> None:
    start = time.perf_counter()
    graph = bitnet(shape)
    session = rv.load(graph, providers=["cpu"], threads=threads)
    decoder = Decoder(session, shape)
    prompt = list(range(128))
    decoder.step(prompt, 0)
    decoder.step([1], len(prompt))
    console.print(f"{shape.weights / 1e9:.2f} G ternary weights, ready after {time.perf_counter() - start:.0f} s")
    table = Table("work", "shortest, ms", "median, ms", "tokens/s by the shortest", "by the median", "weights, GB/s")
    for what, tokens, before in (("prompt of 128", prompt, 0), ("one token", [1], len(prompt))):
        taken: list[float] = []
        while sum(taken) < seconds or len(taken) < 5:
            start = time.perf_counter()
            decoder.step(tokens, before)
            taken.append(time.perf_counter() - start)
        least, middle = min(taken), statistics.median(taken)
        rates = [f"{len(tokens) / t:.1f}" for t in (least, middle)]
        moved = f"{shape.weights / 4e9 / least:.1f}"
        table.add_row(what, f"{least * 1e3:.1f}", f"{middle * 1e3:.1f}", *rates, moved)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each product, and each kind of step")
    parser.add_argument("--only", choices=("products", "model"))
    parser.add_argument("--threads", type=int, default=2, help="of the model")
    parser.add_argument("--layers", type=int, default=30)
    args = parser.parse_args()
    console = Console()
    if args.only != "model":
        products(args.seconds, console)
    if args.only != "products":
        model(Shape(layers=args.layers), args.threads, args.seconds, console)


if __name__ == "__main__":
    main()
