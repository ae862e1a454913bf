"""CUDA C of our own: compiled by NVRTC once for a machine, launched on torch's stream.

For the few kernels in which it counts where every operand of the matrix unit comes from, which Triton decides by
itself. What was compiled is kept beside the other caches. A launch goes to the driver directly, because it may let the
next kernel start early (``pdl``), which torch and CuPy offer no way to say.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ranvier.codegen.llvm import cache
from ranvier.codegen.triton import driver
from ranvier.errors import CannotWrite, KernelError
from ranvier.formats.files import write_files

_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Function:
    """One kernel on one device. Arguments of a launch are tensors, None for no tensor, and ctypes numbers."""

    def __init__(self, image: bytes, name: str) -> None:
        self._function = driver.function(image, name)
        self._shared = driver.USUAL_SHARED

    def launch(self, grid: int, threads: int, shared: int, args: Sequence[Any], *, pdl: bool = False) -> None:
        if shared > self._shared:
            driver.allow_shared(self._function, shared)
            self._shared = shared
        held = [
            ctypes.c_void_p(None if x is None else x.data_ptr()) if x is None or isinstance(x, torch.Tensor) else x
            for x in args
        ]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held))
        early = _Attribute(_EARLY, b"", (ctypes.c_uint * 16)(1))
        stream = torch.cuda.current_stream().cuda_stream
        how = _Launch((grid, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(early), int(pdl))
        driver.call("cuLaunchKernelEx", ctypes.byref(how), self._function, places, None)


@functools.cache
def function(name: str, defines: tuple[tuple[str, int], ...], device: int) -> Function:
    """The kernel ``name`` of the file of this name, compiled with constants for a device, which is current."""
    major, minor = torch.cuda.get_device_capability(device)
    options = (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *(f"-D{key}={value}" for key, value in defines))
    return Function(_image(name, options), name)


def named(defines: Mapping[str, int | bool]) -> tuple[tuple[str, int], ...]:
    """Constants as ``function`` takes them."""
    return tuple((key, int(value)) for key, value in defines.items())


def source(name: str) -> str:
    """The text of a kernel, with what it includes of ours in its place: a compiler gets one text and needs no paths."""
    folder = resources.files(__package__)
    text = folder.joinpath(f"{name}.cu").read_text("utf-8")
    return re.sub(r'^#include "(.+)"$', lambda found: folder.joinpath(found[1]).read_text("utf-8"), text, flags=re.M)


def _image(name: str, options: Sequence[str]) -> bytes:
    """Machine code, from the cache where it is there."""
    text = source(name)
    folder = cache.folder()
    version = ".".join(map(str, _compiler_version()))
    digest = hashlib.sha256("\n".join((text, name, version, *options)).encode()).hexdigest()
    kept = None if folder is None else folder / "cuda" / f"{name}-{digest[:32]}.cubin"
    if kept is not None:
        with contextlib.suppress(OSError):
            return kept.read_bytes()
    made = compiled(text, name, options)
    if kept is not None:
        with contextlib.suppress(OSError, CannotWrite):  # a cache that cannot be written is none
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_files({kept: [made]})
    return made


def compiled(text: str, name: str, options: Sequence[str]) -> bytes:
    """Machine code of CUDA C."""
    library, program = _nvrtc(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            raise KernelError(f"kernel {name!r} does not compile: {_read(library, program, 'ProgramLog').decode()}")
        return _read(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, room)
    return room.raw


@functools.cache
def facts(device: int) -> tuple[tuple[int, int], int]:
    """The capability of a device, and how many multiprocessors it has."""
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count


@functools.cache
def missing(device: int, since: tuple[int, int]) -> str:
    """Why a kernel that needs this capability cannot be had; empty where it can."""
    if facts(device)[0] < since or torch.version.hip:
        return f"capability {since[0]}.{since[1]} is needed"
    try:
        _nvrtc()
        driver.cuda()
    except OSError as error:
        return str(error)
    return ""


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The compiler: by the linker's name of it, or among the packages that torch brings along."""
    names = [f"libnvrtc.so.{major}" for major in _majors()]
    around = Path(torch.__file__).parent.parent / "nvidia"
    names += [str(found) for name in tuple(names) for found in sorted(around.glob(f"**/{name}"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"no NVRTC among {', '.join(names)}")


def _majors() -> list[str]:
    own = str(torch.version.cuda or "").split(".")[0]
    return list(dict.fromkeys(each for each in (own, "13", "12") if each))


def _compiler_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value
