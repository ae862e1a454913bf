"""DynamicQuantizeLSTM on the CPU provider against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.integer import lstm
from tests.providers.cpu.compare import Array, check

RNG = np.random.default_rng(23)


def numbers(*shape: int) -> Array:
    return np.asarray(RNG.normal(size=shape).astype(np.float32))


@pytest.fixture(params=[lstm._ROUND_NS, 0.0], ids=["one round", "a round per step"])
def _rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm, "_ROUND_NS", request.param)


@pytest.mark.usefixtures("_rounds")
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("kind", "per_column"), [(np.int8, False), (np.uint8, True)])
def test_directions(direction: str, kind: type, per_column: bool) -> None:
    count = 2 if direction == "bidirectional" else 1
    for steps, batch, width, hidden in ((6, 1, 10, 24), (4, 3, 7, 5), (1, 9, 16, 16)):
        limits = np.iinfo(kind)
        w, r = (
            RNG.integers(limits.min, limits.max, (count, k, 4 * hidden), endpoint=True).astype(kind)
            for k in (width, hidden)
        )
        shape = (count, 4 * hidden) if per_column else (count,)
        scales = [RNG.uniform(0.001, 0.004, shape).astype(np.float32) for _ in range(2)]
        zeros = [np.asarray(RNG.integers(limits.min + 100, limits.max - 100, shape).astype(kind)) for _ in range(2)]
        state = [numbers(count, batch, hidden) for _ in range(2)]
        inputs: list[Any] = [numbers(steps, batch, width), w, r, numbers(count, 8 * hidden) * 0.1, None, *state, None]
        inputs += [scales[0], zeros[0], scales[1], zeros[1]]
        how = {"constant": [1, 2, 3, 8, 9, 10, 11], "domain": "com.microsoft", "outputs": 3}
        attrs = {"hidden_size": hidden, "direction": direction}
        # a state that rounds to another code moves later results by a step of its scale
        check("DynamicQuantizeLSTM", inputs, attrs, rtol=1e-3, atol=2e-3, **how)
        inputs[5] = inputs[6] = inputs[3] = None
        check("DynamicQuantizeLSTM", inputs, attrs, rtol=1e-3, atol=2e-3, **how)
