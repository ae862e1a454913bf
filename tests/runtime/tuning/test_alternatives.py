"""Every alternative that planners offer computes the same: each is taken, one at a time, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import ranvier
from ranvier.codegen import tuning_store
from ranvier.codegen.tuning import SITES, Table
from ranvier.runtime.tuning.variant import Variant
from tests.codegen.harness import ISAS
from tests.runtime.small_models import model_of

FLOAT, U8, I8 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8


def _normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _io(name: str, kind: int, shape: tuple[int, ...]) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def convolutions() -> ModelProto:
    """3x3 (direct or Winograd), 1x1, a deep one, one with few outputs."""
    weights = {
        "w0": _normal(32, 3, 3, 3),
        "w1": _normal(48, 32, 3, 3) / 16,
        "w2": _normal(200, 48, 1, 1) / 8,
        "w3": _normal(64, 200, 3, 3) / 40,
        "w4": _normal(2, 64, 1, 1) / 8,
    }
    nodes = [
        helper.make_node("Conv", [f"x{k}", f"w{k}"], [f"x{k + 1}"], pads=[p] * 4, strides=[s, s], name=f"conv{k}")
        for k, (p, s) in enumerate(((1, 1), (1, 1), (0, 1), (1, 2), (0, 1)))
    ]
    return model_of(nodes, [_io("x0", FLOAT, (1, 3, 26, 22))], [_io("x5", FLOAT, (1, 2, 13, 11))], weights)


def products() -> ModelProto:
    """Constant and computed factors, few and many rows, a deep K, a transposed B."""
    weights = {"w": _normal(300, 96) / 16, "v": _normal(96, 2600) / 8, "u": _normal(2600, 40) / 50}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="wide"),
        helper.make_node("MatMul", ["a", "v"], ["b"], name="wider"),
        helper.make_node("MatMul", ["b", "u"], ["c"], name="deep"),
        helper.make_node("Transpose", ["a"], ["at"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["a", "at"], ["d"], name="by its transpose"),
        helper.make_node("MatMul", ["d", "c"], ["e"], name="both computed"),
        helper.make_node("Gemm", ["row", "w"], ["f"], name="row"),
    ]
    inputs = [_io("x", FLOAT, (2, 190, 300)), _io("row", FLOAT, (1, 300))]
    return model_of(nodes, inputs, [_io("e", FLOAT, (2, 190, 40)), _io("f", FLOAT, (1, 96))], weights)


def codes() -> ModelProto:
    """A product and convolutions of 8-bit codes, one of them of channels in groups, and one whose results are codes."""
    rng = np.random.default_rng(7)
    weights = {
        "w": rng.integers(-100, 100, (1200, 48)).astype(np.int8),
        "k": rng.integers(-100, 100, (24, 8, 3, 3)).astype(np.int8),
        "g": rng.integers(-100, 100, (24, 32, 3, 3)).astype(np.int8),
        "q": rng.integers(-60, 60, (24, 32, 3, 3)).astype(np.int8),
        "step": np.float32(0.02),
        "wide": np.float32(0.5),
        "zero": np.uint8(7),
        "none": np.int8(0),
    }
    nodes = [
        helper.make_node("MatMulInteger", ["x", "w"], ["a"], name="product"),
        helper.make_node("ConvInteger", ["y", "k"], ["b"], pads=[1, 1, 1, 1], name="filters"),
        helper.make_node("ConvInteger", ["z", "g"], ["c"], pads=[1, 1, 1, 1], group=2, name="grouped"),
        helper.make_node(
            "QLinearConv", ["v", "step", "zero", "q", "step", "none", "wide", "zero"], ["d"], pads=[1] * 4, name="coded"
        ),
    ]
    inputs = [_io("x", U8, (500, 1200)), _io("y", U8, (1, 8, 40, 40)), _io("z", U8, (1, 64, 40, 40))]
    image = (1, 24, 40, 40)
    outputs = [_io("a", TensorProto.INT32, (500, 48)), *(_io(name, TensorProto.INT32, image) for name in "bc")]
    inputs, outputs = [*inputs, _io("v", U8, (1, 32, 40, 40))], [*outputs, _io("d", U8, image)]
    return model_of(nodes, inputs, outputs, weights)


def _feed(session: ranvier.Session) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    found: dict[str, Any] = {}
    for name, kind in session.inputs.items():
        made = rng.standard_normal(kind.shape) if kind.dtype.numpy.kind == "f" else rng.integers(0, 255, kind.shape)
        found[name] = made.astype(kind.dtype.numpy)
    return found


CASES: list[tuple[Callable[[], ModelProto], str, float]] = [
    (convolutions, "float32", 1e-4),
    (convolutions, "bf16", 0.03),
    (products, "float32", 1e-4),
    (products, "bf16", 0.03),
    (codes, "float32", 0.0),
]


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_store, "folder", lambda: tmp_path)


@pytest.mark.parametrize("isa", [isa.name for isa in ISAS])
@pytest.mark.parametrize(("model", "precision", "apart"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_every_alternative_gives_the_same(
    model: Callable[[], ModelProto], precision: str, apart: float, isa: str
) -> None:
    given = model()
    with ranvier.load(given, providers=["reference"]) as reference:
        feed = _feed(reference)
        expected = list(reference.run(feed).values())
    session = ranvier.load(
        given, providers=["cpu"], threads=2, precision=precision, provider_options={"cpu": {"isa": isa}}
    )
    with session:
        usual = Variant(session, Table(), feed)
        usual.run()
        decisions = usual.decisions()
        usual.close()
        assert decisions, "no planner asked"
        assert {d.site for d in decisions.values()} <= set(SITES)
        for k in range(max(len(d.others) for d in decisions.values())):
            names = {key: d.others[k] for key, d in decisions.items() if k < len(d.others)}
            variant = Variant(session, Table(names), feed)
            results = variant.run()
            taken = {key: d.chosen for key, d in variant.decisions().items() if d.chosen}
            # a decision may be gone where another one was taken besides: blocks of a convolution that is done otherwise
            assert taken and all(names[key] == name for key, name in taken.items())
            variant.close()
            for found, wanted in zip(results, expected):
                largest = np.abs(wanted).max()
                np.testing.assert_allclose(found, wanted, rtol=0, atol=apart * largest, err_msg=str(taken))


def test_all_kinds_of_decisions_are_asked_for_on_the_best_instruction_set() -> None:
    asked: set[str] = set()
    for model in (convolutions, products, codes):
        session = ranvier.load(model(), providers=["cpu"], threads=2, provider_options={"cpu": {"isa": ISAS[0].name}})
        with session:
            variant = Variant(session, Table(), _feed(session))
            variant.run()
            asked |= {d.site for d in variant.decisions().values()}
            variant.close()
    expected = set(SITES)
    if ISAS[0].has("amx-int8") or ISAS[0].triple != "x86_64":
        expected.remove("integer squares")  # which are about vectors of x86
    if not ISAS[0].has("amx-int8"):
        expected.remove("integer way")  # which is about the matrix unit …
        if not ISAS[0].has("avx512vnni"):
            expected.remove("integer rows")  # … and about what reads a copy of the image
    assert asked == expected
