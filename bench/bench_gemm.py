"""Matrix products on one core: ours against NumPy's BLAS and ONNX Runtime, and against the peak of the FMA units.

    python bench/bench_gemm.py [--rounds 10] [--only bert] [--isa avx2] [--without avxvnni]
                                [--types bf16 int8] [--json]

Times are CPU time of the calling thread (everything here runs on it), the least of three or more repetitions; how much
faster ours is, is the median over rounds in which the peers and ours run one after the other. That is what stays
comparable on a machine that others use too. The peak is what a loop of
register-only FMAs reaches between the runs of the same case. ``--without`` leaves extensions of the instruction set
unused, as on processors that lack them.

With ``--types`` the same products with constant weights are made of narrower numbers (bf16, f16, int8 with int32 sums)
beside those of float32; the peak is then that of the matrix unit, where there is one, taken before and after the runs
of every round, and the share of it the median over calm rounds: those in which it was about the same both times, and
not half of the highest, which is what somebody at work on the other half of the core leaves of it. Up to four times as
many rounds are made until enough were calm; the table says how many were, and with fewer than three all count. The peer
is OpenVINO told to compute in bfloat16.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ranvier.codegen.llvm import compiler, peaks
from ranvier.codegen.llvm.amx.micro import suits
from ranvier.codegen.llvm.builder import Module, vector
from ranvier.codegen.llvm.gemm import matmul, pack_b
from ranvier.codegen.llvm.integer import integer_matmul, pack_codes
from ranvier.codegen.llvm.isa import OPTIONAL, Isa, available, with_extensions
from ranvier.dtypes import DType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.codegen.harness import Runner, aligned, view_of

Array = np.ndarray[Any, Any]
STEADY = 0.94  # of the higher peak of a round is the lower one where nothing changed meanwhile …
ALONE = 0.7  # … and of the highest of all where nobody shared the core: clocks alone make less of a difference
FEWEST_CALM = 3  # rounds that a median is taken of
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class Case:
    """A product: batch, M, K, N; B constant (packed before) or an input; B given as its transpose or not."""

    group: str
    m: int
    k: int
    n: int
    batch: int = 1
    constant: bool = True
    transposed: bool = False
    rounds: dict[str, list[float]] = field(default_factory=dict)  # least seconds of every round, per runner
    peak: float = 0.0  # of FMAs, measured between the runs of this case
    tile_peaks: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # before and after every round

    @property
    def name(self) -> str:
        lead = f"{self.batch}x" if self.batch > 1 else ""
        kind = "" if self.constant else " input B" + ("^T" if self.transposed else "")
        return f"{lead}{self.m}x{self.k}x{self.n}{kind}"

    @property
    def best(self) -> dict[str, float]:
        return {name: min(found) for name, found in self.rounds.items()}

    def ratio(self, peer: str) -> float:
        """How much longer the peer takes: the median over rounds, as both share each round's disturbances."""
        return statistics.median(p / o for p, o in zip(self.rounds[peer], self.rounds["ours"]))

    def calm(self, kind: str, top: float) -> list[bool]:
        """Whether the matrix unit was left alone, for every round."""
        return [min(both) >= max(STEADY * max(both), ALONE * top) for both in self.tile_peaks[kind]]

    def share(self, kind: str, top: float) -> float:
        """Of the matrix unit's peak: the median over calm rounds, each against the peak before and after it."""
        calm = self.calm(kind, top)
        rounds = zip(self.rounds[kind], self.tile_peaks[kind], calm if sum(calm) >= FEWEST_CALM else [True] * len(calm))
        shares = (self.flops / t / 1e9 / max(both) for t, both, counts in rounds if counts)
        return statistics.median(shares)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n


