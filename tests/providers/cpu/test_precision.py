"""Float32 values in 16 bits: results within what rounding explains, and memory as the assignment says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.codegen.llvm import isa
from ranvier.codegen.llvm.gemm.halves import multiplies_halves
from ranvier.dtypes import DType
from ranvier.providers.cpu.kernel import CpuKernel
from ranvier.providers.cpu.narrow import assign as assigning
from ranvier.providers.cpu.narrow.effective import effective
from ranvier.providers.cpu.realise import Realiser
from ranvier.runtime.session import Session

Array = np.ndarray[Any, Any]
ROUNDING = 2.0**-8  # relative: half of the distance between two bfloat16 numbers, with room for a second rounding
HERE = effective("bf16", isa.host())[0] == "bf16"
needs_products = pytest.mark.skipif(not HERE, reason="this processor has no bfloat16 products")
needs_float16 = pytest.mark.skipif(effective("fp16", isa.host())[0] != "fp16", reason="no use of float16 here")
needs_halves = pytest.mark.skipif(not multiplies_halves(isa.host()), reason="this processor has no float16 arithmetic")


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"{op}_{outputs.split()[0]}", **attrs)


def model(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, Array], outputs: str, constants: Mapping[str, Any] | None = None
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for k, x in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(x), name) for name, x in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def floats(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def narrowed(made: onnx.ModelProto, **options: Any) -> Session:
    return rv.load(made, providers=["cpu"], optimization="none", precision="bf16", **options)


def choices(session: Session) -> dict[str, tuple[str, str]]:
    return {n.name: (n.precision, n.stored) for n in session.report.nodes if n.precision}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every byte and every multiplication counts, kernels themselves cost nothing: all that may be narrow is."""
    monkeypatch.setattr(assigning, "LAUNCH", 0.0)
    monkeypatch.setattr(assigning, "touching", lambda nbytes: 1e-9 * nbytes)
    monkeypatch.setattr(assigning, "multiplying", lambda flops, isa: 1.0 + flops)
    yield


# -- storage --------------------------------------------------------------------------------------------------------


@needs_products
@pytest.mark.usefixtures("eager")
def test_what_lies_between_two_kernels_is_rounded_once() -> None:
    x = floats(0, 33, 50)
    made = model(
        [node("Tanh", "x", "t"), node("Transpose", "t", "u", perm=[1, 0]), node("CumSum", "u a", "y")],
        {"x": x},
        "y",
        {"a": 0},
    )
    with narrowed(made) as session:
        found = session.run({"x": x})["y"]
    assert choices(session)["Tanh_t"] == ("f32", "f32")  # CumSum takes float32 only: converting would be for nothing
    made = model(
        [node("Tanh", "x", "t"), node("ReduceSum", "t a", "s"), node("Mul", "t s", "y")], {"x": x}, "y", {"a": [1]}
    )
    with narrowed(made) as session:
        found = session.run({"x": x})["y"]
    assert choices(session)["Tanh_t"] == ("f32", "bf16")
    stored = np.tanh(x.astype(np.float64)).astype(DType.bfloat16.numpy).astype(np.float64)
    # both that read it see the same rounded values, and neither rounds anything again
    np.testing.assert_allclose(found, stored * stored.sum(axis=1, keepdims=True), rtol=2e-3)


@needs_products
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_are_close_and_lie_as_assigned(seed: int) -> None:
    made, x = random_graph(seed)
    expected = rv.load(made, providers=["reference"], optimization="none").run({"x": x})
    checked: list[Realiser] = []
    whole = Realiser.run

    def watched(self: Realiser) -> Any:
        done = whole(self)
        checked.append(self)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Realiser, "run", watched)
        patch.setattr(CpuKernel, "_interpret", lambda *_: pytest.fail("the partition ran by the reference"))
        with narrowed(made) as session:
            found = session.run({"x": x})
    for name, want in expected.items():
        assert found[name].dtype == np.float32
        gap = np.abs(found[name].astype(np.float64) - want).max()
        assert gap <= 12 * ROUNDING * max(1.0, np.abs(want).max())
    for realiser in checked:
        stored = realiser.done.assignment.stored
        for value, view in realiser._views.items():
            wanted = stored.get(value, realiser.program.dtype(value))
            assert view.dtype is wanted and view.element is realiser.program.dtype(value)
            if wanted is DType.bfloat16:
                assert view.storage.kind == "temp" and view.storage.stands_for is DType.float32


