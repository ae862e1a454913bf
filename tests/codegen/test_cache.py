"""Kernels on disk and in memory: found again, made once, never trusted when damaged, freed when dropped."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier import logs
from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import cache, image, isa, library, peaks
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa
from ranvier.errors import InvalidConfig, KernelError

HOST = isa.host()
KEY = "0123456789abcdef" * 2


def emit_constant(module: Module, symbol: str, target: Isa, value: int = 0) -> None:
    fn = module.function(symbol, [("i64", "x")], "i64")
    fn.ret(fn.add(fn.args["x"], fn.i64(value)))


def adds(value: int, emit=emit_constant) -> KernelSpec:
    """A kernel that adds a number; each number is another kernel."""
    return KernelSpec(f"adds {value}", ("test adds", value), functools.partial(emit, value=value))


def call(kernel: library.Kernel, x: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(kernel.address)(x)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(cache.SWITCH, raising=False)
    monkeypatch.delenv(cache.LIMIT, raising=False)
    monkeypatch.setattr(cache.Sources, "trusted", lambda self: True)  # whoever edits files while tests run
    monkeypatch.setattr(library, "counts", library.Counts())
    return tmp_path / "cache" / "kernels"


def made() -> tuple[int, int]:
    return library.counts.compiled, library.counts.read


# -- the folder -----------------------------------------------------------------------------------------------------


def test_location(monkeypatch, tmp_path):
    assert cache.folder() == tmp_path / "cache"
    monkeypatch.delenv(cache.FOLDER)
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache.folder() == tmp_path / "xdg" / "ranvier"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache.folder() == Path.home() / ".cache" / "ranvier"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    assert cache.folder() == Path.home() / "Library" / "Caches" / "ranvier"
    monkeypatch.setattr(cache.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache.folder() == tmp_path / "ranvier" / "cache"
    monkeypatch.setenv(cache.SWITCH, "off")
    assert cache.folder() is None and cache.current() is None


def test_no_home(monkeypatch):
    def nobody() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv(cache.FOLDER)
    monkeypatch.setattr(Path, "home", nobody)
    assert cache.current() is None
    assert call(library.kernels([adds(1)], HOST)[adds(1)], 1) == 2


@pytest.mark.parametrize(
    ("text", "expected"), [("", 512_000_000), ("1000", 1000), ("3k", 3000), ("1.5G", 1_500_000_000)]
)
def test_limit(monkeypatch, text, expected):
    monkeypatch.setenv(cache.LIMIT, text)
    assert cache.limit_bytes() == expected


@pytest.mark.parametrize("text", ["much", "-1", "M", "nan", "infG"])
def test_limit_that_is_no_size(monkeypatch, text):
    monkeypatch.setenv(cache.LIMIT, text)
    with pytest.raises(InvalidConfig, match=cache.LIMIT):
        cache.limit_bytes()


# -- entries --------------------------------------------------------------------------------------------------------


def test_entries_come_back(own_cache):
    disk = cache.KernelCache(own_cache, 10**6)
    assert disk.get(KEY) is None
    disk.put(KEY, b"payload")
    assert disk.get(KEY) == b"payload"
    disk.put(KEY, b"another")
    assert disk.get(KEY) == b"another" and len(disk.entries()) == 1
    assert disk.clear()[0] == 1 and disk.get(KEY) is None


@pytest.mark.parametrize("damage", ["empty", "short", "header", "cut", "flipped", "longer", "foreign", "renamed"])
def test_damaged_entries_are_absent(own_cache, damage):
    disk = cache.KernelCache(own_cache, 10**6)
    disk.put(KEY, bytes(range(200)))
    (path,) = own_cache.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-100] ^= 1
    elif damage == "renamed":  # whole, under a name that is not its own
        path = path.rename(path.with_name(path.name.replace("0", "1")))
    size = {"empty": 0, "short": 10, "header": 64, "cut": len(data) - 1}.get(damage, len(data))
    content = b"\x7fELF" * 100 if damage == "foreign" else bytes(data[:size]) + (b"x" if damage == "longer" else b"")
    path.write_bytes(content)
    key = path.name.split(".")[0]
    assert disk.get(key) is None
    disk.put(key, b"again")
    assert disk.get(key) == b"again"


def test_least_recently_used_go_first(own_cache):
    disk = cache.KernelCache(own_cache, 10_000)
    now = time.time()
    for k in range(8):
        disk.put(f"{k:032x}", bytes(1000))
        os.utime(own_cache / f"{k:032x}.kernel", (now - 10 * 86400 + k, now - 10 * 86400 + k))
    assert disk.get(f"{0:032x}") is not None  # used again: no longer the oldest
    (own_cache / f"{KEY}.1.2.new").write_bytes(b"left by a process that died")
    os.utime(own_cache / f"{KEY}.1.2.new", (now - 7200, now - 7200))
    for k in range(8, 12):
        disk.put(f"{k:032x}", bytes(1000))
    left = {int(e.path.name.split(".")[0], 16) for e in disk.entries()}
    assert 0 in left and 1 not in left and 11 in left
    assert sum(e.nbytes for e in disk.entries()) <= 10_000
    assert not list(own_cache.glob("*.new"))


def test_larger_than_the_limit(own_cache):
    disk = cache.KernelCache(own_cache, 100)
    disk.put(KEY, bytes(1000))
    assert disk.get(KEY) is None and not own_cache.exists()


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "_said", set())
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file"))
    specs = [adds(k) for k in (11, 12, 13)]
    found = library.kernels(specs, HOST)
    assert [call(found[s], 1) for s in specs] == [12, 13, 14]
    assert made() == (3, 0)
    assert len(logs._said) == 1


def test_a_full_disk(own_cache, monkeypatch):
    disk = cache.KernelCache(own_cache, 10**6)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    disk.put(KEY, b"x")
    assert disk.get(KEY) is None and list(own_cache.iterdir()) == []


def test_reading_is_quick(own_cache):
    disk = cache.KernelCache(own_cache, 10**6)
    disk.put(KEY, bytes(4000))
    times = []
    for _ in range(200):
        started = time.perf_counter()
        disk.get(KEY)
        times.append(time.perf_counter() - started)
    assert min(times) < 100e-6


# -- what keys depend on --------------------------------------------------------------------------------------------


def test_sources(tmp_path):
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text("2")
    first = cache.Sources(tmp_path).digest
    assert cache.Sources(tmp_path).digest == first
    (tmp_path / "deep" / "b.py").write_text("3")
    second = cache.Sources(tmp_path).digest
    (tmp_path / "deep" / "b.py").rename(tmp_path / "b.py")
    assert len({first, second, cache.Sources(tmp_path).digest}) == 3


def test_the_digest_of_sources_is_kept(tmp_path, monkeypatch):
    file = tmp_path / "emit.py"
    file.write_text("a = 1")
    kept = cache.KernelCache(tmp_path / "kept", cache.DEFAULT_LIMIT)
    first = cache.Sources(tmp_path, kept).digest
    assert not kept.entries()  # changed a moment ago: the next change might leave size and time as they are
    os.utime(file, (1e9, 1e9))
    assert cache.Sources(tmp_path, kept).digest == first
    assert len(kept.entries()) == 1
    with monkeypatch.context() as without:
        without.setattr(cache.Sources, "_read", lambda self: pytest.fail("read again"))
        assert cache.Sources(tmp_path, kept).digest == first
    file.write_text("a = 2")
    os.utime(file, (1e9 + 1, 1e9 + 1))
    assert cache.Sources(tmp_path, kept).digest == cache.Sources(tmp_path).digest != first


def test_code_edited_after_import_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cache, "_TRUST_SECONDS", 0.0)
    (tmp_path / "a.py").write_text("1")
    found = cache.Sources(tmp_path)
    os.utime(tmp_path / "a.py", (1e9, 1e9))
    assert found.trusted()
    os.utime(tmp_path / "a.py", (time.time() + 60, time.time() + 60))
    assert not found.trusted()
    (tmp_path / "a.py").unlink()
    assert not found.trusted()


def test_emitters_of_other_packages_count_too():
    inside = cache.sources_of(peaks._emit_fma)
    outside = cache.sources_of(adds(1).emit)
    assert inside is not None and len(inside) == 1
    assert outside is not None and len(outside) == 2 and outside[0] is inside[0]
    assert (
        len(
            {
                cache.key_of(*each)
                for each in (
                    ("rv_x", inside, ""),
                    ("rv_x", outside, ""),
                    ("rv_y", outside, ""),
                    ("rv_y", outside, "-o"),
                )
            }
        )
        == 4
    )
    typed_in = eval("lambda module, symbol, isa: None", {"__name__": "__main__"})
    assert cache.sources_of(typed_in) is None


# -- the library ----------------------------------------------------------------------------------------------------


def test_second_time_nothing_is_emitted():
    def broken(module: Module, symbol: str, target: Isa, value: int) -> None:
        raise AssertionError("emitted although it was cached")

    specs = [adds(k) for k in range(20, 26)]
    found = library.kernels(specs, HOST)
    assert made() == (6, 0)
    del found
    gc.collect()
    again = [adds(k, broken) for k in range(20, 26)]
    found = library.kernels(again, HOST)
    assert made() == (6, 6)
    assert [call(found[s], 100) for s in again] == [120, 121, 122, 123, 124, 125]


def test_off(monkeypatch, own_cache):
    monkeypatch.setenv(cache.SWITCH, "off")
    library.kernels([adds(30)], HOST)
    gc.collect()
    library.kernels([adds(30)], HOST)
    assert made() == (2, 0) and not own_cache.exists()


def test_held_kernels_are_shared():
    first = library.kernels([adds(40), adds(41), adds(40)], HOST)
    second = library.kernels([adds(41), adds(42)], HOST)
    assert len(first) == 2 and first[adds(41)] is second[adds(41)]
    assert made() == (3, 0)


def test_instruction_sets_do_not_mix():
    found = {target.name: library.kernels([adds(50)], target)[adds(50)] for target in isa.available()}
    assert len({k.symbol for k in found.values()}) == len(found) == library.counts.compiled


def test_one_bad_kernel_leaves_the_others(monkeypatch):
    def bad(module: Module, symbol: str, target: Isa, value: int) -> None:
        module.function(symbol, [], "i64").line("nonsense")

    wrong, right = adds(60, bad), adds(61)
    with pytest.raises(KernelError, match="does not parse"):
        library.kernels([wrong, right], HOST)
    assert not library._under_way
    assert call(library.kernels([right], HOST)[right], 1) == 62
    corrected = adds(60)
    assert call(library.kernels([corrected], HOST)[corrected], 1) == 61


def test_many_threads_make_each_kernel_once():
    calls: list[int] = []

    def slow(module: Module, symbol: str, target: Isa, value: int) -> None:
        calls.append(value)
        time.sleep(0.002)
        emit_constant(module, symbol, target, value)

    specs = [adds(k, slow) for k in range(100, 116)]
    gate = threading.Barrier(6)

    def session(k: int) -> list[int]:
        order = specs[k:] + specs[:k]  # each begins with another one, so that all wait for each other
        gate.wait()
        found = library.kernels(order, HOST)
        held.append(found)
        return [call(found[s], 0) for s in specs]

    held: list[object] = []
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(session, range(6)))
    assert results == [list(range(100, 116))] * 6
    assert sorted(calls) == list(range(100, 116))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_fork():
    def stuck(module: Module, symbol: str, target: Isa, value: int) -> None:
        started.set()
        release.wait(20)
        emit_constant(module, symbol, target, value)

    started, release = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: library.kernels([adds(70, stuck)], HOST))
    other.start()
    started.wait(20)
    child = os.fork()
    if not child:  # here nobody makes the kernel that the parent's thread is making
        code = 1
        try:
            code = 0 if call(library.kernels([adds(70)], HOST)[adds(70)], 1) == 71 else 1
        finally:
            os._exit(code)
    release.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_PROGRAM = """
