"""Convolutions whose neighbouring pixels are taken as one, against plain ones in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.codegen.llvm.conv import ConvShape, joined, joined_weights, pixels_together
from ranvier.codegen.llvm.isa import named
from ranvier.codegen.loops.ir import Epilogue, Index, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS
from tests.codegen.test_conv import Case, names, reference

F32 = DType.float32
WIDE = named("avx512", "x86_64")
# few output channels; widths that some number of pixels divides
CASES = [
    Case((1, 8, 6, 24), 8, (3, 9), pads=(1, 4, 1, 4)),
    Case((2, 4, 11, 20), 3, (9, 9), pads=(4, 4, 4, 4)),
    Case((1, 8, 7, 12), 1, (5, 5), pads=(2, 2, 2, 2)),
    Case((1, 16, 12, 20), 3, (3, 9), pads=(1, 4, 1, 4)),  # quicker than dot products
    Case((1, 5, 9, 23), 2, (3, 5), strides=(1, 2), pads=(1, 2, 1, 2)),
    Case((1, 1, 96), 1, (33,), pads=(16, 16)),
    Case((1, 3, 4, 5, 12), 4, (2, 3, 5), pads=(0, 1, 2, 1, 1, 2)),
]


def shape_of(case: Case) -> ConvShape:
    return case.shape(np.zeros((case.cout, case.x[1], *case.kernel)))


def model(case: Case, w: Any, bias: Any, added: bool) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    shape = shape_of(case)
    out = [case.x[0], case.cout, *shape.out[3 - case.rank :]]
    attributes = {"strides": list(case.strides or (1,) * case.rank), "pads": list(case.pads)}
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"], **attributes)]
    nodes.append(helper.make_node("Add", ["c", "r"], ["s"]) if added else helper.make_node("Identity", ["c"], ["s"]))
    nodes.append(helper.make_node("Relu", ["s"], ["y"]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, case.x)]
    if added:
        inputs.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, out))
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(bias, "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("added", [False, True], ids=["bias", "bias and summand"])
@pytest.mark.parametrize("isa", [i.name for i in ISAS])
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_against_float64(case: Case, isa: str, added: bool) -> None:
    assert pixels_together(shape_of(case), WIDE) > 1
    rng = np.random.default_rng(case.cout)
    x = rng.standard_normal(case.x).astype(np.float32)
    w = case.weights(rng, np.float32)
    bias = rng.standard_normal(case.cout).astype(np.float32)
    want = reference(case, x.astype(np.float64), w) + bias.reshape(-1, *(1,) * case.rank)
    given = {"x": x}
    if added:
        given["r"] = rng.standard_normal(want.shape).astype(np.float32)
        want = want + given["r"]
    options = {"cpu": {"isa": isa}}
    with rv.load(model(case, w, bias, added), providers=["cpu"], provider_options=options, threads=1) as session:
        got = session.run(given)["y"]
    np.testing.assert_allclose(got, np.maximum(want, 0), rtol=1e-5, atol=2e-5)


def test_the_way_that_keeps_neighbours_apart() -> None:
    """Zeros are multiplied by what lies beside a pixel's window; without leave to do so nothing of it is seen."""
    case = CASES[0]
    rng = np.random.default_rng(1)
    x = rng.standard_normal(case.x).astype(np.float32)
    x[0, 0, 3, 11] = np.inf
    w, bias = case.weights(rng, np.float32), np.zeros(case.cout, np.float32)
    with np.errstate(invalid="ignore"):
        want = reference(case, x.astype(np.float64), w)
    options = {"cpu": {"winograd": False}}
    with rv.load(model(case, w, bias, False), providers=["cpu"], provider_options=options, threads=1) as session:
        got = session.run({"x": x})["y"]
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(np.maximum(want, 0)))


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 8, 6, 24), 16, (3, 9), pads=(1, 4, 1, 4)),  # channels fill a vector
        Case((1, 8, 6, 24), 8, (1, 1)),  # nothing but zeros would be added
        Case((1, 8, 6, 23), 8, (3, 9), pads=(1, 4, 1, 4)),  # no number of pixels divides the width
        Case((1, 64, 6, 24), 1, (3, 9), pads=(1, 4, 1, 4)),  # dot products are quicker
        Case((1, 8, 6, 24), 8, (3, 3), dilations=(1, 2), pads=(1, 2, 1, 2)),
        Case((1, 8, 6, 24), 8, (3, 9), pads=(1, 4, 1, 4), group=2),
    ],
)
def test_where_it_does_not_pay(case: Case) -> None:
    w = np.zeros((case.cout, case.x[1] // case.group, *case.kernel))
    assert pixels_together(case.shape(w), WIDE) == 1


def test_weights_move_on_by_a_stride() -> None:
    shape = ConvShape.conv((1, 1, 1, 9), (1, 1, 1, 2), strides=(1, 2))
    made = joined_weights(np.array([[[[5.0, 7.0]]]], np.float32), shape, 2)
    np.testing.assert_array_equal(made.reshape(2, 4), [[5, 7, 0, 0], [0, 0, 5, 7]])


def test_memory_that_cannot_be_seen_so() -> None:
    dense = View.temporary(F32, (1, 4, 3, 6), (0, 2, 3, 1))
    shape = ConvShape.conv((1, 4, 3, 6), (4, 4, 1, 1))
    found = joined(shape, dense, None, 3)
    assert found is not None
    wide, out, _ = found
    assert out.shape == (1, 12, 3, 2) and out.strides == (72, 1, 24, 12)
    assert (wide.cout, wide.out, wide.kernel, wide.strides) == (12, (1, 3, 2), (1, 1, 3), (1, 1, 3))
    assert joined(shape, dense, None, 1) is None
    assert joined(shape, View.temporary(F32, (1, 4, 3, 6)), None, 3) is None
    part = View(dense.storage, F32, (1, 2, 3, 6), dense.strides)
    assert joined(shape, part, None, 3) is None
    uses_position = Epilogue(Op("add", (Result(0, F32), Op("cast", (Index(2),), F32)), F32))
    of_image = Operand(View.temporary(F32, (4,)), (0, 0, 1))  # not constant: it cannot be repeated
    for epilogue in (uses_position, Epilogue(Op("add", (Result(0, F32), Load(0, F32)), F32), (of_image,))):
        assert joined(shape, dense, epilogue, 3) is None
