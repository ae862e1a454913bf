"""Elementwise work behind a pool: the pool by its own kernel, the rest as loops that read what it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.conv import pools
from tests.providers.cpu.compare import agree

RNG = np.random.default_rng(41)
HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
PADDED = "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]"
POOLS = {
    "largest": f"MaxPool<{PADDED}>",
    "largest by one": "MaxPool<kernel_shape = [2, 3]>",
    "mean": f"AveragePool<{PADDED}>",
    "mean with pads": f"AveragePool<{PADDED}, count_include_pad = 1>",
    "mean without pads": "AveragePool<kernel_shape = [2, 2], strides = [2, 1]>",
}
BEHIND = {
    "one": "y = Relu(p)",
    "some": "a = Sigmoid(p)\n b = Mul(p, a)\n y = Add(b, p)",
    "a constant": "s = Constant<value_floats = [0.1, 0.2, 0.3]>()\n r = Reshape(s, k)\n y = Mul(p, r)",
    "a division": "s = Constant<value_float = 3.0>()\n y = Div(p, s)",
    "codes": "s = Constant<value_float = 0.03>()\n y = QuantizeLinear<output_dtype = 5>(p, s)",
    "another type": "y = Cast<to = 7>(p)",
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Launch | None]:
    """What became of pools that were met."""
    found: list[Launch | None] = []
    before = pools.pooled

    def noted(*args: Any, **how: Any) -> Launch | None:
        found.append(before(*args, **how))
        return found[-1]

    monkeypatch.setattr(pools, "pooled", noted)
    return found


def model(body: str, kind: str = "float") -> onnx.ModelProto:
    """``body`` reads x and ends in y; k is a shape of channels."""
    made = onnx.parser.parse_model(f"{HEAD} g ({kind}[2,3,13,14] x, {kind}[2,3,7,7] z) => (y) {{ {body} }}")
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 3, 1, 1]), "k"))
    return made


def feeds(dtype: Any = np.float32) -> dict[str, np.ndarray[Any, Any]]:
    return {name: RNG.normal(size=(2, 3, *size)).astype(dtype) for name, size in (("x", (13, 14)), ("z", (7, 7)))}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("pool", POOLS)
def test_what_follows(pool: str, behind: str, taken: list[Launch | None]) -> None:
    agree(model(f"p = {POOLS[pool]}(x)\n {BEHIND[behind]}"), feeds())
    assert [each is not None for each in taken] == [True]


@pytest.mark.parametrize("pool", ["largest", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_another_tensor_joins(pool: str, dtype: Any, taken: list[Launch | None]) -> None:
    """It may lie in another order than what is pooled."""
    kind = {np.float32: "float", np.float16: "float16", np.float64: "double"}[dtype]
    close = 2e-3 if dtype is np.float16 else 1e-5
    body = f"p = {POOLS[pool]}(x)\n t = Transpose<perm = [0, 1, 3, 2]>(z)\n y = Sub(p, t)"
    agree(model(body, kind), feeds(dtype), rtol=close, atol=close)
    # there is no kernel for the largest of doubles: loops do all of it
    assert [each is not None for each in taken] == ([] if pool == "largest" and dtype is np.float64 else [True])


@pytest.mark.parametrize("pool", ["largest", "mean"])
@pytest.mark.parametrize("turned", [False, True])
def test_behind_a_convolution(pool: str, turned: bool, taken: list[Launch | None]) -> None:
    """Channels lie together there, and in the result only where nobody wants them elsewhere."""
    end = "y = Transpose<perm = [0, 2, 3, 1]>(r)" if turned else "y = Identity(r)"
    made = model(f"c = Conv(x, w)\n p = {POOLS[pool]}(c)\n r = Relu(p)\n {end}")
    weights = RNG.normal(size=(24, 3, 1, 1)).astype(np.float32)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    agree(made, feeds(), rtol=1e-4, atol=1e-5)
    assert [each is not None for each in taken] == [True]


def test_largest_of_codes(taken: list[Launch | None]) -> None:
    made = model(f"p = {POOLS['largest']}(x)\n y = Cast<to = 1>(p)", "uint8")
    agree(made, {"x": RNG.integers(0, 256, (2, 3, 13, 14), np.uint8), "z": np.zeros((2, 3, 7, 7), np.uint8)})
    assert [each is not None for each in taken] == [True]


def test_elements_in_16_bits(taken: list[Launch | None]) -> None:
    """What lies between is bfloat16 then, as what is pooled is: nothing is rounded that was not."""
    made = model(f"c = Conv(x, w)\n p = {POOLS['largest']}(c)\n y = Neg(p)")
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((32, 3, 1, 1), np.float32), "w"))
    x = feeds()
    (exact,) = rv.load(made).run(x).values()
    (found,) = rv.load(made, precision="bf16").run(x).values()
    assert all(each is not None for each in taken)
    np.testing.assert_allclose(found, exact, rtol=2e-2, atol=2e-2)


def test_windows_that_are_left_to_loops_keep_what_follows() -> None:
    """One window as large as the image: no kernel of its own, one nest as before."""
    made = model("p = MaxPool<kernel_shape = [13, 14]>(x)\n y = Relu(p)")
    with rv.load(made) as session, session.profile() as profile:
        session.run(feeds())
    assert len(profile.records()) == 1
    agree(made, feeds())
