"""The cyclic collector rests while a model is set up, and only then."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

import ranvier
from ranvier.memory.collector import collector_paused


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_a_pause_ends_with_the_last_of_several() -> None:
    gc.enable()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_ends_where_setting_up_fails() -> None:
    gc.enable()
    with pytest.raises(ValueError), collector_paused():
        raise ValueError
    assert gc.isenabled()


def test_who_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_collects_although_another_thread_paused_it() -> None:
    gc.enable()
    with collector_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_was_imported_is_old_at_once_but_for_whoever_froze_something() -> None:
    gc.enable()
    fresh: list[object] = [[]]
    assert any(each is fresh for each in gc.get_objects(generation=0))
    ranvier._imported("ranvier.errors")
    assert gc.isenabled() and gc.get_freeze_count() < 1000
    assert any(each is fresh for each in gc.get_objects(generation=2))
    gc.freeze()
    try:
        ranvier._imported("ranvier.errors")
        assert gc.isenabled() and gc.get_freeze_count() >= 1000
    finally:
        gc.unfreeze()
