"""BitLinear on the CPU provider against the reference: equal, not close, wherever there is no bias to add."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary import Form, fives, form_of, token_codes
from ranvier.formats.onnx import read, save
from ranvier.ops.own.bitlinear import DOMAIN, pack_codes
from ranvier.providers.cpu.kernel import CpuKernel
from ranvier.providers.cpu.lower import bitlinear as lowering
from tests.providers.cpu.compare import agree, one_node, run

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(8)


def operands(lead: tuple[int, ...], k: int, n: int, *, each: bool = False, bias: bool = False) -> list[Array]:
    x = RNG.standard_normal((*lead, k)).astype(np.float32)
    w = RNG.integers(-1, 2, (n, k)).astype(np.int8)
    scale = RNG.random((n,) if each else ()).astype(np.float32) + np.float32(0.1)
    return [x, pack_codes(w), scale, *([RNG.standard_normal(n).astype(np.float32)] if bias else [])]


def model(given: list[Array], k: int, n: int) -> onnx.ModelProto:
    return one_node("BitLinear", given, {"K": k, "N": n}, constant=(1, 2, 3), domain=DOMAIN)


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (1, 1, 40)])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (50, 33), (256, 70)])
@pytest.mark.parametrize("each", [False, True])
def test_equal_to_the_definition(lead: tuple[int, ...], k: int, n: int, each: bool) -> None:
    given = operands(lead, k, n, each=each)
    agree(model(given, k, n), {"x0": given[0]}, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["avx2", "portable"])
@pytest.mark.parametrize("m", [1, 9])
def test_other_instruction_sets(monkeypatch: pytest.MonkeyPatch, kind: str, m: int) -> None:
    monkeypatch.setenv("RANVIER_CPU_ISA", kind)
    given = operands((m,), 130, 40)
    try:
        agree(model(given, 130, 40), {"x0": given[0]}, rtol=0, atol=0)
    except rv.errors.InvalidConfig:
        pytest.skip(f"this machine has no {kind}")


@pytest.mark.parametrize("lead", [(1,), (3,), (4,)])
def test_weights_packed_for_far_caches(monkeypatch: pytest.MonkeyPatch, lead: tuple[int, ...]) -> None:
    monkeypatch.setattr(fives, "_LEAST", 0)
    given = operands(lead, 200, 130, each=True)
    agree(model(given, 200, 130), {"x0": given[0]}, rtol=0, atol=0)


def test_the_form_of_weights_is_chosen_by_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one layer leaves in the cache is pushed out by the others; codes that two layers share are there once."""
    asked = []

    def recorded(isa: Isa, rows: int, k: int, n: int, together: int) -> Form:
        asked.append((rows, k, n, together))
        return form_of(isa, rows, k, n, together)

    monkeypatch.setattr(lowering, "form_of", recorded)
    rng = np.random.default_rng(0)
    stored = {f"codes{n}": pack_codes(rng.integers(-1, 2, (n, 12)).astype(np.int8)) for n in (12, 20)}
    layers = [("x", "codes12", "a", 12), ("a", "codes12", "b", 12), ("b", "codes20", "y", 20)]
    nodes = [
        helper.make_node("BitLinear", [x, codes, "scale"], [y], domain=DOMAIN, K=12, N=n) for x, codes, y, n in layers
    ]
    graph = helper.make_graph(
        nodes,
        "several",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 20])],
        [onnx.numpy_helper.from_array(v, name) for name, v in {**stored, "scale": np.array(0.5, "f4")}.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    several = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    agree(several, {"x": rng.standard_normal((1, 12)).astype(np.float32)}, rtol=0, atol=0)
    together = 12 * 12 + 12 * 20
    assert {(1, 12, 12, together), (1, 12, 20, together)} == set(asked)


@pytest.mark.parametrize("depths", [(15, 16), (53, 56), (56, 53)])
def test_layers_of_other_depths_that_share_codes(depths: tuple[int, int]) -> None:
    """Where the last byte is not full, the same bytes are codes of several depths."""
    codes = pack_codes(RNG.integers(-1, 2, (20, max(depths))).astype(np.int8))
    feeds = {f"x{k}": RNG.standard_normal((5, k)).astype(np.float32) for k in depths}
    nodes = [
        helper.make_node("BitLinear", [f"x{k}", "codes", "scale"], [f"y{k}"], domain=DOMAIN, K=k, N=20) for k in depths
    ]
    graph = helper.make_graph(
        nodes,
        "shared",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in feeds.items()],
        [helper.make_tensor_value_info(f"y{k}", TensorProto.FLOAT, [5, 20]) for k in depths],
        [onnx.numpy_helper.from_array(codes, "codes"), onnx.numpy_helper.from_array(np.array(0.5, "f4"), "scale")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    agree(helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds, rtol=0, atol=0)


def test_with_a_bias() -> None:
    """Scaling and adding may be one rounding instead of two."""
    given = operands((3,), 90, 20, bias=True)
    agree(model(given, 90, 20), {"x0": given[0]}, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(dtype: type) -> None:
    given = operands((4,), 64, 20)
    given[0] = given[0].astype(dtype)
    agree(model(given, 64, 20), {"x0": given[0]}, rtol=1e-3 if dtype is np.float16 else 1e-7)


def test_what_is_no_number_shows() -> None:
    given = operands((3,), 64, 20)
    given[0][1, 5], given[0][2, 6] = np.nan, np.inf
    found = run(model(given, 64, 20), {"x0": given[0]}, "cpu")[0]
    assert np.isfinite(found[0]).all() and np.isnan(found[1:]).all()


def test_nothing_to_multiply() -> None:
    for lead, k, n in (((0,), 8, 4), ((2,), 0, 4), ((2,), 8, 0)):
        given = operands(lead, k, n)
        found = run(model(given, k, n), {"x0": given[0]}, "cpu")[0]
        assert found.shape == (*lead, n) and not found.any()


def test_no_tokens_and_no_columns_are_compiled() -> None:
    for lead, k, n in (((0,), 8, 4), ((3, 0), 8, 4), ((2,), 8, 0)):
        given = operands(lead, k, n)
        agree(model(given, k, n), {"x0": given[0]})


def with_a_three(given: list[Array]) -> list[Array]:
    given[1][2, 5] |= 0b1100
    return given


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (with_a_three, "3 was found"),
        (lambda given: [*given[:2], np.ones(7, np.float32)], "1 or 20 numbers"),
        (lambda given: [*given[:2], np.ones(0, np.float32)], "1 or 20 numbers"),
        (lambda given: [*given, np.ones(1, np.float32)], "bias 20"),
    ],
)
def test_operands_that_do_not_fit_are_errors_as_in_the_definition(spoiled: Any, message: str, rows: int) -> None:
    given = spoiled(operands((rows,), 64, 20))
    with pytest.raises(rv.errors.RanvierError, match=message):
        run(model(given, 64, 20), {"x0": given[0]}, "cpu")


def test_what_stands_behind_the_last_column_does_not_matter() -> None:
    given = operands((3,), 62, 20)
    clean = run(model(given, 62, 20), {"x0": given[0]}, "cpu")[0]
    given[1][:, -1] |= 0b11110000
    np.testing.assert_array_equal(agree(model(given, 62, 20), {"x0": given[0]}, rtol=0, atol=0)[0], clean)


def test_weights_that_are_computed_go_to_the_reference() -> None:
    given = operands((2,), 8, 4)
    made = one_node("BitLinear", given, {"K": 8, "N": 4}, domain=DOMAIN)
    with rv.load(made, providers=["cpu", "reference"]) as session:
        (node,) = session.report.nodes
        assert node.provider == "reference"
        assert "no constant" in str(node.declined)


def block(k: int, n: int, middle: int) -> tuple[onnx.ModelProto, Array]:
    """Half ternary, half float: two layers of the same tokens, a gate, a float layer, a sum with the input."""
    names = {}

    def ternary(name: str, rows: int, columns: int) -> list[str]:
        names[f"{name}_w"] = pack_codes(RNG.integers(-1, 2, (columns, rows)).astype(np.int8))
        names[f"{name}_s"] = np.float32(RNG.random() + 0.1)
        return [f"{name}_w", f"{name}_s"]

    names["norm"], names["f"] = np.ones(k, np.float32), (RNG.standard_normal((middle, n)) / 8).astype(np.float32)
    nodes = [
        helper.make_node("RMSNormalization", ["x", "norm"], ["h"], axis=-1),
        helper.make_node("BitLinear", ["h", *ternary("a", k, middle)], ["a"], domain=DOMAIN, K=k, N=middle),
        helper.make_node("BitLinear", ["h", *ternary("b", k, middle)], ["b"], domain=DOMAIN, K=k, N=middle),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Mul", ["r", "r"], ["rr"]),
        helper.make_node("Mul", ["rr", "b"], ["g"]),
        helper.make_node("MatMul", ["g", "f"], ["m"]),
        helper.make_node("BitLinear", ["m", *ternary("c", n, k)], ["c"], domain=DOMAIN, K=n, N=k),
        helper.make_node("Add", ["c", "x"], ["y"]),
    ]
    shape = ["batch", "time", k]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(np.asarray(v), key) for key, v in names.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), RNG.standard_normal((2, 5, k)).astype("f4")


