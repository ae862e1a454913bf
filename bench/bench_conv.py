"""Convolution layers of real networks, ours against ONNX Runtime, one thread each.

Ours runs channels-last; ONNX Runtime runs a model of one Conv in its own order (NCHW). Both are called in turns and the
minimum of many calls counts, because neighbours on the machine only ever add time.

With --bf16 the layers run in bfloat16 with float32 sums, against our own float32 kernels and against OpenVINO, of which
the time of the convolution alone counts (its own profile), not that of the conversions around it.

With --int8 they read and write codes of 8 bits, channels-last on both sides here, against our own float32 kernels and
against ONNX Runtime's QLinearConv, which has to change the order of what it reads and writes.

    python bench/bench_conv.py [name …] [--isa avx2] [--seconds 0.6] [--no-winograd] [--bf16 | --int8]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from ranvier.codegen.llvm.conv import ConvShape, conv, pack_weights, takes_any_layout
from ranvier.codegen.llvm.integer import integer_conv, integer_depthwise, pack_depthwise, pack_filters
from ranvier.codegen.llvm.isa import Isa, chosen
from ranvier.codegen.loops.ir import Const, Epilogue, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen import harness

Array = np.ndarray[Any, Any]
F32, BF16, U8 = DType.float32, DType.bfloat16, DType.uint8


@dataclass(frozen=True)
class Layer:
    name: str
    size: int
    cin: int
    cout: int
    kernel: int = 1
    stride: int = 1
    group: int = 1

    @property
    def pad(self) -> int:
        return self.kernel // 2

    def tensors(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """An input, weights that keep its variance, and a bias."""
        x = rng.standard_normal((1, self.cin, self.size, self.size)).astype(np.float32)
        depth = self.cin // self.group
        w = rng.standard_normal((self.cout, depth, self.kernel, self.kernel)).astype(np.float32)
        w /= np.float32(np.sqrt(depth * self.kernel**2))
        return x, w, rng.standard_normal(self.cout).astype(np.float32)


LAYERS = (
    Layer("resnet stem 7x7", 224, 3, 64, 7, 2),
    Layer("resnet 1x1 64-256", 56, 64, 256),
    Layer("resnet 1x1 256-64", 56, 256, 64),
    Layer("resnet 3x3 64", 56, 64, 64, 3),
    Layer("resnet 1x1 512-128", 28, 512, 128),
    Layer("resnet 3x3 128", 28, 128, 128, 3),
    Layer("resnet 3x3 s2 128", 56, 128, 128, 3, 2),
    Layer("resnet 1x1 s2 256-512", 56, 256, 512, 1, 2),
    Layer("resnet 1x1 1024-256", 14, 1024, 256),
    Layer("resnet 1x1 256-1024", 14, 256, 1024),
    Layer("resnet 3x3 256", 14, 256, 256, 3),
    Layer("resnet 1x1 2048-512", 7, 2048, 512),
    Layer("resnet 1x1 512-2048", 7, 512, 2048),
    Layer("resnet 3x3 512", 7, 512, 512, 3),
    Layer("mobilenet stem", 224, 3, 32, 3, 2),
    Layer("mobilenet dw 32", 112, 32, 32, 3, 1, 32),
    Layer("mobilenet 1x1 32-16", 112, 32, 16),
    Layer("mobilenet 1x1 16-96", 112, 16, 96),
    Layer("mobilenet dw s2 96", 112, 96, 96, 3, 2, 96),
    Layer("mobilenet 1x1 96-24", 56, 96, 24),
    Layer("mobilenet 1x1 24-144", 56, 24, 144),
    Layer("mobilenet dw 144", 56, 144, 144, 3, 1, 144),
    Layer("mobilenet dw s2 144", 56, 144, 144, 3, 2, 144),
    Layer("mobilenet 1x1 192-32", 28, 192, 32),
    Layer("mobilenet dw 192", 28, 192, 192, 3, 1, 192),
    Layer("mobilenet dw 384", 14, 384, 384, 3, 1, 384),
    Layer("mobilenet 1x1 384-64", 14, 384, 64),
    Layer("mobilenet 1x1 576-96", 14, 576, 96),
    Layer("mobilenet dw 960", 7, 960, 960, 3, 1, 960),
    Layer("mobilenet 1x1 960-320", 7, 960, 320),
    Layer("efficientnet dw 5x5 240", 28, 240, 240, 5, 1, 240),
    Layer("convnext dw 7x7 96", 56, 96, 96, 7, 1, 96),
    Layer("detector stem 640", 640, 3, 32, 3, 2),
    Layer("detector 3x3 s2 32-64", 320, 32, 64, 3, 2),
    Layer("detector 3x3 64", 80, 64, 64, 3),
    Layer("detector 3x3 32", 160, 32, 32, 3),
    Layer("vgg 3x3 256", 56, 256, 256, 3),
    Layer("gray 5x5 1-64", 224, 1, 64, 5),
    Layer("3x3 10-20", 56, 10, 20, 3),
)


def best(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The least time of one call of each, called in turns; a call that returns a float has measured itself."""
    found = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for name, call in calls.items():
            for _ in range(3):
                start = time.perf_counter()
                told = call()
                taken = told if isinstance(told, float) else time.perf_counter() - start
                found[name] = min(found[name], taken)
    return found