import sys
from ranvier.codegen.llvm import cache, isa, library
from tests.codegen import test_cache as t
cache.sources_of = lambda emit: []  # files edited between two processes are not what is tested here
specs = [t.adds(k) for k in range(200, 230)]
found = library.kernels(specs, isa.host())
assert [t.call(found[s], 1) for s in specs] == [k + 1 for k in range(200, 230)]
print(library.counts.compiled, library.counts.read, "llvmlite.binding" in sys.modules)
"""


def run_processes(count: int) -> list[str]:
    command = [sys.executable, "-c", _PROGRAM]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    outputs = [p.communicate(timeout=60)[0].strip() for p in started]
    assert all(p.returncode == 0 for p in started)
    return outputs


def test_processes_share(own_cache):
    for output in run_processes(3):
        compiled, read, _ = output.split()
        assert int(compiled) + int(read) == 30
    assert len(list(own_cache.glob("*.kernel"))) == 30 and not list(own_cache.glob("*.new"))
    victim = sorted(own_cache.glob("*.kernel"))[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    assert run_processes(1) == [f"1 29 {not image.supported()}"]
    # neither a process that compiles nor one that finds all kernels loads LLVM where images are
    assert run_processes(1) == [f"0 30 {not image.supported()}"]


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_dropped_code_is_freed(monkeypatch):
    monkeypatch.setenv(cache.SWITCH, "off")

    def cycles(first: int, count: int) -> None:
        for k in range(first, first + count):
            spec = adds(k)
            assert call(library.kernels([spec], HOST)[spec], 1) == k + 1

    held = set(library._kernels.keys())  # by sessions of other tests
    cycles(1000, 60)
    gc.collect()
    before = rss_bytes()
    cycles(2000, 300)
    gc.collect()
    assert rss_bytes() - before < 3_000_000
    assert set(library._kernels.keys()) <= held


# -- peaks ----------------------------------------------------------------------------------------------------------


def test_peaks(monkeypatch, own_cache):
    monkeypatch.setattr(peaks, "_BLOCK", 1 << 20)
    monkeypatch.setattr(peaks, "_FMA_SECONDS", 0.001)
    peaks._peaks.cache_clear()
    one = peaks.peaks(HOST, 1)
    assert one.gflops > 1 and one.copy_gbs > 0.5 and one.read_gbs > 0.5 and one.l2_read_gbs > 0.5
    peaks._peaks.cache_clear()
    monkeypatch.setattr(peaks, "measure", lambda *_: pytest.fail("measured again"))
    assert peaks.peaks(HOST, 1) == one
    higher = peaks.Peaks(one.gflops + 1, 0.0, 0.0, one.l2_read_gbs + 1)
    by_tiles = {"bf16_tile_gflops": one.bf16_tile_gflops, "int8_tile_gops": one.int8_tile_gops}
    assert all((figure > 0) == HOST.has("amx-int8") for figure in by_tiles.values())
    monkeypatch.setattr(peaks, "measure", lambda *_: higher)
    best = peaks.peaks(HOST, 1, refresh=True)
    assert best == replace(higher, copy_gbs=one.copy_gbs, read_gbs=one.read_gbs, **by_tiles) == peaks.peaks(HOST, 1)
    (own_cache.parent / "peaks.json").write_text("{ not json")
    peaks._peaks.cache_clear()
    assert peaks.peaks(HOST, 1) == higher
    peaks.forget()
    assert not (own_cache.parent / "peaks.json").exists()


@pytest.mark.parametrize("target", isa.available(), ids=lambda i: i.name)
def test_peak_kernels_do_what_they_time(target):
    import numpy as np

    rng = np.random.default_rng(0)
    x = peaks._pages(4 * 8192)
    x[:] = rng.integers(-8, 8, 8192)
    found = library.kernels(peaks._SPECS.values(), target)
    run = {name: peaks._SIGNATURE(found[spec].address) for name, spec in peaks._SPECS.items()}
    for name in ("copy", "copy past"):
        y = peaks._pages(4 * 8192)
        run[name](x.ctypes.data, y.ctypes.data, 8192, 1)
        assert (x == y).all()
    run["read"](x.ctypes.data, y.ctypes.data, 8192, 3)
    assert y[: target.lanes(4)].sum() == 3 * x.sum()
