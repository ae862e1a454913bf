"""Random tensors, decoding of images, and optimizer steps."""

from __future__ import annotations

import io
import os
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidValue, NotSupported, ResourceLimit, ShapeMismatch
from ranvier.ops.allocation import tensor_limit
from ranvier.ops.registry import evaluate, get

FLOATS = [DType.float16, DType.bfloat16, DType.float32, DType.float64]
TRAINING = "ai.onnx.preview.training"


# -- random tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_moments(dtype):
    normal = evaluate("RandomNormal", shape=(100, 200), dtype=dtype.onnx, mean=3.0, scale=0.5, seed=1.0)
    assert (normal.shape, normal.dtype) == ((100, 200), dtype.numpy)
    wide = normal.astype(np.float64)
    assert abs(wide.mean() - 3) < 0.02 and abs(wide.std() - 0.5) < 0.02
    uniform = evaluate("RandomUniform", shape=(100, 200), dtype=dtype.onnx, low=-1.0, high=3.0, seed=1.0)
    assert uniform.dtype == dtype.numpy
    wide = uniform.astype(np.float64)
    assert wide.min() >= -1 and wide.max() <= 3
    assert abs(wide.mean() - 1) < 0.05


def test_seeds():
    def draw(**seed):
        like = evaluate("RandomUniformLike", np.zeros(8, np.float32), **seed)
        probabilities = np.full(64, 0.5)
        return [
            evaluate("RandomNormal", shape=(8,), **seed).tolist(),
            evaluate("RandomNormalLike", like, **seed).tolist(),
            like.tolist(),
            evaluate("Multinomial", np.zeros((2, 50), np.float32), sample_size=20, **seed).tolist(),
            evaluate("Bernoulli", probabilities, **seed).tolist(),
        ]

    assert draw(seed=0.5) == draw(seed=0.5)
    for other in (draw(seed=0.25), draw(seed=-0.5), draw()):
        assert all(a != b for a, b in zip(draw(seed=0.5), other))
    assert all(a != b for a, b in zip(draw(), draw()))


def test_like_takes_the_shape_and_the_type():
    half = np.zeros((2, 3), ml_dtypes.bfloat16)
    assert evaluate("RandomNormalLike", half).dtype == half.dtype
    assert evaluate("RandomUniformLike", np.zeros((2, 3), np.int32), dtype=DType.float64.onnx).dtype == np.float64
    assert evaluate("RandomNormal", shape=()).shape == ()
    assert evaluate("Bernoulli", np.full((3, 2), 0.5), dtype=DType.bool.onnx).dtype == bool


def test_few_classes_and_many_are_chosen_alike():
    logits = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    logits[1, 2] = -np.inf
    few = evaluate("Multinomial", logits, sample_size=5, seed=4.0)
    padded = np.pad(logits, ((0, 0), (0, 100)), constant_values=-np.inf)
    assert np.array_equal(few, evaluate("Multinomial", padded, sample_size=5, seed=4.0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_child_process_draws_other_numbers():
    evaluate("RandomUniform", shape=(4,))  # whatever draws is there before the fork
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, evaluate("RandomUniform", shape=(4,)).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 16) != evaluate("RandomUniform", shape=(4,)).tobytes()
    os.close(reading)
    os.close(writing)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float32, (3, 4), elements=st.floats(-30, 30, width=32)), st.integers(0, 3))
def test_multinomial_never_draws_the_impossible(logits, impossible):
    logits[:, impossible] = -np.inf
    drawn = evaluate("Multinomial", logits, sample_size=50, dtype=DType.int64.onnx)
    assert drawn.shape == (3, 50) and drawn.dtype == np.int64
    assert drawn.min() >= 0 and drawn.max() < 4
    assert (drawn != impossible).all()


def test_frequencies():
    logits = np.log(np.array([[0.1, 0.2, 0.7]])) + 5  # not normalized
    drawn = evaluate("Multinomial", logits, sample_size=20000, seed=3.0)
    assert drawn.dtype == np.int32
    np.testing.assert_allclose(np.bincount(drawn[0]) / 20000, [0.1, 0.2, 0.7], atol=0.02)
    p = np.repeat([0.0, 0.25, 1.0], 10000)
    ones = evaluate("Bernoulli", p, seed=3.0).reshape(3, -1).mean(axis=1)
    assert ones[0] == 0 and ones[2] == 1 and abs(ones[1] - 0.25) < 0.02


