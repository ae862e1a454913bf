"""A small model of BitNet's architecture: prompt and steps agree with the reference, and with a longer prompt."""

from __future__ import annotations

import numpy as np
import pytest

import ranvier as rv
from bench.models.ternary import Decoder, Shape, bitnet

SHAPE = Shape(layers=2, hidden=64, inner=96, heads=4, groups=2, vocabulary=40, room=16)


def logits(provider: str, threads: int = 1) -> list[np.ndarray]:
    with rv.load(bitnet(SHAPE), providers=[provider], threads=threads) as session:
        assert {node.provider for node in session.report.nodes} == {provider}
        decoder = Decoder(session, SHAPE)
        steps = [decoder.step([3, 1, 4, 1, 5], 0), decoder.step([9], 5), decoder.step([2], 6)]
        again = Decoder(session, SHAPE)
        return [*steps, again.step([3, 1, 4, 1, 5, 9, 2], 0)]


@pytest.mark.parametrize("provider", ["cpu", "bitnet"])
@pytest.mark.parametrize("threads", [1, 2])
def test_agrees_with_the_reference(provider: str, threads: int) -> None:
    expected, found = logits("reference"), logits(provider, threads)
    for have, want in zip(found, expected, strict=True):
        assert have.shape == (1, 1, SHAPE.vocabulary)
        # a sum of floats in another order may move a token's code by one
        np.testing.assert_allclose(have, want, atol=0.05 * float(np.abs(want).max()))
    np.testing.assert_allclose(found[2], found[3], atol=0.05 * float(np.abs(found[3]).max()))
