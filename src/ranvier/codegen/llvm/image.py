"""Object code as an image: all sections in one piece with every distance resolved, so that loading is a copy.

A linker wants 100 µs an object and the whole of LLVM in memory; an image wants neither. Only what generated kernels
consist of is understood (ELF, code and constants, of an architecture in :mod:`relocation`); :func:`from_object` answers
None to anything else, and LLVM links that.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
import weakref
from collections.abc import Sequence
from dataclasses import field

from ranvier.codegen.llvm import fresh_code
from ranvier.codegen.llvm.isa import architecture
from ranvier.codegen.llvm.relocation import RULES, Rules
from ranvier.errors import KernelError, OutOfMemory
from ranvier.records import dataclass

MAGIC = b"RVIMAGE1"
_ALIGN = 64  # the largest alignment of a section that an image keeps
_HEADER = struct.Struct("<8sIIII")  # magic, bytes of code, counts of symbols, imports and absolute addresses
_ITEM = struct.Struct("<IH")  # offset, bytes of the name that follows

# sections that hold memory at run time: SHF_ALLOC; written to while running: SHF_WRITE; one copy per thread: SHF_TLS
_ALLOC, _WRITE, _TLS = 0x2, 0x1, 0x400
_PROGBITS, _SYMTAB, _RELA, _UNWIND = 1, 2, 4, 0x70000001


@dataclass
class Image:
    """Position-independent code of one object."""

    code: bytes
    symbols: dict[str, int]  # exported functions -> offset
    imports: list[tuple[str, int]] = field(default_factory=list)  # 8-byte slots for addresses from the process
    absolute: list[int] = field(default_factory=list)  # 8-byte offsets into the image, to become addresses

    def to_bytes(self) -> bytes:
        parts = [_HEADER.pack(MAGIC, len(self.code), len(self.symbols), len(self.imports), len(self.absolute))]
        parts.append(self.code)
        for name, offset in [*self.symbols.items(), *self.imports]:
            encoded = name.encode()
            parts += [_ITEM.pack(offset, len(encoded)), encoded]
        parts.append(struct.pack(f"<{len(self.absolute)}I", *self.absolute))
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Image:
        _, size, symbols, imports, absolute = _HEADER.unpack_from(data)
        at = _HEADER.size + size
        items: list[tuple[str, int]] = []
        for _ in range(symbols + imports):
            offset, length = _ITEM.unpack_from(data, at)
            at += _ITEM.size
            items.append((data[at : at + length].decode(), offset))
            at += length
        rest = list(struct.unpack_from(f"<{absolute}I", data, at))
        return cls(data[_HEADER.size : _HEADER.size + size], dict(items[:symbols]), items[symbols:], rest)


def supported() -> bool:
    """Can this process load images? On other systems rules for executable memory differ."""
    return architecture() in RULES and fresh_code.possible()


# -- from an object -------------------------------------------------------------------------------------------------


@dataclass
class _Section:
    name: int
    kind: int
    flags: int
    address: int
    start: int
    size: int
    link: int
    info: int
    align: int
    entry: int
    place: int = -1  # where it lies in the image


def from_object(data: bytes) -> Image | None:
    """The image of a relocatable object, or None where it holds something an image cannot express."""
    rules = RULES.get(architecture())
    if data[:7] != b"\x7fELF\x02\x01\x01" or not rules or struct.unpack_from("<HH", data, 16) != (1, rules.machine):
        return None
    table, size, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", data, table + k * size)) for k in range(count)]
    code = bytearray()
    for section in sections:
        if not section.flags & _ALLOC or not section.size or section.kind == _UNWIND:  # nothing here throws
            continue
        relocated = any(s.kind == _RELA and sections[s.info] is section for s in sections)
        if section.kind != _PROGBITS or section.flags & _TLS or section.align > _ALIGN:
            return None
        if section.flags & _WRITE and not relocated:  # addresses among constants are writable only for the linker
            return None
        code += b"\0" * (-len(code) % max(1, section.align))
        section.place = len(code)
        code += data[section.start : section.start + section.size]
    return _Linker(data, sections, code, rules).run()


class _Linker:
    def __init__(self, data: bytes, sections: list[_Section], code: bytearray, rules: Rules) -> None:
        self._sections = sections
        self._code = code
        self._rules = rules
        self._slots: dict[str, int] = {}  # import -> its slot
        self._stubs: dict[str, int] = {}  # import -> code that jumps there: it may lie further than a call reaches
        self._absolute: list[int] = []
        table = next(s for s in sections if s.kind == _SYMTAB)
        names = sections[table.link].start
        self._symbols: list[tuple[str, int, int, int]] = []
        for at in range(table.start, table.start + table.size, 24):
            name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            end = data.index(b"\0", names + name)
            self._symbols.append((data[names + name : end].decode(), info, section, value))
        self._relocations = [
            (sections[s.info], struct.unpack_from("<QIIq", data, at))
            for s in sections
            if s.kind == _RELA and sections[s.info].place >= 0
            for at in range(s.start, s.start + s.size, 24)
        ]

    def run(self) -> Image | None:
        for section, (offset, kind, symbol, addend) in self._relocations:
            if not self._relocate(section.place + offset, kind, self._symbols[symbol], addend):
                return None
        exported = {
            name: self._sections[section].place + value
            for name, info, section, value in self._symbols
            if info >> 4 and section and section < len(self._sections)  # neither local nor undefined
        }
        return Image(bytes(self._code), exported, list(self._slots.items()), self._absolute)

    def _relocate(self, at: int, kind: int, symbol: tuple[str, int, int, int], addend: int) -> bool:
        name, _, section, value = symbol
        rules = self._rules
        target: int | None
        inside = 0 < section < len(self._sections) and self._sections[section].place >= 0
        if inside:
            target = self._sections[section].place + value
        elif section:
            return False  # in a section that is not loaded, or special
        elif kind in rules.calls:
            target = self._stub(name)
        elif kind in rules.slots:
            target = self._slot(name)
        else:
            return False
        if target is None or (inside and kind in rules.slots):
            return False
        if kind == rules.absolute:
            struct.pack_into("<Q", self._code, at, target + addend)
            self._absolute.append(at)
            return True
        return rules.write(self._code, at, kind, target + addend)

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            self._code += b"\0" * (-len(self._code) % 8)
            self._slots[name] = len(self._code)
            self._code += bytes(8)
        return self._slots[name]

    def _stub(self, name: str) -> int | None:
        if name not in self._stubs:
            slot = self._slot(name)
            self._code += b"\0" * (-len(self._code) % 4)
            made = self._rules.stub(len(self._code), slot)
            if made is None:
                return None
            self._stubs[name] = len(self._code)
            self._code += made
        return self._stubs[name]


# -- into memory ----------------------------------------------------------------------------------------------------


@functools.cache
def _process() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found.mmap.argtypes, found.mmap.restype = [pointer, size, number, number, number, ctypes.c_int64], pointer
    found.mprotect.argtypes = [pointer, size, number]
    found.munmap.argtypes = [pointer, size]
    return found


@functools.cache
def _imported(name: str) -> int:
    try:
        return ctypes.cast(getattr(_process(), name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise KernelError(f"generated code calls {name}, which this process does not have") from None


class Loaded:
    """Images in executable memory: addresses by name. The memory goes back when this object does.

    Not so at the end of the interpreter: threads may still be inside the code then, and their end comes later.
    """

    def __init__(self, images: Sequence[Image]) -> None:
        starts: list[int] = []
        size = 0
        page = RULES[architecture()].page
        for image in images:
            starts.append(size)
            size += len(image.code) + -len(image.code) % page
        size = max(size, 1)
        process = _process()
        base = process.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if base is None or base == ctypes.c_void_p(-1).value:
            raise OutOfMemory(f"no memory for {size} bytes of generated code", requested=size)
        weakref.finalize(self, process.munmap, base, size).atexit = False
        self.addresses: dict[str, int] = {}
        for image, start in zip(images, starts):
            at = base + start
            ctypes.memmove(at, image.code, len(image.code))
            for name, offset in image.imports:
                ctypes.c_uint64.from_address(at + offset).value = _imported(name)
            for offset in image.absolute:
                ctypes.c_uint64.from_address(at + offset).value += at
            self.addresses |= {name: at + offset for name, offset in image.symbols.items()}
        fresh_code.announce(base, size)
        # never writable and executable at the same time: some systems forbid it
        if process.mprotect(base, size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise KernelError(f"this system allows no generated code: error {ctypes.get_errno()} from mprotect")

    def __getitem__(self, name: str) -> int:
        return self.addresses[name]
