"""Kernels compiled for a GPU on any machine: that they compile, and move memory in whole vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]


def test_common_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    nvidia = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not nvidia.exists():
        pytest.skip("this triton has no assembler for NVIDIA's GPUs")
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.codegen.compile_for_gpu"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not any("st.local" in marks for marks in found.values())  # nothing spills
    for name in ("copy", "transpose", "many"):
        assert {"ld.global.v4", "st.global.v4"} <= set(found[name])
    assert "ld.global.v4" in found["argmax"] and "ld.global.v4" in found["sums"]
    assert "wgmma" in found["product"] and "wgmma" in found["convolution"]
