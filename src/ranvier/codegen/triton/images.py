"""Machine code of kernels: kept on disk, or compiled by Triton in other processes, many at once.

Triton itself is not imported here, and a process whose kernels were all compiled before never needs it. Where no other
process can be started there is no image, and whoever asks compiles by Triton in its own process; ``RANVIER_COMPILER``
may ask for that, as for the code of processors.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ranvier
from ranvier import logs
from ranvier.codegen.llvm import cache, compiler, servers
from ranvier.codegen.triton import compile_server
from ranvier.codegen.triton.printer import Source
from ranvier.devices import usable_cores
from ranvier.errors import KernelError
from ranvier.records import dataclass

_KINDS = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_MULTIPLE = 16  # what Triton tells addresses and numbers apart by
_INT32 = 1 << 31
_SCRATCH = 2  # parameters that Triton puts behind those of every kernel, empty for ours
_EARLY = 8  # processes that start before anybody knows how many kernels there are


@dataclass(frozen=True)
class Order:
    """Everything that the machine code of a kernel depends on. ``kinds`` of all arguments: ``constexpr`` for those in
    ``fixed``, by position, which are no parameters then; ``multiples``: positions of multiples of 16."""

    text: str
    name: str
    kinds: tuple[str, ...]
    fixed: tuple[tuple[int, int], ...]
    multiples: tuple[int, ...]
    warps: int
    stages: int
    capability: int

    def message(self) -> bytes:
        fields = ("text", "name", "kinds", "fixed", "multiples", "warps", "stages", "capability")
        return json.dumps({name: getattr(self, name) for name in fields}).encode()

    def parameters(self) -> int:
        return sum(kind != "constexpr" for kind in self.kinds) + _SCRATCH


@dataclass(frozen=True)
class Image:
    """Machine code, and what a launch of it has to say."""

    key: str
    code: bytes
    name: str
    warps: int
    shared: int


def order(source: Source, aligned: Iterable[bool], capability: int) -> Order:
    """What Triton would compile for these arguments when it is launched: it tells 1 and multiples of 16 from others."""
    kinds = [f"*{_KINDS[pointer.dtype]}" for pointer in source.pointers]
    multiples = [k for k, each in enumerate(aligned) if each]
    fixed: list[tuple[int, int]] = []
    for number in source.numbers:
        position = len(kinds)
        if number == 1:
            kinds.append("constexpr")
            fixed.append((position, number))
            continue
        kinds.append("i32" if -_INT32 <= number < _INT32 else "i64")
        if number % _MULTIPLE == 0:
            multiples.append(position)
    for _, size in source.constants:
        fixed.append((len(kinds), size))
        kinds.append("constexpr")
    how = (source.warps, source.stages, capability)
    return Order(source.text, source.name, tuple(kinds), tuple(fixed), tuple(multiples), *how)


# -- finding them -----------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_found: dict[str, Future[Image | None]] = {}
_given_up = False  # on other processes


def image(wanted: Order) -> Image | None:
    """The machine code of an order; whoever asks for the same at the same time waits for the same answer. None: compile
    it in this process. Raises KernelError where Triton refuses it."""
    message = wanted.message()
    key = _key(message)
    with _lock:
        known = _found.get(key)
        if known is None:
            mine: Future[Image | None] = Future()
            _found[key] = mine
    if known is not None:
        return known.result()
    try:
        made = _made(key, message, wanted)
    except BaseException as error:
        mine.set_exception(error)
        if not isinstance(error, KernelError):  # an interrupt is nothing to remember
            _found.pop(key, None)
        raise
    mine.set_result(made)
    return made


def prepare(count: int | None = None) -> None:
    """Start processes for so many orders. None: nobody knows yet how many, and none where something was compiled
    before, because then most of it will be there."""
    if not elsewhere():
        return
    if count is None:
        kept = cache.current()
        count = 0 if kept is not None and kept.get(_key(b"")) is not None else _EARLY
    if count:
        try:
            _servers().prepare(min(count, _most()))
        except servers.Unavailable as error:
            _give_up(str(error))


def is_kept(wanted: Order) -> bool:
    """Whether an order needs no compiler."""
    key, kept = _key(wanted.message()), cache.current()
    return key in _found or (kept is not None and kept.get(key) is not None)


def elsewhere() -> bool:
    """Whether kernels are compiled in other processes."""
    wanted = os.environ.get(compiler.VARIABLE, "").strip().lower()
    return not _given_up and wanted != compiler.INSIDE and _obstacle() is None


def _made(key: str, message: bytes, wanted: Order) -> Image | None:
    kept = cache.current()
    found = kept.get(key) if kept is not None else None
    if found is None:
        found = _compiled(message)
        if found is not None and kept is not None:
            kept.put(key, found)
            kept.put(_key(b""), b"something was compiled")
    if found is None:
        return None
    line, _, code = found.partition(b"\n")
    facts: dict[str, Any] = json.loads(line)
    if facts["parameters"] != wanted.parameters():
        logs.logger.info("%s is launched by Triton: it takes other parameters than expected", wanted.name)
        return None
    return Image(key, code, facts["name"], facts["warps"], facts["shared"])


def _compiled(message: bytes) -> bytes | None:
    if not elsewhere():
        return None
    try:
        return _servers().compile(compile_server.SIZE.pack(len(message)) + message)
    except servers.Rejected as error:
        raise KernelError(f"Triton does not compile a kernel: {error}") from None
    except servers.Unavailable as error:
        _give_up(str(error))
        return None


def _servers() -> servers.Servers:
    return servers.of(_command(), _most())


@functools.cache
def _command() -> list[str]:
    """How to start one: without the user's settings, and with the folders that this process imports from."""
    flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    folders = [str(Path(ranvier.__file__).resolve().parents[1]), *(os.path.abspath(each) for each in sys.path if each)]
    own = os.path.dirname(os.path.abspath(compile_server.__file__))
    listed = json.dumps([each for each in dict.fromkeys(folders) if each != own])
    return [sys.executable, *flags, os.path.abspath(compile_server.__file__), listed]


def _most() -> int:
    return max(1, min(servers.MOST, usable_cores() - 1))


@functools.cache
def _obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return compiler.no_interpreter()


def _give_up(why: str) -> None:
    global _given_up
    _given_up = True
    logs.warn_once("triton elsewhere", f"kernels are compiled by Triton inside this process: {why}")


def _key(message: bytes) -> str:
    return hashlib.blake2b(message + _surroundings().encode(), digest_size=16).hexdigest()


@functools.cache
def _surroundings() -> str:
    """What machine code depends on beside the order: Triton, what it is told, and the functions that kernels call."""
    told = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("TRITON_"))
    told = [each for each in told if not each.startswith(("TRITON_CACHE_", "TRITON_HOME", compile_server.INTERPRETED))]
    here = Path(__file__).parent
    texts = [hashlib.sha256((here / f"{name}.py").read_bytes()).hexdigest() for name in ("functions", "native")]
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None
    texts.append(hashlib.sha256(Path(found.origin).read_bytes()).hexdigest())  # which has its version
    return "\0".join([*told, *texts])
