"""The k best of every row, by a heap that keeps the worst of them on top.

An element and its index become one unsigned number: the value's order in the high half, the index, lower first, in
the low half. All entries of a row differ then, and one comparison settles order and ties. Where no order is asked
for, the heap is handed out as it stands: ONNX Runtime does the same, and models exist that depend on it.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.elements import is_signed, load_vector, memory_type, widened
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType


def top_k(x: View, values: View, indices: View, *, largest: bool, in_order: bool) -> list[Launch]:
    """The k best along the last axis of a dense [rows, n] into [rows, k]; k is at least 1."""
    rows, n = x.shape
    k = values.shape[1]
    dtype = x.dtype
    if not rows:
        return []

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _emit(module, symbol, isa, dtype, largest, in_order)

    return [
        Launch(
            KernelSpec(f"top k {dtype}", ("top k", dtype.name, largest, in_order), emit),
            tuple(At.of(v) for v in (x, values, indices)),
            (n, k),
            rows,
            (values.storage, indices.storage),
            grain=max(1, 4096 // n),
            scratch=k * _entry_bits(dtype) // 8,
            flops=4.0 * x.size + 20.0 * rows * k,
            traffic=float(x.nbytes + values.nbytes + indices.nbytes),
        )
    ]


def _key_bits(dtype: DType) -> int:
    return 64 if dtype.bits == 64 else 32


def _entry_bits(dtype: DType) -> int:
    return 2 * _key_bits(dtype)


def _key(f: Fn, value: Val, dtype: DType, largest: bool) -> Val:
    """The value as an unsigned number whose order is the wanted one, NaN beyond the largest value."""
    bits = _key_bits(dtype)
    kind = f"i{bits}"
    if value.is_float:
        # -0 equals 0, and every NaN any other
        value = f.select(f.cmp("uno", value, value), f.const(value.type, float("nan")), f.add(value, 0.0))
        raw = f.bitcast(value, vector(kind, value.lanes))
        sign = f.ashr(raw, bits - 1)
        key = f.xor(raw, f.or_(sign, f.const(raw.type, -(1 << (bits - 1)))))
    elif dtype is DType.bool:
        key = f.cast(value, kind, signed=False)
    else:
        key = f.cast(value, kind, signed=is_signed(dtype))
        if is_signed(dtype):
            key = f.xor(key, f.const(key.type, -(1 << (bits - 1))))
    return key if largest else f.not_(key)


def _entry(f: Fn, key: Val, index: Val, bits: int) -> Val:
    """The key over the index, which counts downward so that the first of equal values is the best."""
    wide = f"i{2 * bits}"
    high = f.shl(f.cast(key, wide, signed=False), bits)
    low = f.cast(f.not_(index if bits == 64 else f.cast(index, "i32")), wide, signed=False)
    return f.or_(high, low)


def _emit_sift(module: Module, name: str, wide: str) -> None:
    """Let an entry sink below every child that is worse; of two children the worse one rises."""
    f = module.function(name, [("ptr", "heap"), ("i64", "start"), ("i64", "count")], internal=True)
    heap, count = f.args["heap"], f.args["count"]
    at = f.var("i64", f.args["start"])
    entry = f.load(wide, f.gep(heap, f.args["start"], wide), 8)
    with f.while_() as going:
        left = f.add(f.shl(at.get(), 1), 1)
        going.only(f.cmp("slt", left, count))
        right = f.add(left, 1)
        other = f.select(f.cmp("slt", right, count), right, left)
        here, there = (f.load(wide, f.gep(heap, p, wide), 8) for p in (left, other))
        swap = f.cmp("ult", there, here)
        worse = f.select(swap, there, here)
        going.only(f.cmp("ugt", entry, worse))
        f.store(worse, f.gep(heap, at.get(), wide), 8)
        at.set(f.select(swap, other, left))
    f.store(entry, f.gep(heap, at.get(), wide), 8)
    f.ret()


def _emit(module: Module, symbol: str, isa: Isa, dtype: DType, largest: bool, in_order: bool) -> None:
    bits = _key_bits(dtype)
    wide, sift = f"i{2 * bits}", f"{symbol}_sift"
    _emit_sift(module, sift, wide)
    f = module.kernel(symbol)
    x, values, indices = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(3))
    n, k = (f.load("i64", f.gep(f.args["dims"], d, "i64"), invariant=True) for d in range(2))
    heap, element = f.args["scratch"], memory_type(dtype)
    lanes = isa.lanes(bits // 8)

    def sink(start: Val, count: Val) -> None:
        f.call(sift, "void", [heap, start, count])

    with f.loop(f.args["begin"], f.args["end"]) as row:
        line = f.gep(x, f.mul(row, n), element)

        def entry_at(index: Val, line: Val = line) -> Val:
            value = load_vector(f, isa, dtype, f.gep(line, index, element), 1)
            return _entry(f, _key(f, value, dtype, largest), index, bits)

        with f.loop(0, k) as index:  # from the back, so that every part is a heap of its own
            at = f.sub(f.sub(k, 1), index)
            f.store(entry_at(index), f.gep(heap, at, wide), 8)
            sink(at, k)

        def consider(index: Val) -> None:
            entry = entry_at(index)
            with f.if_(f.cmp("ugt", entry, f.load(wide, heap, 8))):
                f.store(entry, heap, 8)
                sink(f.i64(0), k)

        whole = f.add(k, f.and_(f.sub(n, k), -lanes))
        with f.loop(k, whole, lanes) as start:
            # most of a long row is worse than what was found: look at a vector of it at a time
            key = _key(f, load_vector(f, isa, dtype, f.gep(line, start, element), lanes), dtype, largest)
            worst = f.cast(f.lshr(f.load(wide, heap, 8), bits), f"i{bits}")
            better = f.cmp("ugt", key, widened(f, worst, lanes))
            with f.if_(f.reduce("or", better)), f.loop(0, lanes) as lane:
                consider(f.add(start, lane))
        with f.loop(whole, n) as index:
            consider(index)
        if in_order:
            _emit_sort(f, heap, k, wide, sink)
        with f.loop(0, k) as place:
            entry = f.load(wide, f.gep(heap, place, wide), 8)
            index = f.not_(f.cast(entry, f"i{bits}"))
            index = index if bits == 64 else f.cast(index, "i64", signed=False)
            at = f.add(f.mul(row, k), place)
            f.store(f.load(element, f.gep(line, index, element)), f.gep(values, at, element))
            f.store(index, f.gep(indices, at, "i64"))
    f.ret()


def _emit_sort(f: Fn, heap: Val, k: Val, wide: str, sink: Callable[[Val, Val], None]) -> None:
    """The worst goes to the end, again and again: the best comes to stand first."""
    with f.loop(1, k) as done:
        last = f.sub(k, done)
        worst, moved = f.load(wide, heap, 8), f.load(wide, f.gep(heap, last, wide), 8)
        f.store(moved, heap, 8)
        f.store(worst, f.gep(heap, last, wide), 8)
        sink(f.i64(0), last)