def random_graph(seed: int) -> tuple[onnx.ModelProto, Array]:
    """Smooth operators only: where a value is compared or cut off, a rounding may change everything."""
    rng = np.random.default_rng(seed)
    x = floats(seed, 2, 8, 6, 10)
    constants: dict[str, Any] = {"axes": np.array([1]), "scale": floats(1, 10), "shift": floats(2, 10)}
    nodes: list[onnx.NodeProto] = []
    have = [("x", (2, 8, 6, 10))]

    def add(op: str, inputs: str, shape: tuple[int, ...], **attrs: Any) -> None:
        name = f"v{len(nodes)}"
        nodes.append(node(op, inputs, name, **attrs))
        have.append((name, shape))

    for _ in range(10):
        name, shape = have[rng.integers(max(0, len(have) - 4), len(have))]
        match rng.integers(11):
            case 0:
                add(str(rng.choice(["Tanh", "Sigmoid", "Relu", "Erf", "Softplus"])), name, shape)
            case 1:
                other = next(n for n, s in reversed(have) if s == shape)
                add(str(rng.choice(["Add", "Mul"])), f"{name} {other}", shape)
                add("Tanh", have[-1][0], shape)  # sums of sums must not grow
            case 2:
                perm = [0, 2, 3, 1] if len(shape) == 4 else list(range(len(shape)))
                add("Transpose", name, tuple(shape[p] for p in perm), perm=perm)
            case 3:
                add("Concat", f"{name} {name}", (2 * shape[0], *shape[1:]), axis=0)
            case 4:
                add("Softmax", name, shape, axis=-1)
            case 5 if shape[-1] == 10:
                add("LayerNormalization", f"{name} scale shift", shape, axis=-1)
            case 6:
                add("ReduceMean", f"{name} axes", (shape[0], 1, *shape[2:]), keepdims=1)
            case 7 if len(shape) == 4 and min(shape[2:]) > 1:
                add("MaxPool", name, (*shape[:2], shape[2] - 1, shape[3] - 1), kernel_shape=[2, 2])
            case 8 if len(shape) == 4:
                weights = f"w{len(nodes)}"
                constants[weights] = floats(seed, 16, shape[1], 1, 1) / np.float32(shape[1])
                add("Conv", f"{name} {weights}", (shape[0], 16, *shape[2:]))
            case 9:
                weights = f"w{len(nodes)}"
                constants[weights] = floats(seed, shape[-1], 24) / np.float32(shape[-1])
                add("MatMul", f"{name} {weights}", (*shape[:-1], 24))
            case _:
                sizes = f"s{len(nodes)}"
                constants[sizes] = np.array([shape[0], -1, shape[-1]])
                add("Reshape", f"{name} {sizes}", (shape[0], int(np.prod(shape[1:-1])), shape[-1]))
    used = {name for each in nodes for name in each.input}
    outputs = " ".join(name for name, _ in have[1:] if name not in used)
    return model(nodes, {"x": x}, outputs, constants), x


# -- products -------------------------------------------------------------------------------------------------------


@needs_products
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_products_round_their_operands_and_add_up_in_float32(rows: int) -> None:
    x, w1, w2 = floats(0, rows, 300), floats(1, 300, 130), floats(2, 130, 40)
    chain = [node("MatMul", "x w1", "h"), node("Relu", "h", "r"), node("MatMul", "r w2", "y")]
    made = model(chain, {"x": x}, "y", {"w1": w1, "w2": w2})
    with narrowed(made) as session:
        found = session.run({"x": x})["y"].astype(np.float64)
    told = choices(session)
    assert told["MatMul_h"] == ("bf16", "bf16") and told["MatMul_y"] == ("bf16", "f32")
    bfloat = DType.bfloat16.numpy

    def rounded(a: Array) -> Array:
        return a.astype(np.float32).astype(bfloat).astype(np.float64)

    hidden = rounded(np.maximum(rounded(x) @ rounded(w1), 0))
    exact = hidden @ rounded(w2)
    # what is left is the order of the sums, and hidden values that fell to the other side of a tie
    np.testing.assert_allclose(found, exact, atol=2e-3 * np.abs(exact).max())


