"""Compiled kernels of the tests are kept beside the checkout: nothing is written to the user's cache, a second run need
not compile again, and parallel workers share what one of them made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranvier.codegen.llvm import cache

KERNELS = Path(__file__).parent.parent / ".cache"


@pytest.fixture(scope="session", autouse=True)
def kernel_cache() -> Iterator[Path]:
    """Where kernels are kept, here and in processes that tests start; tests of the cache itself set their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.FOLDER, os.environ.get(cache.FOLDER) or str(KERNELS))
        patch.setenv(cache.LIMIT, "4G")  # all instruction sets and the whole suite; pruning would only cost time
        yield Path(os.environ[cache.FOLDER])