def test_bad_random_nodes():
    for name in ("RandomNormal", "RandomUniform"):
        with pytest.raises(DTypeMismatch, match=f"^{name}: .*got int32"):
            evaluate(name, shape=(2,), dtype=DType.int32.onnx)
        with pytest.raises(DTypeMismatch, match=f"^{name}Like: .*got string"):
            evaluate(f"{name}Like", np.array(["a"], object))
        with pytest.raises(InvalidValue, match="negative size"):
            evaluate(name, shape=(-2,))
        with pytest.raises(ResourceLimit):
            evaluate(name, shape=(2**40, 2**20))
    with pytest.raises(InvalidValue, match=r"^Bernoulli: every input must be a probability"):
        evaluate("Bernoulli", np.array([np.nan]))
    with pytest.raises(DTypeMismatch, match=r"^Multinomial"):
        evaluate("Multinomial", np.zeros((1, 2)), dtype=1)
    with pytest.raises(ShapeMismatch, match=r"^Multinomial"):
        evaluate("Multinomial", np.zeros((1, 0)))
    for bad in (np.nan, np.inf):
        with pytest.raises(InvalidValue, match=r"^Multinomial"):
            evaluate("Multinomial", np.array([[0, bad]]))
    with pytest.raises(InvalidValue, match=r"^Multinomial"):
        evaluate("Multinomial", np.full((1, 2), -np.inf))


def test_random_operators_say_so():
    for name in ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"):
        assert "random" in get("", name).traits


# -- images ------------------------------------------------------------------------------------------------------------

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


def encoded(image, kind: str, **options) -> np.ndarray:
    pillow = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    (image if isinstance(image, pillow.Image) else pillow.fromarray(image)).save(stream, kind, **options)
    return np.frombuffer(stream.getvalue(), np.uint8)


@pytest.mark.parametrize("kind", ["BMP", "PNG", "TIFF", "PPM", "WEBP"])
def test_lossless_images_come_back(kind):
    stream = encoded(PIXELS, kind, **({"lossless": True} if kind == "WEBP" else {}))
    rgb = evaluate("ImageDecoder", stream)
    np.testing.assert_array_equal(rgb, PIXELS)
    np.testing.assert_array_equal(evaluate("ImageDecoder", stream, pixel_format="BGR"), PIXELS[:, :, ::-1])
    gray = evaluate("ImageDecoder", stream, pixel_format="Grayscale")
    assert (gray.shape, gray.dtype) == ((5, 7, 1), np.uint8)
    bt601 = PIXELS @ np.array([0.299, 0.587, 0.114])
    assert np.abs(gray[:, :, 0] - bt601).max() <= 0.51


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA"])
def test_every_picture_gets_three_channels(mode):
    pillow = pytest.importorskip("PIL.Image")
    stream = encoded(pillow.fromarray(PIXELS).convert(mode), "PNG")
    assert evaluate("ImageDecoder", stream).shape == (5, 7, 3)


def test_sixteen_bit_gray_keeps_its_high_byte():
    wide = np.array([[0, 300, 65535]], np.uint16)
    stream = encoded(wide, "PNG")
    assert evaluate("ImageDecoder", stream, pixel_format="Grayscale").ravel().tolist() == [0, 1, 255]


def test_damaged_streams_are_empty_images():
    stream = encoded(PIXELS, "PNG")
    for damaged in (stream[:0], stream[:60], np.zeros(50, np.uint8), encoded(PIXELS, "GIF")):
        assert evaluate("ImageDecoder", damaged).shape == (0, 0, 3)
        assert evaluate("ImageDecoder", damaged, pixel_format="Grayscale").shape == (0, 0, 1)


def test_refused_images():
    with pytest.raises(InvalidValue, match=r"^ImageDecoder: pixel_format"):
        evaluate("ImageDecoder", encoded(PIXELS, "PNG"), pixel_format="CMYK")
    with pytest.raises(ShapeMismatch, match=r"^ImageDecoder: expected a 1-D stream"):
        evaluate("ImageDecoder", PIXELS)
    with tensor_limit(100), pytest.raises(ResourceLimit, match="ImageDecoder"):
        evaluate("ImageDecoder", encoded(PIXELS, "PNG"))