@needs_products
@pytest.mark.usefixtures("eager")
def test_kept_nodes_stay_in_float32() -> None:
    x = floats(0, 1, 32, 12, 12)
    weights = {f"w{k}": floats(k, 32, 32, 3, 3) / np.float32(17) for k in range(3)}
    nodes = [
        node("Conv", f"{a} w{k}", b, pads=[1, 1, 1, 1]) for k, (a, b) in enumerate([("x", "a"), ("a", "b"), ("b", "y")])
    ]
    made = model(nodes, {"x": x}, "y", weights)
    exact = rv.load(made, providers=["cpu"]).run({"x": x})["y"]
    with narrowed(made) as session:
        assert {kind for kind, _ in choices(session).values()} == {"bf16"}
        off = np.abs(session.run({"x": x})["y"] - exact).max()
    with narrowed(made, keep_f32=["Conv_[ab]"]) as session:
        assert choices(session) == {"Conv_a": ("f32", "f32"), "Conv_b": ("f32", "f32"), "Conv_y": ("bf16", "f32")}
        why = {n.name: n.precision_why for n in session.report.nodes}
        assert why["Conv_a"] == "kept by 'Conv_[ab]'"
    with narrowed(made, keep_f32=["*"]) as session:
        found = session.run({"x": x})["y"]
    np.testing.assert_array_equal(found, exact)
    assert off > 1e-4 * np.abs(exact).max()


@needs_products
@pytest.mark.usefixtures("eager")
def test_recurrent_layers_round_their_own_weights_unless_they_are_kept() -> None:
    x = floats(0, 9, 1, 24)
    constants = {"w": floats(1, 1, 160, 24) / np.float32(5), "r": floats(2, 1, 160, 40) / np.float32(6)}
    made = model([node("LSTM", "x w r", "y", hidden_size=40)], {"x": x}, "y", constants)
    exact = rv.load(made, providers=["cpu"]).run({"x": x})["y"]
    constants["r"] = constants["r"].astype(DType.bfloat16.numpy).astype(np.float32)
    rounded = model([node("LSTM", "x w r", "y", hidden_size=40)], {"x": x}, "y", constants)
    expected = rv.load(rounded, providers=["cpu"]).run({"x": x})["y"]
    with narrowed(made) as session:
        assert choices(session) == {"LSTM_y": ("bf16", "f32")}
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=1e-6)
    assert np.abs(expected - exact).max() > 1e-5
    with narrowed(made, keep_f32=["LSTM*"]) as session:
        assert choices(session) == {"LSTM_y": ("f32", "f32")}
        np.testing.assert_array_equal(session.run({"x": x})["y"], exact)


# -- what keeps its bits --------------------------------------------------------------------------------------------


@needs_products
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        ([node("Mul", "x x", "v"), node("Softmax", "v", "s", axis=-1), node("Mul", "v s", "y")], "goes into exp"),
        ([node("Mul", "x x", "v"), node("Sin", "v", "s"), node("ReduceSum", "v", "r"), node("Mul", "s r", "y")], "sin"),
        ([node("Mul", "x x", "v"), node("ArgMax", "v", "y"), node("ReduceSum", "v", "z")], "searched"),
        ([node("Mul", "x x", "v"), node("Round", "v", "y"), node("ReduceSum", "v", "z")], "goes into round"),
        ([node("Mul", "x x", "v"), node("Cast", "v", "y", to=TensorProto.INT32), node("ReduceSum", "v", "z")], "whole"),
    ],
    ids=["exp", "angle", "search", "round", "integer"],
)
def test_what_rounding_would_show_in(nodes: list[onnx.NodeProto], kept: str) -> None:
    x = floats(0, 64, 64)
    outputs = " ".join(name for each in nodes for name in each.output if name in ("y", "z"))
    with narrowed(model(nodes, {"x": x}, outputs)) as session:
        found = next(n for n in session.report.nodes if n.name == "Mul_v")
    assert found.stored == "f32" and kept in found.precision_why