CASES = [
    *(Case("square", s, s, s) for s in (256, 512, 1024, 2048)),
    *(Case("square", s, s, s, constant=False) for s in (256, 1024)),
    Case("bert", 128, 768, 768),
    Case("bert", 128, 768, 3072),
    Case("bert", 128, 3072, 768),
    *(Case("rows", m, 768, 768) for m in (2, 4, 8, 16, 32)),
    Case("rows", 16, 768, 768, constant=False),
    Case("vector", 1, 768, 3072),
    Case("vector", 1, 4096, 4096),
    Case("vector", 1, 512, 1000),
    Case("vector", 1, 768, 3072, constant=False),
    Case("vector", 1, 768, 3072, constant=False, transposed=True),
    Case("narrow", 3136, 64, 16),
    Case("narrow", 3136, 16, 24),
    Case("narrow", 1000, 64, 40),
    Case("narrow", 1000, 64, 100),
    Case("attention", 128, 64, 128, 12, constant=False, transposed=True),
    Case("attention", 128, 128, 64, 12, constant=False),
    Case("attention", 1, 64, 512, 12, constant=False, transposed=True),
    Case("attention", 1, 512, 64, 12, constant=False),
    *(Case("tiny", s, s, s, 2000, constant=False) for s in (2, 4, 8, 16)),
]


LARGE = [Case("large", 512, 4096, 4096), Case("large", 197, 768, 3072)]  # of narrower types only


def fresh(*shape: int) -> Array:
    array = aligned(math.prod(shape) * 4).view(np.float32).reshape(shape)
    array[:] = np.random.default_rng(1).standard_normal(shape)
    return array


def ours(case: Case, a: Array, b: Array, isa: Isa) -> Callable[[], None]:
    out = fresh(case.batch, case.m, case.n)
    views = view_of(a), view_of(b), view_of(out, "output")
    right = pack_b(b[0], isa, rows_hint=case.m) if case.constant else views[1]
    bound = {views[0].storage: a, views[1].storage: b, views[2].storage: out}
    run = Runner(matmul(views[0], right, views[2], isa), isa, bound)
    run()
    wanted = a[:4].astype(np.float64) @ b[:4]
    error = float(np.max(np.abs(out[:4] - wanted)))
    assert error < 1e-4 * math.sqrt(case.k) * 8, f"{case.name}: off by {error}"
    return run


NARROW = {"bf16": DType.bfloat16, "f16": DType.float16}


def narrow(case: Case, a: Array, b: Array, isa: Isa, kind: str) -> Callable[[], None]:
    """The product of a constant B in another type: floats of 16 bits to float32, or codes to exact int32."""
    dtype = NARROW.get(kind, DType.uint8).numpy
    left = np.round(a * 32 + 128).clip(0, 255).astype(dtype) if kind == "int8" else a.astype(dtype)
    rows = aligned(left.nbytes).view(left.dtype).reshape(left.shape)  # as if a layer before had made them
    rows[:] = left
    out = fresh(case.batch, case.m, case.n).view(np.int32 if kind == "int8" else np.float32)
    views = view_of(rows, "temp"), view_of(out, "output")
    bound = {views[0].storage: rows, views[1].storage: out}
    if kind == "int8":
        weights = np.round(b[0] * 32).clip(-128, 127).astype(np.int8)
        launches = integer_matmul(views[0], pack_codes(weights, isa, rows_hint=case.m), views[1], isa)
    else:
        packed = pack_b(b[0], isa, rows_hint=case.m, dtype=NARROW[kind])
        launches = matmul(views[0], packed, views[1], isa)
        if packed.storage.array is not None:  # as a session has them: where they were packed, which is in large pages
            bound[packed.storage] = packed.storage.array
    return Runner(launches, isa, bound)


def openvino_peer(case: Case, a: Array, b: Array) -> Callable[[], None] | None:
    """OpenVINO on one thread, told to compute in bfloat16; input and output are float32."""
    try:
        import openvino as ov
        from openvino import opset13 as ops
    except ImportError:
        return None
    given = ops.parameter(list(a.shape), np.float32)
    model = ov.Model([ops.matmul(given, ops.constant(np.ascontiguousarray(b[0])), False, False)], [given])
    config = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "1"}
    request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
    request.set_input_tensor(ov.Tensor(a, shared_memory=True))
    return lambda: request.infer()  # type: ignore[no-any-return]


def tile_loop(isa: Isa, kind: str) -> Callable[[], float] | None:
    """10^9 operations a second of the matrix unit on tiles that stay in it; None where there is none."""
    if kind not in TILE_PEAKS or not suits(isa, TILE_PEAKS[kind], TILE_PEAKS[kind]):
        return None
    return peaks.tile_loop(isa, TILE_PEAKS[kind])


TILE_PEAKS = {"bf16": DType.bfloat16, "int8": DType.int8}


