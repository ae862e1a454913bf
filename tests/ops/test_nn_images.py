"""Resampling, detection, signals and losses: known results and laws they must obey."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.nn_tools import close, evaluate, floats, ints, quick

# -- resampling -------------------------------------------------------------------------------------------------------

RULES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("rule", RULES)
def test_resize_by_one_is_the_identity(mode: str, rule: str) -> None:
    x = floats(2, 3, 5, 4)
    scales = np.ones(4, np.float32)
    attrs = {"mode": mode, "coordinate_transformation_mode": rule}
    np.testing.assert_array_equal(evaluate("Resize", x, None, scales, **attrs), x)
    np.testing.assert_array_equal(evaluate("Resize", x, None, None, ints(2, 3, 5, 4), **attrs), x)


@quick
@given(
    st.sampled_from(["nearest", "linear", "cubic"]), st.sampled_from(RULES), st.integers(1, 9), st.integers(1, 9),
    st.booleans(), st.booleans(), st.sampled_from([np.float32, np.float16, np.uint8]),
)  # fmt: skip
def test_resize_keeps_a_constant(mode, rule, height, width, antialias, exclude, dtype) -> None:
    x = np.full((1, 1, 5, 4), 77, dtype)
    y = evaluate(
        "Resize",
        x,
        None,
        None,
        ints(1, 1, height, width),
        mode=mode,
        coordinate_transformation_mode=rule,
        antialias=int(antialias and mode != "nearest"),
        exclude_outside=int(exclude),
    )
    assert y.shape == (1, 1, height, width)
    assert y.dtype == dtype
    close(y, 77)


def test_resize_of_a_ramp_stays_a_ramp() -> None:
    x = np.arange(5, dtype=np.float32).reshape(1, 5)
    for mode in ("linear", "cubic"):
        y = evaluate(
            "Resize",
            x,
            None,
            None,
            ints(1, 17),
            mode=mode,
            coordinate_transformation_mode="align_corners",
            cubic_coeff_a=-0.5,
        )
        close(y[0, 4:13], np.linspace(0, 4, 17)[4:13])


def test_growing_twofold_repeats_or_blends() -> None:
    x = floats(1, 2, 3, 4)
    scales = np.array([1, 1, 2, 3], np.float32)
    y = evaluate("Resize", x, None, scales)
    np.testing.assert_array_equal(y, x.repeat(2, axis=2).repeat(3, axis=3))
    np.testing.assert_array_equal(evaluate("Resize", x, scales, version=10), y)
    np.testing.assert_array_equal(evaluate("Upsample", x, scales, version=9), y)
    np.testing.assert_array_equal(evaluate("Upsample", x, version=7, scales=(1.0, 1.0, 2.0, 3.0)), y)
    np.testing.assert_array_equal(evaluate("Upsample", x, version=1, height_scale=2.0, width_scale=3.0), y)
    line = np.array([[0.0, 4.0]], np.float32)
    grown = evaluate("Resize", line, None, np.array([1, 2], np.float32), mode="linear")
    close(grown, [[0, 1, 3, 4]])


def test_antialiasing_averages_what_disappears() -> None:
    x = np.array([[0, 1, 0, 1, 0, 1, 0, 1]], np.float32)
    sizes = ints(1, 2)
    assert np.ptp(evaluate("Resize", x, None, None, sizes, mode="linear", antialias=1)) < 0.2
    inner = evaluate("Resize", x, None, None, sizes, mode="linear", antialias=1)
    close(inner.mean(), 0.5, 0.1)


@pytest.mark.parametrize(("policy", "shape"), [("stretch", (9, 8)), ("not_larger", (7, 8)), ("not_smaller", (9, 11))])
def test_resize_can_keep_the_aspect_ratio(policy: str, shape: tuple[int, int]) -> None:
    x = floats(2, 6, 7, 3)
    y = evaluate("Resize", x, None, None, ints(9, 8), axes=(1, 2), keep_aspect_ratio_policy=policy, mode="linear")
    assert y.shape == (2, *shape, 3)


def test_crop_and_resize_fills_the_outside() -> None:
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    y = evaluate(
        "Resize",
        x,
        np.array([0, -0.5, 1, 1], np.float32),
        None,
        ints(4, 4),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=-1.0,
    )
    assert (y[:, 0] == -1).all()
    close(y[:, 1:], np.stack([x[:, 0], x[:, 1:3].mean(1), x[:, 3]], axis=1))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("spatial", [(5, 4), (3, 4, 5)])
def test_the_identity_grid_samples_the_image_itself(mode: str, padding: str, align: int, spatial: Any) -> None:
    x = floats(2, 3, *spatial)
    rank = len(spatial)
    theta = np.tile(np.eye(rank, rank + 1, dtype=np.float32), (2, 1, 1))
    grid = evaluate("AffineGrid", theta, ints(2, 3, *spatial), align_corners=align)
    assert grid.shape == (2, *spatial, rank)
    close(evaluate("GridSample", x, grid, mode=mode, padding_mode=padding, align_corners=align), x, 1e-3)


def test_grid_sample_beyond_the_edge() -> None:
    x = np.array([[[[1, 2, 4]]]], np.float32)
    at = np.array([-5 / 3, 5 / 3, 7 / 3], np.float32)  # the pixels -1.5, 3.5 and 4.5
    grid = np.stack([at, np.zeros(3, np.float32)], axis=-1).reshape(1, 1, 3, 2)
    sample = lambda padding: evaluate("GridSample", x, grid, padding_mode=padding)[0, 0, 0]  # noqa: E731
    close(sample("zeros"), [0, 0, 0])
    close(sample("border"), [1, 4, 4])
    close(sample("reflection"), [1.5, 3, 1.5], 1e-3)
    words = np.array([[[["a", "b", "c"]]]], object)
    assert evaluate("GridSample", words, grid, mode="nearest").tolist() == [[[["", "", ""]]]]


# -- detection --------------------------------------------------------------------------------------------------------


def test_roi_align_of_a_ramp_reads_bin_centers() -> None:
    rows, columns = np.mgrid[0:20, 0:16].astype(np.float32)
    x = np.stack([rows, columns])[None]
    rois = np.array([[2.0, 3.0, 10.0, 15.0]], np.float32)
    y = evaluate("RoiAlign", x, rois, ints(0), output_height=3, output_width=2)
    close(y[0, 0, :, 0], 3 - 0.5 + 4 * (np.arange(3) + 0.5))
    close(y[0, 1, 0], 2 - 0.5 + 4 * (np.arange(2) + 0.5))
    old = evaluate("RoiAlign", x, rois, ints(0), version=10, output_height=3, output_width=2, sampling_ratio=2)
    close(old, y + 0.5)


def test_roi_align_outside_the_image_is_zero() -> None:
    x = np.ones((1, 1, 4, 4), np.float32)
    far = np.array([[50, 50, 60, 60], [1, 1, 1, 1]], np.float32)
    for mode in ("avg", "max"):
        assert not evaluate("RoiAlign", x, far, ints(0, 0), mode=mode).any()


def test_max_roi_pool_takes_the_largest_of_each_bin() -> None:
    x = floats(2, 3, 8, 8)
    rois = np.array([[1, 0, 0, 7, 7], [0, 2, 2, 3, 3]], np.float32)
    y = evaluate("MaxRoiPool", x, rois, pooled_shape=(2, 4))
    np.testing.assert_array_equal(y[0], x[1].reshape(3, 2, 4, 4, 2).max((2, 4)))
    np.testing.assert_array_equal(y[1, :, 0, 0], x[0, :, 2, 2])


def naive_nms(boxes, scores, limit, overlap, least):
    kept = []
    for n, c in itertools.product(range(len(scores)), range(scores.shape[1])):
        chosen: list[int] = []
        for k in sorted(range(len(boxes[n])), key=lambda k: -scores[n, c, k]):
            alone = all(iou(boxes[n, k], boxes[n, j]) <= overlap for j in chosen)
            if alone and scores[n, c, k] > least and len(chosen) < limit:
                chosen.append(k)
        kept += [[n, c, k] for k in chosen]
    return kept


def iou(a, b):
    high = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    wide = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return high * wide / (areas - high * wide)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("centered", [0, 1])
def test_non_max_suppression_is_greedy(seed: int, centered: int) -> None:
    random = np.random.default_rng(seed)
    corner, extent = random.random((2, 20, 2)) * 4, random.random((2, 20, 2)) * 3 + 0.1
    boxes = np.concatenate([corner, corner + extent], 2).astype(np.float32)
    scores = random.random((2, 3, 20)).astype(np.float32)
    given_boxes = boxes
    if centered:
        middle = (corner + extent / 2)[..., ::-1]
        given_boxes = np.concatenate([middle, extent[..., ::-1]], 2).astype(np.float32)
    thresholds = np.float32(0.3), np.float32(0.2)
    y = evaluate(
        "NonMaxSuppression", given_boxes, scores, ints(4), *map(np.asarray, thresholds), center_point_box=centered
    )
    assert y.dtype == np.int64
    assert y.tolist() == naive_nms(boxes, scores, 4, *thresholds)
    assert evaluate("NonMaxSuppression", boxes, scores).shape == (0, 3)


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [None, 6, 9, 12])
def test_dft_is_a_sum_of_waves_and_inverts(length: int | None) -> None:
    x = floats(2, 9, 2)
    n = length or 9
    z = np.zeros((2, n), complex)
    kept = (x[..., 0] + 1j * x[..., 1])[:, :n]
    z[:, : kept.shape[1]] = kept
    waves = np.exp(-2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n)
    size = None if length is None else np.array(length)
    y = evaluate("DFT", x, size, np.array(1))
    close(y, np.stack([(z @ waves).real, (z @ waves).imag], -1))
    np.testing.assert_array_equal(evaluate("DFT", x, size, version=17, axis=1), y)
    back = evaluate("DFT", y, None, np.array(-2), inverse=1)
    close(back[..., 0], z.real)


@pytest.mark.parametrize("length", [8, 9])
def test_one_sided_dft_inverts_to_a_real_signal(length: int) -> None:
    x = floats(2, length, 1)
    half = evaluate("DFT", x, None, np.array(1), onesided=1)
    assert half.shape == (2, length // 2 + 1, 2)
    close(half, evaluate("DFT", x, None, np.array(1))[:, : length // 2 + 1])
    close(evaluate("DFT", half, np.array(length), np.array(1), inverse=1, onesided=1), x)


@pytest.mark.parametrize("onesided", [0, 1])
def test_stft_transforms_every_frame(onesided: int) -> None:
    x, taper = floats(2, 50, 1), np.abs(floats(16))
    y = evaluate("STFT", x, np.array(5), taper, onesided=onesided)
    frames = range((50 - 16) // 5 + 1)
    assert y.shape == (2, len(frames), 9 if onesided else 16, 2)
    for k in frames:
        frame = x[:, k * 5 : k * 5 + 16] * taper[:, None]
        close(y[:, k], evaluate("DFT", frame, None, np.array(1), onesided=onesided))


def test_windows() -> None:
    size = np.array(11)
    close(evaluate("HannWindow", size, periodic=0), np.hanning(11))
    close(evaluate("BlackmanWindow", size, periodic=0), np.blackman(11))
    close(evaluate("HammingWindow", size, periodic=0), np.hamming(11), 1e-2)
    close(evaluate("HannWindow", size), np.hanning(12)[:-1])
    assert evaluate("HannWindow", size, output_datatype=16).dtype == ml_dtypes.bfloat16


def test_mel_bands_are_triangles_in_order() -> None:
    args = np.array(10), np.array(512), np.array(16000), np.float32(20), np.float32(7600)
    bands = evaluate("MelWeightMatrix", *map(np.asarray, args))
    assert bands.shape == (257, 10)
    assert bands.min() >= 0
    close(bands.max(axis=0), 1)
    peaks = bands.argmax(axis=0)
    assert (np.diff(peaks) > 0).all()
    for band, peak in zip(bands.T, peaks):
        assert (np.diff(band[: peak + 1]) >= 0).all()
        assert (np.diff(band[peak:]) <= 0).all()


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [None, -1, 2])
def test_losses_sum_log_probabilities(reduction: str, weighted: bool, ignore: int | None) -> None:
    scores, weights = floats(4, 5, 3), np.abs(floats(5))
    labels = np.random.default_rng(0).integers(0, 5, (4, 3))
    labels[0, 0] = 2
    if ignore == -1:
        labels[1, 1] = -1
    attrs = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    inputs = (weights,) if weighted else ()
    y, log_prob = evaluate("SoftmaxCrossEntropyLoss", scores, labels, *inputs, outputs=2, **attrs)
    close(np.exp(log_prob).sum(1), 1)
    terms, total = np.zeros((4, 3)), 0.0
    for n, t in itertools.product(range(4), range(3)):
        if labels[n, t] != ignore:
            weight = weights[labels[n, t]] if weighted else 1.0
            terms[n, t] = -weight * log_prob[n, labels[n, t], t]
            total += weight
    close(y, {"mean": terms.sum() / total, "sum": terms.sum(), "none": terms}[reduction])
    close(evaluate("NegativeLogLikelihoodLoss", log_prob, labels, *inputs, **attrs), y)