@needs_products
@pytest.mark.usefixtures("eager")
def test_a_sum_that_every_layer_adds_to_stays_and_norms_may_be_rounded() -> None:
    x, w = floats(0, 40, 64), floats(1, 64, 64) / np.float32(8)
    ones = {"g": np.ones(64, np.float32), "w": w}
    nodes: list[onnx.NodeProto] = []
    for k in range(3):
        a, b = ("x" if k == 0 else f"r{k}"), f"r{k + 1}"
        nodes += [node("LayerNormalization", f"{a} g", f"n{k}", axis=-1), node("MatMul", f"n{k} w", f"m{k}")]
        nodes.append(node("Add", f"{a} m{k}", b))
    with narrowed(model(nodes, {"x": x}, "r3", ones)) as session:
        found = {n.name: n for n in session.report.nodes}
    assert [found[f"Add_r{k}"].stored for k in (1, 2, 3)] == ["f32"] * 3
    assert "every layer" in found["Add_r1"].precision_why
    assert found["MatMul_m1"].precision == found["LayerNormalization_n1"].stored == "bf16"


@needs_products
@pytest.mark.usefixtures("eager")
def test_signals_stay_exact_up_to_their_logarithm() -> None:
    """A loud tone and a soft one: in bfloat16 the soft one would drown in the rounding of the loud one."""
    time = np.arange(256)
    x = np.stack([np.sin(0.7 * time + k) + 1e-4 * np.sin(1.9 * time) for k in range(32)]).astype(np.float32)
    w = np.stack([np.cos(f * time) for f in np.linspace(0, 3, 64)], axis=1).astype(np.float32)
    front = [node("MatMul", "x w", "s"), node("Mul", "s s", "p"), node("Clip", "p low", "c"), node("Log", "c", "l")]
    after = [node("Tanh", "l", "h"), node("MatMul", "h v", "y")]
    made = model(front + after, {"x": x}, "y l", {"w": w, "v": floats(0, 64, 64), "low": np.float32(1e-10)})
    with narrowed(made) as session:
        found = session.run({"x": x})
        told = choices(session)
    exact = rv.load(made, providers=["reference"], optimization="none").run({"x": x})
    assert told["MatMul_s"] == ("f32", "f32") and told["MatMul_y"][0] == "bf16"
    np.testing.assert_allclose(found["l"], exact["l"], atol=0.05)


@needs_products
@pytest.mark.usefixtures("eager")
def test_bands_of_powers_may_be_rounded_before_their_logarithm() -> None:
    """What is added up there is never negative: a rounding is a part of the band, and shows as no more than that."""
    time = np.arange(256)
    x = np.stack([np.sin(0.7 * time + k) + 1e-4 * np.sin(1.9 * time) for k in range(32)]).astype(np.float32)
    w = np.stack([np.cos(f * time) for f in np.linspace(0, 3, 64)], axis=1).astype(np.float32)
    bands = np.abs(floats(1, 64, 40))
    front = [node("MatMul", "x w", "s"), node("Mul", "s s", "p"), node("MatMul", "p b", "m")]
    rest = [node("Clip", "m low", "c"), node("Log", "c", "y")]
    made = model(front + rest, {"x": x}, "y", {"w": w, "b": bands, "low": np.float32(1e-10)})
    with narrowed(made) as session:
        found = session.run({"x": x})["y"]
        told = choices(session)
    exact = rv.load(made, providers=["reference"], optimization="none").run({"x": x})["y"]
    assert told["MatMul_s"][0] == "f32" and told["MatMul_m"][0] == "bf16"
    np.testing.assert_allclose(found, exact, atol=0.02)


def test_fourier_transforms_are_computed_in_float32() -> None:
    """With products of 16 bits or without."""
    x, window = floats(0, 1, 8000), np.hanning(400).astype(np.float32)
    made = model([node("STFT", "x step window", "y")], {"x": x}, "y", {"step": 160, "window": window})
    exact = rv.load(made, providers=["cpu"], optimization="none").run({"x": x})["y"]
    with narrowed(made) as session:
        found = session.run({"x": x})["y"]
        (told,) = session.report.nodes
    assert "float64" in told.precision_why
    assert 0 < np.abs(found - exact).max() < 1e-6 * np.abs(exact).max()
    with narrowed(made, keep_f32=["STFT_y"]) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], exact)