@pytest.mark.parametrize("optimization", ["none", "aggressive"])
@pytest.mark.parametrize("threads", [1, 2])
def test_half_ternary_half_float(optimization: str, threads: int) -> None:
    made, x = block(96, 40, 130)
    with rv.load(made, providers=["reference"]) as session:
        expected = session.run({"x": x})["y"]

    def no_reference(*_: Any) -> None:
        pytest.fail("the partition ran by the reference")

    options: dict[str, Any] = {"providers": ["cpu"], "optimization": optimization, "threads": threads}
    with mock.patch.object(CpuKernel, "_interpret", no_reference), rv.load(made, **options) as session:
        assert {node.provider for node in session.report.nodes} == {"cpu"}
        found = session.run({"x": x})["y"]
        for rows in (x[:1, :1], x[:1], x[:, :3]):  # other numbers of tokens: other kernels on the same weights
            part = expected[: len(rows), : rows.shape[1]]
            np.testing.assert_allclose(session.run({"x": rows})["y"], part, rtol=0.05, atol=0.2)
    # float sums in another order may move a token's code by one
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.2)
    assert np.mean(np.abs(found - expected)) < 0.01


def test_tokens_are_quantized_once_for_layers_side_by_side() -> None:
    made, x = block(64, 32, 48)
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return token_codes(*args)

    patched = mock.patch.object(lowering, "token_codes", counted)
    with patched, rv.load(made, providers=["cpu"], optimization="none") as session:
        session.run({"x": x})
    assert len(calls) == 2  # of the three layers, two read the same


