"""Memory that nobody has is given back now and then."""

from __future__ import annotations

import pytest

from ranvier.memory import trim


def test_given_back_after_enough_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(trim, "_trim", lambda: calls.append)
    monkeypatch.setattr(trim, "_gone", 0)
    for _ in range(5):
        trim.gone(trim._EVERY // 2)
    assert len(calls) == 2


def test_the_c_library_is_asked_where_it_knows() -> None:
    assert trim._trim()(0) in (0, 1)
