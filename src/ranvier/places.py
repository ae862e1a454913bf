"""Where a user's machine keeps what can be made or fetched again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = "RANVIER_CACHE_DIR"


def cache_folder() -> Path | None:
    """The folder of all caches: that of ``RANVIER_CACHE_DIR``, or ours in the user's; None where there is no home."""
    if given := os.environ.get(FOLDER):
        return Path(given).expanduser()
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "ranvier" / "cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "ranvier"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "ranvier"
