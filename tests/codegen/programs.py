"""Small integer kernels and programs for tests of the driver: memory shows what ran, how often and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm import atomics
from ranvier.codegen.llvm.builder import Fn, Module
from ranvier.codegen.llvm.isa import Isa, host
from ranvier.codegen.llvm.program import NativeProgram, Placement
from ranvier.codegen.storage import Storage

Array = np.ndarray[Any, Any]
POISON = 0x5A5A
BIG = 1e8  # floating-point operations that make a step worth several threads


def _kernel(m: Module, symbol: str) -> Fn:
    params = [("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch")]
    return m.function(symbol, params)


def _emit_count(m: Module, symbol: str, isa: Isa) -> None:
    f = _kernel(m, symbol)
    out = f.load("ptr", f.args["bufs"])
    amount, effort = f.load("i64", f.args["dims"]), f.load("i64", f.gep(f.args["dims"], 8))
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        # the scratch is this thread's alone: what is written there is still there after some work
        f.store(tile, f.args["scratch"])
        work = f.var("i64", 0)
        with f.loop(0, effort) as k:
            work.set(f.xor(work.get() * 31, k))
            f.line('call void asm sideeffect "", ""()')
        atomics.load(f, "i64", f.args["scratch"], "seq_cst")
        mine = f.cmp("eq", atomics.load(f, "i64", f.args["scratch"], "seq_cst"), tile)
        step = f.select(mine, amount, f.i64(1 << 40))
        atomics.modify(f, "add", f.gep(out, tile, "i64"), step, "monotonic")
        with f.if_(f.cmp("eq", work.get(), -1)):
            f.store(work.get(), f.args["scratch"])
    f.ret()


def _emit_mix(m: Module, symbol: str, isa: Isa) -> None:
    f = _kernel(m, symbol)
    out, a, b = (f.load("ptr", f.gep(f.args["bufs"], 8 * k)) for k in range(3))
    size, step, start = (f.load("i64", f.gep(f.args["dims"], 8 * k)) for k in range(3))
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        other = f.rem(tile * step + start, size)
        value = f.load("i64", f.gep(a, other, "i64")) + f.load("i64", f.gep(b, tile, "i64")) * 3
        f.store(value, f.gep(out, tile, "i64"))
    f.ret()


# out[tile] += dims[0], atomically, after dims[1] rounds of pointless work
COUNT = KernelSpec("count", ("test count", 1), _emit_count)
# out[tile] = a[(tile * step + start) % size] + 3 * b[tile]
MIX = KernelSpec("mix", ("test mix", 1), _emit_mix)


def _emit_ladder(m: Module, symbol: str, isa: Isa) -> None:
    f = _kernel(m, symbol)
    out = f.load("ptr", f.args["bufs"])
    width, step = (f.load("i64", f.gep(f.args["dims"], 8 * k)) for k in range(2))
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        level = f.div(tile, width)
        place = tile - level * width
        below = f.gep(out, level * width, "i64")
        other = f.load("i64", f.gep(below, f.rem(place * step + level, width), "i64"))
        f.store(f.load("i64", f.gep(below, place, "i64")) * 3 + other + 1, f.gep(below, width + place, "i64"))
    f.ret()


# out[k + 1, j] = 3 * out[k, j] + out[k, (j * step + k) % width] + 1: round k needs all of the round before
LADDER = KernelSpec("ladder", ("test ladder", 1), _emit_ladder)
ISA = host()


def _emit_order(m: Module, symbol: str, isa: Isa) -> None:
    f = _kernel(m, symbol)
    out = f.load("ptr", f.args["bufs"])
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        count = f.load("i64", out) + 1
        f.store(count, out)
        f.store(tile, f.gep(out, count, "i64"))
    f.ret()


# out[0] counts tiles, and out[out[0]] is the one after that many; for one thread
ORDER = KernelSpec("order", ("test order", 1), _emit_order)


def ordering(out: Storage, tiles: int, traffic: float, *, grain: int = 1) -> Launch:
    return Launch(ORDER, (At(out),), (), tiles, (out,), grain=grain, traffic=traffic)


def counting(
    out: Storage, tiles: int, *, amount: int = 1, effort: int = 0, flops: float = BIG, grain: int = 1
) -> Launch:
    return Launch(COUNT, (At(out),), (amount, effort), tiles, (out,), grain=grain, scratch=64, flops=flops)


def climbing(out: Storage, width: int, rounds: int, *, step: int = 5, flops: float = BIG, grain: int = 1) -> Launch:
    return Launch(LADDER, (At(out),), (width, step), width, (out,), grain=grain, flops=flops * rounds, rounds=rounds)


def climbed(first: Array, rounds: int, *, step: int = 5) -> Array:
    rows = [first]
    places = np.arange(len(first))
    for k in range(rounds):
        rows.append(3 * rows[-1] + rows[-1][(places * step + k) % len(first)] + 1)
    return np.stack(rows)


class Mixer:
    """A random program over a few rows of integers: every step reads two of them, one shuffled, and writes a third.

    Row 0 is the input, the last row the output, the others lie in the arena.
    """

    def __init__(self, seed: int, *, rows: int = 5, steps: int | None = None) -> None:
        rng = random.Random(seed)
        self.size = size = rng.choice([1, 2, 3, 7, 16, 33, 100])
        self.input, self.output = Storage("input", 8 * size), Storage("output", 8 * size)
        temps = [Storage.temporary(8 * size) for _ in range(rows - 2)]
        self.storages = [self.input, *temps, self.output]
        self.places = {t: Placement(1, 8 * size * k) for k, t in enumerate(temps)}
        self.places |= {self.input: Placement(2, 0), self.output: Placement(3, 0)}
        self.arena_bytes = 8 * size * len(temps)
        self.plan: list[tuple[int, int, int, int, int]] = []
        self.launches: list[Launch] = []
        count = rng.randint(1, 12) if steps is None else steps
        for k in range(count):
            out = rows - 1 if k == count - 1 else rng.randrange(1, rows)
            a, b = (rng.choice([r for r in range(rows) if r != out]) for _ in range(2))
            step, start = rng.randrange(1, 50), rng.randrange(50)
            self.plan.append((out, a, b, step, start))
            written = self.storages[out]
            buffers = tuple(At(self.storages[r]) for r in (out, a, b))
            flops = rng.choice([0.0, BIG, BIG])
            launch = Launch(
                MIX, buffers, (size, step, start), size, (written,), grain=rng.choice([1, 1, 3]), flops=flops
            )
            self.launches.append(launch)

    def expected(self, given: Array) -> Array:
        """The output, when the arena was zero and the output POISON before."""
        rows = np.zeros((len(self.storages), self.size), np.int64)
        rows[0], rows[-1] = given, POISON
        index = np.arange(self.size)
        for out, a, b, step, start in self.plan:
            rows[out] = rows[a][(index * step + start) % self.size] + 3 * rows[b]
        return np.array(rows[-1])


def run_mixer(mixer: Mixer, program: NativeProgram, *, seed: int = 3, **options: Any) -> None:
    given = np.random.default_rng(seed).integers(-1000, 1000, mixer.size)
    arena = np.zeros(mixer.arena_bytes + 8, np.uint8)
    out = np.full(mixer.size, POISON)
    assert program.run([given], [out], address(arena), **options) == len(mixer.launches)
    np.testing.assert_array_equal(out, mixer.expected(given))


def address(array: Array) -> int:
    return int(array.ctypes.data)


def placed(storages: Sequence[Storage]) -> dict[Storage, Placement]:
    """The storages as outputs, in order."""
    return {storage: Placement(2 + k, 0) for k, storage in enumerate(storages)}
