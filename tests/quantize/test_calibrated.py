"""GPTQ and AWQ on layers that were trained, against rounding to the nearest; ranges from samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.errors import DTypeMismatch, InvalidConfig, ShapeMismatch
from ranvier.quantize import Awq, Entropy, Gptq, InputMoments, Integers, MeanSquare, Percentile, observer

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def layers() -> list[tuple[Array, Array]]:
    """Weights [out, in] and inputs of each layer of a trained classifier of digits."""
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    images, labels = load_digits(return_X_y=True)
    model = MLPClassifier((96, 64), max_iter=25, random_state=0, tol=0.0)
    with np.errstate(all="ignore"):
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(images[:1200] / 16.0, labels[:1200])
    found, inputs = [], images[:1200] / 16.0
    for weights, bias in zip(model.coefs_, model.intercepts_):
        found.append((weights.T.astype(np.float32), inputs.astype(np.float32)))
        inputs = np.maximum(inputs @ weights + bias, 0)
    return found


def moments_of(inputs: Array) -> InputMoments:
    moments = InputMoments(inputs.shape[1])
    for start in range(0, len(inputs), 100):
        moments.update(inputs[start : start + 100])
    return moments


def output_error(weights: Array, changed: Array, inputs: Array) -> float:
    return float((((changed - weights) @ inputs.T) ** 2).mean())


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_layer_is_better_than_rounding(layers: Any, group: int, symmetric: bool) -> None:
    for weights, inputs in layers:
        size = weights.shape[1] if group == -1 else group
        moments = moments_of(inputs)
        nearest = Integers(4, symmetric, "group", size, signed=False).quantize(weights).dequantize()
        plain = output_error(weights, nearest, inputs)
        for reorder in (False, True):
            coded = Gptq(4, group, symmetric, reorder).quantize(weights, moments)
            assert output_error(weights, coded.dequantize(), inputs) < 0.8 * plain
            assert coded.codes.max() < 16 and coded.scales.shape == (len(weights), -(-weights.shape[1] // size))
        # as far as samples are trusted wholly; else it may be as good as rounding, where they are too few to tell
        scaled, factors = Awq(4, group, symmetric, damping=0.001).quantize(weights, moments)
        assert output_error(weights, scaled.dequantize() / factors, inputs) < plain
        scaled, factors = Awq(4, group, symmetric).quantize(weights, moments)
        assert output_error(weights, scaled.dequantize() / factors, inputs) <= plain


def test_the_error_without_inputs_is_the_error(layers: Any) -> None:
    weights, inputs = layers[1]
    changed = weights + np.random.default_rng(0).standard_normal(weights.shape).astype(np.float32) * 0.01
    assert moments_of(inputs).error(changed - weights) == pytest.approx(
        output_error(weights, changed, inputs), rel=1e-5
    )


def test_inputs_that_say_nothing() -> None:
    weights = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    moments = moments_of(np.zeros((10, 32), np.float32))
    coded = Gptq(4, 16).quantize(weights, moments)
    assert np.abs(coded.dequantize() - weights).max() < 1.0
    np.testing.assert_array_equal(Gptq(4, 16, damping=0.0).quantize(weights, moments).codes, coded.codes)
    with pytest.raises(InvalidConfig, match="infinite or NaN"):
        moments.update(np.full((1, 32), np.nan))


# -- ranges -----------------------------------------------------------------------------------------------------------


def observed(name: str, batches: list[Array]) -> tuple[float, float]:
    found = observer(name)
    for batch in batches:
        found.update(batch)
    return found.range()


def test_ranges() -> None:
    rng = np.random.default_rng(5)
    batches = [rng.standard_normal(5000).astype(np.float32) * scale for scale in (0.1, 1.0, 1.0, 1.0)]
    batches.append(np.array([80.0, -60.0], np.float32))  # outliers, one in ten thousand
    assert observed("minmax", batches) == (-60.0, 80.0)
    for name in ("percentile", "mse", "entropy"):
        low, high = observed(name, batches)
        assert -60 <= low < -1 and 1 < high <= 80
    low, high = observed("percentile", batches)
    everything = np.concatenate(batches)
    inside = ((everything >= low) & (everything <= high)).mean()
    assert 0.9995 < inside <= 1.0 and high < 10


def test_the_least_squared_error_is_one() -> None:
    batch = np.random.default_rng(6).standard_t(2, 20000).astype(np.float32)

    def error(low: float, high: float) -> float:
        step = (high - low) / 255
        return float((np.clip(np.rint((batch - low) / step), 0, 255) * step + low - batch).astype(np.float64).var())

    found = observed("mse", [batch])
    assert error(*found) < error(*observed("minmax", [batch]))


def test_zeros_cut_no_range() -> None:
    """An activation leaves many, and every range reads them back as they are."""
    numbers = np.abs(np.random.default_rng(7).standard_normal(20000)).astype(np.float32)
    (_, plain), (_, found) = observed("entropy", [numbers]), observed("entropy", [numbers, np.zeros(20000, np.float32)])
    assert found == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("name", ["minmax", "percentile", "mse", "entropy"])
def test_ranges_of_little(name: str) -> None:
    assert observed(name, []) == (0.0, 0.0)
    assert observed(name, [np.zeros(5, np.float32)]) == (0.0, 0.0)
    low, high = observed(name, [np.array([np.nan, np.inf, 2.0], np.float32)])
    assert low == 0.0 and 0.0 < high <= 2.0
    with pytest.raises(InvalidConfig, match="did you mean"):
        observer("percentil")


@pytest.mark.parametrize("name", ["minmax", "percentile", "mse", "entropy"])
@pytest.mark.filterwarnings("error")
def test_ranges_of_the_least_and_the_largest(name: str) -> None:
    tiny, huge = np.array([1e-45, -1e-45], np.float32), np.array([3e38, -3e38], np.float32)
    for batches in ([tiny], [huge], [tiny, huge], [np.array([1e300, 2.0])]):
        low, high = observed(name, batches)
        assert low <= 0.0 <= high and np.isfinite(high - low)


@pytest.mark.parametrize("name", ["percentile", "mse", "entropy"])
def test_ranges_of_zeros_that_come_first_or_last(name: str) -> None:
    """A layer that is silent on the first sample counts as one that is on the last."""
    rng = np.random.default_rng(3)
    loud, silent = rng.standard_normal(2000).astype(np.float32), np.zeros(60_000, np.float32)
    found = []
    for samples in ((silent, loud), (loud, silent)):
        ranges = observer(name)
        for sample in samples:
            ranges.update(sample)
        found.append(ranges.range())
    assert found[0] == found[1]
    assert name != "percentile" or found[0][1] < np.abs(loud).max()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_few_codes_leave_most_of_a_range(bits: int) -> None:
    values = 1 / (1 + np.exp(-4 * np.random.default_rng(2).standard_normal(50_000)))
    ranges = Entropy(bits)
    ranges.update(values.astype(np.float32))
    low, high = ranges.range()
    step = (high - low) / ((1 << bits) - 1)
    back = np.clip(np.rint((values - low) / step), 0, (1 << bits) - 1) * step + low
    assert np.square(back - values).mean() < 0.1 * np.square(values).mean()


@pytest.mark.parametrize("name", ["minmax", "percentile", "mse", "entropy"])
@pytest.mark.filterwarnings("error")
def test_samples_that_are_no_real_numbers(name: str) -> None:
    odd: list[Any] = [np.array(["a"]), np.ones(2, complex), np.array(["2020"], "M8[D]"), [[1.0], [2.0, 3.0]], None]
    for samples in odd:
        with pytest.raises(DTypeMismatch):
            observer(name).update(samples)
        with pytest.raises((DTypeMismatch, ShapeMismatch)):
            InputMoments(1).update(samples)


# -- what GPTQ and AWQ refuse, and groups that follow the order -------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_inputs_whose_squares_are_no_numbers() -> None:
    with pytest.raises(InvalidConfig, match="squares"):
        InputMoments(2).update(np.full((3, 2), 1e200))


@pytest.mark.filterwarnings("error")
def test_awq_is_judged_by_what_a_type_of_16_bits_reads() -> None:
    """Weights that are made larger before rounding may be beyond float16."""
    rng = np.random.default_rng(4)
    weights = (rng.standard_normal((16, 64)) * 20_000).clip(-60_000, 60_000).astype(np.float16)
    inputs = rng.standard_normal((400, 64)) * 10.0 ** rng.uniform(-2, 2, 64)
    coded, factors = Awq(4, 32).quantize(weights, moments_of(inputs))
    assert coded.dequantize().dtype == np.float16
    wide = weights.astype(np.float64)
    nearest = Integers(4, False, "group", 32, signed=False).quantize(weights).dequantize()
    plain = output_error(wide, nearest.astype(np.float64), inputs)
    assert output_error(wide, coded.dequantize().astype(np.float64) / factors, inputs) <= plain


@pytest.mark.filterwarnings("error")
def test_weights_near_the_largest_number() -> None:
    rng = np.random.default_rng(5)
    most = np.finfo(np.float32).max
    weights = (rng.uniform(-1, 1, (4, 32)) * most).astype(np.float32)
    weights[:, ::5] = most
    inputs = rng.standard_normal((100, 32)) * 10.0 ** rng.uniform(-2, 2, 32)
    moments = moments_of(inputs)
    for scheme in (Gptq(4, 8), Gptq(4, 8, False, True, False)):
        assert np.isfinite(scheme.quantize(weights, moments).dequantize()).all()
    coded, factors = Awq(4, 8).quantize(weights, moments)
    assert np.isfinite(coded.dequantize() / factors.astype(np.float64)).all()


def test_moments_of_other_channels_do_not_add_up() -> None:
    for parts in ([], [InputMoments(3), InputMoments(4)]):
        with pytest.raises(ShapeMismatch):
            InputMoments.joined(parts)


def test_weights_and_inputs_that_do_not_fit() -> None:
    weights, moments = np.ones((4, 32), np.float32), moments_of(np.ones((3, 32), np.float32))
    for scheme in (Gptq(4, 16), Awq(4, 16)):
        for wrong in (weights[:, :31], weights[0], weights[None]):
            with pytest.raises(ShapeMismatch, match="weights"):
                scheme.quantize(wrong, moments)
    with pytest.raises(ShapeMismatch, match="inputs"):
        moments.update(np.ones((2, 64), np.float32))
    assert Gptq(4, 16).quantize(weights[:0], moments).shape == (0, 32)
    assert Awq(4, 16).quantize(weights[:0], moments)[0].shape == (0, 32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gptq(1),
        lambda: Gptq(4, 0),
        lambda: Gptq(4, -2),
        lambda: Gptq(4, damping=-1.0),
        lambda: Gptq(4, fit="least"),
        lambda: Awq(9),
        lambda: Awq(4, steps=0),
        lambda: InputMoments(0),
        lambda: InputMoments(2.5),  # type: ignore[arg-type]
        lambda: InputMoments("4"),  # type: ignore[arg-type]
        lambda: Entropy(0),
        lambda: MeanSquare("8"),  # type: ignore[arg-type]
        lambda: Percentile("99"),  # type: ignore[arg-type]
        lambda: observer(3),  # type: ignore[arg-type]
        lambda: observer(["mse"]),  # type: ignore[arg-type]
    ],
)
def test_options_out_of_range(make: Any) -> None:
    with pytest.raises(InvalidConfig):
        make()


@pytest.mark.parametrize("group", [32, 48, -1])
def test_groups_in_the_order_of_rounding(layers: Any, group: int) -> None:
    weights, inputs = layers[1]
    moments = moments_of(inputs)
    coded = Gptq(4, group, reorder=True, static_groups=False).quantize(weights, moments)
    size = weights.shape[1] if group == -1 else group
    assert coded.order is not None and np.bincount(coded.order).max() <= size
    zeros = np.take(coded.zeros, coded.order, 1).astype(np.float32)
    plain = (coded.codes.astype(np.float32) - zeros) * np.take(coded.scales, coded.order, 1)
    np.testing.assert_allclose(coded.dequantize(), plain, rtol=1e-6)
    nearest = Integers(4, True, "group", size, signed=False).quantize(weights).dequantize()
    assert output_error(weights, coded.dequantize(), inputs) < 0.8 * output_error(weights, nearest, inputs)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_how_large_inputs_are_says_nothing(layers: Any, scale: float) -> None:
    """Also where channels are never read, as the borders of pictures."""
    weights, inputs = layers[0]
    assert (inputs == 0).all(axis=0).any()
    found, plain = (Gptq(4, 32, reorder=True).quantize(weights, moments_of(inputs * k)) for k in (scale, 1.0))
    errors = [output_error(weights, each.dequantize(), inputs) for each in (found, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_how_large_inputs_are_changes_no_factor(layers: Any, scale: float) -> None:
    weights, inputs = layers[1]
    found, plain = (Awq(4, 32).quantize(weights, moments_of(inputs * k))[1] for k in (scale, 1.0))
    assert plain.max() > 1.5 * plain.min()
    np.testing.assert_allclose(found, plain, rtol=1e-3)


# -- how far moments are trusted --------------------------------------------------------------------------------------


def test_doubt_is_how_samples_differ() -> None:
    rng = np.random.default_rng(8)
    sizes = (3, 8, 5, 1, 13)
    draws = [rng.standard_normal((size, 6)) * np.geomspace(2, 0.1, 6) for size in sizes]
    moments = InputMoments(6)
    for draw in draws:
        moments.update(draw)
        moments.update(draw[:0])  # a run that reads nothing is no draw
    count = sum(sizes)
    mean = sum(draw.T @ draw for draw in draws) / count
    spread = sum(size * np.square(draw.T @ draw / size - mean).sum() for size, draw in zip(sizes, draws)) / count
    off = spread / (count**2 / sum(size**2 for size in sizes) - 1)
    told = np.square(mean - np.eye(6) * np.trace(mean) / 6).sum()
    assert moments.doubt == pytest.approx(2 * off / (told - off))


def test_doubt_of_many_few_and_no_samples() -> None:
    rng = np.random.default_rng(9)
    channels = np.geomspace(2, 0.1, 32)

    def doubt(count: int, factors: Array | float) -> float:
        moments = InputMoments(32)
        for _ in range(count):
            moments.update(rng.standard_normal((4, 32)) * factors)
        return moments.doubt

    assert doubt(2000, channels) < 0.02 < doubt(100, channels) < doubt(4, channels)
    assert doubt(20, 1.0) > 5  # channels that are alike: whatever else is seen is chance
    assert doubt(1, channels) == 32 / 4
    assert doubt(0, channels) == 32
    assert doubt(3, 0.0) == 0.0  # nothing was ever read


def test_moments_of_layers_that_share_weights_add_up(layers: Any) -> None:
    inputs = layers[1][1]
    joined = InputMoments.joined([moments_of(inputs[:500]), moments_of(inputs[500:])])
    np.testing.assert_allclose(joined.second, moments_of(inputs).second)
    assert joined.count == len(inputs)
    assert joined.doubt == pytest.approx(moments_of(inputs).doubt, rel=0.2)
