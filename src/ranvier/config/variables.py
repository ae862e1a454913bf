"""Environment variables that set no option of a session, and a word about those that set nothing at all.

A misspelt variable would otherwise do nothing, and nobody would see it. Names are written down here although other
modules read them, because most processes never import those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ranvier.config.files import VARIABLE as FILE_VARIABLE
from ranvier.devices.choose import CUDA_DEVICE, FORCE_CPU
from ranvier.errors import nearest
from ranvier.logs import warn_once

PREFIX = "RANVIER_"
PRESET_VARIABLE = "RANVIER_PRESET"
OTHERS = {
    PRESET_VARIABLE: "names the preset",
    FILE_VARIABLE: "names the file with options",
    **dict.fromkeys(FORCE_CPU, "chooses the CPU over CUDA"),
    **dict.fromkeys(CUDA_DEVICE, "chooses the GPU"),
    "RANVIER_CACHE": "switches the kernel cache",
    "RANVIER_CACHE_DIR": "places the kernel cache",
    "RANVIER_CACHE_LIMIT": "limits the kernel cache",
    "RANVIER_CALIBRATE": "switches measuring for placement by cost",
    "RANVIER_COMPILER": "says where kernels are compiled",
    "RANVIER_CPU_ISA": "forces the instruction set of generated code",
    "RANVIER_MODELS": "names the folder with models to measure",
    "RANVIER_WEIGHTS_CACHE": "places weights that were fetched",
    "RANVIER_WORKER": "names the worker of the provider remote",
    "RANVIER_WORKER_CA": "names the certificate of that worker",
    "RANVIER_WORKER_TOKEN": "is what that worker wants to see",
}


def likely(variable: str, options: Iterable[str]) -> str:
    """`` (did you mean 'RANVIER_THREADS'?)`` where a known name is close, else nothing.

    The prefix, which all have in common, does not count.
    """
    names = {name.removeprefix(PREFIX): name for name in (*options, *OTHERS) if name.startswith(PREFIX)}
    hint = nearest(variable.removeprefix(PREFIX), names)
    return hint.replace("'", f"'{PREFIX}", 1) if "did you mean" in hint else ""


def warn_of_misspelt(environ: Mapping[str, str], options: Iterable[str]) -> None:
    """Once for each variable that looks like one of ours and is none.

    Only where a known name is close: other programs may have reasons of their own to begin a name like this.
    """
    options = tuple(options)
    for name in environ:
        if name.startswith(PREFIX) and name not in OTHERS and name not in options and environ[name].strip():
            hint = likely(name, options)
            if hint:
                warn_once(f"variable {name}", f"environment variable {name} is unknown and has no effect{hint}")


__all__ = ["OTHERS", "PREFIX", "PRESET_VARIABLE", "likely", "warn_of_misspelt"]