def numpy_peer(a: Array, b: Array) -> Callable[[], None]:
    out = np.empty((*a.shape[:-1], b.shape[-1]), np.float32)
    return lambda: np.matmul(a, b, out=out)  # type: ignore[no-any-return]


def onnx_peer(case: Case, a: Array, b: Array) -> Callable[[], None] | None:
    try:
        import onnxruntime as ort
    except ImportError:
        return None
    from onnx import TensorProto, helper, numpy_helper

    def value(name: str, shape: tuple[int, ...]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes, inputs, weights = [], [value("a", a.shape)], []
    given = b.swapaxes(-1, -2) if case.transposed else b
    right = "b"
    if case.constant:
        weights.append(numpy_helper.from_array(np.ascontiguousarray(b[0]), "b"))
    else:
        inputs.append(value("b", given.shape))
        if case.transposed:
            nodes.append(helper.make_node("Transpose", ["b"], ["t"], perm=[0, 2, 1]))
            right = "t"
    nodes.append(helper.make_node("MatMul", ["a", right], ["y"]))
    graph = helper.make_graph(nodes, "g", inputs, [value("y", (*a.shape[:-1], case.n))], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    held = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x)) for x in (a, given)]
    held.append(ort.OrtValue.ortvalue_from_shape_and_type((*a.shape[:-1], case.n), np.float32))
    binding.bind_ortvalue_input("a", held[0])
    if not case.constant:
        binding.bind_ortvalue_input("b", held[1])
    binding.bind_ortvalue_output("y", held[2])
    return lambda: session.run_with_iobinding(binding)  # type: ignore[no-any-return]


def peak_loop(isa: Isa) -> Callable[[], float]:
    """GFLOP/s of FMAs that touch nothing but registers."""
    chains, lanes = 12, isa.lanes(4)
    kind, step = vector("float", lanes), isa.vector_bytes
    module = Module()
    f = module.function("peak", [("i64", "n"), ("ptr", "memory")])
    memory = f.args["memory"]
    sums = [f.var(kind, f.load(kind, f.gep(memory, k * step))) for k in range(chains)]
    x, y = (f.load(kind, f.gep(memory, (chains + k) * step)) for k in range(2))
    with f.loop(0, f.args["n"]):
        for each in sums:
            each.set(f.fma(x, y, each.get()))
    for k, each in enumerate(sums):
        f.store(each.get(), f.gep(memory, k * step))
    f.ret()
    code = compiler.link([compiler.compile_object(str(module), isa)], ["peak"])
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(code["peak"])
    buffer, turns = aligned((chains + 2) * step, 0), 100_000

    def once() -> float:
        start = time.thread_time()
        call(turns, buffer.ctypes.data)
        return turns * chains * lanes * 2 / (time.thread_time() - start) / 1e9 + 0 * len(code.addresses)

    return once


def highest(cases: list[Case], kind: str) -> float:
    """Peak of the matrix unit in all rounds."""
    return max((max(both) for c in cases for both in c.tile_peaks.get(kind, ())), default=0.0)


def measure(cases: list[Case], isa: Isa, rounds: int, types: Sequence[str] = ()) -> None:
    """Fills every case's best seconds per runner, and its FMA peak in GFLOP/s."""
    fma = peak_loop(isa)
    units = {kind: loop for kind in types if (loop := tile_loop(isa, kind)) is not None}
    for case in cases:  # one after the other: each finds its own data in the caches, as it would in a loop
        a = fresh(case.batch, case.m, case.k)
        b = fresh(1 if case.constant else case.batch, *((case.n, case.k) if case.transposed else (case.k, case.n)))
        b = b.swapaxes(-1, -2) if case.transposed else b
        runs: dict[str, Callable[[], Any]] = {"ours": ours(case, a, b, isa)}
        if types:
            runs |= {kind: narrow(case, a, b, isa, kind) for kind in types}
            peers = {"openvino": openvino_peer(case, a, b)}
        else:
            peers = {"numpy": numpy_peer(a, b), "onnxruntime": onnx_peer(case, a, b)}
        runs |= {name: peer for name, peer in peers.items() if peer is not None}
        repeat = max(3, min(40, int(2e8 / case.flops)))  # the first finds what the runs before it left of its data
        for k in range(4 * rounds if units else rounds):
            if k >= rounds and all(sum(case.calm(kind, highest(cases, kind))) >= rounds for kind in units):
                break
            case.peak = max(case.peak, *(fma() for _ in range(5)))
            for name, run in runs.items():
                least = math.inf
                loop = units.get(name)
                before = max(loop() for _ in range(5)) if loop else 0.0
                for _ in range(repeat):
                    start = time.thread_time()
                    run()
                    least = min(least, time.thread_time() - start)
                case.rounds.setdefault(name, []).append(least)
                if loop:
                    case.tile_peaks.setdefault(name, []).append((before, max(loop() for _ in range(5))))


