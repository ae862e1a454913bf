"""Gradients of regions of images and of convolutions whose taps move against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.errors import NotSupported
from tests.passes.gradient_tools import Array, Case, check, op_of, r
from tests.passes.test_differentiate_contrib import fused

IMAGES = r(2, 2, 5, 6)
BOXES = np.array([[0.3, 0.6, 4.1, 3.7], [1.2, -0.7, 6.8, 2.9], [2.1, 1.3, 2.6, 1.9]])  # one reaches outside
WHOSE = np.array([0, 1, 0], np.int64)
CORNERS = np.array([[0.12, 0.23, 0.81, 0.72], [-0.2, 0.31, 0.62, 1.3], [0.9, 0.83, 0.21, 0.13]])


def aligned(**attrs: Any) -> Case:
    given = {"output_height": 2, "output_width": 3, "spatial_scale": 0.83, **attrs}
    return Case(op_of("RoiAlign", **given), [IMAGES, BOXES], [WHOSE], shape=(3, 2, 2, 3))


def pooled(boxes: Array, **attrs: Any) -> Case:
    return Case(op_of("MaxRoiPool", pooled_shape=[2, 3], **attrs), [IMAGES], [boxes])


def cropped(**attrs: Any) -> Case:
    given = [IMAGES] if attrs.get("mode") == "nearest" else [IMAGES, CORNERS]
    rest = [CORNERS] if attrs.get("mode") == "nearest" else []
    build = fused("CropAndResize", extrapolation_value=0.7, **attrs)
    return Case(build, given, [*rest, WHOSE, np.array([3, 2], np.int64)], shape=(3, 2, 3, 2))


def deformed(taps: int, group: int = 1, groups: int = 1, more: int = 0, **attrs: Any) -> Case:
    given = [r(2, 4, 4, 5), r(4, 4 // group, 2, 2, seed=1), r(2, groups * taps * 2, 3, 4, seed=2)]
    given += [r(4), r(2, groups * taps, 3, 4, seed=4)][:more]
    return Case(op_of("DeformConv", kernel_shape=[2, 2], group=group, offset_group=groups, **attrs), given)


CASES = {
    "RoiAlign": aligned(sampling_ratio=2),
    "RoiAlign as many as needed": aligned(),
    "RoiAlign from corners": aligned(coordinate_transformation_mode="output_half_pixel"),
    "RoiAlign max": aligned(mode="max", sampling_ratio=2),
    "MaxRoiPool": pooled(np.array([[0.0, 0, 1, 4, 3], [1, 2, 0, 5, 4], [1, 1, 1, 1, 1]])),
    "MaxRoiPool outside": pooled(np.array([[0.0, 3, 3, 9, 8], [1, 7, 7, 9, 9]]), spatial_scale=0.9),
    "CropAndResize": cropped(),
    "CropAndResize nearest": cropped(mode="nearest"),
    "DeformConv": deformed(4),
    "DeformConv with all": deformed(4, group=2, groups=2, more=2),
    "DeformConv in steps": Case(
        op_of("DeformConv", strides=[2, 1], dilations=[1, 2], pads=[1, 0, 1, 1]),
        [r(1, 2, 4, 4), r(2, 2, 2, 2, seed=1), r(1, 8, 3, 3, seed=2)],
    ),
    "DeformConv of a line": Case(op_of("DeformConv"), [r(1, 2, 5), r(3, 2, 2, seed=1), r(1, 2, 4, seed=2)]),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


def test_a_maximum_of_as_many_samples_as_needed_is_refused() -> None:
    with pytest.raises(NotSupported, match="sampling_ratio"):
        check(aligned(mode="max"))
