"""Runs launches for aarch64 as programs of their own: by themselves where that is the processor, else under
``qemu-aarch64``, where that is installed.

No cross linker is needed: each run becomes a static executable of one segment, with code, constants and buffers at
addresses known here, and a few instructions at the start that call every kernel and write the buffers to stdout.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from ranvier.codegen.launch import Code, KernelSpec, Launch
from ranvier.codegen.llvm import compiler
from ranvier.codegen.llvm.isa import Isa, architecture, named
from ranvier.codegen.llvm.library import source, symbol_of
from ranvier.codegen.storage import Storage
from tests.codegen.harness import POISON, Array, ranges_of

NEON = named("neon", "aarch64")
_NATIVE = sys.platform == "linux" and architecture() == "aarch64"
_QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
needed = pytest.mark.skipif(not (_NATIVE or _QEMU), reason="qemu-aarch64 is not installed")
_BASE = 0x400000  # where the file is mapped, headers and all
_HEADERS = 64 + 56


def run(launches: Sequence[Launch], bound: Mapping[Storage, Array], isa: Isa = NEON, *, split: int = 1) -> None:
    """Like the harness's ``run``: the arrays hold the results afterwards."""
    program = _Program(isa)
    for launch in launches:
        for spec in [launch.spec, *(b.spec for b in launch.buffers if isinstance(b, Code))]:
            program.add_kernel(spec)
    for storage, array in bound.items():
        program.add_storage(storage, np.ascontiguousarray(array).tobytes())
    for launch in launches:
        program.add_launch(launch, split)
    results = program.run()
    for storage, array in bound.items():
        array[...] = np.frombuffer(results[storage], array.dtype).reshape(array.shape)


