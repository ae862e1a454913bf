"""The cyclic collector rests while a model is set up, and only then."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

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