def model_of(layer: Layer, x: Array, w: Array, bias: Array) -> bytes:
    node = helper.make_node(
        "Conv",
        ["x", "w", "b"],
        ["c"],
        kernel_shape=[layer.kernel] * 2,
        strides=[layer.stride] * 2,
        pads=[layer.pad] * 4,
        group=layer.group,
    )
    relu = helper.make_node("Relu", ["c"], ["y"])
    graph = helper.make_graph(
        [node, relu],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(bias, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def openvino_bf16(layer: Layer, x: Array, w: Array, bias: Array) -> tuple[Callable[[], float], Array]:
    """Calls that return the time of the convolution alone, and the result."""
    import io

    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1, "PERF_COUNT": True}
    model = core.read_model(io.BytesIO(model_of(layer, x, w, bias)))
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    result: Array = np.array(request.infer({0: x})[0])

    def call() -> float:
        request.infer()
        return sum(i.real_time.total_seconds() for i in request.profiling_info if "Convolution" in i.node_type)

    return call, result


def peer(layer: Layer, x: Array, w: Array, bias: Array) -> Callable[[], Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = model_of(layer, x, w, bias)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    binding = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    target = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(result))
    binding.bind_ortvalue_input("x", value)
    binding.bind_ortvalue_output("y", target)

    def call() -> Array:
        session.run_with_iobinding(binding)
        return result

    return call


def ours(
    layer: Layer, x: Array, w: Array, bias: Array, isa: Isa, winograd: bool, dtype: DType = F32
) -> tuple[Callable[[], None], Array]:
    pads = (layer.pad,) * 4
    shape = ConvShape.conv(x.shape, w.shape, strides=(layer.stride,) * 2, pads=pads, group=layer.group)
    if not takes_any_layout(shape):
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    if not takes_any_layout(shape):  # a network's input is float32, what its layers pass on is stored narrow
        x = x.astype(dtype.numpy)
    source = harness.aligned(x.nbytes).view(x.dtype)
    order = (0, 1, 2, 3) if takes_any_layout(shape) else (0, 2, 3, 1)
    source[:] = x.transpose(order).reshape(-1)
    x_view = harness.view_of(x)
    target = harness.aligned(dtype.numpy.itemsize * shape.pixels * layer.cout).view(dtype.numpy)
    out = View.temporary(dtype, (1, layer.cout, *shape.out[1:]), (0, 2, 3, 1))
    operand = Operand(View.constant(bias, F32), (0, 0, 1))
    value = Op("max", (Op("add", (Result(0, F32), Load(0, F32)), F32), Const(0.0, F32)), F32)
    packed = pack_weights(w, isa, shape, winograd=winograd, dtype=dtype)
    launches = conv(x_view, packed, out, shape, isa, epilogue=Epilogue(value, (operand,)), threads=1)
    runner = harness.Runner(launches, isa, {x_view.storage: source, out.storage: target})
    result = target.reshape(1, *shape.out[1:], layer.cout).transpose(0, 3, 1, 2)
    return runner, result


def fma_peak(isa: Isa) -> float:
    """GFLOP/s of independent fused multiply-adds in registers."""
    import ctypes

    from ranvier.codegen.launch import KernelSpec
    from ranvier.codegen.llvm.builder import Module, vector
    from ranvier.codegen.llvm.library import kernels

    lanes, chains = isa.lanes(4), 12
    kind = vector("float", lanes)

    def emit(module: Module, symbol: str, target: Isa) -> None:
        f = module.function(symbol, [("i64", "count"), ("ptr", "out")])
        sums = [f.var(kind, float(k)) for k in range(chains)]
        factor = f.load(kind, f.args["out"])
        with f.loop(0, f.args["count"]):
            for each in sums:
                each.set(f.fma(factor, factor, each.get()))
        for k, each in enumerate(sums):  # each to a place of its own, or all but the last would be dead
            f.store(each.get(), f.gep(f.args["out"], k * isa.vector_bytes))
        f.ret()

    spec = KernelSpec("peak", ("peak", lanes), emit)
    kernel = kernels([spec], isa)[spec]
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(kernel.address)
    room = harness.aligned(64 * chains, 0)
    count = 200_000
    least = min(_timed(lambda: function(count, room.ctypes.data)) for _ in range(40))
    return float(2 * lanes * chains * count / least / 1e9)


def tile_peak(isa: Isa) -> float:
    """GFLOP/s of the matrix unit on tiles that are there."""
    import ctypes

    from ranvier.codegen.launch import KernelSpec
    from ranvier.codegen.llvm.amx import tiles
    from ranvier.codegen.llvm.builder import Module
    from ranvier.codegen.llvm.library import kernels

    def emit(module: Module, symbol: str, target: Isa) -> None:
        f = module.function(symbol, [("i64", "count")])
        tiles.configure(f, f.i64(tiles.ROWS))
        with f.loop(0, f.args["count"]):
            for r in range(2):
                for c in range(2):
                    tiles.multiply(f, "tdpbf16ps", tiles.sums(r, c), tiles.a_tile(r), tiles.b_tile(c))
        tiles.release(f)
        f.ret()

    spec = KernelSpec("tile peak", ("tile peak",), emit)
    kernel = kernels([spec], isa)[spec]
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(kernel.address)
    count = 20_000
    least = min(_timed(lambda: function(count)) for _ in range(40))
    return 4 * 2 * 16 * 16 * 32 * count / least / 1e9


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


_SCALE = 0.02  # of inputs, weights and outputs
_ZERO = 100  # the code of zero in inputs


def coded(rng: np.random.Generator, layer: Layer) -> tuple[Array, Array, Array]:
    """Codes of an input, of weights, and a bias of sums."""
    x = rng.integers(0, 256, (1, layer.cin, layer.size, layer.size)).astype(np.uint8)
    w = rng.integers(-9, 10, (layer.cout, layer.cin // layer.group, layer.kernel, layer.kernel)).astype(np.int8)
    return x, w, rng.integers(-900, 900, layer.cout).astype(np.int32)


def ours_int8(layer: Layer, x: Array, w: Array, bias: Array, isa: Isa) -> tuple[Callable[[], None], Array]:
    pads = (layer.pad,) * 4
    if 1 < layer.cin < 4:  # planes are put side by side four at a time
        x, w = (np.pad(each, ((0, 0), (0, 4 - layer.cin), (0, 0), (0, 0))) for each in (x, w))
    shape = ConvShape.conv(x.shape, w.shape, strides=(layer.stride,) * 2, pads=pads, group=layer.group)
    source, zero = harness.aligned(x.nbytes), harness.aligned(1)
    source[:], zero[:] = x.transpose(0, 2, 3, 1).reshape(-1), _ZERO
    x_view = View(harness.view_of(source).storage, U8, x.shape, dense_last(x.shape))
    target = harness.aligned(shape.pixels * layer.cout)
    out = View.temporary(U8, (1, layer.cout, *shape.out[1:]), (0, 2, 3, 1))
    moved = bias - _ZERO * w.astype(np.int32).sum((1, 2, 3))
    operand = Operand(View.constant(moved.astype(np.int32), DType.int32), (0, 0, 1))
    total = Op("cast", (Op("add", (Result(0, DType.int32), Load(0, DType.int32)), DType.int32),), F32)
    scale = np.full(layer.cout, _SCALE * _SCALE, np.float32)
    scales = Operand(View.constant(scale, F32), (0, 0, 1))
    number = Op("max", (Op("mul", (total, Load(1, F32)), F32), Const(0.0, F32)), F32)
    step = Load(2, F32)
    quotient = Op("quotient", (number, step, Op("reciprocal", (step,), F32)), F32)
    value = Op("cast", (Op("round", (quotient,), F32),), U8)
    one = Operand(View.constant(np.array([_SCALE], np.float32), F32), (0, 0, 0))
    epilogue = Epilogue(value, (operand, scales, one))
    zero_view = harness.view_of(zero)
    if layer.group == layer.cin > 1:
        packed = pack_depthwise(w, np.zeros(1, np.int8), isa, shape)
        launches = integer_depthwise(x_view, zero_view, packed, out, shape, isa, epilogue=epilogue)
    else:
        launches = integer_conv(x_view, zero_view, pack_filters(w, isa, shape), out, shape, isa, epilogue=epilogue)
    bound = {x_view.storage: source, zero_view.storage: zero, out.storage: target}
    result = target.reshape(1, *shape.out[1:], layer.cout).transpose(0, 3, 1, 2)
    return harness.Runner(launches, isa, bound), result


def dense_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, c, h, w = shape
    return c * h * w, 1, w * c, c


def peer_int8(layer: Layer, x: Array, w: Array, bias: Array) -> Callable[[], Array]:
    names = ["x", "xs", "xz", "w", "s", "wz", "s", "oz", "b"]
    constants = {
        "xs": np.float32(_SCALE),
        "s": np.float32(_SCALE),
        "xz": np.uint8(_ZERO),
        "w": w,
        "wz": np.int8(0),
        "oz": np.uint8(0),
        "b": bias,
    }
    attributes = {"strides": [layer.stride] * 2, "pads": [layer.pad] * 4, "group": layer.group}
    node = helper.make_node("QLinearConv", names, ["y"], kernel_shape=[layer.kernel] * 2, **attributes)
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, None)],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    return lambda: np.asarray(session.run(None, {"x": x})[0]) if result.size else result


def in_int8(names: list[str], isa: Isa, seconds: float) -> None:
    heads = ("ours µs", "f32 µs", "ORT µs", "ORT/ours", "f32/ours", "GOP/s", "differ")
    print(f"{'layer':26} " + " ".join(f"{h:>8}" for h in heads))
    rng = np.random.default_rng(0)
    ratios: list[tuple[float, float]] = []
    for layer in chosen_layers(names):
        plain, _ = ours(layer, *layer.tensors(rng), isa, True)
        x, w, bias = coded(rng, layer)
        small, result = ours_int8(layer, x, w, bias, isa)
        theirs = peer_int8(layer, x, w, bias)
        least = best({"f32": plain, "int8": small, "ort": theirs}, seconds)
        rate = 2.0 * result.size * w[0].size / least["int8"] / 1e9
        differ = int((result != theirs()).sum())
        ratios.append((least["ort"] / least["int8"], least["f32"] / least["int8"]))
        times = " ".join(f"{least[k] * 1e6:8.1f}" for k in ("int8", "f32", "ort"))
        shares = " ".join(f"{r:8.2f}" for r in ratios[-1])
        print(f"{layer.name:26} {times} {shares} {rate:8.0f} {differ:8}", flush=True)
    show_means(("ONNX Runtime", "our float32"), ratios)


def show_means(names: tuple[str, ...], ratios: list[tuple[float, float]]) -> None:
    for name, found in zip(names, zip(*ratios)):
        print(f"geometric mean of {name} / ours: {float(np.exp(np.mean(np.log(found)))):.3f}")


def chosen_layers(names: list[str]) -> list[Layer]:
    return [layer for layer in LAYERS if not names or any(n in layer.name for n in names)]


def in_bf16(names: list[str], isa: Isa, seconds: float) -> None:
    peak = tile_peak(isa) if isa.has("amx-bf16") else 2 * fma_peak(isa)
    print(f"{isa.name}: bfloat16 peak {peak:.0f} GFLOP/s")
    heads = ("ours µs", "f32 µs", "OV µs", "OV/ours", "f32/ours", "GFLOP/s", "of peak", "error")
    print(f"{'layer':26} " + " ".join(f"{h:>8}" for h in heads))
    rng = np.random.default_rng(0)
    ratios: list[tuple[float, float]] = []
    for layer in chosen_layers(names):
        x, w, bias = layer.tensors(rng)
        plain, _ = ours(layer, x, w, bias, isa, True)
        narrow, result = ours(layer, x, w, bias, isa, True, BF16)
        theirs, want = openvino_bf16(layer, x, w, bias)
        least = best({"f32": plain, "bf16": narrow, "openvino": theirs}, seconds)
        rate = 2.0 * result.size * w[0].size / least["bf16"] / 1e9
        error = float(np.abs(result.astype(np.float32) - want).max() / np.abs(want).max())
        ratios.append((least["openvino"] / least["bf16"], least["f32"] / least["bf16"]))
        times = " ".join(f"{least[k] * 1e6:8.1f}" for k in ("bf16", "f32", "openvino"))
        shares = " ".join(f"{r:8.2f}" for r in ratios[-1])
        print(f"{layer.name:26} {times} {shares} {rate:8.0f} {rate / peak:8.1%} {error:8.1e}", flush=True)
    show_means(("OpenVINO", "our float32"), ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of layer names")
    parser.add_argument("--isa", default="")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--no-winograd", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--int8", action="store_true")
    given = parser.parse_args()
    isa = chosen(given.isa)
    if given.bf16:
        in_bf16(given.names, isa, given.seconds)
        return
    if given.int8:
        in_int8(given.names, isa, given.seconds)
        return
    peak = fma_peak(isa)
    print(f"{isa.name}: FMA peak {peak:.0f} GFLOP/s")
    print(f"{'layer':26} {'ours µs':>9} {'ORT µs':>9} {'ORT/ours':>9} {'GFLOP/s':>8} {'of peak':>8} {'error':>8}")
    rng = np.random.default_rng(0)
    ratios: list[float] = []
    for layer in chosen_layers(given.names):
        x, w, bias = layer.tensors(rng)
        depth = w.shape[1]
        theirs = peer(layer, x, w, bias)
        mine, result = ours(layer, x, w, bias, isa, not given.no_winograd)
        least = best({"ours": mine, "ort": theirs}, given.seconds)
        flops = 2.0 * result.size * depth * layer.kernel**2
        want = theirs()
        error = float(np.abs(result - want).max() / np.abs(want).max())
        rate = flops / least["ours"] / 1e9
        ratios.append(least["ort"] / least["ours"])
        print(
            f"{layer.name:26} {least['ours'] * 1e6:9.1f} {least['ort'] * 1e6:9.1f} {ratios[-1]:9.2f} {rate:8.1f} "
            f"{rate / peak:8.1%} {error:8.1e}",
            flush=True,
        )
    print(f"geometric mean of ORT/ours: {float(np.exp(np.mean(np.log(ratios)))):.3f}")


if __name__ == "__main__":
    main()
