"""Arrays of other libraries go in and out by DLPack. Those that are not installed are left out."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import onnx.parser
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from tests.torch.device import ON_TWIN, TORCH_DEVICE, options  # noqa: E402

MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 20]>g (float[n, 3] x) => (float[n, 3] y) { z = Exp(x) y = Add(z, x) }'
)
X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)


def arrays_of(name: str) -> tuple[Any, Any]:
    """An array of the library where the provider computes, or on the host where it has none there; and from_dlpack."""
    if name == "cupy" and ON_TWIN:
        pytest.skip("CuPy needs a GPU")
    library = pytest.importorskip("jax.numpy" if name == "jax" else name)
    if name == "torch":
        return torch.from_numpy(X).to(TORCH_DEVICE), torch.from_dlpack
    made = library.asarray(X)
    return made, importlib.import_module("jax").dlpack.from_dlpack if name == "jax" else library.from_dlpack


@pytest.mark.parametrize("name", ["numpy", "torch", "cupy", "jax"])
def test_in_and_out(name: str) -> None:
    given, taken = arrays_of(name)
    wanted = np.exp(X) + X
    with rv.load(MODEL, optimization="none", providers=["cuda", "reference"], provider_options=options()) as session:
        for _ in range(4):  # the last ones are captured
            np.testing.assert_allclose(session.run({"x": given})["y"], wanted, rtol=1e-6)
            there = session.run_in_place({"x": given})["y"]
            if name == "numpy" or (name == "jax" and not ON_TWIN):  # neither takes what lies on a GPU there
                found = there.cpu().numpy()
            else:
                found = taken(there)
                if name == "cupy":
                    assert found.data.ptr == there.data_ptr()  # no copy
                    found = found.get()
                elif name == "torch":
                    found = found.cpu()
            np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_what_lies_on_the_device_is_read_where_it_lies(name: str) -> None:
    if ON_TWIN:
        pytest.skip("the twin takes what lies on the host for an array")
    given, _ = arrays_of(name)
    with rv.load(MODEL, optimization="none", providers=["cuda", "reference"], provider_options=options()) as session:
        session.run_in_place({"x": given})
        before = sum(count.bytes for count in session._moved.snapshot())
        session.run_in_place({"x": given})
        assert sum(count.bytes for count in session._moved.snapshot()) == before
