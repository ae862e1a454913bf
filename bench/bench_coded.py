"""Products with weights of few bits: ours against ONNX Runtime's MatMulNBits and OpenVINO's compressed weights.

    python -m bench.bench_coded [--all] [--threads 1 2] [--rows 1] [--shapes 4096x4096] [--codes int4/32]
                                [--scales float16] [--far] [--json]

The products of 4-bit Llama layers by default, about a minute and a half; a line for each as soon as it is measured.

Activations are taken as they are ("exact": accuracy level 0 there, dynamic quantization off), or as codes of 8 bits
("int8": accuracy level 4, dynamic quantization in groups of the weights' size). Ours and the peers run in turn, and the
least times of all turns are compared: on a machine that others use too, those are the ones nobody disturbed. What
reading the same bytes by itself takes is measured in the same turns: "of reading" is that time beside ours. Weights of
all are out of the near caches whenever they are used, because the others ran in between. With ``--far`` they are out of
all caches, as those of a model that is larger than these: other memory is read first, then comes a product with weights
of its own, after which threads are awake as they are behind the layer before, and then the one that is measured.

Scales are float32 for all; ``--scales float16`` has numbers among them that float16 holds, as checkpoints of GPTQ, AWQ
and GGUF have them. OpenVINO is left out where it is not installed. Codes of 3, 5 and 6 bits, which neither of them
reads, have ours of as many bits as they read beside them, 4 or 8 ("wider"). "iq4" are codes of 8 bits that are the 16
levels of GGUF's IQ4_NL, of which the positions are what ours reads; "wider" are any of 8 bits. With ``--scales steps``
scales of groups, and minima of 2, 4 and 5 bits, are integers times a float16 that 256 weights share, as in kinds of
GGUF; "wider" are others near them, in float32.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import ranvier as rv
from ranvier.codegen.llvm import peaks
from ranvier.codegen.llvm.isa import available
from ranvier.ops.contrib.levels import IQ4_LEVELS
from ranvier.ops.contrib.weight_only import WIDER, packed, raised_by

Array = np.ndarray[Any, Any]
SHAPES = ("4096x4096", "4096x11008")
CODES = ("int4/32", "int4/128")
ALL_SHAPES = ("2048x2048", *SHAPES, "11008x4096")
ALL_CODES = (*CODES, "int8/128", "int6/32", "int5/32", "int3/32", "int2/64", "nf4/64", "iq4/32")
COLUMNS = ("product", "ours us", "GB/s", "of reading", "onnxruntime", "openvino", "wider", "error")
WIDTHS = (-48, 9, 7, 11, 12, 10, 8, 8)
PEERS = ("onnxruntime", "openvino", "wider")
MICROSOFT = "com.microsoft"
SHARED = 256  # weights that have one step
OTHER_BYTES = 512 << 20  # more than any third-level cache has
FAR_SECONDS = 4  # times as long, most of which goes by with that


@dataclass
class Case:
    """K, N, rows, codes (bits of integers, "nf4" or "iq4") and the group that shares a scale."""

    k: int
    n: int
    rows: int
    code: str
    group: int
    exact: bool
    threads: int
    scales: str = "float32"
    seconds: dict[str, float] = field(default_factory=dict)  # the least, by runner
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """Of a code in the model."""
        return {"nf4": 4, "iq4": 8}.get(self.code) or int(self.code[3:])

    @property
    def nbytes(self) -> int:
        """Codes and scales."""
        bits = 4 if self.code == "iq4" else self.bits
        codes, groups = self.n * self.k * bits // 8, self.n * (self.k // self.group)
        if self.scales == "steps":
            return codes + (2 if self.minima else 1) * (groups + 2 * self.n * self.k // SHARED)
        return codes + np.dtype(self.scales).itemsize * groups

    @property
    def minima(self) -> bool:
        return self.scales == "steps" and self.bits in (2, 4, 5)

    @property
    def name(self) -> str:
        how = "exact" if self.exact else "int8"
        return f"{self.rows} x {self.k} x {self.n} {self.code}/{self.group} {how}, {self.threads} thr"


class Weights:
    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.codes = rng.integers(0, 1 << case.bits, (case.n, case.k)).astype(np.uint8)
        if case.code == "iq4":
            self.codes = (IQ4_LEVELS + 128).astype(np.uint8)[self.codes % len(IQ4_LEVELS)]
        groups = case.n, case.k // case.group
        self.zeros: Array | None = None
        if case.scales == "steps":
            self.scales = _stepped(rng, case, 1)
            if case.minima:
                self.zeros = _stepped(rng, case, 0) / self.scales
        else:
            self.scales = rng.uniform(0.01, 0.1, groups).astype(case.scales).astype(np.float32)
        self.x = rng.standard_normal((case.rows, case.k)).astype(np.float32)

    def expected(self, case: Case) -> Array:
        scales = np.repeat(self.scales, case.group, axis=1)
        middle = np.float32(1 << (case.bits - 1))
        zeros = middle if self.zeros is None else np.repeat(self.zeros, case.group, axis=1)
        return np.asarray(self.x @ ((self.codes - zeros) * scales).T)


def _stepped(rng: np.random.Generator, case: Case, least: int) -> Array:
    """Integers times a float16 that 256 weights share, the largest of them as large as can be."""
    run = SHARED // case.group
    integers = rng.integers(least, 64, (case.n, case.k // case.group)).astype(np.float32)
    integers[:, ::run] = 63
    steps = rng.uniform(1e-4, 1e-3, (case.n, case.k // SHARED)).astype(np.float16).astype(np.float32)
    return integers * np.repeat(steps, run, axis=1)


def model(case: Case, w: Weights) -> onnx.ModelProto:
    attrs: dict[str, Any] = {"K": case.k, "N": case.n, "block_size": case.group}
    if case.code == "nf4":
        op, codes = "MatMulBnb4", (w.codes[:, ::2] << 4 | w.codes[:, 1::2]).reshape(-1)
        attrs["quant_type"] = 1
    else:
        op, codes = "MatMulNBits", packed(w.codes.reshape(case.n, -1, case.group), case.bits)
        attrs |= {"bits": case.bits, "accuracy_level": 0 if case.exact else 4}
    stored = [("codes", codes), ("scales", w.scales.reshape(-1))]
    if w.zeros is not None:
        stored.append(("zeros", w.zeros.reshape(-1)))
    node = helper.make_node(op, ["x", *(name for name, _ in stored)], ["y"], domain=MICROSOFT, **attrs)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [case.rows, case.k])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [case.rows, case.n])],
        [onnx.numpy_helper.from_array(x, name) for name, x in stored],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


Runner = Callable[[], Array]


def wider(case: Case, w: Weights) -> Runner | None:
    """Ours of the same numbers in more bits; or of nearly the same."""
    if case.scales == "steps":
        more = copy.copy(w)
        more.scales = np.nextafter(w.scales, np.float32(1))
        if w.zeros is not None:
            more.zeros = w.zeros * np.random.default_rng(1).uniform(0.99, 1.01, w.zeros.shape).astype(np.float32)
        return ours(case, more)
    if case.code == "iq4":
        any_codes = replace(case, code="int8")
        return ours(any_codes, Weights(any_codes))
    bits = WIDER.get(case.bits)
    if bits is None:
        return None
    more = copy.copy(w)
    more.codes = w.codes + np.uint8(raised_by(case.bits))
    return ours(replace(case, code=f"int{bits}"), more)


def ours(case: Case, w: Weights) -> Runner:
    session = rv.load(model(case, w), providers=["cpu"], threads=case.threads)
    return lambda: np.asarray(next(iter(session.run({"x": w.x}).values())))


def onnx_runtime(case: Case, w: Weights) -> Runner | None:
    if case.bits in WIDER or case.minima:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    data = model(case, w).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda: np.asarray(session.run(None, {"x": w.x})[0])


def openvino(case: Case, w: Weights) -> Runner | None:
    if not case.code.startswith("int") or case.bits not in (4, 8) or case.minima:
        return None
    try:
        import openvino as ov
        from openvino import opset13 as op
    except ImportError:
        return None

    kind = ov.Type.u4 if case.bits == 4 else ov.Type.u8
    shape = [case.n, case.k // case.group, case.group]
    x = op.parameter([case.rows, case.k], np.float32)
    zero = np.array([1 << (case.bits - 1)], np.uint8)
    held = [np.ascontiguousarray(packed(w.codes, case.bits).reshape(-1)), zero]  # tensors only refer to it
    codes, zeros = (
        op.convert(op.constant(ov.Tensor(part, dims, kind)), np.float32)
        for part, dims in zip(held, (shape, [1, 1, 1]), strict=True)
    )
    scaled = op.multiply(op.subtract(codes, zeros), op.constant(w.scales.reshape(case.n, -1, 1)))
    matrix = op.reshape(scaled, op.constant(np.array([case.n, case.k])), False)
    options = {
        "INFERENCE_NUM_THREADS": case.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0 if case.exact else case.group,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = ov.Core().compile_model(ov.Model([op.matmul(x, matrix, False, True)], [x]), "CPU", options)
    request = compiled.create_infer_request()

    def run() -> Array:
        assert held
        return np.asarray(request.infer([w.x], share_inputs=True, share_outputs=True)[0])

    return run


MAKERS = {"ours": ours, "onnxruntime": onnx_runtime, "openvino": openvino, "wider": wider}


def far_away(case: Case, names: Sequence[str]) -> Callable[[str], None]:
    """What brings a runner's weights out of all caches, and its threads where a layer before would leave them."""
    others = Weights(case, seed=1)
    layers = {name: MAKERS[name](case, others) for name in names}
    memory = np.ones(OTHER_BYTES // 8)

    def before(name: str) -> None:
        memory.sum()
        layer = layers.get(name)
        if layer is not None:
            layer()

    return before


def measure(case: Case, seconds: float, far: bool = False) -> None:
    w = Weights(case)
    runners: dict[str, Runner] = {}
    for name, make in MAKERS.items():
        made = make(case, w)
        if made is not None:
            runners[name] = made
    expected = w.expected(case) if case.code != "nf4" else runners["onnxruntime"]()
    for name, run in runners.items():
        if name == "wider" and case.code == "iq4":
            continue  # other weights
        case.errors[name] = float(np.abs(run() - expected).max() / np.abs(expected).max())
    reading = peaks.read_loop(available()[0], case.nbytes, case.threads)
    before = far_away(case, list(runners)) if far else None
    case.seconds = dict.fromkeys([*runners, "reading"], float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in runners.items():
            if before is not None:
                before(name)
            start = time.perf_counter()
            run()
            case.seconds[name] = min(case.seconds[name], time.perf_counter() - start)
        if before is not None:
            before("reading")
        case.seconds["reading"] = min(case.seconds["reading"], reading())


def ratio(case: Case, name: str) -> float:
    """How many times as long as ours."""
    return case.seconds[name] / case.seconds["ours"]


def line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:<{-w}}" if w < 0 else f"{cell:>{w}}" for cell, w in zip(cells, WIDTHS))


def row(case: Case) -> str:
    least = case.seconds["ours"]
    peers = [f"{ratio(case, name):.2f} x" if name in case.seconds else "-" for name in PEERS]
    rate, read = f"{case.nbytes / least / 1e9:.1f}", f"{100 * ratio(case, 'reading'):.0f} %"
    return line((case.name, f"{least * 1e6:.0f}", rate, read, *peers, f"{case.errors['ours']:.0e}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--all", action="store_true", help="more shapes and codes; several minutes")
    parser.add_argument("--shapes", nargs="+", help="K x N")
    parser.add_argument("--codes", nargs="+", help="int2 to int6, int8, nf4 or iq4, / group")
    parser.add_argument("--scales", choices=("float16", "float32", "steps"), default="float32", help="numbers of them")
    parser.add_argument("--only", choices=("exact", "int8"))
    parser.add_argument("--far", action="store_true", help="weights come from memory")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each product")
    parser.add_argument("--json", action="store_true", help="at the end, instead of lines")
    given = parser.parse_args()
    shapes = given.shapes or (ALL_SHAPES if given.all else SHAPES)
    codes = given.codes or (ALL_CODES if given.all else CODES)
    cases = []
    if not given.json:
        print("weights of few bits; peers: how many times as long as ours they take")
        print(line(COLUMNS), flush=True)
    for threads, rows, shape, coded in itertools.product(given.threads, given.rows, shapes, codes):
        k, n = (int(x) for x in shape.split("x"))
        code, group = coded.split("/")
        for exact in (True, False):
            skipped = given.only and exact != (given.only == "exact")
            if skipped or (code == "nf4" and not exact):
                continue
            case = Case(k, n, rows, code, int(group), exact, threads, given.scales)
            measure(case, given.seconds * (FAR_SECONDS if given.far else 1), given.far)
            cases.append(case)
            if not given.json:
                print(row(case), flush=True)
    if given.json:
        found = [
            {
                "case": c.name,
                "us": {name: s * 1e6 for name, s in c.seconds.items()},
                "ratio": {name: ratio(c, name) for name in c.seconds if name != "ours"},
                "error": c.errors,
            }
            for c in cases
        ]
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
