"""The fastest form of a product that is right is chosen, and what was chosen is not measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ranvier.codegen.storage import View  # noqa: E402
from ranvier.dtypes import DType  # noqa: E402
from ranvier.providers.cuda import choosing  # noqa: E402
from ranvier.providers.cuda.choosing import Chooser  # noqa: E402
from ranvier.providers.cuda.forms import LIBRARY, Form, Multiplied  # noqa: E402
from ranvier.providers.cuda.place import Twin  # noqa: E402


@pytest.fixture
def chooser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chooser]:
    """One that measures, on a machine whose times are made up: see ``SECONDS``."""
    kept: dict[str, str] = {}
    made = Chooser(Twin())
    monkeypatch.setattr(made, "_measures", True)
    monkeypatch.setattr(choosing, "decided", lambda structure, device: kept.get(structure))
    monkeypatch.setattr(choosing, "remember", lambda structure, device, best, times: kept.update({structure: best}))
    monkeypatch.setattr(choosing.tune, "on_gpu", lambda run: (run(), SECONDS[RUNS[-1]])[1])
    RUNS.clear()
    yield made


RUNS: list[str] = []
SECONDS = {LIBRARY: 3.0, "tile": 1.0}


def product(rows: int = 32) -> Multiplied:
    f16 = DType.float16
    return Multiplied(*(View.temporary(f16, shape) for shape in ((1, rows, 64), (1, 64, 48), (1, rows, 48))))


def running(results: dict[str, Any]) -> Callable[[Form], Any]:
    def run(form: Form) -> Any:
        kind = form.name.split()[0]
        RUNS.append(kind)
        found = results[kind]
        if isinstance(found, Exception):
            raise found
        return found

    return run


RIGHT = torch.arange(6, dtype=torch.float16).reshape(2, 3)


def test_the_fastest_is_taken_and_remembered(chooser: Chooser) -> None:
    assert chooser.known(product()) is None
    found = chooser.choose(product(), running({LIBRARY: RIGHT, "tile": RIGHT}))
    assert found.name.startswith("tile")
    again = chooser.known(product())
    assert again is not None and again.name == found.name
    assert chooser.known(product(33)) is None  # other sizes are another decision


@pytest.mark.parametrize("wrong", [RIGHT + 1, RIGHT * float("nan"), RuntimeError("out of resources")])
def test_what_is_wrong_or_fails_is_never_taken(chooser: Chooser, wrong: Any) -> None:
    assert chooser.choose(product(), running({LIBRARY: RIGHT, "tile": wrong})).name == LIBRARY


def test_after_some_seconds_nothing_is_measured(chooser: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_SECONDS", -1.0)
    assert chooser.choose(product(), running({})).name == LIBRARY and not RUNS


def test_without_a_gpu_nothing_is_measured() -> None:
    found = Chooser(Twin()).known(product())
    assert found is not None and found.name == LIBRARY
    tiled = Chooser(Twin(), "tile").known(product())
    assert tiled is not None and tiled.name.startswith("tile")
