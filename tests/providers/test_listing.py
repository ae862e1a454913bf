"""Listing the providers is quick: no other runtime is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

from ranvier.providers.registry import REGISTRY

HEAVY = ("onnxruntime", "openvino", "mlx.core", "grpc", "torch")
TEXT = f"""
import contextlib, io, json, sys
from ranvier.cli.app import cli
out = io.StringIO()
with contextlib.redirect_stdout(out):
    cli(["providers", "--json"], standalone_mode=False)
found = json.loads(out.getvalue())["providers"]
print(json.dumps([found, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def test_listing_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", TEXT], check=True, timeout=120, capture_output=True, text=True)
    found, imported = json.loads(done.stdout)
    assert imported == []
    listed = {each["name"]: each for each in found}
    assert {"cpu", "reference", "mlx", "onnxruntime", "openvino", "sim", "remote"} <= listed.keys()
    assert listed["cpu"]["automatic"] and not listed["sim"]["automatic"]
    for each in found:
        assert each["available"] or each["reason"]


def test_names_that_auto_does_not_stand_for() -> None:
    assert REGISTRY.automatic("cpu") and REGISTRY.automatic("CPUExecutionProvider")
    assert not REGISTRY.automatic("ort")
