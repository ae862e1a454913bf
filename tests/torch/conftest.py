"""Tests that need torch, or triton with it: kernels are interpreted unless ``TRITON_INTERPRET=0`` says otherwise."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is imported

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["*"]
elif importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["codegen/*"]
