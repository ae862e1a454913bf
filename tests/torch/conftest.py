"""Tests that need torch, or triton with it: kernels are interpreted unless ``TRITON_INTERPRET=0`` says otherwise."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is imported

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["*"]
elif importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["codegen/*"]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Torch's own generator draws the same for a test whatever ran before it, as NumPy's do (tests/conftest.py)."""
    import torch

    torch.manual_seed(0)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """``RANVIER_TEST_SHARE=2/8`` keeps every eighth test from the third on: for several processes where there is no
    xdist, as on machines where nothing can be installed."""
    share = os.environ.get("RANVIER_TEST_SHARE")
    if share:
        first, count = map(int, share.split("/"))
        kept = items[first::count]
        config.hook.pytest_deselected(items=[item for k, item in enumerate(items) if k % count != first])
        items[:] = kept
