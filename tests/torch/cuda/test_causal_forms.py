"""Causal attention with padding: known in a graph, and computed by whatever is right and fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ranvier.providers.cuda import causal  # noqa: E402
from ranvier.providers.cuda.causal import CausalForms, causal_forms  # noqa: E402
from ranvier.providers.cuda.choosing import LIBRARY  # noqa: E402
from tests.torch.codegen.checking import DEVICE  # noqa: E402

SIZES = (1, 2, 24, 16)
TIMES: dict[str, float] = {}
KEPT: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without compilers whose times are made up, in the order in which forms are measured."""
    done: Future[None] = Future()
    done.set_result(None)
    KEPT.clear()
    TIMES.clear()
    monkeypatch.setattr(causal, "TILES", ((16, 16, 4, 2), (32, 16, 4, 2)))
    monkeypatch.setattr(causal, "compile_later", lambda call, device: done)
    monkeypatch.setattr(causal.images, "prepare", lambda count: None)
    monkeypatch.setattr(causal, "decided", lambda structure, device: KEPT.get(structure))
    monkeypatch.setattr(causal, "remember", lambda structure, device, best, times: KEPT.update({structure: best}))
    order = iter([LIBRARY, "16,16,4,2", "32,16,4,2"])
    monkeypatch.setattr(causal.tune, "on_gpu", lambda run: (run(), TIMES[next(order)])[1])
    causal._forms.cache_clear()
    yield
    causal._forms.cache_clear()


def given() -> tuple[Any, ...]:
    q, k, v = (torch.randn(SIZES).half().to(DEVICE) for _ in range(3))
    row = torch.zeros(1, 1, 1, SIZES[2], device=DEVICE).half()
    row[..., :5] = torch.finfo(torch.float16).min
    return q, k, v, row


def by_torch(q: Any, k: Any, v: Any, row: Any) -> Any:
    n = q.shape[2]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    scores = (q.double() @ k.double().mT * 0.25 + row.double()).masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ v.double()).half()


def counted(result: Any) -> tuple[Callable[[], Any], list[int]]:
    calls: list[int] = []

    def run() -> Any:
        calls.append(1)
        return result

    return run, calls


def forms(tensors: tuple[Any, ...]) -> CausalForms:
    found = causal_forms(*tensors, 0.25)
    assert found is not None
    return found


def test_the_fastest_is_taken_and_remembered() -> None:
    TIMES.update({LIBRARY: 3.0, "16,16,4,2": 2.0, "32,16,4,2": 1.0})
    tensors = given()
    wanted = by_torch(*tensors)
    library, calls = counted(wanted)
    made = forms(tensors)
    assert made(library, tensors, decide=False) is wanted and not KEPT
    found = made(library, tensors, decide=True)
    assert list(KEPT.values()) == ["32,16,4,2"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=4e-3)
    assert found.shape == SIZES and found.transpose(1, 2).is_contiguous()
    before = len(calls)
    made(library, tensors, decide=True)
    causal._forms.cache_clear()
    forms(tensors)(library, tensors, decide=False)  # another part of the same sizes
    assert len(calls) == before


def test_the_library_stays_where_it_is_faster() -> None:
    TIMES.update({LIBRARY: 1.0, "16,16,4,2": 2.0, "32,16,4,2": 3.0})
    tensors = given()
    wanted = by_torch(*tensors)
    assert forms(tensors)(lambda: wanted, tensors, decide=True) is wanted
    assert list(KEPT.values()) == [LIBRARY]


def test_what_disagrees_is_not_taken() -> None:
    TIMES.update({LIBRARY: 3.0, "16,16,4,2": 2.0, "32,16,4,2": 1.0})
    tensors = given()
    other = by_torch(*tensors) + 1
    assert forms(tensors)(lambda: other, tensors, decide=True) is other
    assert list(KEPT.values()) == [LIBRARY]


def test_what_only_torch_can() -> None:
    q, k, v, row = given()
    assert causal_forms(q.float(), k, v, row, 0.25) is None
    assert causal_forms(q[..., :12], k, v, row, 0.25) is None
    assert causal_forms(q, k.mT.contiguous().mT, v, row, 0.25) is None
    assert causal_forms(q, k, v, row.float(), 0.25) is None
    far = torch.empty_strided(SIZES, (0, 16, 1 << 28, 1), dtype=torch.float16, device="meta")
    assert causal_forms(q, far, v, row, 0.25) is None
