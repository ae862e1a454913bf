"""Printed Triton kernels on a GPU: whether they are right when compiled, and how near they come to what it can do.

    python -m bench.bench_triton [--output FILE] [--seconds 90] [--tests N] [--no-compile] [--tune]

First the tests of the printer run compiled instead of interpreted, in several processes. Then every case is timed
beside torch, eager and compiled, in CUDA graphs of launches so that Python's own time is not in it; the fraction is of
what copying memory, or a large product, was measured to reach in the same run. A case that fails is reported, and the
others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Row:
    """One case, times in microseconds."""

    name: str
    ours: float = 0.0
    torch: float = 0.0
    compiled: float = 0.0
    tuned: float = 0.0
    floor: float = 0.0
    error: float = 0.0  # largest difference from torch's result, relative to its largest value
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        def shown(x: float) -> str:
            return f"{x:9.2f}" if x else "        -"

        fraction = f"{self.floor / self.ours:6.2f}" if self.ours and self.floor else "     -"
        times = " ".join(shown(x) for x in (self.ours, self.torch, self.compiled, self.tuned, self.floor))
        return f"{self.name:34} {times} {fraction}  {self.error:.1e} {'; '.join(self.failures)[:160]}"


HEAD = f"{'case':34} {'ours':>9} {'torch':>9} {'compiled':>9} {'tuned':>9} {'floor':>9} {'of it':>6}  error (us)"


def run_tests(processes: int, limit: float) -> dict[str, Any]:
    """The printer's tests with compiled kernels, shared out among processes."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    listed = subprocess.run(
        [*base, "--collect-only", "tests/torch/codegen"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    started = time.monotonic()
    shards = [names[k::processes] for k in range(processes)]
    running = [
        subprocess.Popen(
            [*base, "-rf", *shard], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for shard in shards
        if shard
    ]
    failures: list[str] = []
    unfinished = 0
    for process in running:
        try:
            text = process.communicate(timeout=max(1.0, limit - (time.monotonic() - started)))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0]
            unfinished += 1
        failures += [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if process.returncode not in (0, 1) and not any(f in text for f in ("FAILED", "ERROR")):
            failures.append(f"exit {process.returncode}: {text[-300:]}")
    taken = round(time.monotonic() - started, 1)
    return {"tests": len(names), "failures": failures, "unfinished_processes": unfinished, "seconds": taken}


@dataclass
class Case:
    """A nest or a product, the tensors it works on and what torch does instead."""

    name: str
    make: Callable[[], Any]  # Printed
    memory: dict[Any, Any]
    result: Any
    torch: Callable[[], Any]
    traffic: float = 0.0  # bytes
    flops: float = 0.0
    tune: Callable[[], Any] | None = None  # measures and returns a Printed
    tolerance: float = 1e-2


def cases() -> Iterator[Callable[[], Case]]:
    """Makers of the cases, so that one that fails to be made does not end the run."""
    import torch
    import torch.nn.functional as F

    from ranvier.codegen.loops.ir import Const, Epilogue, Load, Map, Nest, Op, Operand, Reduce, Result
    from ranvier.codegen.loops.normalize import normalized
    from ranvier.codegen.storage import View
    from ranvier.codegen.triton import gemm, library, tune
    from ranvier.dtypes import DType

    f32, f16 = DType.float32, DType.float16
    kinds = {f32: torch.float32, f16: torch.float16, DType.bfloat16: torch.bfloat16, DType.int8: torch.int8}

    def tensor(dtype: DType, *shape: int) -> tuple[View, Any]:
        if dtype is DType.int8:
            made = torch.randint(-100, 100, shape, dtype=torch.int8, device="cuda")
        else:
            made = torch.randn(shape, device="cuda").to(kinds[dtype])
        return View.temporary(dtype, shape), made

    def nest_case(
        name: str, nest: Nest, memory: dict[Any, Any], result: Any, other: Callable[[], Any], **more: Any
    ) -> Case:
        def tuned() -> Any:
            normal = normalized(nest)
            found = tune.tune(nest, memory, "bench", seconds=6.0)
            assert normal is not None and found is not None
            return library.planned(normal, found)

        made = library.kernel(nest)
        return Case(name, lambda: made, memory, result, other, tune=tuned if len(made.calls) == 1 else None, **more)

    def pointwise(name: str, dtype: DType, shapes: list[tuple[int, ...]], value: Any, other: Any) -> Callable[[], Case]:
        def make() -> Case:
            views, tensors = zip(*(tensor(dtype, *shape) for shape in shapes))
            out, result = tensor(dtype, *shapes[0])
            operands = [Operand(v.expanded(out.shape), v.expanded(out.shape).strides) for v in views]
            loads = [Load(k, dtype) for k in range(len(views))]
            nest = Nest(
                out.shape, (*operands, Operand(out, out.strides)), (Map(((len(views), value(*loads)),)),), label=name
            )
            memory = {v.storage: t for v, t in zip([*views, out], [*tensors, result])}
            traffic = sum(v.nbytes for v in (*views, out))
            return nest_case(name, nest, memory, result, lambda: other(*tensors), traffic=traffic)

        return make

    def gelu(x: Any, dtype: DType) -> Any:
        scaled = Op("mul", (x, Const(0.7071067811865476, dtype)), dtype)
        one_plus = Op("add", (Op("erf", (scaled,), dtype), Const(1.0, dtype)), dtype)
        return Op("mul", (Op("mul", (x, Const(0.5, dtype)), dtype), one_plus), dtype)

    yield pointwise("copy f32 8192x8192", f32, [(8192, 8192)], lambda x: x, torch.clone)
    yield pointwise("copy f16 8192x8192", f16, [(8192, 8192)], lambda x: x, torch.clone)
    yield pointwise(
        "bias gelu f16 8192x3072", f16, [(8192, 3072), (3072,)],
        lambda x, b: gelu(Op("add", (x, b), f16), f16), lambda x, b: F.gelu(x + b),
    )  # fmt: skip
    yield pointwise(
        "channel scale relu f16 32x256x56x56", f16, [(32, 256, 56, 56), (256, 1, 1)],
        lambda x, s: Op("max", (Op("mul", (x, s), f16), Const(0.0, f16)), f16), lambda x, s: torch.relu(x * s),
    )  # fmt: skip

    def transposed(dtype: DType, shape: tuple[int, ...], perm: tuple[int, ...]) -> Callable[[], Case]:
        def make() -> Case:
            view, x = tensor(dtype, *shape)
            turned = view.transposed(perm)
            out, result = tensor(dtype, *turned.shape)
            nest = Nest(
                out.shape, (Operand(turned, turned.strides), Operand(out, out.strides)), (Map(((1, Load(0, dtype)),)),)
            )
            memory = {view.storage: x, out.storage: result}
            name = f"transpose {dtype} {'x'.join(map(str, shape))} {''.join(map(str, perm))}"
            return nest_case(name, nest, memory, result, lambda: x.permute(perm).contiguous(), traffic=2 * view.nbytes)

        return make

    yield transposed(f16, (8192, 8192), (1, 0))
    yield transposed(f32, (8192, 8192), (1, 0))
    yield transposed(f16, (32, 128, 12, 64), (0, 2, 1, 3))
    yield transposed(f16, (32, 256, 56, 56), (0, 2, 3, 1))

    def softmax(rows: int, length: int) -> Callable[[], Case]:
        def make() -> Case:
            (view, x), (out, result) = tensor(f16, rows, length), tensor(f16, rows, length)
            v = Op("cast", (Load(0, f16),), f32)
            e = Op("exp", (Op("sub", (v, Result(0, f32)), f32),), f32)
            stages = (Reduce("max", v, f32), Reduce("sum", e, f32), Map(((1, Op("div", (e, Result(1, f32)), f32)),)))
            nest = Nest(
                view.shape, (Operand(view, view.strides), Operand(out, out.strides)), stages, frozenset({1}), "softmax"
            )
            memory = {view.storage: x, out.storage: result}
            return nest_case(
                f"softmax f16 {rows}x{length}",
                nest,
                memory,
                result,
                lambda: torch.softmax(x, 1),
                traffic=2 * view.nbytes,
            )

        return make

    for rows, length in ((49152, 128), (16384, 1024), (4096, 16384), (1024, 50304), (8, 128256)):
        yield softmax(rows, length)

    def layer_norm(rows: int, length: int) -> Callable[[], Case]:
        def make() -> Case:
            (view, x), (out, result) = tensor(f16, rows, length), tensor(f16, rows, length)
            (vs, scale), (vb, shift) = tensor(f16, length), tensor(f16, length)
            v, count = Op("cast", (Load(0, f16),), f32), Const(1 / length, f32)
            apart = Op("sub", (v, Op("mul", (Result(0, f32), count), f32)), f32)
            spread = Op("add", (Op("mul", (Result(1, f32), count), f32), Const(1e-5, f32)), f32)
            value = Op("mul", (apart, Op("rsqrt", (spread,), f32)), f32)
            scaled = Op("fma", (value, Op("cast", (Load(1, f16),), f32), Op("cast", (Load(2, f16),), f32)), f32)
            stages = (Reduce("sum", v, f32), Reduce("sum", Op("mul", (apart, apart), f32), f32), Map(((3, scaled),)))
            operands = (
                Operand(view, view.strides),
                Operand(vs, (0, 1)),
                Operand(vb, (0, 1)),
                Operand(out, out.strides),
            )
            memory = {view.storage: x, vs.storage: scale, vb.storage: shift, out.storage: result}
            nest = Nest(view.shape, operands, stages, frozenset({1}), "layer norm")
            return nest_case(
                f"layer norm f16 {rows}x{length}", nest, memory, result,
                lambda: F.layer_norm(x, (length,), scale, shift), traffic=2 * view.nbytes,
            )  # fmt: skip

        return make

    yield layer_norm(16384, 768)
    yield layer_norm(8192, 4096)

    def summed(shape: tuple[int, ...], axes: tuple[int, ...]) -> Callable[[], Case]:
        def make() -> Case:
            from ranvier.codegen.loops.ir import Final

            view, x = tensor(f32, *shape)
            kept = tuple(1 if a in axes else n for a, n in enumerate(shape))
            out, result = tensor(f32, *kept)
            strides = tuple(0 if a in axes else s for a, s in enumerate(out.strides))
            stages = (Reduce("sum", Load(0, f32), f32), Final(((1, Result(0, f32)),)))
            nest = Nest(shape, (Operand(view, view.strides), Operand(out, strides)), stages, frozenset(axes), "sum")
            name = f"sum f32 {'x'.join(map(str, shape))} over {axes}"
            memory = {view.storage: x, out.storage: result}
            return nest_case(
                name, nest, memory, result, lambda: x.sum(axes, keepdim=True), traffic=view.nbytes, tolerance=1e-2
            )

        return make

    yield summed((16384, 4096), (1,))
    yield summed((65536, 1024), (0,))
    yield summed((64, 256, 4096), (1,))
    yield summed((16384, 8192), (0, 1))

    def product(dtype: DType, m: int, n: int, k: int, fused: bool, transposed: bool = False) -> Callable[[], Case]:
        def make() -> Case:
            va, a = tensor(dtype, 1, m, k)
            vb, b = tensor(dtype, 1, n, k) if transposed else tensor(dtype, 1, k, n)
            right = b.transpose(1, 2) if transposed else b
            view_b = vb.transposed((0, 2, 1)) if transposed else vb
            whole = dtype is DType.int8
            out, result = tensor(f32 if whole else dtype, 1, m, n)
            bias_view, bias = tensor(f32 if whole else dtype, n)
            memory = {va.storage: a, vb.storage: b, out.storage: result, bias_view.storage: bias}
            if whole:
                sums: Any = Op("cast", (Result(0, DType.int32),), f32)
                epilogue = Epilogue(Op("mul", (sums, Const(1e-3, f32)), f32))
            else:
                x = Op("add", (Result(0, f32), Op("cast", (Load(0, dtype),), f32)), f32)
                value = gelu(x, f32) if fused else Result(0, f32)
                epilogue = Epilogue(value, (Operand(bias_view, (0, 0, 1)),) if fused else ())

            def other() -> Any:
                if whole:
                    return torch._int_mm(a[0], right[0]).float()[None] * 1e-3
                return F.gelu(torch.addmm(bias, a[0], right[0]))[None] if fused else torch.matmul(a, right)

            def tuned() -> Any:
                tile = gemm.tune_product(va, view_b, out, memory, "bench", epilogue, precision="tf32", seconds=8.0)
                return gemm.product(va, view_b, out, epilogue, precision="tf32", tile=tile)

            torch.backends.cuda.matmul.allow_tf32 = True
            made = gemm.product(va, view_b, out, epilogue, precision="tf32")
            name = f"product {dtype} {m}x{n}x{k}{' gelu' if fused else ''}{' t' if transposed else ''}"
            return Case(
                name, lambda: made, memory, result, other, tune=tuned,
                traffic=va.nbytes + vb.nbytes + out.nbytes, flops=2.0 * m * n * k,
            )  # fmt: skip

        return make

    yield product(f16, 4096, 4096, 4096, True)
    yield product(f16, 8192, 8192, 8192, False, True)
    yield product(DType.bfloat16, 4096, 3072, 768, True)
    yield product(f16, 128, 3072, 768, True)
    yield product(f16, 1, 4096, 4096, False, True)
    yield product(f16, 16, 11008, 4096, False, True)
    yield product(f32, 2048, 2048, 2048, False)
    yield product(DType.int8, 4096, 4096, 4096, False, True)


def ceilings() -> dict[str, float]:
    """Bytes and operations per second that plain copies and products reach."""
    import torch

    from ranvier.codegen.triton import tune

    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    bandwidth = 2 * x.numel() / tune.on_gpu(lambda: y.copy_(x))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.empty_like(a)
    rate = 2 * 8192**3 / tune.on_gpu(lambda: torch.mm(a, b, out=c))
    return {"bytes_per_second": bandwidth, "f16_flops_per_second": rate}


def measured(case: Case, limits: dict[str, float], compile_too: bool, tune_too: bool) -> Row:
    import torch

    from ranvier.codegen.triton import tune

    row = Row(case.name)
    by_rate = case.flops / limits["f16_flops_per_second"]
    row.floor = max(case.traffic / limits["bytes_per_second"], by_rate) * 1e6

    def attempt(what: str, work: Callable[[], float]) -> float:
        try:
            return work()
        except Exception as error:
            row.failures.append(f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}")
            torch.cuda.synchronize()
            return 0.0

    def timed(printed: Any) -> float:
        temporaries = {s: torch.empty(s.nbytes, dtype=torch.uint8, device="cuda") for s in printed.temporaries}
        return tune.on_gpu(printed.bound({**case.memory, **temporaries})) * 1e6

    row.ours = attempt("ours", lambda: timed(case.make()))
    want = case.torch().float()
    if row.ours:
        difference = (case.result.float() - want).abs().max() / want.abs().max().clamp(min=1e-20)
        row.error = float(difference)
        if not row.error <= case.tolerance:
            row.failures.append("differs")
    row.torch = attempt("torch", lambda: tune.on_gpu(case.torch) * 1e6)
    if compile_too:
        torch._dynamo.reset()
        row.compiled = attempt("torch.compile", lambda: tune.on_gpu(torch.compile(case.torch)) * 1e6)
    if tune_too and case.tune is not None:
        better = case.tune
        row.tuned = attempt("tuned", lambda: timed(better()))
    return row


def launch_cost() -> dict[str, float]:
    """Microseconds of Python per launch of a kernel that does next to nothing."""
    import torch

    from ranvier.codegen.loops.ir import Load, Map, Nest, Operand
    from ranvier.codegen.storage import View
    from ranvier.codegen.triton import library
    from ranvier.dtypes import DType

    a, out = View.temporary(DType.float32, (64,)), View.temporary(DType.float32, (64,))
    nest = Nest((64,), (Operand(a, (1,)), Operand(out, (1,))), (Map(((1, Load(0, DType.float32)),)),))
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    made, memory = library.kernel(nest), {a.storage: x, out.storage: y}
    bound = made.bound(memory)

    def each(run: Callable[[], Any]) -> float:
        for _ in range(20):
            run()
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                run()
            best = min(best, time.perf_counter() - start)
        return best / 200 * 1e6

    return {"bound": each(bound), "launch": each(lambda: made.launch(memory)), "torch": each(lambda: y.copy_(x))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="write what was found as JSON")
    parser.add_argument("--seconds", type=float, default=90.0, help="no new case begins after so long")
    parser.add_argument("--tests", type=int, default=12, help="processes for the tests; 0: none")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes seconds a case")
    parser.add_argument("--tune", action="store_true", help="measure other tiles too, seconds a case")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # where the package is not installed
    if options.tune:
        os.environ.setdefault("RANVIER_CACHE_DIR", "/tmp/ranvier-bench-tuning")
    import torch
    import triton

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 2
    started = time.monotonic()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip

    def save() -> None:
        if options.output:
            options.output.write_text(json.dumps(found, indent=1))

    if options.tests:
        try:
            found["tests"] = run_tests(options.tests, min(60.0, options.seconds * 0.6))
        except Exception as error:
            found["tests"] = {"failures": [repr(error)]}
        print(json.dumps(found["tests"], indent=1)[:4000], flush=True)
        save()
    for name, part in (("ceilings", ceilings), ("launch_us", launch_cost)):
        try:
            found[name] = part()
        except Exception:
            found[name] = {}
            found.setdefault("failures", []).append(f"{name}: {traceback.format_exc()[-600:]}")
            print(found["failures"][-1])
        print(name, {k: float(f"{v:.4g}") for k, v in found[name].items()}, flush=True)
    limits = {"bytes_per_second": 4.2e12, "f16_flops_per_second": 7.7e14, **found["ceilings"]}
    print(HEAD)
    rows: list[Row] = []
    for make in cases():
        if time.monotonic() - started > options.seconds:
            print("out of time")
            break
        try:
            case = make()
            if options.only and options.only not in case.name:
                continue
            early = time.monotonic() - started < options.seconds * 0.75
            row = measured(case, limits, early and not options.no_compile, options.tune)
        except Exception as error:
            row = Row("?", failures=[f"{type(error).__name__}: {error}", traceback.format_exc()[-400:]])
        rows.append(row)
        found["cases"] = [asdict(r) for r in rows]
        print(row.line(), flush=True)
        save()
    found["seconds"] = round(time.monotonic() - started, 1)
    save()
    bad = [r.name for r in rows if r.failures] + found.get("tests", {}).get("failures", [])
    print(f"{len(rows)} cases in {found['seconds']} s; {len(bad)} with failures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