def test_decompression_bombs_are_refused():
    header = encoded(np.zeros((1, 1), np.uint8), "PPM").tobytes().replace(b"1 1", b"60000 60000")
    with pytest.raises(InvalidValue, match=r"^ImageDecoder: .*exceeds limit"):
        evaluate("ImageDecoder", np.frombuffer(header, np.uint8))


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(NotSupported, match=r"ranvier\[image\]"):
        evaluate("ImageDecoder", np.zeros(4, np.uint8))


# -- optimizer steps ---------------------------------------------------------------------------------------------------

VARIABLES = st.lists(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=2, max_side=3), elements=st.floats(-3, 3, width=32)),
    min_size=1,
    max_size=3,
)


def scalars(rate, count):
    return np.asarray(rate, np.float32), np.asarray(count, np.int64)


@settings(max_examples=30, deadline=None)
@given(VARIABLES, st.integers(0, 3))
def test_momentum(values, count):
    gradients = [np.cos(v) for v in values]
    state = [np.sin(v) for v in values]
    size = len(values)
    for mode in ("standard", "nesterov"):
        results = evaluate(
            "Momentum",
            *scalars(0.1, count),
            *values,
            *gradients,
            *state,
            domain=TRAINING,
            outputs=2 * size,
            alpha=0.9,
            beta=0.5,
            mode=mode,
            norm_coefficient=0.01,
        )
        for x, g, v, x_new, v_new in zip(values, gradients, state, results[:size], results[size:]):
            assert x_new.dtype == np.float32 and x_new.shape == x.shape
            whole = 0.01 * x + g
            velocity = 0.9 * v + (0.5 if count else 1) * whole
            np.testing.assert_allclose(v_new, velocity, rtol=1e-5, atol=1e-6)
            direction = velocity if mode == "standard" else whole + 0.9 * velocity
            np.testing.assert_allclose(x_new, x - 0.1 * direction, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "states"), [("Adam", 2), ("Adagrad", 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adaptive_steps_find_a_minimum(name, states, dtype):
    target = np.array([1.0, -2.0], dtype)
    x, state = np.zeros(2, dtype), [np.zeros(2, dtype)] * states
    for count in range(1, 400):
        gradient = 2 * (x - target)
        x, *state = evaluate(
            name, *scalars(0.3, count), x, gradient, *state, domain=TRAINING, outputs=1 + states, epsilon=1e-6
        )
        assert x.dtype == dtype
    np.testing.assert_allclose(x, target, atol=1e-2)


def test_the_first_adam_step_has_the_length_of_the_rate():
    x, g, zero = np.zeros(3, np.float32), np.array([5, -0.01, 100], np.float32), np.zeros(3, np.float32)
    moved, *_ = evaluate("Adam", *scalars(0.1, 1), x, g, zero, zero, domain=TRAINING, outputs=3, epsilon=0.0)
    np.testing.assert_allclose(moved, -0.1 * np.sign(g), rtol=1e-4)


def test_bad_optimizer_steps():
    x = np.ones(2, np.float32)
    with pytest.raises(InvalidValue, match=r"^Adam: expected 4 tensors per variable, got 3"):
        evaluate("Adam", *scalars(0.1, 1), x, x, x, domain=TRAINING)
    with pytest.raises(ShapeMismatch, match=r"^Adagrad: variable 0 has shape"):
        evaluate("Adagrad", *scalars(0.1, 1), x, x[:1], x, domain=TRAINING)
    momentum = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0}
    with pytest.raises(InvalidValue, match=r"^Momentum: mode"):
        evaluate("Momentum", *scalars(0.1, 1), x, x, x, domain=TRAINING, mode="heavy", **momentum)
    with pytest.raises(ShapeMismatch, match=r"^Momentum: 'R' must be a scalar"):
        evaluate("Momentum", x, scalars(0, 1)[1], x, x, x, domain=TRAINING, mode="standard", **momentum)
