"""What other runtimes are known to compute otherwise, or fail at, they are not given: the reference runs it, and the
report says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.codegen.llvm.isa import architecture
from ranvier.errors import InvalidConfig, ProviderUnavailable, RanvierError
from ranvier.providers.onnxruntime import OnnxRuntimeOptions
from ranvier.providers.registry import REGISTRY

BIG = 1 << 40


def model(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "ai.onnx.ml" : 3]>\n{text}')


def outcome(provider: str, text: str, inputs: dict[str, Any], op: str, opset: int = 21) -> tuple[str, Any]:
    """Why the provider declined the operator, nothing where it took it, and what came out."""
    try:
        REGISTRY.get(provider)
    except ProviderUnavailable as error:
        pytest.skip(str(error))
    with rv.load(model(text, opset), providers=[provider, "reference"], optimization="none") as session:
        (node,) = [node for node in session.report.nodes if node.op == op]
        result: Any
        try:
            result = session.run(inputs)["y"]
        except RanvierError as error:
            result = error
        assert not session.report.fallbacks
        return "; ".join(reason for who, reason in node.declined if who == provider), result


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, type):
        return isinstance(found, wanted)
    return bool(found.dtype == wanted.dtype and np.array_equal(found, wanted))


def wide(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# (the graph, its inputs, what is right, the reason why OpenVINO is not asked)
OPENVINO: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "Add": ("(int64[2] x) => (int64[2] y) { y = Add(x, x) }", {"x": wide(BIG, 1)}, wide(2 * BIG, 2), "in 32 bits"),
    "Identity": ("(uint64[1] x) => (uint64[1] y) { y = Identity(x) }", {"x": np.uint64([BIG])}, np.uint64([BIG]),
                 "keeps uint64 in 32 bits"),
    "Equal": ("(int64[1] x, int64[1] z) => (bool[1] y) { y = Equal(x, z) }", {"x": wide(BIG), "z": wide(0)},
              np.array([False]), "by 32 of their bits"),
    "Mul": ("(uint8[1] x) => (uint8[1] y) { y = Mul(x, x) }", {"x": np.uint8([200])}, np.uint8([64]), "largest uint8"),
    "Sub": ("(int8[1] x, int8[1] z) => (int8[1] y) { y = Sub(x, z) }", {"x": np.int8([-100]), "z": np.int8([100])},
            np.int8([56]), "largest int8"),
    "ReduceSum": ("(int32[2] x) => (int32[1] y) { y = ReduceSum(x) }", {"x": np.int32([1 << 24, 1])},
                  np.int32([(1 << 24) + 1]), "adds int32 as floats"),
    "MatMul": ("(int32[1,1] x) => (int32[1,1] y) { y = MatMul(x, x) }", {"x": np.int32([[4097]])},
               np.int32([[4097 * 4097]]), "adds int32 as floats"),
    "Mod": ("(int32[1] x, int32[1] z) => (int32[1] y) { y = Mod(x, z) }", {"x": np.int32([1]), "z": np.int32([0])},
            RanvierError, "computes int32 as floats"),
    "Gather": ("(float[4] x, int32[1] z) => (float[1] y) { y = Gather(x, z) }",
               {"x": np.ones(4, np.float32), "z": np.int32([4])}, RanvierError, "within range"),
    "Pad": ("(float[2] x, int64[2] z) => (float[n] y) { y = Pad <mode = \"edge\"> (x, z) }",
            {"x": np.ones(2, np.float32), "z": wide(-3, 3)}, RanvierError, "writes beyond its memory"),
    "GatherND": ("(float[4] x, int64[1,1] z) => (float[1] y) { y = GatherND(x, z) }",
                 {"x": np.ones(4, np.float32), "z": wide(4).reshape(1, 1)}, RanvierError, "within range"),
}  # fmt: skip

# operators that it has only floats for on all processors, and a number that they leave an integer as it is by
EVERYWHERE = {"Div": 1, "Mod": 30000000, "Pow": 1}


@pytest.mark.parametrize(("op", "by"), [("Add", 0), ("Sub", 0), ("Max", 0), ("Mul", 1), *EVERYWHERE.items()])
def test_openvino_has_floats_for_integers(op: str, by: int) -> None:
    text = f"g (int32[1] x) => (int32[1] y) {{ i = Constant <value = int32[1] {{{by}}}> () y = {op}(x, i) }}"
    x = np.int32([20000001])
    reason, found = outcome("openvino", text, {"x": x}, op)
    assert same(found, x)
    assert ("as floats" in reason) == (op in EVERYWHERE or architecture() == "aarch64")


@pytest.mark.parametrize("op", OPENVINO)
def test_openvino_is_not_given_what_it_computes_otherwise(op: str) -> None:
    text, inputs, wanted, why = OPENVINO[op]
    reason, found = outcome("openvino", f"g {text}", inputs, op)
    assert why in reason
    assert same(found, wanted)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("Gather", "i = Constant <value = int64[2] {3, -4}> () y = Gather(x, i)"),
        ("Gather", "i = Constant <value = int64[2] {0, -5}> () y = Gather(x, i)"),
        ("Pad", "i = Constant <value = int64[2] {1, 0}> () y = Pad(x, i)"),
        ("GatherND", "i = Constant <value = int64[2,1] {3, -4}> () y = GatherND(x, i)"),
        ("Mul", "c = Cast <to = 6> (x) i = Constant <value = int32[1] {-2}> () d = Mul(c, i) y = Cast <to = 1> (d)"),
    ],
)
def test_openvino_is_given_what_is_known_to_be_well(op: str, text: str) -> None:
    x = np.float32([-7, 2, 3, 4])
    reason, found = outcome("openvino", f"g (float[4] x) => (float[n] y) {{ {text} }}", {"x": x}, op)
    wrong = "-5" in text
    assert bool(reason) == wrong or "as floats on this processor" in reason
    right = {"Mul": np.float32([14, -4, -6, -8]), "Pad": np.float32([0, -7, 2, 3, 4])}
    wanted: Any = RanvierError if wrong else right.get(op, x[[3, 0]])
    assert same(found, wanted)


RESIZE = 's = Constant <value = int64[2] {%s}> () y = Resize <mode = "%s"> (x, , , s)'
CAUSAL = "(float[1,1,4,2] q, int64[1] n) => (float[1,1,4,2] y) { y = Attention <is_causal = 1> (q, q, q, , , , n) }"


@pytest.mark.parametrize(
    ("op", "text", "right"),
    [
        ("Softplus", "y = Softplus(x)", [[2.061154e-9, 8.315287e-7, 0.04858735, 0.6931472]]),
        ("Log", "e = Exp(x) y = Log(e)", [[-20, -14, -3, 0]]),
        ("Tanh", "y = Tanh(x)", [[-1, -1, -0.9950548, 0]]),
        ("Erf", "y = Erf(x)", [[-1, -1, -0.9999779, 0]]),
        ("Resize", RESIZE % ("1, 3", "nearest"), [[-20, -14, 0]]),
    ],
)
def test_openvino_is_coarser(op: str, text: str, right: Any) -> None:
    x = np.float32([[-20, -14, -3, 0]])
    reason, found = outcome("openvino", f"g (float[1,4] x) => (float[1,n] y) {{ {text} }}", {"x": x}, op)
    assert bool(reason) == (op == "Softplus" or architecture() == "aarch64")
    np.testing.assert_allclose(found, np.float32(right), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "text"),
    [("Exp", "y = Exp(x)"), ("Resize", RESIZE % ("2, 6", "nearest")), ("Resize", RESIZE % ("2, 5", "linear"))],
)
def test_openvino_is_given_the_rest_of_them(op: str, text: str) -> None:
    x = np.float32([[1, 2, 4]])
    reason, _ = outcome("openvino", f"g (float[1,3] x) => (float[m,n] y) {{ {text} }}", {"x": x}, op)
    assert not reason


def test_openvino_is_not_asked_about_queries_that_see_nothing() -> None:
    q = np.float32([[[[1, 0], [0, 1], [2, 0], [0, 2]]]])
    reason, found = outcome("openvino", f"g {CAUSAL}", {"q": q, "n": wide(2)}, "Attention", 24)
    assert "may see anything" in reason
    assert not found[0, 0, :2].any()  # of four queries the last two have keys


def test_openvino_compiles_without_its_generator_what_that_fails_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    from ranvier.providers.openvino import provider

    asked: list[dict[str, Any]] = []

    class Failing:
        """Its generator fails, and on another device everything."""

        def read_model(self, data: bytes) -> bytes:
            return data

        def compile_model(self, model: bytes, plugin: str, choices: dict[str, Any]) -> str:
            asked.append(choices)
            if "SNIPPETS_MODE" not in choices or plugin == "GPU":
                raise RuntimeError("cannot be merged")
            return "made"

    monkeypatch.setattr(provider, "_core", Failing)
    assert provider._compiled(b"", "CPU", {"A": 1}) == "made"
    assert asked == [{"A": 1}, {"A": 1, "SNIPPETS_MODE": "DISABLE"}]
    with pytest.raises(RuntimeError, match="merged"):
        provider._compiled(b"", "GPU", {})
    assert len(asked) == 3


LSTM = "(float[1,2,3] x, float[1,4,3] w, float[1,4,1] r) => (float[1,2,1,1] y) { y = LSTM <%s> (x, w, r) }"
ROI = "(float[1,1,4,4] x, float[1,4] r, int64[1] b) => (float[1,1,1,1] y) { y = RoiAlign(x, r, b) }"
CONV = "(uint8[1,1,1,1] x, uint8[2,1,1,1] w, uint8 a, uint8%s z) => (int32[1,2,1,1] y) { y = ConvInteger(x, w, a, z) }"
LARGEST = "(bool[%s,2] x) => (bool[1,1] y) { y = ReduceMax(x) }"
ROIS = {"x": np.ones((1, 1, 4, 4), np.float32), "r": np.float32([[0, 0, 4, 4]]), "b": wide(0)}
GATES = {"x": np.ones((1, 2, 3), np.float32), "w": np.ones((1, 4, 3), np.float32), "r": np.ones((1, 4, 1), np.float32)}
ONE = {"x": np.ones((1, 1, 1, 1), np.uint8), "w": np.ones((2, 1, 1, 1), np.uint8), "a": np.uint8(0)}


@pytest.mark.parametrize(
    ("op", "opset", "text", "inputs", "why"),
    [
        ("LSTM", 14, LSTM % "hidden_size = 1, layout = 1", GATES, "batch first"),
        ("LSTM", 14, LSTM.replace("1,2,1,1", "1,1,2,1") % "hidden_size = 1", GATES, ""),
        ("RoiAlign", 22, ROI, ROIS, "no kernel for version 22"),
        ("RoiAlign", 16, ROI, ROIS, ""),
        ("ConvInteger", 10, CONV % "[2]", {**ONE, "z": np.zeros(2, np.uint8)}, "one zero point"),
        ("ConvInteger", 10, CONV % "", {**ONE, "z": np.uint8(0)}, ""),
        ("ReduceMax", 20, LARGEST % "n", {"x": np.ones((0, 2), bool)}, "no extreme of no booleans"),
        ("ReduceMax", 20, LARGEST % "1", {"x": np.ones((1, 2), bool)}, ""),
    ],
)
def test_onnxruntime_is_not_given_what_it_fails_at(op: str, opset: int, text: str, inputs: Any, why: str) -> None:
    reason, found = outcome("onnxruntime", f"g {text}", inputs, op, opset)
    assert (why in reason) if why else not reason
    with rv.load(model(f"g {text}", opset), providers=["reference"], optimization="none") as session:
        np.testing.assert_allclose(found, session.run(inputs)["y"], rtol=1e-5)


def test_a_model_without_the_main_domain_names_an_opset_that_all_know() -> None:
    text = "g (float[3] x) => (float[3] y) { y = ai.onnx.ml.Binarizer <threshold = 0.5> (x) }"
    reason, found = outcome("onnxruntime", text, {"x": np.float32([0, 1, 0.2])}, "Binarizer")
    assert not reason
    assert found.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("ep", "hint"),
    [("CUDAExecutionProvidr", r"did you mean 'CUDAExecutionProvider'"), ("DmlExecutionProvider", r"it has .*CPUExec")],
)
def test_a_provider_inside_onnxruntime_that_is_not_there(ep: str, hint: str) -> None:
    """Misspelt, the name that was meant is told; spelt right, what this installation has instead."""
    library = pytest.importorskip("onnxruntime")
    assert ep not in library.get_available_providers()
    with pytest.raises(InvalidConfig, match=rf"here has no '{ep}' \({hint}"):
        REGISTRY.get("onnxruntime").configure(OnnxRuntimeOptions(ep=ep))  # type: ignore[attr-defined]