# -- where there is none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [i.name for i in isa.available() if effective("bf16", i)[1]])
def test_other_processors_compute_in_float32_and_say_why(code: str) -> None:
    x, w = floats(0, 30, 64), floats(1, 64, 64)
    made = model([node("MatMul", "x w", "m"), node("Tanh", "m", "y")], {"x": x}, "y", {"w": w})
    options: dict[str, Any] = {"providers": ["cpu"], "provider_options": {"cpu": {"isa": code}}}
    exact = rv.load(made, **options).run({"x": x})["y"]
    with rv.load(made, precision="bfloat16", **options) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], exact)
        assert f"{code} has no bf16 products" in session.report.refused
        assert "float32 instead of bf16" in str(session.report)


def test_a_provider_that_has_no_other_precision() -> None:
    x = floats(0, 4, 4)
    with rv.load(model([node("Tanh", "x", "y")], {"x": x}, "y"), providers=["reference"], precision="bf16") as session:
        assert "no provider" in session.report.refused


@needs_float16
@pytest.mark.usefixtures("eager")
def test_float16_waits_for_a_sample_of_what_the_values_are() -> None:
    x, w = floats(0, 64, 64), floats(1, 64, 64)
    nodes = [node("Mul", "x x", "v"), node("ReduceSum", "v a", "s"), node("Mul", "v s", "y")]
    made = model(nodes, {"x": x}, "y", {"a": [1], "w": w})
    options: dict[str, Any] = {"providers": ["cpu"], "optimization": "none", "precision": "fp16"}
    with rv.load(made, **options) as session:
        found = {n.name: n for n in session.report.nodes}
    assert found["Mul_v"].stored == "f32" and "unknown range" in found["Mul_v"].precision_why
    with rv.load(made, calibration={"x": x}, **options) as session:
        assert choices(session)["Mul_v"] == ("f32", "fp16")
        exact = rv.load(made, providers=["reference"]).run({"x": x})["y"]
        np.testing.assert_allclose(session.run({"x": x})["y"], exact, rtol=2e-3, atol=1e-3 * np.abs(exact).max())
    with rv.load(made, calibration={"x": x * np.float32(200)}, **options) as session:
        (why,) = (n.precision_why for n in session.report.nodes if n.name == "Mul_v")
    assert "near the end of float16" in why


@needs_halves
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rows", [1, 40])
def test_float16_products_where_their_sums_fit(rows: int) -> None:
    """Weights and activations that are large enough might sum up to more than float16 has, and stay in float32."""
    x, first, second = floats(0, rows, 200), floats(1, 200, 96) / 8, floats(2, 96, 50) / 8
    nodes = [node("MatMul", "x a", "h"), node("Relu", "h", "r"), node("MatMul", "r b", "y")]
    options: dict[str, Any] = {"providers": ["cpu"], "optimization": "none", "precision": "fp16"}
    made = model(nodes, {"x": x}, "y", {"a": first, "b": second})
    with rv.load(made, calibration={"x": x}, **options) as session:
        told, found = choices(session), session.run({"x": x})["y"]
    assert told["MatMul_h"][0] == told["MatMul_y"][0] == "fp16"
    exact = np.maximum(x.astype(np.float64) @ first, 0) @ second
    assert 0 < np.abs(found - exact).max() < 5e-3 * np.abs(exact).max()
    made = model(nodes, {"x": x}, "y", {"a": first, "b": second * np.float32(300)})
    with rv.load(made, calibration={"x": x}, **options) as session:
        why = {n.name: n.precision_why for n in session.report.nodes}
        told = choices(session)
    assert told["MatMul_h"][0] == "fp16" and told["MatMul_y"][0] == "f32"
    assert "64 products may come to" in why["MatMul_y"]


@needs_halves
@pytest.mark.usefixtures("eager")
def test_float16_weights_that_lie_the_other_way_round() -> None:
    """What Gemm multiplies with is a constant seen another way, whose range is known all the same."""
    x, w = floats(0, 20, 64), floats(1, 48, 64) / 8
    made = model([node("Gemm", "x w", "y", transB=1)], {"x": x}, "y", {"w": w})
    options: dict[str, Any] = {"providers": ["cpu"], "optimization": "none", "precision": "fp16"}
    with rv.load(made, calibration={"x": x}, **options) as session:
        told, found = choices(session), session.run({"x": x})["y"]
    assert told["Gemm_y"][0] == "fp16"
    exact = x.astype(np.float64) @ w.T
    assert 0 < np.abs(found - exact).max() < 5e-3 * np.abs(exact).max()
