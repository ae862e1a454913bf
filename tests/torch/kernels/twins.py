"""CUDA C of ours on a machine without a GPU: the same source, compiled for the processor with ``twin.h``."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ranvier.providers.cuda.kernels import native
from tests.torch.kernels.checking import DEVICE

COMPILER = shutil.which("g++") or shutil.which("c++")
FOLDER = Path(__file__).parent
ENTRY = """
#include "twin.h"
{source}
extern "C" void twin(int grid{declared}) {{ run_blocks(grid, THREADS, [&] {{ {name}({given}); }}); }}
"""


class Twin:
    """Stands for a loaded kernel; a launch runs it here."""

    def __init__(self, folder: Path, name: str, defines: tuple[tuple[str, int], ...], late: int | None = None) -> None:
        """``late``: a warp whose lanes but the first are behind where they wait for a barrier."""
        source = native.source(name)
        signature = re.search(rf"{name}\(([^)]*)\)", source)
        assert signature is not None
        arguments = [" ".join(each.split()) for each in signature[1].split(",")]
        given = ", ".join(each.split()[-1] for each in arguments)
        declared = "".join(f", {each}" for each in arguments).replace("__restrict__", "")
        text = ENTRY.format(source=source, name=name, declared=declared, given=given)
        digest = hashlib.sha256((text + str(defines)).encode()).hexdigest()[:16]
        written, library = folder / f"{digest}.cpp", folder / f"{digest}.so"
        written.write_text(text)
        constants = [f"-D{key}={value}" for key, value in (*defines, *([] if late is None else [("LATE", late)]))]
        how = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{FOLDER}"]
        subprocess.run([str(COMPILER), *how, *constants, str(written), "-o", str(library)], check=True, timeout=120)
        self._call = ctypes.CDLL(str(library)).twin
        self._call.restype = None
        self.launches: list[tuple[int, int, int]] = []

    def launch(self, grid: int, threads: int, shared: int, args: Any, *, pdl: bool = False) -> None:
        self.launches.append((grid, threads, shared))
        given = [
            ctypes.c_void_p(x if x is None else x.data_ptr()) if x is None or isinstance(x, torch.Tensor) else x
            for x in args
        ]
        self._call(ctypes.c_int(grid), *given)


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Twin]:
    """Kernels that were asked for. On a GPU they are the real ones, and nothing is listed."""
    return _twins(tmp_path, monkeypatch, None)


@pytest.fixture(params=range(4))
def late_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Twin]:
    """The same with lanes of one warp far apart, as a processor that runs lanes by themselves may let them be."""
    return _twins(tmp_path, monkeypatch, request.param)


def _twins(folder: Path, monkeypatch: pytest.MonkeyPatch, late: int | None) -> list[Twin]:
    made: list[Twin] = []
    known: dict[tuple[str, tuple[tuple[str, int], ...]], Twin] = {}
    if DEVICE == "cuda":
        return made
    if COMPILER is None:
        pytest.skip("no C++ compiler")

    def function(name: str, defines: tuple[tuple[str, int], ...], device: int) -> Twin:
        if (name, defines) not in known:
            made.append(Twin(folder, name, defines, late))
            known[name, defines] = made[-1]
        return known[name, defines]

    monkeypatch.setattr(native, "function", function)
    monkeypatch.setattr(native, "facts", lambda _device: ((9, 0), 1))
    return made