def test_all_numbers_of_tokens_share_the_packed_weights() -> None:
    """Kernels change with the number of tokens, also back to one that was there before; what they read does not."""
    k, n = 200, 70
    given = operands((40,), k, n, each=True)
    made = model(given, k, n)
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "tokens"
    expected = run(made, {"x0": given[0]}, "reference")[0]
    with rv.load(made, providers=["cpu"]) as session:
        held = set()
        for tokens in (40, 1, 15, 16, 5, 17, 1, 4, 3, 39):
            np.testing.assert_array_equal(session.run({"x0": given[0][-tokens:]})["y0"], expected[-tokens:])
            held.add(session.memory().packed)
    assert len(held) == 1


def test_models_with_it_survive_a_file(tmp_path: Any) -> None:
    made, x = block(64, 32, 48)
    save(read(made), tmp_path / "b.onnx")
    written = onnx.load(tmp_path / "b.onnx")
    assert {(n.domain, n.op_type) for n in written.graph.node if n.domain} == {(DOMAIN, "BitLinear")}
    assert {o.domain: o.version for o in written.opset_import}[DOMAIN] == 1
    results = []
    for source in (made, tmp_path / "b.onnx"):
        with rv.load(source) as session:
            results.append(session.run({"x": x})["y"])
    np.testing.assert_array_equal(*results)
