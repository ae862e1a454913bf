"""Rows put behind those of a cache: where the cache is its own result, nothing but the new rows is written.

A caller that keeps keys and values in one buffer with room for more gives it as the past and as the present. Only the
run knows, so the kernel compares addresses: in the same memory the rows that are kept are there already, and those
behind the new ones are left as they are; anywhere else the former are copied and the latter are zero.
"""

from __future__ import annotations

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View

_DIMS = ("heads", "time", "rows", "past_rows", "width", "new_batch", "new_head", "new_row", "first_step")
_BUFFERS = ("past", "new", "first", "out")


def append(past: View, new: View, first: View, out: View) -> list[Launch]:
    """``out`` [batch, heads, rows, width]: ``first[batch]`` rows of ``past``, then those of ``new``, then zeros.

    ``past`` and ``out`` are dense, rows of ``new`` contiguous, and ``first`` (int64) plus the new rows never more than
    there are.
    """
    batch, heads, time, width = new.shape
    item = out.dtype.numpy.itemsize
    numbers = {
        "heads": heads,
        "time": time,
        "rows": out.shape[2],
        "past_rows": past.shape[2],
        "width": width,
        "new_batch": new.strides[0],
        "new_head": new.strides[1],
        "new_row": new.strides[2],
        "first_step": first.strides[0],
    }

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _emit(module.kernel(symbol), isa, item)

    return [
        Launch(
            KernelSpec(f"append rows of {item} bytes", ("append rows", item), emit),
            (At.of(past), At.of(new), At.of(first), At.of(out)),
            tuple(numbers[name] for name in _DIMS),
            tiles=batch * heads,
            writes=(out.storage,),
            traffic=2.0 * out.nbytes,
            label="append",
        )
    ]


def _emit(f: Fn, isa: Isa, item: int) -> None:
    element, lanes = f"i{8 * item}", isa.lanes(item)
    dim = {n: f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True) for k, n in enumerate(_DIMS)}
    past, new, first, out = (
        f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k, _ in enumerate(_BUFFERS)
    )
    width, time, rows = dim["width"], dim["time"], dim["rows"]

    def filled(target: Val, count: Val, source: Val | None) -> None:
        """Whole vectors, then what is left one by one; zeros where there is no source."""
        whole = f.and_(count, -lanes)
        for start, stop, step, unit in ((f.i64(0), whole, lanes, vector(element, lanes)), (whole, count, 1, element)):
            with f.loop(start, stop, step) as at:
                value = f.const(unit, 0) if source is None else f.load(unit, f.gep(source, at, element))
                f.store(value, f.gep(target, at, element))

    with f.loop(f.args["begin"], f.args["end"]) as tile:
        batch = f.div(tile, dim["heads"], signed=False)
        head = tile - batch * dim["heads"]
        start = f.load("i64", f.gep(first, batch * dim["first_step"], "i64"))
        source = f.gep(past, tile * dim["past_rows"] * width, element)
        target = f.gep(out, tile * rows * width, element)
        with f.if_(f.cmp("ne", source, target)):
            filled(target, f.min_(start, dim["past_rows"]) * width, source)
            behind = start + time
            filled(f.gep(target, behind * width, element), (rows - behind) * width, None)
        added = f.gep(new, batch * dim["new_batch"] + head * dim["new_head"], element)
        with f.loop(0, time) as t:
            filled(f.gep(target, (start + t) * width, element), width, f.gep(added, t * dim["new_row"], element))
    f.ret()
