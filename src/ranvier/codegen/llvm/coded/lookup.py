"""Generated code that looks codes up: whether all are levels of a table, and which positions those have.

Two codes at a time are a place in a table that has what is known of both: whether one is no level, or their positions
as they fill a byte. There are few pairs of levels, so the parts of tables that are read stay near the processor.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Literal

import numpy as np

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.called import called
from ranvier.codegen.llvm.isa import Isa

Array = np.ndarray[Any, Any]
RUN = 8  # codes that are read at once: they fill bytes, whatever their bits
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


def all_levels(codes: Array, levels: tuple[float, ...], bits: int, isa: Isa) -> bool:
    """Whether bytes are full of these, of which there are runs in a row."""
    given, table = np.ascontiguousarray(codes), _pairs("others", levels, bits)
    function = _function("others", bits, isa)
    return not function(given.ctypes.data, 0, given.size // bits, table.ctypes.data)


def looked_up(codes: Array, levels: tuple[float, ...], bits: int, isa: Isa) -> Array:
    """Bytes that are full of codes, likewise, as bytes of positions of 4 bits."""
    found = np.empty((*codes.shape[:-1], codes.shape[-1] * 4 // bits), np.uint8)
    given, table = np.ascontiguousarray(codes), _pairs("positions", levels, bits)
    function = _function("positions", bits, isa)
    function(given.ctypes.data, found.ctypes.data, given.size // bits, table.ctypes.data)
    return found


@functools.cache
def others(levels: tuple[float, ...], bits: int) -> Array:
    """By code: whether it is none of these."""
    found: Array = ~np.isin(_values(bits), levels)
    return found


@functools.cache
def positions(levels: tuple[float, ...], bits: int) -> Array:
    """By code: where it is among them."""
    found: Array = (_values(bits)[:, None] == levels).argmax(axis=1)
    return found.astype(np.uint8)


def _values(bits: int) -> Array:
    """By code of so many bits: what it stands for."""
    return np.arange(1 << bits) - (1 << (bits - 1))


What = Literal["others", "positions"]


@functools.cache
def _pairs(what: What, levels: tuple[float, ...], bits: int) -> Array:
    """By two codes: whether one is none of these, or both positions."""
    if what == "others":
        other = others(levels, bits)
        return np.ascontiguousarray(other[:, None] | other)
    each = positions(levels, bits)
    return np.ascontiguousarray(each[:, None] << 4 | each)


@functools.cache
def _function(what: What, bits: int, isa: Isa) -> Any:
    return called(lookup_spec(what, bits), isa, _SIGNATURE)


def lookup_spec(what: What, bits: int) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        params = [("ptr", "codes"), ("ptr", "positions"), ("i64", "runs"), ("ptr", "table")]
        _emit(module.function(symbol, params, "i8"), what, bits)

    return KernelSpec(f"{what} of {bits} bits", ("coded lookup", what, bits), emit)


def _emit(f: Fn, what: What, bits: int) -> None:
    other = f.var("i8", 0)
    with f.loop(0, f.args["runs"]) as run:
        codes = _run(f, f.gep(f.args["codes"], run * bits), bits)
        places = [f.and_(f.lshr(codes, 2 * bits * pair), (1 << 2 * bits) - 1) for pair in range(RUN // 2)]
        entries = [f.load("i8", f.gep(f.args["table"], place)) for place in places]
        if what == "others":
            other.set(f.or_(other.get(), functools.reduce(f.or_, entries)))
        else:
            for pair, entry in enumerate(entries):
                f.store(entry, f.gep(f.args["positions"], run * (RUN // 2) + pair))
    f.ret(other.get())


def _run(f: Fn, at: Val, bits: int) -> Val:
    """As many bytes as codes have bits, in one number; none behind them is read."""
    found, read = f.i64(0), 0
    for size in (8, 4, 2, 1):
        if bits - read >= size:
            part = f.cast(f.load(f"i{8 * size}", f.gep(at, read), 1), "i64", signed=False)
            found = f.or_(found, f.shl(part, 8 * read)) if read else part
            read += size
    return found
