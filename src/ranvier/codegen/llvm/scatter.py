"""Elements placed by position into a tensor that is there already.

Positions may repeat, and then the order matters: the last one wins, and sums are formed as they come. So a thread
owns targets, never updates: single elements are split along axes that keep their coordinate, rows by columns.
"""

from __future__ import annotations

from typing import Literal

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.elements import NARROW, is_signed, load_vector, memory_type, store_vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

Combine = Literal["none", "add", "mul", "max", "min"]
_UNSIGNED = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32, 8: DType.uint64}
_TILE = 4096  # elements placed by one tile, about


def scatter_elements(target: View, positions: View, updates: View, combine: Combine, isa: Isa) -> list[Launch]:
    """``target[positions[a, k, b]]`` becomes or is combined with ``updates[a, k, b]``, in the order of k.

    Operands are dense; ``target`` is addressed by element. Positions of different (a, b) must differ.
    """
    before, along, after = positions.shape
    if not positions.size or not target.size:
        return []
    dtype = _moved(target.dtype, combine)
    chunk = after if before * along >= 64 else min(after, max(16, _TILE // max(1, along)))
    chunks = -(-after // chunk)
    signature = ("scatter elements", dtype.name, combine)

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _emit_elements(module.kernel(symbol), isa, dtype, combine)

    return [
        _launch(
            KernelSpec(f"scatter {dtype} {combine}", signature, emit),
            (target, positions, updates),
            (along, after, chunk, chunks),
            before * chunks,
            grain=max(1, _TILE // max(1, along * chunk)),
        )
    ]


def scatter_rows(target: View, positions: View, updates: View, combine: Combine, isa: Isa) -> list[Launch]:
    """``target[positions[k] : positions[k] + R]`` becomes or is combined with ``updates[k, :]``, in the order of k."""
    count, length = updates.shape
    if not updates.size or not target.size:
        return []
    dtype = _moved(target.dtype, combine)
    chunk = max(64, -(-length // max(1, updates.size // _TILE)))
    tiles = -(-length // chunk)
    signature = ("scatter rows", dtype.name, combine)

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _emit_rows(module.kernel(symbol), isa, dtype, combine)

    spec = KernelSpec(f"scatter rows {dtype} {combine}", signature, emit)
    return [_launch(spec, (target, positions, updates), (count, length, chunk), tiles)]


def _moved(dtype: DType, combine: Combine) -> DType:
    """Elements that are only moved are bits; bools combine as the bytes they are."""
    if combine == "none" or dtype is DType.bool:
        return _UNSIGNED[dtype.numpy.itemsize]
    assert dtype not in NARROW, "narrow floats are combined in float32"
    return dtype


def _launch(
    spec: KernelSpec, views: tuple[View, View, View], dims: tuple[int, ...], tiles: int, grain: int = 1
) -> Launch:
    updates = views[2]
    return Launch(
        spec,
        tuple(At.of(v) for v in views),
        dims,
        tiles,
        (views[0].storage,),
        grain=grain,
        flops=2.0 * updates.size,
        traffic=2.0 * updates.nbytes + views[1].nbytes,
    )


def _frame(f: Fn, count: int) -> tuple[list[Val], list[Val]]:
    buffers = [f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(3)]
    return buffers, [f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True) for k in range(count)]


def _emit_elements(f: Fn, isa: Isa, dtype: DType, combine: Combine) -> None:
    (target, positions, updates), (along, after, chunk, chunks) = _frame(f, 4)
    element = memory_type(dtype)
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        group = f.div(tile, chunks, signed=False)
        start = f.mul(f.sub(tile, f.mul(group, chunks)), chunk)
        stop = f.min_(f.add(start, chunk), after)
        with f.loop(0, along) as k:
            row = f.mul(f.add(f.mul(group, along), k), after)
            with f.loop(start, stop) as j:
                at = f.add(row, j)
                place = f.gep(target, f.load("i64", f.gep(positions, at, "i64")), element)
                value = f.load(element, f.gep(updates, at, element))
                if combine != "none":
                    value = _combined(f, combine, f.load(element, place), value, dtype)
                f.store(value, place)
    f.ret()


def _emit_rows(f: Fn, isa: Isa, dtype: DType, combine: Combine) -> None:
    (target, positions, updates), (count, length, chunk) = _frame(f, 3)
    element, lanes = memory_type(dtype), isa.lanes(dtype.numpy.itemsize)

    def place(to: Val, source: Val, width: int) -> None:
        value = load_vector(f, isa, dtype, source, width)
        if combine != "none":
            value = _combined(f, combine, load_vector(f, isa, dtype, to, width), value, dtype)
        store_vector(f, isa, dtype, value, to)

    with f.loop(f.args["begin"], f.args["end"]) as tile:
        start = f.mul(tile, chunk)
        stop = f.min_(f.add(start, chunk), length)
        whole = f.add(start, f.and_(f.sub(stop, start), -lanes))
        with f.loop(0, count) as k:
            to = f.gep(target, f.load("i64", f.gep(positions, k, "i64")), element)
            source = f.gep(updates, f.mul(k, length), element)
            with f.loop(start, whole, lanes) as j:
                place(f.gep(to, j, element), f.gep(source, j, element), lanes)
            with f.loop(whole, stop) as j:
                place(f.gep(to, j, element), f.gep(source, j, element), 1)
    f.ret()


def _combined(f: Fn, combine: Combine, old: Val, new: Val, dtype: DType) -> Val:
    if combine == "add":
        return f.add(old, new)
    if combine == "mul":
        return f.mul(old, new)
    return (f.max_ if combine == "max" else f.min_)(old, new, signed=is_signed(dtype))
