"""Bytes looked up in a table of 256 bytes.

Where the processor can permute bytes of two registers, the whole table stays in four of them and 64 codes are looked
up by two permutations and a choice; elsewhere one after the other.
"""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View

_BLOCK = 16 << 10  # codes of a tile
_WIDE = 64


def table_lookup(codes: View, table: View, out: View) -> list[Launch]:
    """``out[k] = table[codes[k]]``, all of bytes; codes and results dense and in the same order."""
    size = codes.size
    if not size:
        return []
    return [
        Launch(
            KernelSpec("table lookup", ("table lookup",), _emit),
            (At.of(codes), At.of(table), At.of(out)),
            (size,),
            tiles=-(-size // _BLOCK),
            writes=(out.storage,),
            flops=float(size),
            traffic=2.0 * size,
            label="table",
        )
    ]


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    f = module.kernel(symbol)
    codes, table, out = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(3))
    size = f.load("i64", f.args["dims"], invariant=True)
    first = f.args["begin"] * _BLOCK
    past = f.min_(f.args["end"] * _BLOCK, size)
    whole = first
    if isa.has("avx512vbmi"):
        whole = first + f.and_(past - first, -_WIDE)
        kind = vector("i8", _WIDE)
        parts = [f.load(kind, f.gep(table, k * _WIDE), 1) for k in range(4)]
        with f.loop(first, whole, _WIDE) as k:
            f.store(_found(f, f.load(kind, f.gep(codes, k), 1), parts), f.gep(out, k), 1)
    with f.loop(whole, past) as k:
        code = f.cast(f.load("i8", f.gep(codes, k)), "i64", signed=False)
        f.store(f.load("i8", f.gep(table, code)), f.gep(out, k))
    f.ret()


def _found(f: Fn, codes: Val, parts: list[Val]) -> Val:
    low, high = (
        f.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", codes.type, [parts[k], codes, parts[k + 1]]) for k in (0, 2)
    )
    return f.select(f.cmp("slt", codes, 0), high, low)
