"""Where the tests of the provider run: on torch's CPU device, or on the GPU whose number ``RANVIER_TEST_DEVICE`` is."""

from __future__ import annotations

import os
from typing import Any

DEVICE = os.environ.get("RANVIER_TEST_DEVICE", "cpu")
ON_TWIN = DEVICE == "cpu"
TORCH_DEVICE = "cpu" if ON_TWIN else f"cuda:{DEVICE}"


def options(**more: Any) -> dict[str, dict[str, Any]]:
    """A session's ``provider_options``."""
    return {"cuda": {"device": DEVICE, **more}}
