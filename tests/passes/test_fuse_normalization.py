"""Normalisations as PyTorch, TensorFlow and PaddlePaddle export them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ranvier.graph.patterns import scalar_of
from tests.passes.fuse_tools import Fused, Sketch, assert_same, fused

Inverse = Callable[[Sketch, str], str]

INVERSE: dict[str, Inverse] = {
    "reciprocal": lambda s, energy: s.Reciprocal(s.Sqrt(energy)),
    "one over": lambda s, energy: s.Div(1.0, s.Sqrt(energy)),
    "power": lambda s, energy: s.Pow(energy, -0.5),
}


def weights(*shape: int, seed: int = 0, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(dtype)


def mean(s: Sketch, x: str, axes: tuple[int, ...] = (-1,), **attrs: int) -> str:
    return s.ReduceMean(x, list(axes), **attrs)


def centred(s: Sketch, x: str, axes: tuple[int, ...] = (-1,)) -> str:
    return s.Sub(x, mean(s, x, axes))


def energy(s: Sketch, x: str, axes: tuple[int, ...] = (-1,), epsilon: float = 1e-5) -> str:
    return s.Add(mean(s, s.Pow(x, 2.0), axes), epsilon)


def torch_norm(s: Sketch, x: str, axes: tuple[int, ...] = (-1,)) -> str:
    d = centred(s, x, axes)
    return s.Div(d, s.Sqrt(energy(s, d, axes)))


# -- LayerNormalization ---------------------------------------------------------------------------------------------


def test_torch_layer_norm() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", "t", 8]))
    found = assert_same(s.model(s.Add(s.Mul(y, weights(8)), weights(8, seed=1))))
    assert found.ops == {"LayerNormalization": 1}
    node = found.only("LayerNormalization")
    assert len(node.inputs) == 3 and node.attrs["axis"] == -1 and node.attrs["epsilon"] == pytest.approx(1e-5)


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm_without_scale_or_bias(with_scale: bool, with_bias: bool) -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", [2, 3, 8]))
    y = s.Mul(weights(8), y) if with_scale else y
    y = s.Add(weights(8, seed=1), y) if with_bias else y
    found = assert_same(s.model(y))
    assert found.ops == {"LayerNormalization": 1}
    assert (scalar_of(found.only("LayerNormalization").inputs[1]) == 1.0) is not with_scale


def test_layer_norm_over_several_axes() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", 3, 4, 5]), (-3, -2, -1))
    found = assert_same(s.model(s.Add(s.Mul(y, weights(3, 4, 5)), weights(3, 4, 5, seed=1))))
    assert found.ops == {"LayerNormalization": 1}
    assert found.only("LayerNormalization").attrs["axis"] == -3


def test_layer_norm_by_positive_axes() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", 3, 4]), (2, 1))
    assert assert_same(s.model(y)).only("LayerNormalization").attrs["axis"] == -2


def test_layer_norm_by_axes_as_attribute() -> None:
    s = Sketch(opset=17)
    x = s.input("x", ["n", 8])
    d = s.Sub(x, s.ReduceMean(x, axes=[-1]))
    y = s.Div(d, s.Sqrt(s.Add(s.ReduceMean(s.Mul(d, d), axes=[1]), 1e-5)))
    assert assert_same(s.model(y)).ops == {"LayerNormalization": 1}


def test_layer_norm_centred_twice() -> None:
    s = Sketch()
    x = s.input("x", ["n", 8])
    m = mean(s, x)
    y = s.Div(s.Sub(x, m), s.Sqrt(energy(s, s.Sub(x, m))))
    assert assert_same(s.model(y)).ops == {"LayerNormalization": 1}


@pytest.mark.parametrize("name", INVERSE)
def test_layer_norm_by_inverse_root(name: str) -> None:
    s = Sketch()
    d = centred(s, s.input("x", ["n", "t", 8]))
    y = s.Mul(d, INVERSE[name](s, energy(s, d)))
    assert assert_same(s.model(s.Add(s.Mul(y, weights(8)), weights(8)))).ops == {"LayerNormalization": 1}


def test_layer_norm_with_scale_in_the_denominator() -> None:
    s = Sketch()
    d = centred(s, s.input("x", ["n", "t", 8]))
    gain = s.Mul(s.Reciprocal(s.Sqrt(energy(s, d))), weights(8))
    assert assert_same(s.model(s.Add(s.Mul(d, gain), weights(8)))).ops == {"LayerNormalization": 1}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_tensorflow_layer_norm(pooled: bool, scaled: bool) -> None:
    s = Sketch()
    x = s.input("x", ["n", 6, 8])
    average = (lambda v: s.GlobalAveragePool(v)) if pooled else (lambda v: mean(s, v))
    m = average(x)
    d = s.Sub(x, m)
    gain = s.Reciprocal(s.Sqrt(s.Add(average(s.Mul(d, d)), 1e-6)))
    gain = s.Mul(gain, weights(8)) if scaled else gain
    y = s.Add(s.Mul(x, gain), s.Sub(weights(8, seed=1), s.Mul(m, gain)))
    found = assert_same(s.model(y))
    assert found.ops == {"LayerNormalization": 1}
    assert found.only("LayerNormalization").attrs["epsilon"] == pytest.approx(1e-6)


def test_layer_norm_of_halves_in_float32() -> None:
    s = Sketch(dtype=np.float16)
    wide = s.Cast(s.input("x", ["n", 8]), to=1)
    d = s.Sub(wide, mean(s, wide))
    variance = s.Add(mean(s, s.Pow(d, np.float32(2))), np.float32(1e-5))
    y = s.Cast(s.Div(d, s.Sqrt(variance)), to=10)
    model = s.model(s.Add(s.Mul(y, weights(8, dtype=np.float16)), weights(8, dtype=np.float16)))
    found = assert_same(model, tolerance=2e-3)
    assert found.ops == {"LayerNormalization": 1}
    assert str(found.graph.outputs[0].type) == "float16[n, 8]"


def test_layer_norm_in_halves_throughout() -> None:
    s = Sketch(dtype=np.float16)
    y = torch_norm(s, s.input("x", ["n", 8]))
    found = assert_same(s.model(s.Mul(y, weights(8, dtype=np.float16))))
    assert found.ops == {"LayerNormalization": 1}


def test_a_scale_of_higher_rank_loses_its_leading_ones() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", "t", 8]))
    found = assert_same(s.model(s.Mul(y, weights(1, 1, 8))))
    assert found.ops == {"LayerNormalization": 1}
    assert found.only("LayerNormalization").inputs[1].const.shape == (8,)


def test_a_scalar_scale_is_spread() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", "t", 8]))
    found = assert_same(s.model(s.Add(s.Mul(y, 2.0), 1.0)))
    assert found.ops == {"LayerNormalization": 1}
    assert found.only("LayerNormalization").inputs[1].const.shape == (8,)


def test_a_computed_scale_moves_in() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", 8]))
    assert assert_same(s.model(s.Mul(y, s.Abs(s.input("w", [8]))))).ops == {"Abs": 1, "LayerNormalization": 1}


def test_a_scale_per_sample_stays_outside() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", "t", 8]))
    found = assert_same(s.model(s.Mul(y, s.input("gain", ["n", 1, 8]))))
    assert found.ops == {"LayerNormalization": 1, "Mul": 1}
    assert "scale differs along axes that are not normalised" in found.reasons()


def test_a_residual_is_no_bias() -> None:
    s = Sketch()
    x = s.input("x", ["n", "t", 8])
    found = assert_same(s.model(s.Add(s.Mul(torch_norm(s, x), weights(8)), x)))
    assert found.ops == {"LayerNormalization": 1, "Add": 1}


def test_layer_norm_with_a_size_that_is_not_known() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", ["n", "d"]))
    found = assert_same(s.model(y))
    assert found.only("LayerNormalization").inputs[1].const.shape == (1,)


def test_an_axis_in_the_middle_is_a_reason() -> None:
    s = Sketch()
    found = assert_same(s.model(torch_norm(s, s.input("x", ["n", 6, 8]), (1,))))
    assert "LayerNormalization" not in found.ops
    assert "axes [1] are not the last ones" in found.reasons()


def test_a_positive_axis_of_unknown_rank_is_a_reason() -> None:
    s = Sketch()
    found = fused(s.model(torch_norm(s, s.input("x", None), (1,))))
    assert "LayerNormalization" not in found.ops
    assert "axes [1] are not the last ones" in found.reasons()


def test_different_axes_are_not_layer_norm() -> None:
    s = Sketch()
    d = centred(s, s.input("x", [2, 6, 8]), (-2, -1))
    found = assert_same(s.model(s.Div(d, s.Sqrt(energy(s, d)))))
    assert "LayerNormalization" not in found.ops
    assert found.ops["RMSNormalization"] == 1  # which the second half is by itself
    assert "mean and variance are taken over different axes" in found.reasons()


def test_reduced_axes_must_be_kept() -> None:
    s = Sketch()
    x = s.input("x", [8, 8])
    d = s.Sub(x, mean(s, x, keepdims=0))
    found = assert_same(s.model(s.Div(d, s.Sqrt(energy(s, d)))))
    assert "LayerNormalization" not in found.ops


def test_an_epsilon_that_varies_is_a_reason() -> None:
    s = Sketch()
    x = s.input("x", ["n", 8])
    d = centred(s, x)
    found = assert_same(s.model(s.Div(d, s.Sqrt(s.Add(mean(s, s.Mul(d, d)), s.Abs(s.input("e", [1])))))))
    assert "epsilon is not one constant number" in found.reasons()


def test_a_variance_that_leaves_the_graph_is_kept() -> None:
    s = Sketch()
    d = centred(s, s.input("x", ["n", 8]))
    variance = mean(s, s.Mul(d, d))
    found = assert_same(s.model(s.Div(d, s.Sqrt(s.Add(variance, 1e-5))), variance))
    assert "LayerNormalization" not in found.ops and "RMSNormalization" not in found.ops


def test_float64_is_left_alone() -> None:
    s = Sketch(dtype=np.float64)
    found = assert_same(s.model(torch_norm(s, s.input("x", ["n", 8]))), tolerance=1e-14)
    assert "LayerNormalization" not in found.ops
    assert "float64 cannot be normalised in float32" in found.reasons()


# -- RMSNormalization -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*INVERSE, "divided"])
@pytest.mark.parametrize("axes", [(-1,), (-2, -1)])
def test_rms_norm(name: str, axes: tuple[int, ...]) -> None:
    s = Sketch()
    x = s.input("x", ["n", 6, 8])
    e = energy(s, x, axes, 1e-6)
    y = s.Div(x, s.Sqrt(e)) if name == "divided" else s.Mul(x, INVERSE[name](s, e))
    found = assert_same(s.model(s.Mul(weights(8), y)))
    assert found.ops == {"RMSNormalization": 1}
    assert found.only("RMSNormalization").attrs["axis"] == -len(axes)


def llama_norm(s: Sketch, x: str) -> str:
    """The tensor widened, normalised, rounded, and only then scaled."""
    wide = s.Cast(x, to=1)
    squares = s.Add(mean(s, s.Pow(wide, np.float32(2))), np.float32(1e-6))
    return s.Cast(s.Mul(wide, s.Reciprocal(s.Sqrt(squares))), to=10)


def test_llama_rms_norm() -> None:
    s = Sketch(dtype=np.float16)
    y = llama_norm(s, s.input("x", ["n", "t", 8]))
    found: Fused = assert_same(s.model(s.Mul(weights(8, dtype=np.float16), y)), tolerance=2e-3)
    assert found.ops == {"RMSNormalization": 1}
    assert str(found.graph.outputs[0].type) == "float16[n, t, 8]"


def test_a_widened_tensor_that_others_read_stays() -> None:
    s = Sketch(dtype=np.float16)
    x = s.input("x", ["n", 8])
    y = llama_norm(s, x)
    wide = s.nodes[0].output[0]
    found = assert_same(s.model(s.Mul(weights(8, dtype=np.float16), y), s.Neg(wide)), tolerance=2e-3)
    assert found.ops == {"RMSNormalization": 1, "Cast": 1, "Neg": 1}


def test_a_scale_before_the_rounding_stays_in_float32() -> None:
    s = Sketch(dtype=np.float16)
    wide = s.Cast(s.input("x", ["n", 8]), to=1)
    squares = s.Add(mean(s, s.Pow(wide, np.float32(2))), np.float32(1e-6))
    y = s.Mul(s.Mul(wide, s.Reciprocal(s.Sqrt(squares))), weights(8))
    found = assert_same(s.model(s.Cast(y, to=10)), tolerance=2e-3)
    assert found.ops == {"Cast": 2, "RMSNormalization": 1}
    assert "the scale is applied before the result is rounded" in found.reasons()


def test_squares_of_another_value_are_no_rms_norm() -> None:
    s = Sketch()
    x, y = s.input("x", ["n", 8]), s.input("y", ["n", 8])
    assert "RMSNormalization" not in assert_same(s.model(s.Div(x, s.Sqrt(energy(s, y))))).ops


# -- groups and channels --------------------------------------------------------------------------------------------


def group_norm(s: Sketch, x: str, groups: int, whole: object = None) -> str:
    ones, zeros = np.ones(groups, np.float32), np.zeros(groups, np.float32)
    y = s.InstanceNormalization(s.Reshape(x, [0, groups, -1]), ones, zeros, epsilon=1e-5)
    return s.Reshape(y, s.Shape(x) if whole is None else whole)


def test_group_norm() -> None:
    s = Sketch()
    y = group_norm(s, s.input("x", ["n", 6, "h", "w"]), 3)
    found = assert_same(s.model(s.Add(s.Mul(y, weights(6, 1, 1)), weights(6, 1, 1, seed=1))))
    assert found.ops["GroupNormalization"] == 1 and not found.ops.keys() & {"Mul", "Add", "InstanceNormalization"}
    assert found.only("GroupNormalization").attrs["num_groups"] == 3


def test_group_norm_of_known_shape() -> None:
    s = Sketch()
    y = group_norm(s, s.input("x", [2, 6, 4, 5]), 2, [2, 6, 4, 5])
    assert assert_same(s.model(s.Mul(y, weights(1, 6, 1, 1)))).ops == {"GroupNormalization": 1}


def test_group_norm_with_a_scale_per_group() -> None:
    s = Sketch()
    x = s.input("x", [2, 6, 4])
    y = s.InstanceNormalization(s.Reshape(x, [0, 3, -1]), weights(3), weights(3, seed=1))
    assert assert_same(s.model(s.Reshape(y, [2, 6, 4]))).ops == {"GroupNormalization": 1}


def test_groups_that_cut_through_channels_are_a_reason() -> None:
    s = Sketch()
    found = assert_same(s.model(group_norm(s, s.input("x", [2, 6, 4, 4]), 4, [2, 6, 4, 4])))
    assert "GroupNormalization" not in found.ops
    assert "6 channels do not divide into 4 groups" in found.reasons()


def test_a_result_of_another_shape_is_a_reason() -> None:
    s = Sketch()
    found = assert_same(s.model(group_norm(s, s.input("x", [2, 6, 4, 5]), 2, [2, 6, 5, 4])))
    assert "the result is not known to be reshaped back" in found.reasons()


def test_instance_norm_by_means_with_a_style() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", [1, 6, "h", "w"]), (2, 3))
    gamma = s.Reshape(s.input("gamma", [6]), [1, 6, 1, 1])
    beta = s.Reshape(s.input("beta", [6]), [1, 6, 1, 1])
    found = assert_same(s.model(s.Add(s.Mul(y, gamma), beta)))
    assert found.ops["InstanceNormalization"] == 1 and not found.ops.keys() & {"Mul", "Add", "LayerNormalization"}


def test_a_scale_per_pixel_is_no_channel_scale() -> None:
    s = Sketch()
    y = torch_norm(s, s.input("x", [1, 6, 4, 5]), (3,))
    found = assert_same(s.model(s.Mul(y, weights(6, 1, 1))))
    assert found.ops == {"LayerNormalization": 1, "Mul": 1}


# -- Euclidean norm -------------------------------------------------------------------------------------------------


def test_l2_norm() -> None:
    s = Sketch()
    x = s.input("x", ["n", 8, "t"])
    found = assert_same(s.model(s.Div(x, s.ReduceL2(x, [1]))))
    assert found.ops == {"LpNormalization": 1}
    assert found.only("LpNormalization").attrs == {"axis": 1, "p": 2}


def test_l2_norm_with_a_floor_below_every_norm() -> None:
    s = Sketch()
    x = s.input("x", ["n", 8])
    norm = s.Expand(s.Clip(s.ReduceL2(x, [-1]), 1e-30), s.Shape(x))
    found = assert_same(s.model(s.Div(x, norm)), [np.array([[0.0] * 8, [3.0] * 8], np.float32)])
    assert found.ops["LpNormalization"] == 1 and "Div" not in found.ops


def test_l2_norm_with_a_floor_that_matters_is_a_reason() -> None:
    s = Sketch()
    x = s.input("x", ["n", 8])
    found = assert_same(s.model(s.Div(x, s.Clip(s.ReduceL2(x, [-1]), 1e-12))))
    assert "LpNormalization" not in found.ops
    assert "vectors shorter than 1e-12 would be stretched" in found.reasons()


def test_l2_norm_over_two_axes_is_a_reason() -> None:
    s = Sketch()
    x = s.input("x", ["n", 4, 4])
    found = assert_same(s.model(s.Div(x, s.ReduceL2(x, [1, 2]))))
    assert "the norm is not known to be taken along one axis" in found.reasons()
