"""Views of loops as tensors of torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ranvier.codegen.storage import View  # noqa: E402
from ranvier.dtypes import DType  # noqa: E402
from ranvier.graph.ir import Value  # noqa: E402
from ranvier.graph.types import TensorType  # noqa: E402
from ranvier.providers.cuda.realise import Places  # noqa: E402
from ranvier.providers.cuda.steps import Env  # noqa: E402


def test_steps_backwards() -> None:
    """torch has no negative strides; a slice with negative steps is a view in loops."""
    device = torch.device("cpu")
    x = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    value = Value("x", TensorType(DType.float32, (2, 3, 4)))
    places, env = Places(device), Env(device, None, {}, {})
    env.tensors[value] = x
    whole = places.outside(value, x)
    view = View(whole.storage, DType.float32, (2, 3, 2), (-12, 4, -2), offset=15)
    found = places.tensor(view, env)
    assert (found.numpy() == x.numpy()[::-1, :, 3::-2]).all()
    none = View(whole.storage, DType.float32, (2, 0, 2), (-12, 4, -2), offset=15)
    assert places.tensor(none, env).shape == (2, 0, 2)
