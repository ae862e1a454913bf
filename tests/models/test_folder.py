"""Every model in the folder that RANVIER_MODELS names, against the results stored beside it.

``reference/NAME.npz`` holds one input as ``in_0`` … and the expected outputs as ``out_0`` …
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ranvier as rv

FOLDER = os.environ.get("RANVIER_MODELS")
MODELS = sorted(Path(FOLDER).glob("*.onnx")) if FOLDER else []
QUANTIZED = {"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeLSTM", "MatMulInteger", "ConvInteger"}


@pytest.mark.skipif(not MODELS, reason="RANVIER_MODELS names no folder with models")
@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
@pytest.mark.parametrize("level", ["none", "aggressive"])
def test_model(path: Path, level: str) -> None:
    session = rv.load(path, optimization=level)
    stored = path.parent / "reference" / f"{path.stem}.npz"
    if not stored.exists():
        run_once(session)
        return
    data = np.load(stored)
    inputs = [data[f"in_{k}"] for k in range(sum(name.startswith("in_") for name in data.files))]
    outputs = list(session.run(inputs).values())
    operators = {node.op for node in session.graph.all_nodes()}
    for k, got in enumerate(outputs):
        want = data[f"out_{k}"]
        assert got.shape == want.shape and got.dtype == want.dtype
        if want.dtype.kind != "f" or not want.size:
            np.testing.assert_array_equal(got, want)
            continue
        scale = float(np.abs(want).max())
        # a quantized model may land one step aside; fp32 must agree to 1e-4, with room for the peer's own rounding
        relative = 2e-2 if operators & QUANTIZED else 1e-4
        np.testing.assert_allclose(got, want, rtol=relative, atol=relative * scale + 1e-6)


def run_once(session: rv.Session) -> None:
    """A model without stored results must at least run, and give finite numbers."""
    rng = np.random.default_rng(0)
    feeds = {}
    for name, kind in session.inputs.items():
        shape = [d if isinstance(d, int) else 1 for d in kind.shape or ()]
        low = rng.random(shape)
        feeds[name] = (low * 2).astype(kind.dtype.numpy) if kind.dtype.is_integer else low.astype(kind.dtype.numpy)
    for result in session.run(feeds).values():
        assert result.dtype.kind != "f" or np.isfinite(result).all()
