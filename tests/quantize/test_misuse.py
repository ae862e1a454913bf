"""Schemes that need samples without any, and layers that are to stay by names that are nobody's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Graph
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.passes.ternary import convert_to_bitnet
from ranvier.quantization import CalibrationDataReader
from ranvier.quantization.matmul_nbits_quantizer import (
    GPTQWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    RTNWeightOnlyQuantConfig,
)
from ranvier.quantize import Awq, Gptq, InputMoments, Integers, register_scheme, scheme, schemes
from ranvier.runtime.quantizing.weight_only import codes_of

WEIGHTS = np.random.default_rng(1).standard_normal((6, 32)).astype(np.float32)


@pytest.mark.parametrize("which", [Gptq(4, 16), Awq(4, 16)])
@pytest.mark.parametrize("moments", [None, 3, np.eye(32), InputMoments])
def test_what_is_no_moments(which: Any, moments: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"{type(which).__name__} needs samples.*InputMoments"):
        which.quantize(WEIGHTS, moments)


@pytest.mark.parametrize("which", [Gptq(4, 16), Awq(4, 16)])
def test_moments_that_saw_no_sample(which: Any) -> None:
    moments = InputMoments(32)
    for _ in range(2):
        with pytest.raises(InvalidConfig, match=f"{type(which).__name__}.*no sample"):
            which.quantize(WEIGHTS, moments)
        moments.update(np.zeros((0, 32), np.float32))  # which shows it none
    moments.update(np.zeros((1, 32), np.float32))
    which.quantize(WEIGHTS, moments)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_layers_of_a_model_that_read_no_rows_are_rounded_to_the_nearest(name: str) -> None:
    found = codes_of(WEIGHTS, name, 16, [InputMoments(32)]).codes
    np.testing.assert_array_equal(found.codes, codes_of(WEIGHTS, "uint4", 16).codes.codes)


def test_layers_that_read_no_rows_with_scripts_for_onnxruntime() -> None:
    kind, made = TensorProto.FLOAT, []
    ends = ([helper.make_tensor_value_info(name, kind, ["n", size])] for name, size in (("x", 32), ("y", 32)))
    weights = numpy_helper.from_array(np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "one")
    graph = helper.make_graph([node], "g", *ends, [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    rows = iter([{"x": np.zeros((0, 32), np.float32)}])

    class Reader(CalibrationDataReader):
        def get_next(self) -> Any:
            return next(rows, None)

    for config in (GPTQWeightOnlyQuantConfig(Reader(), mse=True), RTNWeightOnlyQuantConfig()):
        quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=False, algo_config=config)
        quantizer.process()
        made.append([each.op_type for each in quantizer.model.model.graph.node])
    assert made == [["MatMulNBits"]] * 2


@pytest.mark.parametrize("name", ["gptq", "awq", "GPTQ"])
def test_names_of_schemes_that_need_samples(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"needs samples.*InputMoments.*--scheme {name.lower()} --calib"):
        scheme(name)


def test_a_scheme_of_others_may_have_such_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "_added", {})
    register_scheme("gptq", lambda: Integers(3))
    assert scheme("gptq").name == "int3"


# -- layers that stay -------------------------------------------------------------------------------------------------


def two_layers() -> Graph:
    graph = Graph(opsets={"": 21})
    ops = GraphOps(graph, None, "test", complete)
    x = graph.add_input("x", TensorType(DType.float32, (4, 16)))
    weights = np.random.default_rng(2).standard_normal((2, 16, 16)).astype(np.float32)
    y = ops.MatMul(ops.Relu(ops.MatMul(x, weights[0], _name="body"), _name="between"), weights[1], _name="lm_head")
    graph.outputs = [y]
    return graph


@pytest.mark.parametrize("keep", ["lm_head", ["lm_head"], ("lm*",), "*head", {"lm_head", "between"}])
def test_names_and_patterns_of_layers_that_stay(keep: Any) -> None:
    assert convert_to_bitnet(two_layers(), keep) == ["body"]


@pytest.mark.parametrize("keep", [(), [], frozenset()])
def test_no_layer_stays(keep: Any) -> None:
    assert convert_to_bitnet(two_layers(), keep) == ["body", "lm_head"]


@pytest.mark.parametrize(
    "keep, said",
    [
        (["nonsense"], "no layer has the name 'nonsense'.*body.*lm_head"),
        (["body", "lm_haed"], "did you mean 'lm_head'"),
        ("lm_hed", "did you mean 'lm_head'"),
        ([""], "no layer"),
        ([3], "keep is a name"),
        (3, "keep is a name"),
        (None, "keep is a name"),
    ],
)
def test_what_is_the_name_of_no_layer(keep: Any, said: str) -> None:
    graph = two_layers()
    with pytest.raises(InvalidConfig, match=said):
        convert_to_bitnet(graph, keep)
    assert [node.op for node in graph] == ["MatMul", "Relu", "MatMul"]


def test_names_of_layers_that_are_converted_already() -> None:
    graph = two_layers()
    assert convert_to_bitnet(graph, ["body"]) == ["lm_head"]
    assert convert_to_bitnet(graph, ["lm_head"]) == ["body"]
