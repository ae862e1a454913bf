"""Compiled kernels of the tests are kept beside the checkout: nothing is written to the user's cache, a second run need
not compile again, and parallel workers share what one of them made."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from ranvier.codegen.llvm import cache
from ranvier.config import files

hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")  # a test that fails fails again, and one that passes passes again

KERNELS = Path(__file__).parent.parent / ".cache"


@pytest.fixture(scope="session", autouse=True)
def kernel_cache() -> Iterator[Path]:
    """Where kernels are kept, here and in processes that tests start; tests of the cache itself set their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.FOLDER, os.environ.get(cache.FOLDER) or str(KERNELS))
        patch.setenv(cache.LIMIT, "4G")  # all instruction sets and the whole suite; pruning would only cost time
        patch.setenv(files.VARIABLE, "off")  # what the user prefers is not what the tests expect
        yield Path(os.environ[cache.FOLDER])


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Commands that tests run in this process set how much is logged; the next test shall not inherit that."""
    loggers = [logging.getLogger("ranvier"), logging.getLogger()]
    before = [(each.level, list(each.handlers)) for each in loggers]
    yield
    for each, (level, handlers) in zip(loggers, before):
        each.setLevel(level)
        each.handlers[:] = handlers


class _Flaws(logging.Handler):
    """What the CPU provider could not compile although it should: the user gets the reference's result and a warning,
    a test must not pass like that."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "which is a flaw" in record.getMessage():
            self.found.append(record.getMessage())


@pytest.fixture(autouse=True)
def no_flaws() -> Iterator[None]:
    handler = _Flaws()
    logging.getLogger("ranvier").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ranvier").removeHandler(handler)
    assert not handler.found


_DRAWN: dict[int, tuple[np.random.Generator, dict[str, object]]] = {}
"""Generators that modules of the tests hold, with the states they had when all of them were imported."""


def _generators(module: object) -> list[np.random.Generator]:
    return [value for value in vars(module).values() if isinstance(value, np.random.Generator)]


def pytest_collection_finish() -> None:
    here = str(Path(__file__).parent)
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None) or "").startswith(here):
            _DRAWN.update((id(each), (each, each.bit_generator.state)) for each in _generators(module))


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers whichever tests ran before it in its process: the workers of a parallel run share
    the tests out anew each time, and what fails once must fail again."""
    for each in _generators(request.module):
        each.bit_generator.state = _DRAWN[id(each)][1]
