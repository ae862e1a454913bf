"""Launches that need nothing of each other as one: the parts of a step, each with its own kernel, memory and numbers.

Q, K and V of attention are three products of one tensor. Taken apart, threads meet after each of them, and one that is
narrow is not worth a second thread at all. As one step they are one range of tiles, and every part writes its result
where it would have: nothing has to be taken out of a wider matrix afterwards. A tile is worked on by the same code with
the same numbers as ever, so results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.varying import largest


class Part(IntEnum):
    """Numbers of a part; they follow :data:`PARTS` in ``dims``, and the dims of all parts follow them.

    A part's kernel is as manieth in ``bufs`` as the part is, and the buffers of all parts follow the kernels.
    """

    FIRST = 0  # the tile of the whole with which the part begins
    SHARE = 1  # tiles of the whole that it takes part in …
    TILES = 2  # … and its own
    BUFS = 3  # where its buffers begin
    DIMS = 4  # where its dims do


PARTS = 0  # position in ``dims`` of how many there are
_TABLE = 1


def joined(launches: Sequence[Launch], *, in_turns: bool = False) -> Launch:
    """The step that does what all of ``launches`` do, whatever their order: none may touch what another writes.

    The parts' tiles stand one after another, or, ``in_turns``, the first of all parts before the second: a thread
    that has the first half of the whole then has the first half of each.
    """
    assert all(each.rounds == 1 for each in launches)
    most = largest(*(each.tiles for each in launches))
    table: list[int] = []
    dims: list[int] = []
    buffers: list[At | Code] = [Code(each.spec) for each in launches]
    first = 0
    for each in launches:
        at = (len(buffers), _TABLE + len(Part) * len(launches) + len(dims))
        table += [0, most, each.tiles, *at] if in_turns else [first, each.tiles, each.tiles, *at]
        first += each.tiles
        buffers += each.buffers
        dims += each.dims
    flops, traffic = sum(each.flops for each in launches), sum(each.traffic for each in launches)
    # operations at the speed of each: what is left of the rate is such that they take as long as one after another
    effort = sum(each.flops / each.rate for each in launches)
    return Launch(
        _spec(),
        tuple(buffers),
        (len(launches), *table, *dims),
        tiles=most if in_turns else first,
        writes=tuple(dict.fromkeys(storage for each in launches for storage in each.writes)),
        grain=1 if in_turns else min(each.grain for each in launches),
        scratch=largest(*(each.scratch for each in launches)),
        flops=flops,
        traffic=traffic,
        label=" + ".join(dict.fromkeys(each.label for each in launches)),
        rate=flops / effort if effort else 1.0,
        far=any(each.far for each in launches),
    )


def _spec() -> KernelSpec:
    return KernelSpec("products of one tensor", ("joined launches",), _emit)


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    f = module.kernel(symbol, optimized=False)
    bufs, dims, begin, end = (f.args[name] for name in ("bufs", "dims", "begin", "end"))
    with f.loop(0, _number(f, dims, f.i64(PARTS))) as part:
        first, share, tiles, at_bufs, at_dims = (
            _number(f, dims, part * len(Part) + (_TABLE + int(each))) for each in Part
        )

        def own(tile: Val, first: Val = first, share: Val = share, tiles: Val = tiles) -> Val:
            """The part's tile that stands at a tile of the whole, or comes next."""
            return f.div(f.min_(f.max_(tile - first, 0), share) * tiles, share)

        start, stop = own(begin), own(end)
        with f.if_(f.cmp("slt", start, stop)):
            kernel = f.load("ptr", f.gep(bufs, part, "ptr"))
            given = [f.gep(bufs, at_bufs, "ptr"), f.gep(dims, at_dims, "i64"), start, stop, f.args["scratch"]]
            f.call_pointer(kernel, "void", given)
    f.ret()


def _number(f: Fn, dims: Val, at: Val) -> Val:
    return f.load("i64", f.gep(dims, at, "i64"))
