"""Activations as 8-bit codes: one pass finds the largest magnitude of a token, a second writes codes and their sum.

Rows of codes are padded with zeros, so that kernels read whole steps of K, and lie so far apart that they are not in
each other's way in the cache.
"""

from __future__ import annotations

import math

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, mangled, vector
from ranvier.codegen.llvm.gemm.blocks import grain
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.pack import STEP, padded
from ranvier.codegen.storage import View

_X, _CODES, _FACTORS, _SUMS = range(4)
_CHAINS = 4
OVER = 9  # what a kernel that takes nine codes at a time reads behind the last one
_BYTES = vector("i8", STEP)


def row_bytes(k: int) -> int:
    """Bytes from one row of codes to the next; at least ``OVER`` behind its end are zeros."""
    whole = padded(k + OVER)
    return whole + (STEP if whole % 1024 == 0 else 0)


def token_codes(x: View, codes: View, factors: View, sums: View, least: float, threads: int) -> list[Launch]:
    """``x`` is dense [..., K] float32. For each token: codes (rows of :func:`row_bytes`), what it was multiplied by,
    and the sum of its codes. ``least``: a largest magnitude counts as at least this."""
    k = x.shape[-1]
    tokens = math.prod(x.shape[:-1])
    work = tokens * k * 2e-4  # microseconds
    return [
        Launch(
            _spec(least),
            (At.of(x), At.of(codes), At.of(factors), At.of(sums)),
            (k, row_bytes(k)),
            tiles=tokens,
            writes=(codes.storage, factors.storage, sums.storage),
            grain=grain(tokens, work, threads),
            flops=4.0 * tokens * k,
            traffic=5.0 * tokens * k,
            label="token codes",
        )
    ]


def _spec(least: float) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Tokens(module.kernel(symbol), isa, least).emit()

    return KernelSpec("token codes", ("ternary tokens", least), emit)


class _Tokens:
    def __init__(self, fn: Fn, isa: Isa, least: float) -> None:
        self.f, self.isa, self.least = fn, isa, least
        self.lanes = isa.lanes(4)

    def emit(self) -> None:
        f = self.f
        x, codes, factors, sums = (
            f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in (_X, _CODES, _FACTORS, _SUMS)
        )
        self.k, step = (f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True) for k in range(2))
        self.many = f.and_(self.k, -self.lanes * _CHAINS)
        self.whole = f.and_(self.k, -self.lanes)
        with f.loop(f.args["begin"], f.args["end"]) as token:
            row = f.gep(x, token * self.k, "float")
            target = f.gep(codes, token * step)
            with f.loop(f.and_(self.k, -STEP), step, STEP) as at:
                f.store(f.zero(_BYTES), f.gep(target, at), 1)
            factor = f.div(f.const("float", 127.0), f.max_(self.reach(row), self.least))
            f.store(factor, f.gep(factors, token, "float"))
            f.store(self.codes(row, target, factor), f.gep(sums, token, "i32"))
        f.ret()

    def reach(self, row: Val) -> Val:
        """The largest magnitude: by its bits, whose order is that of magnitudes, with NaN above all."""
        f = self.f
        kind = vector("i32", self.lanes)
        found = [f.var(kind, f.zero(kind)) for _ in range(_CHAINS)]

        def larger(old: Val, bits: Val) -> Val:
            return f.max_(old, f.and_(bits, 0x7FFFFFFF))

        with f.loop(0, self.many, self.lanes * _CHAINS) as at:
            for c, var in enumerate(found):
                var.set(larger(var.get(), f.load(kind, f.gep(f.gep(row, at, "i32"), c * self.lanes, "i32"))))
        with f.loop(self.many, self.whole, self.lanes) as at:
            found[0].set(larger(found[0].get(), f.load(kind, f.gep(row, at, "i32"))))
        total = found[0].get()
        for var in found[1:]:
            total = f.max_(total, var.get())
        last = f.var("i32", f.reduce("smax", total))
        with f.loop(self.whole, self.k) as at:
            last.set(larger(last.get(), f.load("i32", f.gep(row, at, "i32"))))
        return f.bitcast(last.get(), "float")

    def codes(self, row: Val, target: Val, factor: Val) -> Val:
        """Codes at ``target``, and their sum."""
        f, lanes = self.f, self.lanes
        kind = vector("i32", lanes)
        sums = [f.var(kind, f.zero(kind)) for _ in range(_CHAINS)]
        wide = f.splat(factor, lanes)

        def code(numbers: Val, by: Val) -> Val:
            scaled = numbers * by
            whole = vector("i32", scaled.lanes)
            return f.intrinsic(f"llvm.lrint.{mangled(whole)}.{mangled(scaled.type)}", whole, [scaled])

        def stored(found: Val, at: Val) -> Val:
            short = f.cast(found, "i8")
            f.store(short, f.gep(target, at), 1)
            return f.cast(short, "i32")  # what was stored, also where the number was none

        def piece(at: Val, total: Val) -> Val:
            return total + stored(code(f.load(vector("float", lanes), f.gep(row, at, "float")), wide), at)

        after = f.gep(row, self.k, "float")  # the next token is on its way while this one is worked on
        with f.loop(0, self.many, lanes * _CHAINS) as at:
            for line in range(0, 4 * lanes * _CHAINS, 64):
                f.prefetch(f.gep(f.gep(after, at, "float"), line))
            for c, var in enumerate(sums):
                var.set(piece(at + c * lanes, var.get()))
        with f.loop(self.many, self.whole, lanes) as at:
            sums[0].set(piece(at, sums[0].get()))
        total = sums[0].get()
        for var in sums[1:]:
            total = total + var.get()
        last = f.var("i32", f.reduce("add", total))
        with f.loop(self.whole, self.k) as at:
            last.set(last.get() + stored(code(f.load("float", f.gep(row, at, "float")), factor), at))
        return last.get()
