"""What this machine can do at most, measured by generated kernels: the lines of a roofline.

Measured once and kept on disk beside the kernels. A neighbour on the machine can only make a measurement too low, so
the best of several is taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec, Units
from ranvier.codegen.llvm import cache
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.amx.micro import INSTRUCTIONS, suits
from ranvier.codegen.llvm.amx.tiles import COLUMNS, LINE, ROWS
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.library import kernels
from ranvier.devices import machine_info, usable_cores
from ranvier.dtypes import DType
from ranvier.records import dataclass

_VERSION = 3  # of the way of measuring
_FILE = "peaks.json"
_BLOCK = 64 << 20  # bytes of each array of a thread: beyond what caches hold of several streams
_L2_BLOCK = 256 << 10  # fits every second-level cache, and no first-level one
_ROUNDS = 5
_FMA_SECONDS = 0.01  # of one round


@dataclass(frozen=True)
class Peaks:
    """The most that was seen, in 10^9 a second, by all threads together."""

    gflops: float  # float32 multiply-adds, two operations each
    copy_gbs: float  # bytes read plus bytes written
    read_gbs: float
    l2_read_gbs: float
    bf16_tile_gflops: float = 0.0  # by tiles of bfloat16, and of 8-bit integers; 0 where there are none
    int8_tile_gops: float = 0.0

    def arithmetic(self, units: Units) -> float:
        """Multiply-adds by these units, two operations each."""
        found = {
            "bfloat16 tiles": self.bf16_tile_gflops,
            "int8 tiles": self.int8_tile_gops,
            "bytes": 4.0 * self.gflops,  # as many instructions at best, of four times the elements
        }
        return found.get(units) or self.gflops


def peaks(isa: Isa, threads: int | None = None, *, refresh: bool = False) -> Peaks:
    """The peaks for an instruction set and a number of threads (None: all usable cores); about 0.4 s when new.

    With ``refresh`` they are measured again, and what is higher counts: for a benchmark that wants to be sure that
    the first measurement did not fall into a busy moment.
    """
    threads = threads or usable_cores()
    file = _file()
    if not refresh:
        return _peaks(isa, threads, file)
    best = _larger(measure(isa, threads), _peaks(isa, threads, file))
    _remember(file, _known(file) | {_key(isa, threads): asdict(best)})
    _peaks.cache_clear()
    return best


@functools.cache
def _peaks(isa: Isa, threads: int, file: Path | None) -> Peaks:
    known = _known(file)
    with contextlib.suppress(KeyError, TypeError):  # not there, or of another version
        return Peaks(**known[_key(isa, threads)])
    found = measure(isa, threads)
    _remember(file, known | {_key(isa, threads): asdict(found)})
    return found


def _key(isa: Isa, threads: int) -> str:
    return f"{_VERSION} {machine_info().model_name} {isa.key} {threads}"


def _larger(a: Peaks, b: Peaks) -> Peaks:
    return Peaks(*(max(x, y) for x, y in zip(asdict(a).values(), asdict(b).values())))


def forget() -> None:
    """Measure again when asked next."""
    _peaks.cache_clear()
    if (file := _file()) is not None:
        with contextlib.suppress(OSError):
            file.unlink()


def _file() -> Path | None:
    where = cache.folder()
    return None if where is None else where / _FILE


def _known(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(file: Path | None, data: dict[str, Any]) -> None:
    if file is None:
        return
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(data, indent=1))
        os.replace(unfinished, file)
    except OSError:  # it will be measured again
        with contextlib.suppress(OSError):
            unfinished.unlink()


# -- measuring ------------------------------------------------------------------------------------------------------

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_Run = Callable[[int], None]  # the work of one thread, by its number


def measure(isa: Isa, threads: int) -> Peaks:
    """Measure now, whatever is known."""
    specs = _SPECS | {name: _tile_spec(dtype) for name, dtype in _TILES.items() if suits(isa, dtype, dtype)}
    made = kernels(specs.values(), isa)  # held to the end of this function: code is freed with its last holder
    functions = {name: _SIGNATURE(made[spec].address) for name, spec in specs.items()}
    gflops = _arithmetic(functions["fma"], 2.0 * _chains(isa) * isa.lanes(4), threads)
    by_tiles = {
        name: _arithmetic(functions[name], 2.0 * ROWS * COLUMNS * LINE / dtype.numpy.itemsize, threads)
        for name, dtype in _TILES.items()
        if name in functions
    }
    arrays = [(_pages(_BLOCK), _pages(_BLOCK)) for _ in range(threads)]
    addresses = [(int(a.ctypes.data), int(b.ctypes.data)) for a, b in arrays]
    read = functions["read"]

    def copied(name: str) -> _Run:
        return lambda k: functions[name](addresses[k][0], addresses[k][1], _BLOCK // 4, 1)

    def streamed(k: int) -> None:
        read(addresses[k][0], addresses[k][1], _BLOCK // 4, 1)

    near = 400  # passes over what lies in the second-level cache

    def near_read(k: int) -> None:
        read(addresses[k][0], addresses[k][1], _L2_BLOCK // 4, near)

    return Peaks(
        gflops=gflops,
        copy_gbs=2 * _BLOCK * threads / min(_best(copied(name), threads) for name in ("copy", "copy past")) / 1e9,
        read_gbs=_BLOCK * threads / _best(streamed, threads) / 1e9,
        l2_read_gbs=near * _L2_BLOCK * threads / _best(near_read, threads) / 1e9,
        **by_tiles,
    )


def _arithmetic(function: Any, flops: float, threads: int) -> float:
    """10^9 operations a second of a kernel whose every step is ``flops``."""
    sink = np.zeros(1024, np.float32)
    numbers = _numbers()
    zero, tiles = int(sink.ctypes.data), int(numbers.ctypes.data)

    def run_for(steps: int) -> _Run:
        return lambda _k: function(zero, tiles, steps, 1)

    steps = 20_000
    steps = max(steps, int(steps * _FMA_SECONDS / _best(run_for(steps), 1, rounds=2)))
    return flops * steps * threads / _best(run_for(steps), threads) / 1e9


def tile_loop(isa: Isa, dtype: DType) -> Callable[[], float]:
    """A short measurement of the matrix unit by itself, for a benchmark to repeat: 10^9 operations a second."""
    spec = _tile_spec(dtype)
    made = kernels([spec], isa)
    function = _SIGNATURE(made[spec].address)
    numbers = _numbers()
    steps, flops = 2000, 2.0 * ROWS * COLUMNS * LINE / dtype.numpy.itemsize

    def once() -> float:
        held = made[spec], numbers  # code and memory live as long as this function
        start = time.thread_time()
        function(held[1].ctypes.data, held[1].ctypes.data, steps, 1)
        return flops * steps / (time.thread_time() - start) / 1e9

    return once


def read_loop(isa: Isa, nbytes: int, threads: int, *, again: bool = False) -> Callable[[], float]:
    """A short measurement of reading by itself, for a benchmark to repeat: seconds for ``nbytes`` by all threads.

    Every call reads other bytes than the one before, so that near caches do not have them; with ``again`` it reads the
    same ones twice, and what counts is the second time.
    """
    made = kernels([_SPECS["read"]], isa)
    function = _SIGNATURE(made[_SPECS["read"]].address)
    part = nbytes // threads // 1024 * 1024
    blocks = [_pages(max(_BLOCK // 4, 8 * part)) for _ in range(threads)]
    sinks = [np.zeros(64, np.float32) for _ in range(threads)]
    places = itertools.repeat(0) if again else itertools.cycle(range(0, blocks[0].nbytes - part + 1, part))

    def once() -> float:
        held = made, blocks  # code and memory live as long as this function
        at = [next(places) for _ in range(2)]  # of the round that warms up, and of the one that counts
        turns = [iter(at) for _ in range(threads)]

        def streamed(k: int) -> None:
            function(held[1][k].ctypes.data + next(turns[k]), sinks[k].ctypes.data, part // 4, 1)

        return _best(streamed, threads, rounds=1) * nbytes / (part * threads)

    return once


def _numbers() -> np.ndarray[Any, Any]:
    """Tiles of numbers: a matrix unit is slower on them than on zeros, which take less power."""
    numbers = np.random.default_rng(1).standard_normal(1024).astype(np.float32).view(np.uint32) >> 16
    return (numbers * 0x10001).astype(np.uint32)


def _pages(nbytes: int) -> np.ndarray[Any, Any]:
    """Memory that is really there: pages that were never written all show the same page of zeros."""
    found = np.ones(nbytes // 4 + 16, np.float32)
    start = -found.ctypes.data % 64 // 4
    return found[start : start + nbytes // 4]


def _best(run: _Run, threads: int, rounds: int = _ROUNDS) -> float:
    """Seconds of the quickest of several rounds in which all threads work at once, from the first start to the end."""
    gate = threading.Barrier(threads)
    times = [[0.0] * threads for _ in range(rounds + 1)]
    ends = [[0.0] * threads for _ in range(rounds + 1)]

    def work(k: int) -> None:
        for r in range(rounds + 1):  # the first to warm up
            gate.wait()
            times[r][k] = time.perf_counter()
            run(k)
            ends[r][k] = time.perf_counter()

    others = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(1, threads)]
    for other in others:
        other.start()
    work(0)
    for other in others:
        other.join()
    return max(1e-9, min(max(end) - min(begin) for begin, end in zip(times[1:], ends[1:])))


# -- kernels --------------------------------------------------------------------------------------------------------


def _begin(module: Module, symbol: str) -> Fn:
    """``void (ptr source, ptr target, i64 elements, i64 repeats)``."""
    return module.function(symbol, [("ptr", "source"), ("ptr", "target"), ("i64", "count"), ("i64", "repeats")])


def _chains(isa: Isa) -> int:
    """Independent multiply-adds under way: enough for two units of four cycles, with registers to spare."""
    return min(24, isa.registers - 4)


def _emit_fma(module: Module, symbol: str, isa: Isa) -> None:
    fn = _begin(module, symbol)
    kind = vector("float", isa.lanes(4))
    # zeros, which only we know: whole vectors, because one element for all may be copied in every turn
    a, b = (fn.load(kind, fn.gep(fn.args["source"], k * isa.vector_bytes), align=4) for k in range(2))
    sums = [fn.var(kind, float(k)) for k in range(_chains(isa))]
    with fn.loop(0, fn.args["count"]):
        for total in sums:
            # the sum is the addend, as in every product: where multiply-adds overwrite it, a factor that goes round
            # would have to be copied first
            total.set(fn.fma(a, b, total.get()))
    for k, total in enumerate(sums):
        fn.store(total.get(), fn.gep(fn.args["target"], k * isa.lanes(4), "float"))
    fn.ret()


_TILES = {"bf16_tile_gflops": DType.bfloat16, "int8_tile_gops": DType.int8}


def _tile_spec(dtype: DType) -> KernelSpec:
    """Blocks of 32 x 32 sums from tiles that are loaded once."""

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        fn = _begin(module, symbol)
        instruction = INSTRUCTIONS[dtype, dtype]
        line = fn.i64(LINE)
        tiles.configure(fn, fn.i64(ROWS))
        for k in range(2):
            tiles.load(fn, tiles.a_tile(k), fn.gep(fn.args["target"], k * LINE), line)
            tiles.load(fn, tiles.b_tile(k), fn.gep(fn.args["target"], (2 + k) * LINE), line)
        with fn.loop(0, fn.args["count"]):
            for r, v in itertools.product(range(2), repeat=2):
                tiles.multiply(fn, instruction, tiles.sums(r, v), tiles.a_tile(r), tiles.b_tile(v))
        tiles.release(fn)
        fn.ret()

    return KernelSpec(f"peak of tiles of {dtype.name}", ("peak", "tiles", dtype.name), emit)


_UNROLLED = 8


def _vectors(fn: Fn, isa: Isa, base: Val, at: Val) -> list[Val]:
    lanes = isa.lanes(4)
    kind = vector("float", lanes)
    return [fn.load(kind, fn.gep(base, at + k * lanes, "float"), align=64) for k in range(_UNROLLED)]


def _emit_copy(module: Module, symbol: str, isa: Isa, past: bool) -> None:
    """With ``past`` the stores go past the caches, which saves reading what they overwrite."""
    fn = _begin(module, symbol)
    if past:
        module.globals.append("!0 = !{i32 1}")
    hint = ", !nontemporal !0" if past else ""
    lanes = isa.lanes(4)
    with fn.loop(0, fn.args["repeats"]), fn.loop(0, fn.args["count"], lanes * _UNROLLED) as at:
        for k, value in enumerate(_vectors(fn, isa, fn.args["source"], at)):
            target = fn.gep(fn.args["target"], at + k * lanes, "float")
            fn.line(f"store {value.type} {value.name}, ptr {target.name}, align {isa.vector_bytes}{hint}")
    fn.ret()


def _emit_read(module: Module, symbol: str, isa: Isa) -> None:
    fn = _begin(module, symbol)
    kind = vector("float", isa.lanes(4))
    sums = [fn.var(kind, 0.0) for _ in range(_UNROLLED)]
    with fn.loop(0, fn.args["repeats"]), fn.loop(0, fn.args["count"], isa.lanes(4) * _UNROLLED) as at:
        for total, value in zip(sums, _vectors(fn, isa, fn.args["source"], at)):
            total.set(fn.add(total.get(), value))
    whole = sums[0].get()
    for other in sums[1:]:
        whole = fn.add(whole, other.get())
    fn.store(whole, fn.args["target"])
    fn.ret()


_SPECS = {
    "fma": KernelSpec("peak of multiply-adds", ("peak", "fma"), _emit_fma),
    "copy": KernelSpec("peak of copying", ("peak", "copy"), functools.partial(_emit_copy, past=False)),
    "copy past": KernelSpec(
        "peak of copying past caches", ("peak", "copy past"), functools.partial(_emit_copy, past=True)
    ),
    "read": KernelSpec("peak of reading", ("peak", "read"), _emit_read),
}