def show_types(cases: list[Case], isa: Isa, types: Sequence[str]) -> None:
    table = Table(title=f"{isa.key}, one thread")
    table.add_column("M x K x N")
    for kind in types:
        for column in (f"{kind} us", "GOP/s", "of peak", "calm", "B GB/s", "x f32"):
            table.add_column(column, justify="right")
    table.add_column("openvino bf16 us", justify="right")
    for c in cases:
        row = [c.name]
        for kind in types:
            rate = c.flops / c.best[kind] / 1e9
            share = calm = "-"
            if kind in c.tile_peaks:
                top = highest(cases, kind)
                share, alone = f"{c.share(kind, top):.0%}", c.calm(kind, top)
                calm = f"{sum(alone)}/{len(alone)}"
            item = 1 if kind == "int8" else 2
            gbs = item * c.k * c.n / c.best[kind] / 1e9
            faster = statistics.median(f / n for f, n in zip(c.rounds["ours"], c.rounds[kind]))
            row += [f"{c.best[kind] * 1e6:.1f}", f"{rate:.0f}", share, calm, f"{gbs:.1f}", f"{faster:.1f}"]
        peer = c.best.get("openvino")
        table.add_row(*row, f"{peer * 1e6:.1f}" if peer else "-")
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a group: square, bert, rows, vector, narrow, attention, tiny")
    parser.add_argument("--isa", default="", help="another instruction set than the best")
    parser.add_argument("--without", nargs="*", default=[], choices=sorted(set().union(*OPTIONAL.values())))
    parser.add_argument("--types", nargs="*", default=[], choices=("bf16", "f16", "int8"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if any(name not in os.environ for name in ONE_THREAD):  # a BLAS reads them when it is loaded: start again
        os.execve(sys.executable, [sys.executable, *sys.argv], {**ONE_THREAD, **os.environ})
    isa = next(i for i in available() if not options.isa or i.name == options.isa)
    isa = with_extensions(isa, isa.extensions - set(options.without))
    cases = [c for c in CASES if not options.only or c.group == options.only]
    if options.types:
        cases = [c for c in [*cases, *LARGE] if c.constant and (not options.only or c.group == options.only)]
    measure(cases, isa, options.rounds, options.types)
    if options.json:
        rows = [
            {
                "case": c.name,
                "flops": c.flops,
                "seconds": c.best,
                "peak_gflops": c.peak,
                "tile_shares": {kind: c.share(kind, highest(cases, kind)) for kind in c.tile_peaks},
                "calm_rounds": {kind: sum(c.calm(kind, highest(cases, kind))) for kind in c.tile_peaks},
            }
            for c in cases
        ]
        print(json.dumps({"isa": isa.key, "cases": rows}))
        return
    if options.types:
        show_types(cases, isa, options.types)
        return
    table = Table(title=f"{isa.name}, FMA peak {max(c.peak for c in cases):.0f} GFLOP/s")
    for column in ("M x K x N", "us", "GFLOP/s", "of peak", "B GB/s", "numpy us", "onnxruntime us", "ours is x faster"):
        table.add_column(column, justify="left" if column == "M x K x N" else "right")
    for c in cases:
        mine = c.best["ours"]
        rate = c.flops / mine / 1e9
        names = ("numpy", "onnxruntime")
        peers = [c.best.get(p) for p in names]
        weights = 4.0 * c.k * c.n * (1 if c.constant else c.batch) / mine / 1e9
        ratio = " / ".join(f"{c.ratio(p):.2f}" if p in c.rounds else "-" for p in names)
        shown = (f"{p * 1e6:.1f}" if p else "-" for p in peers)
        table.add_row(
            c.name, f"{mine * 1e6:.1f}", f"{rate:.1f}", f"{rate / c.peak:.0%}", f"{weights:.1f}", *shown, ratio
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
