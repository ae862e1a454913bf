"""Causal attention with numbers for the keys against softmax in float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ranvier.codegen.triton.causal import Causal, CausalCall  # noqa: E402
from tests.torch.codegen.checking import DEVICE  # noqa: E402


def _expected(q: Any, k: Any, v: Any, row: Any, scale: float) -> Any:
    n = q.shape[2]
    scores = q.double() @ k.double().mT * scale + row.double().clamp(min=-65504)[:, None, None, :]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.double()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "tile"), [(64, (32, 16, 4, 2)), (83, (32, 32, 4, 2)), (7, (16, 16, 4, 2))])
@pytest.mark.parametrize("padding", ["none", "some", "all but the last"])
def test_against_softmax(dtype: str, n: int, tile: tuple[int, int, int, int], padding: str) -> None:
    batch, heads, depth, kind = 2, 3, 16, getattr(torch, dtype)
    joined = torch.randn(batch, n, 3, heads, depth).to(DEVICE, kind)  # as one product makes them
    q, k, v = (joined[:, :, j].transpose(1, 2) for j in range(3))
    row = torch.zeros(batch, n, dtype=kind, device=DEVICE)
    if padding != "none":
        row[1, : n // 3 if padding == "some" else n - 1] = torch.finfo(kind).min
    row[0] += torch.randn(n).to(DEVICE, kind)
    what = Causal(dtype, (batch, heads, n, depth), *(x.stride()[:3] for x in (q, k, v)), row.stride(0), 0.3)
    out = torch.empty(batch, n, heads, depth, dtype=kind, device=DEVICE)
    CausalCall(what, tile).launch([q, k, v, row, out])
    found = out.transpose(1, 2).double()
    torch.testing.assert_close(found, _expected(q, k, v, row, 0.3), rtol=0, atol=4e-3 if dtype == "float16" else 3e-2)


def test_which_halves_and_depths() -> None:
    assert Causal.takes("float16", 64) and Causal.takes("bfloat16", 128)
    assert not Causal.takes("float32", 64) and not Causal.takes("float16", 80)
