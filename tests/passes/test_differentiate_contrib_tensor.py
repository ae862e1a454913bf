"""Gradients of com.microsoft operators on tensors, images and rows against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.gradient_tools import Case, check, r
from tests.passes.test_differentiate_contrib import fused

IMAGE = r(2, 3, 3, 4)  # channels last
GAMMA, BETA = r(4), r(4, seed=1)
CASES = {
    "Inverse": Case(fused("Inverse"), [r(2, 3, 3) + 3 * np.eye(3)]),
    "Rfft": Case(fused("Rfft"), [r(2, 6)], shape=(2, 4, 2)),
    "Rfft in two": Case(fused("Rfft", signal_ndim=2), [r(2, 3, 5)], shape=(2, 3, 3, 2)),
    "Irfft": Case(fused("Irfft", signal_ndim=1), [r(2, 4, 2)], shape=(2, 6)),
    "Irfft in two": Case(fused("Irfft", signal_ndim=2), [r(2, 3, 3, 2)], shape=(2, 3, 4)),
    "ComplexMul": Case(fused("ComplexMul"), [r(2, 3, 2), r(3, 2)]),
    "ComplexMulConj": Case(fused("ComplexMulConj"), [r(2, 3, 2), r(3, 2)]),
    "CDist": Case(fused("CDist"), [r(3, 4), r(2, 4, seed=1)]),
    "CDist euclidean": Case(fused("CDist", metric="euclidean"), [r(3, 4), r(2, 4, seed=1)]),
    "UnfoldTensor": Case(fused("UnfoldTensor", dim=1, size=3, step=2), [r(2, 7, 2)], shape=(2, 3, 2, 3)),
    "UnfoldTensor last": Case(fused("UnfoldTensor", size=2), [r(2, 4)], shape=(2, 3, 2)),
    "BiasDropout": Case(fused("BiasDropout"), [r(2, 3), r(3), r(2, 3, seed=1)]),
    "BiasSoftmax": Case(fused("BiasSoftmax", axis=2, is_inner_broadcast=0), [r(2, 3, 4), r(1, 3, 4)]),
    "BiasSoftmax inner": Case(fused("BiasSoftmax", axis=2, is_inner_broadcast=1), [r(2, 3, 4), r(2, 1, 4)]),
    "ScaledSiLU": Case(fused("ScaledSiLU", alpha=0.7), [r(5)]),
    "ScaledSiLU by an operand": Case(fused("ScaledSiLU"), [r(5), np.array([0.7])]),
    "GatedRMSNorm": Case(fused("GatedRMSNorm"), [r(2, 6), r(3), r(2, 6, seed=1)]),
    "GatedRMSNorm sigmoid": Case(fused("GatedRMSNorm", activation="sigmoid"), [r(2, 4), r(4), r(2, 4, seed=1)]),
    "BranchwiseRMSNorm": Case(fused("BranchwiseRMSNorm", num_branches=2), [r(2, 6), r(6)]),
    "BranchwiseRMSNorm shared": Case(fused("BranchwiseRMSNorm"), [r(2, 2, 3), r(3)]),
    "GroupNorm": Case(fused("GroupNorm", groups=2, activation=1), [IMAGE, GAMMA, BETA]),
    "GroupNorm planar": Case(fused("GroupNorm", groups=2, activation=0, channels_last=0), [r(2, 4, 3), GAMMA, BETA]),
    "SkipGroupNorm": Case(
        fused("SkipGroupNorm", groups=2, activation=1), [IMAGE, GAMMA, BETA, r(2, 4), r(4, seed=2)]
    ),
    "SkipGroupNorm sum": Case(
        fused("SkipGroupNorm", 1, 2, groups=2, activation=0), [IMAGE, GAMMA, BETA, r(2, 3, 3, 4, seed=1)]
    ),
    "NhwcConv": Case(fused("NhwcConv", pads=[1, 0, 0, 1]), [IMAGE, r(2, 2, 2, 4), r(2)]),
    "NhwcFusedConv": Case(
        fused("NhwcFusedConv", activation="LeakyRelu", activation_params=[0.2]),
        [IMAGE, r(2, 4, 2, 2), r(2), r(2, 2, 2, 2, seed=3)],
    ),
    "NhwcMaxPool": Case(fused("NhwcMaxPool", kernel_shape=[2, 2]), [IMAGE]),
    "ConvTransposeWithDynamicPads": Case(
        fused("ConvTransposeWithDynamicPads", order=(0, 1, 3, 2), strides=[2]),
        [r(1, 2, 3), r(2, 2, 3), r(2)],
        [np.array([1, 0], np.int64)],
        shape=(1, 2, 6),
    ),
    "NGramRepeatBlock": Case(
        lambda op, scores, ids: op.Tanh(fused("NGramRepeatBlock", ngram_size=2)(op, ids, scores)),
        [r(2, 5)],
        [np.array([[1, 2, 1], [3, 3, 3]], np.int64)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])
