"""Determinants of small square matrices: elimination with row pivots, one matrix after the other."""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View


def determinants(x: View, out: View) -> list[Launch]:
    """Of dense float32 or float64 matrices [count, n, n] into [count]."""
    count, n = x.shape[:2]
    kind = register_type(x.dtype)
    if not count:
        return []

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _emit(module, symbol, kind)

    return [
        Launch(
            KernelSpec(f"determinant {x.dtype}", ("determinant", kind), emit),
            tuple(At.of(v) for v in (x, out)),
            (n,),
            count,
            (out.storage,),
            grain=max(1, 4096 // max(1, n**3)),
            scratch=n * n * x.dtype.numpy.itemsize,
            flops=2.0 / 3.0 * count * n**3,
            traffic=float(x.nbytes + out.nbytes),
        )
    ]


def _emit(module: Module, symbol: str, kind: str) -> None:
    f = module.kernel(symbol)
    x, out = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(2))
    n = f.load("i64", f.args["dims"], invariant=True)
    work = f.args["scratch"]
    size = f.mul(n, n)

    def place(i: Val, j: Val) -> Val:
        return f.gep(work, f.add(f.mul(i, n), j), kind)

    with f.loop(f.args["begin"], f.args["end"]) as number:
        source = f.gep(x, f.mul(number, size), kind)
        with f.loop(0, size) as k:
            f.store(f.load(kind, f.gep(source, k, kind)), f.gep(work, k, kind))
        product = f.var(kind, 1.0)
        with f.loop(0, n) as k:
            best, at = f.var(kind, -1.0), f.var("i64", k)
            with f.loop(k, n) as i:
                height = f.unary("fabs", f.load(kind, place(i, k)))
                with f.if_(f.cmp("ogt", height, best.get())):
                    best.set(height)
                    at.set(i)
            other = at.get()
            with f.if_(f.cmp("ne", other, k)):
                product.set(f.neg(product.get()))
                with f.loop(k, n) as j:
                    here, there = place(k, j), place(other, j)
                    a, b = f.load(kind, here), f.load(kind, there)
                    f.store(b, here)
                    f.store(a, there)
            pivot = f.load(kind, place(k, k))
            product.set(f.mul(product.get(), pivot))
            with f.if_(f.cmp("une", pivot, 0.0)), f.loop(f.add(k, 1), n) as i:
                factor = f.div(f.load(kind, place(i, k)), pivot)
                with f.loop(f.add(k, 1), n) as j:
                    to = place(i, j)
                    f.store(f.sub(f.load(kind, to), f.mul(factor, f.load(kind, place(k, j)))), to)
        f.store(product.get(), f.gep(out, number, kind))
    f.ret()
