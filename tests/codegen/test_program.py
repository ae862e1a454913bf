"""The native driver on one thread: addresses, order, abort flag, time stamps, and the slow way to read addresses."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm import compiler, driver, objects
from ranvier.codegen.llvm import program as programs
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.llvm.library import source
from ranvier.codegen.llvm.program import NativeProgram, Placement, Step, chunked
from ranvier.codegen.storage import Storage
from tests.codegen.harness import ISAS
from tests.codegen.programs import BIG, COUNT, ISA, MIX, POISON, Mixer, address, counting, ordering, placed, run_mixer


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_random_programs(isa: Isa) -> None:
    for seed in range(100):
        mixer = Mixer(seed)
        run_mixer(mixer, NativeProgram(mixer.launches, mixer.places, isa, bases=4))


def test_objects_are_readable_here() -> None:
    assert objects.readable()  # on the interpreters that the tests run on


def test_addresses_read_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "readable", lambda: False)
    for seed in range(20):
        mixer = Mixer(seed)
        run_mixer(mixer, NativeProgram(mixer.launches, mixer.places, ISA, bases=4))


def test_other_containers_and_arrays_take_the_slow_way(tmp_path: Path) -> None:
    mixer = Mixer(5)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    given = np.arange(mixer.size)
    mapped = np.memmap(tmp_path / "x", np.int64, "w+", shape=(mixer.size,))
    mapped[:] = given
    arena = np.zeros(mixer.arena_bytes + 8, np.uint8)
    for inputs in ([given], (given,), [mapped], (mapped,)):
        out = np.full(mixer.size, POISON)
        arena[:] = 0
        program.run(inputs, [out], address(arena))  # type: ignore[arg-type]
        np.testing.assert_array_equal(out, mixer.expected(given))
        run_mixer(mixer, program)  # and the quick way still works after it


def test_the_shortest_way_runs_what_every_way_runs() -> None:
    for seed in range(20):
        mixer = Mixer(seed)
        program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
        assert program.enters_alone(1)
        given, out = np.arange(mixer.size), np.full(mixer.size, POISON)
        arena = np.zeros(mixer.arena_bytes + 8, np.uint8)
        assert program.run_alone([given], [out], address(arena))
        np.testing.assert_array_equal(out, mixer.expected(given))


def test_the_shortest_way_is_closed_to_arrays_that_are_not_plain(tmp_path: Path) -> None:
    mixer = Mixer(5)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    size = mixer.size
    mapped = np.memmap(tmp_path / "x", np.int64, "w+", shape=(size,))
    shifted = np.zeros(8 * size + 1, np.uint8)[1:].view(np.int64)
    arena = np.zeros(mixer.arena_bytes + 8, np.uint8)
    for given in (np.arange(2 * size)[::2], np.arange(size)[::-1], shifted, mapped):
        out = np.full(size, POISON)
        assert not program.run_alone([given], [out], address(arena))
        assert not program.run_alone([np.arange(size)], [given], address(arena))
        assert (out == POISON).all() and not arena.any()
    assert not program.run_alone([], [out], address(arena))
    run_mixer(mixer, program)


def test_wrong_number_of_arrays() -> None:
    mixer = Mixer(1)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)
    row = np.zeros(mixer.size, np.int64)
    with pytest.raises(ValueError, match="3 inputs and outputs for a program of 2"):
        program.run([row, row], [row], 0)
    with pytest.raises(ValueError, match="0 inputs"):
        program.run([], [], 0)


def test_offsets_constants_and_inputs_before_outputs() -> None:
    """out = a[0 + 1 word] + 3 * constant, from the second input, with every kind of base."""
    n = 6
    first, second, out = (Storage(kind, 8 * (n + 1)) for kind in ("input", "input", "output"))  # type: ignore[arg-type]
    fixed = np.arange(100, 100 + n)
    constant = Storage.constant(fixed)
    launch = Launch(MIX, (At(out, 8), At(second, 8), At(constant)), (n, 1, 0), n, (out,))
    places = {
        first: Placement(2, 0),
        second: Placement(3, 0),
        out: Placement(4, 0),
        constant: Placement(0, address(fixed)),
    }
    program = NativeProgram([launch], places, ISA, bases=5)
    a, b, c = np.zeros(n + 1, np.int64), np.arange(n + 1) * 10, np.full(n + 1, -7)
    program.run([a, b], [c], 0)
    assert c[0] == -7
    np.testing.assert_array_equal(c[1:], b[1:] + 3 * fixed)


def test_base_out_of_range() -> None:
    out = Storage("output", 8)
    with pytest.raises(ValueError, match="base"):
        NativeProgram([counting(out, 1)], {out: Placement(3, 0)}, ISA, bases=3)


def test_code_is_handed_over() -> None:
    def emit_micro(m: Module, symbol: str, isa: Isa) -> None:
        f = m.function(symbol, [("i64", "x")], "i64")
        f.ret(f.args["x"] * 11)

    def emit_outer(m: Module, symbol: str, isa: Isa) -> None:
        f = m.function(symbol, [("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch")])
        micro, out = f.load("ptr", f.args["bufs"]), f.load("ptr", f.gep(f.args["bufs"], 8))
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            f.store(f.call_pointer(micro, "i64", [tile]), f.gep(out, tile, "i64"))
        f.ret()

    micro = KernelSpec("micro", ("test micro", 1), emit_micro)
    outer = KernelSpec("outer", ("test outer", 1), emit_outer)
    out = Storage("output", 80)
    launch = Launch(outer, (Code(micro), At(out)), (), 10, (out,))
    made = np.zeros(10, np.int64)
    NativeProgram([launch], placed([out]), ISA, bases=3).run([], [made], 0)
    np.testing.assert_array_equal(made, np.arange(10) * 11)


def test_nothing_to_do() -> None:
    out = Storage("output", 8)
    assert NativeProgram([], {}, ISA, bases=2).run([], [], 0) == 0
    program = NativeProgram([counting(out, 0), counting(out, 0, flops=0.0)], placed([out]), ISA, bases=3)
    made = np.zeros(1, np.int64)
    times = np.full((2, 3), -1)
    for threads in (1, 2):
        assert program.run([], [made], 0, threads=threads, times=times) == 2
    assert made[0] == 0 and (times > 0).all()


def test_abort_before_and_between() -> None:
    flag = np.zeros(1, np.int32)
    out, view = Storage("output", 8), Storage("const", 4)
    places = placed([out]) | {view: Placement(0, address(flag))}
    # the middle step counts in the flag itself (its upper half is not looked at)
    flag64 = np.zeros(1, np.int64)
    places[view] = Placement(0, address(flag64))
    setter = Launch(COUNT, (At(view),), (1, 0), 1, (view,), scratch=64)
    program = NativeProgram([counting(out, 1), setter, counting(out, 1)], places, ISA, bases=3)
    made = np.zeros(1, np.int64)
    assert program.run([], [made], 0, abort=address(flag)) == 3
    assert made[0] == 2
    flag64[0] = 0
    assert program.run([], [made], 0, abort=address(flag64)) == 2
    assert made[0] == 3
    assert program.run([], [made], 0, abort=address(flag64)) == 0
    assert made[0] == 3


def test_times_are_those_of_the_clock() -> None:
    out = Storage("output", 80)
    program = NativeProgram([counting(out, 10, effort=1000, flops=0.0)] * 4, placed([out]), ISA, bases=3)
    times = np.zeros((4, 3), np.int64)
    before = time.perf_counter_ns()
    program.run([], [np.zeros(10, np.int64)], 0, times=times)
    after = time.perf_counter_ns()
    stamps = [before, *times[:, :2].ravel().tolist(), after]
    assert stamps == sorted(stamps)
    assert (times[:, 1] > times[:, 0]).all() and (times[:, 2] == 1).all()
    with pytest.raises(ValueError, match="times"):
        program.run([], [np.zeros(10, np.int64)], 0, times=times[:2])


def test_one_program_in_another() -> None:
    """A run that interrupts another on the same thread (a signal handler may) finds memory of its own."""
    mixer = Mixer(8)
    program = NativeProgram(mixer.launches, mixer.places, ISA, bases=4)

    class Interrupting(np.ndarray):  # type: ignore[type-arg]
        @property
        def ctypes(self) -> object:  # type: ignore[override]
            run_mixer(mixer, program)
            return super().ctypes

    given = np.arange(mixer.size)
    out = np.full(mixer.size, POISON)
    arena = np.zeros(mixer.arena_bytes + 8, np.uint8)
    program.run([given.view(Interrupting)], [out], address(arena))
    np.testing.assert_array_equal(out, mixer.expected(given))


def test_calls_are_reused_and_hold_nothing() -> None:
    out = Storage("output", 8)
    program = NativeProgram([counting(out, 1)], placed([out]), ISA, bases=3)
    made = np.zeros(1, np.int64)
    program.run([], [made], 0)
    count = len(programs._calls)
    for _ in range(50):
        program.run([], [made], 0)
    assert len(programs._calls) == count and made[0] == 51
    assert all(call.given == [None, None] for call in programs._calls)


def test_a_program_holds_no_arrays() -> None:
    """Weights that were packed elsewhere must be free to go."""
    out, constant = Storage("output", 8), Storage.constant(np.zeros(3))
    places = placed([out]) | {constant: Placement(0, 0)}
    launch = replace(counting(out, 1, flops=5.0), label="the node", buffers=(At(out), At(constant)))
    program = NativeProgram([launch], places, ISA, bases=3)
    gone = weakref.ref(constant.array)
    del constant, places, launch
    assert gone() is None
    assert program.steps == (Step("the node", "count", 1, 5.0, 0.0),)


@pytest.mark.parametrize("spec", [driver.run_spec(lists=True), driver.run_spec(lists=False), driver.worker_spec()])
def test_written_for_other_machines(spec: KernelSpec) -> None:
    arm = named("neon", "aarch64")
    text = compiler.assembly(source(spec, arm), arm)
    assert "blr" in text


def walks(launches: list[Launch], out: Storage, isa: Isa, runs: int, abort: int = 0) -> list[list[int]]:
    """The tiles of each run, in the order they were worked on."""
    program = NativeProgram(launches, placed([out]), isa, bases=3)
    found = []
    for _ in range(runs):
        made = np.zeros(1000, np.int64)
        program.run([], [made], 0, abort=abort)
        found.append(made[1 : made[0] + 1].tolist())
    return found


@pytest.mark.parametrize("grain", [1, 4])
def test_every_second_run_goes_back_over_a_step_that_a_cache_holds_a_part_of(grain: int) -> None:
    out, turning = Storage("output", 8000), replace(ISA, turns=True)
    launch = ordering(out, 50, 4e6, grain=grain)
    size = programs.slice_tiles(launch, 0, turning)
    assert size == {1: 3, 4: 4}[grain]
    forwards = list(range(50))
    starts = range(50 - size, -size, -size)
    back = [tile for start in starts for tile in range(max(start, 0), start + size)]
    assert sorted(back) == forwards and back[:size] == forwards[-size:]
    assert walks([launch], out, turning, 4) == [forwards, back, forwards, back]
    assert walks([launch], out, replace(ISA, turns=False), 2) == [forwards, forwards]
    flag = np.zeros(1, np.int32)
    assert walks([launch], out, turning, 2, address(flag)) == [forwards, forwards], "in the order of an abort's chunks"
    # a step so large or so small is the same either way, and so is one that much else is read beside
    for traffic in (1e5, 1e8):
        assert walks([ordering(out, 50, traffic)], out, turning, 2) == [forwards, forwards]
    assert walks([launch, ordering(out, 50, 3e6)], out, turning, 2) == [forwards * 2] * 2
    small = ordering(out, 5, 1e4)
    assert walks([small, launch, small], out, turning, 2)[1] == [*range(5), *back, *range(5)]


def test_slices() -> None:
    out, turning = Storage("output", 8), replace(ISA, turns=True)
    assert programs.slice_tiles(ordering(out, 1, 4e6), 0, turning) == 0, "one tile has no order"
    assert programs.slice_tiles(replace(ordering(out, 50, 4e6), rounds=2), 0, turning) == 0, "rounds have their own"
    assert programs.slice_tiles(ordering(out, 50, 4e6), 1e6, turning) == 0, "much is read beside it"
    assert programs.slice_tiles(ordering(out, 10_000, 4e6, grain=512), 0, turning) == 512
    assert programs.slice_tiles(ordering(out, 3, 4e6), 0, turning) == 1


def test_chunks() -> None:
    out = Storage("output", 8)
    assert chunked(counting(out, 0), 4) == (1, 0)
    assert chunked(counting(out, 1), 4) == (1, 1)
    assert chunked(counting(out, 100, flops=1e5), 4) == (100, 1)  # a microsecond: one thread
    assert chunked(counting(out, 100), 1) == (100, 1)
    assert chunked(counting(out, 100, grain=7), 4) == (7, 15)
    for tiles in (2, 3, 5, 31, 64, 1000, 123_457, 1 << 40):
        for flops in (3e6, 1e7, 1e9, 1e12):
            grain, chunks = chunked(counting(out, tiles, flops=flops), 4)
            assert (chunks - 1) * grain < tiles <= chunks * grain
            assert chunks >= min(tiles, 16) // 2 and chunks < 1 << 31
    wide = Launch(COUNT, (At(out),), (), 64, (out,), traffic=BIG)
    assert [chunked(wide, cores)[1] for cores in (2, 64)] == [22, 64]
