"""How long a model takes from its file to the first result, and what with.

PYTHONPATH=src:. python -m bench.gpu.first_result [resnet50_b1 mlp* …] [--device cpu] [--profile]

Every model has a process of its own whose caches are empty: nothing that was compiled or measured before counts.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import cProfile
import fnmatch
import importlib.machinery
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ranvier
from ranvier.codegen.phases import phase, taken

# of this runtime, of Triton and of PyTorch's compiler
_CACHES = ("RANVIER_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """An environment in which everybody's cache is a folder that was just made. Only bytecode is there, as it is for
    every package that was installed."""
    compileall.compile_dir(Path(ranvier.__file__).parent, quiet=2)
    with tempfile.TemporaryDirectory(prefix="ranvier-cold-", ignore_cleanup_errors=True) as folder:
        yield {**os.environ, **{name: os.path.join(folder, name.lower()) for name in _CACHES}}


class Phases:
    """What the time in a ``with`` block went into; imports count as a phase there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.total = 0.0

    def __enter__(self) -> Phases:
        self._undo = _time_imports()
        self._before = taken()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.total = time.perf_counter() - self._start
        self._undo()
        found = {name: seconds - self._before.get(name, 0.0) for name, seconds in taken().items()}
        self.seconds = {name: seconds for name, seconds in found.items() if seconds > 0}
        self.seconds["rest"] = self.total - sum(self.seconds.values())


def _time_imports() -> Callable[[], None]:
    """Let executing a module be a phase; what makes it none again."""
    kept: list[tuple[type, str, Any]] = []
    loaders = (
        (importlib.machinery.SourceFileLoader, "exec_module"),
        (
            importlib.machinery.ExtensionFileLoader,
            "create_module",
        ),
    )
    for loader, name in loaders:
        before = getattr(loader, name)
        kept.append((loader, name, before))

        def timed(self: Any, given: Any, before: Any = before) -> Any:
            with phase("import"):
                return before(self, given)

        setattr(loader, name, timed)

    def undo() -> None:
        for loader, name, before in kept:
            setattr(loader, name, before)

    return undo


def one(name: str, device_name: str, profile: bool) -> dict[str, Any]:
    """One model in this process."""
    import numpy as np
    import torch

    from bench.gpu.cases import cases, default_folder
    from bench.gpu.measure import prepare_ours
    from bench.gpu.twins import tensor

    (case,) = [each for each in cases() if each.name == name]
    path, device = case.model(default_folder()), torch.device(device_name)
    given = {n: tensor(np.asarray(x)).to(device) for n, x in case.inputs(np.random.default_rng(0)).items()}
    profiler = cProfile.Profile() if profile else None
    with Phases() as phases, profiler or contextlib.nullcontext():
        call, _ = prepare_ours(path, case, given, device)
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if profiler is not None:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    return {"name": name, "seconds": phases.total, "phases": phases.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--profile", action="store_true", help="functions too")
    parser.add_argument("--warm", action="store_true", help="a second time with what the first one left in the caches")
    parser.add_argument("--here", action="store_true", help="in this process and with its caches")
    how = parser.parse_args()
    if how.here:
        print(json.dumps(one(how.patterns[0], how.device, how.profile)), flush=True)
        os._exit(0)  # what torch and the driver do at the end has nothing to do with the result
    from bench.gpu.cases import cases

    names = [c.name for c in cases() if any(fnmatch.fnmatch(c.name, p) for p in how.patterns)]
    rest = ["--device", how.device, "--here", *(["--profile"] if how.profile else [])]
    for name in names:
        with empty_caches() as environment:
            for state in ("cold", "warm") if how.warm else ("cold",):
                command = [sys.executable, "-m", "bench.gpu.first_result", name, *rest]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
                lines = done.stdout.strip().splitlines()
                if done.returncode or not lines:
                    print(f"{name}: failed", flush=True)
                    continue
                found = json.loads(lines[-1])
                parts = sorted(found["phases"].items(), key=lambda item: -item[1])
                told = ", ".join(f"{what} {seconds:.2f}" for what, seconds in parts)
                print(f"{name} {state}: {found['seconds']:.2f} s: {told}", flush=True)


if __name__ == "__main__":
    main()