class _Program:
    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self._data = bytearray(64 * 1024)  # the start code goes here
        self._functions: dict[str, int] = {}
        self._places: dict[Storage, tuple[int, int]] = {}
        self._calls: list[tuple[int, list[int]]] = []

    def _append(self, content: bytes, align: int = 64) -> int:
        self._data += b"\0" * (-(len(self._data) + _HEADERS) % align)
        at = _BASE + _HEADERS + len(self._data)
        self._data += content
        return at

    def add_kernel(self, spec: KernelSpec) -> None:
        symbol = symbol_of(spec, self._isa)
        if symbol not in self._functions:
            code = compiler.compile_object(source(spec, self._isa), self._isa)
            self._functions[symbol] = link(code, self._append, self._patch)[symbol]

    def _patch(self, address: int, content: bytes) -> None:
        at = address - _BASE - _HEADERS
        self._data[at : at + len(content)] = content

    def add_storage(self, storage: Storage, content: bytes) -> None:
        self._places[storage] = (self._append(content or b"\0"), len(content))

    def add_launch(self, launch: Launch, split: int) -> None:
        pointers: list[int] = []
        for buffer in launch.buffers:
            if isinstance(buffer, Code):
                pointers.append(self._functions[symbol_of(buffer.spec, self._isa)])
                continue
            if buffer.storage not in self._places:
                given = buffer.storage.array
                poison = bytes([POISON]) * buffer.storage.nbytes
                self.add_storage(buffer.storage, poison if given is None else np.ascontiguousarray(given).tobytes())
            pointers.append(self._places[buffer.storage][0] + buffer.offset)
        bufs = self._append(struct.pack(f"<{len(pointers)}q", *pointers))
        dims = self._append(struct.pack(f"<{len(launch.dims)}q", *launch.dims))
        scratch = self._append(bytes([POISON]) * (launch.scratch + 64))
        function = self._functions[symbol_of(launch.spec, self._isa)]
        self._calls += [(function, [bufs, dims, a, b, scratch]) for a, b in ranges_of(launch, split)]

    def run(self) -> dict[Storage, bytes]:
        code: list[int] = []
        for function, arguments in self._calls:
            for register, value in enumerate(arguments):
                code += _set_register(register, value)
            code += [*_set_register(16, function), 0xD63F0200]  # blr x16
        for at, size in self._places.values():  # write(1, at, size)
            code += [*_set_register(0, 1), *_set_register(1, at), *_set_register(2, size), *_set_register(8, 64)]
            code.append(_SUPERVISOR_CALL)
        code += [*_set_register(0, 0), *_set_register(8, 93), _SUPERVISOR_CALL]  # exit(0)
        start = struct.pack(f"<{len(code)}I", *code)
        assert len(start) <= 64 * 1024
        self._data[: len(start)] = start
        size = _HEADERS + len(self._data)
        header = b"\x7fELF\x02\x01\x01" + bytes(9)
        header += struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
        header += struct.pack("<IIQQQQQQ", 1, 7, 0, _BASE, _BASE, size, size, 0x1000)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "program"
            path.write_bytes(header + self._data)
            path.chmod(0o700)
            starter = [] if _NATIVE else [str(_QEMU)]
            done = subprocess.run([*starter, str(path)], capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, f"the program ended with {done.returncode}: {done.stderr.decode()}"
        found: dict[Storage, bytes] = {}
        at = 0
        for storage, (_, nbytes) in self._places.items():
            found[storage] = done.stdout[at : at + nbytes]
            at += nbytes
        assert at == len(done.stdout)
        return found


_SUPERVISOR_CALL = 0xD4000001


def _set_register(register: int, value: int) -> list[int]:
    """movz and movk of the four quarters."""
    quarters = [(value >> (16 * k)) & 0xFFFF for k in range(4)]
    return [(0xF2800000 if k else 0xD2800000) | k << 21 | q << 5 | register for k, q in enumerate(quarters)]


def link(data: bytes, append, patch) -> dict[str, int]:
    """Place the sections of an aarch64 object and resolve its relocations; addresses of its global functions."""
    table, size, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + k * size) for k in range(count)]
    places: dict[int, int] = {}
    for k, (_, kind, flags, _, start, nbytes, _, _, align, _) in enumerate(sections):
        if flags & 2 and nbytes:
            content = bytes(nbytes) if kind == 8 else data[start : start + nbytes]
            places[k] = append(content, max(1, align))
    symbols = []
    for _, kind, _, _, start, nbytes, names, _, _, _ in sections:
        if kind == 2:
            for at in range(start, start + nbytes, 24):
                name, info, _, where, value, _ = struct.unpack_from("<IBBHQQ", data, at)
                first = sections[names][4] + name
                symbols.append((data[first : data.index(b"\0", first)].decode(), info >> 4, where, value))
    for _, kind, _, _, start, nbytes, _, target, _, _ in sections:
        if kind != 4 or target not in places:
            continue
        for at in range(start, start + nbytes, 24):
            offset, relocation, symbol, addend = struct.unpack_from("<QIIq", data, at)
            name, _, where, value = symbols[symbol]
            assert where in places, f"{name or relocation} is not part of the kernel"
            old = data[sections[target][4] + offset :][:8]
            place = places[target] + offset
            patch(place, _relocated(relocation, old, place, places[where] + value + addend))
    return {name: places[where] + value for name, bind, where, value in symbols if bind == 1 and where in places}


_SCALES = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # ADD and loads and stores of 1 to 16 bytes, low 12 bits


def _relocated(kind: int, old: bytes, place: int, target: int) -> bytes:
    (word,) = struct.unpack_from("<I", old.ljust(4, b"\0"))
    if kind == 257:  # ABS64
        return struct.pack("<Q", target)
    if kind == 261:  # PREL32
        return struct.pack("<i", target - place)
    if kind in (282, 283):  # JUMP26, CALL26
        return struct.pack("<I", word & 0xFC000000 | (target - place) >> 2 & 0x3FFFFFF)
    if kind == 275:  # ADR_PREL_PG_HI21
        pages = (target >> 12) - (place >> 12)
        return struct.pack("<I", word & 0x9F00001F | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)
    assert kind in _SCALES, f"relocation {kind} is not known here"
    return struct.pack("<I", word & ~(0xFFF << 10) | (target & 0xFFF) >> _SCALES[kind] << 10)
