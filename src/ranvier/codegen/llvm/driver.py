"""The code that runs a program: the caller's side and the workers' side, written as LLVM IR.

A program is a list of steps. One thread, the caller, goes through them. Small steps it runs alone. A big step it
*opens*: it describes the step in the pool's shared block and publishes a **ticket**, one 64-bit word that holds a
number of the opening (upper half) and the chunks not yet taken (lower half). Whoever swaps a ticket for the same ticket
less a chunk owns that chunk of tiles. The caller takes chunks like everybody else, waits until all that were taken are
done, and goes on.

Up to PLACED_CHUNKS chunks are one bit each, and a thread prefers those around its own place: what the next step reads
there, it has often written itself, and a line that another core wrote takes longer to come than one from the
own cache. More chunks than that are only counted, and taken in order.

Nobody ever waits for a worker that holds no chunk. A worker that is suspended anywhere else — about to take one, on its
way to sleep, not yet awake — costs nothing but its help, and it needs no permission to be late: it reads the
description first and takes its chunk after, and the swap fails if the opening is another by then, whatever was read.
So the caller may return, and its memory may go, while workers are still looking.

A step of several **rounds** (the time steps of a recurrent layer) is opened once per round: the caller begins the next
when all chunks of the one before are done. Whoever comes late joins at whatever round there is, and if nobody comes the
caller goes through all of them alone, so rounds need no particular number of threads to get to their end.

A thread that runs alone goes **back and forth**: in every second run it takes the slices of a big step from the last to
the first. Weights that are somewhat larger than the second-level cache would never be found there by a program that is
run again and again (the body of a loop, a layer), because what a run reads first was pushed out by what it read last.

Order of memory: a worker's results become visible by its (releasing) addition to DONE, which the caller reads
(acquiring) before it opens the next step by a releasing store that workers acquire. Sleeping needs more: the caller
stores the ticket and then reads SLEEPERS, the worker adds to SLEEPERS and then reads the ticket, all sequentially
consistent, so one of the two sees the other.

A program may want **subnormal numbers taken for zeros** (FLUSH): how a thread computes is a word of its own, so the
caller sets it for the run and a worker for each chunk, and both put back what was there.
"""

from __future__ import annotations

import sys

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import atomics, objects, subnormals, system
from ranvier.codegen.llvm.apart import emit_apart
from ranvier.codegen.llvm.builder import Fn, Module, Val, Var
from ranvier.codegen.llvm.isa import Isa

VERSION = 9  # of the code below: part of its key

# A program: words of its head, words of a step.
STEPS, TABLE, ENTRIES, ENTRY_COUNT, BASES, CLOCK, SCRATCH, STRIDE, ARRAY_TYPE, HEAD_WORK = range(10)
TURNS, RUNS, FLUSH, HEAD_WORDS = range(10, 14)  # whether any step has slices, and the runs so far where one has
KERNEL, BUFFERS, DIMS, TILES, GRAIN, CHUNKS, WORK, ROUNDS, SLICE, STEP_WORDS = range(10)
# TILES and CHUNKS are those of one round. SLICE: tiles of a slice, 0 where the step is walked forwards in every run.
PLACED_CHUNKS = 31
# WORK: nanoseconds of big steps from this one to the end of the program, for one thread, roughly. HEAD_WORK: in all.
# A call: what one run needs besides its program.
GIVEN, GIVEN_COUNT, ARENA, WORKSPACE, POOL, THREADS, ABORT, TIMES, CALL_WORDS = range(9)
TIME_WORDS = 3  # of a step: start, end, threads that took part

# The shared block of a pool, in bytes. What different threads write lies on different cache lines (two apart, because
# processors fetch neighbours).
TICKET = 0
DONE = 128  # chunks finished by workers (lower half), and the workers that finished any (upper half)
STEP = 256  # the open step: its words, then those below
STEP_SCRATCH = STEP + 8 * STEP_WORDS
STEP_STRIDE = STEP_SCRATCH + 8
STEP_LIMIT = STEP_STRIDE + 8  # threads allowed, the caller among them
STEP_ABORT = STEP_LIMIT + 8  # the address of the run's abort flag, or 0
STEP_FIRST = STEP_ABORT + 8  # the first tile of the open round
STEP_FLUSH = STEP_FIRST + 8  # whether subnormal numbers are zeros to it
LOCK = 384  # held by the caller whose program runs
LAST_END = 392  # when the last run ended; the holder of the lock writes it
SLEEPERS = 512
STOP = 640
POOL_CLOCK, POOL_YIELD, POOL_SYSCALL, SPIN, SPIN_IDLE, SPIN_BUSY, WAKE_WORK, PLACES = (768 + 8 * k for k in range(8))
POOL_BYTES = 896

_HALF = 1 << 32
_LOW = _HALF - 1
_FUTEX_WAIT, _FUTEX_WAKE = 9 | 128, 10 | 128  # by bit set, within this process
_PATIENCE_NS = 5_000  # and twice its own time for a chunk: then a waiting caller gives its time slice away


def run_spec(*, lists: bool) -> KernelSpec:
    """``i64 run(program, call)``: the addresses of a program's head and of the words of a call.

    Returns the number of the step reached, or -1 where it could not begin. GIVEN is the address of a Python list
    that holds the list of inputs and the list of outputs (plain lists of plain arrays, C-contiguous and aligned, or it
    does not begin), or, for ``lists=False``, of a table of GIVEN_COUNT addresses. The workspace has room for the
    bases, the pointers of all steps, and scratch.
    """
    return KernelSpec("program driver", ("driver", *_version(), lists), lambda m, s, isa: _emit_run(m, s, isa, lists))


def worker_spec() -> KernelSpec:
    """``i64 work(pool, slot)``: help with whatever is opened, until told to stop (0).

    ``slot`` is 1, 2 … and picks the scratch. Where the system has no futex it returns 1 when there was nothing to do
    for a while, and wants to be called again when there may be.
    """
    return KernelSpec("pool worker", ("worker", *_version()), _emit_worker)


def _version() -> tuple[object, ...]:
    return VERSION, sys.platform, system.futex()[1]


def _word(f: Fn, base: Val, index: int) -> Val:
    return f.load("i64", f.gep(base, 8 * index))


def _now(f: Fn, pool: Val) -> Val:
    return system.emit_now(f, f.load("ptr", f.gep(pool, POOL_CLOCK)))


def _low(f: Fn, value: Val) -> Val:
    return f.and_(value, _LOW)


def _emit_share(m: Module, symbol: str, isa: Isa) -> str:
    """``i64 share(pool, slot)``: run chunks of the open step until none is left; returns how many it ran."""
    name = f"{symbol}_share"
    f = m.function(name, [("i64", "pool"), ("i64", "slot")], "i64", internal=True, optimized=False)
    pool, slot = atomics.pointer(f, f.args["pool"]), f.args["slot"]
    count = f.var("i64", 0)
    with f.while_() as w:
        ticket = atomics.load(f, "i64", f.gep(pool, TICKET), "acquire")
        left = _low(f, ticket)
        w.until(f.cmp("eq", left, 0))
        # relaxed reads of what may be overwritten meanwhile: the exchange below tells whether it was
        kernel, buffers, dims, tiles, grain, chunks, _, _, _, scratch, stride, limit, abort, first = (
            atomics.load(f, "i64", f.gep(pool, STEP + 8 * k), "monotonic") for k in range(STEP_WORDS + 5)
        )
        flush = atomics.load(f, "i64", f.gep(pool, STEP_FLUSH), "monotonic")
        w.until(f.cmp("uge", slot, limit))
        chunk, less = f.var("i64", chunks - left), f.var("i64", 1)
        with f.if_(f.cmp("sle", chunks, PLACED_CHUNKS)):
            place = f.div(slot * chunks, limit, signed=False)
            later = f.and_(left, f.shl(f.i64(-1), place))
            mine = f.select(f.cmp("ne", later, 0), later, left)
            chunk.set(f.intrinsic("llvm.cttz.i64", "i64", [mine, f.const("i1", 1)]))
            less.set(f.and_(mine, f.i64(0) - mine))
        _, taken = atomics.compare_exchange(f, f.gep(pool, TICKET), ticket, ticket - less.get(), "acq_rel", "monotonic")
        with f.if_(taken):
            begin = first + chunk.get() * grain
            end = f.min_(begin + grain, first + tiles)
            # a chunk of a run that was aborted only counts as done
            with f.if_(f.cmp("eq", _aborted(f, abort), 0)), subnormals.flushing(f, isa, flush):
                _call(f, kernel, buffers, dims, begin, end, scratch + slot * stride)
            count.set(count.get() + 1)
    f.ret(count.get())
    return name


def _aborted(f: Fn, abort: Val) -> Val:
    """What the abort flag holds; 0 where the run has none."""
    found = f.var("i32", 0)
    with f.if_(f.cmp("ne", abort, 0)):
        found.set(atomics.load(f, "i32", atomics.pointer(f, abort), "monotonic"))
    return found.get()


def _call(f: Fn, kernel: Val, buffers: Val, dims: Val, begin: Val, end: Val, scratch: Val) -> None:
    at = [atomics.pointer(f, address) for address in (kernel, buffers, dims, scratch)]
    f.call_pointer(at[0], "void", [at[1], at[2], begin, end, at[3]])


def _give_way(f: Fn, pool: Val) -> None:
    function = f.load("ptr", f.gep(pool, POOL_YIELD))
    with f.if_(f.cmp("ne", function, f.zero("ptr"))):
        f.call_pointer(function, "i32", [])


def _futex(f: Fn, pool: Val, operation: int, value: Val, mask: Val) -> None:
    """Sleep while the ticket's upper half is ``value``, or wake ``value`` sleepers whose mask has a common bit."""
    function = f.load("ptr", f.gep(pool, POOL_SYSCALL))
    number = system.futex()[1]
    word = f.gep(pool, TICKET + 4)  # both architectures are little-endian
    given = f"i64 {number}, ptr {word.name}, i32 {operation}, i32 {value.name}, ptr null, ptr null, i32 {mask.name}"
    f.emit("i64", f"call i64 (i64, ...) {function.name}({given})")


def _emit_wake(m: Module, symbol: str) -> str:
    """``void wake(pool, threads, work, ns)``: wake the sleepers among the first ``threads - 1`` workers, if it pays.

    Waking costs the caller some microseconds, and a worker comes tens of microseconds later. It pays where much work
    is left, and where runs follow each other closely: workers stay awake from one to the next then.
    """
    name, away = f"{symbol}_wake", f"{symbol}_apart"
    emit_apart(m, away, PLACES)
    f = m.function(name, [("i64", n) for n in ("pool", "threads", "work", "now")], internal=True, optimized=False)
    pool = atomics.pointer(f, f.args["pool"])
    if system.futex()[1]:
        sleepers = atomics.load(f, "i64", f.gep(pool, SLEEPERS), "seq_cst")
        pause = f.args["now"] - f.load("i64", f.gep(pool, LAST_END))
        often = f.cmp("ult", pause, f.load("i64", f.gep(pool, SPIN_IDLE)))
        much = f.cmp("uge", f.args["work"], f.load("i64", f.gep(pool, WAKE_WORK)))
        with f.if_(f.and_(f.cmp("ne", sleepers, 0), f.or_(often, much))):
            # the bit of a worker is its slot, of those past 31 the last one; bit 0 belongs to nobody
            bits = f.sub(f.shl(f.i64(1), f.min_(f.args["threads"], 32)), 1)
            f.call(away, "void", [f.load("ptr", f.gep(pool, POOL_SYSCALL)), pool])
            _futex(f, pool, _FUTEX_WAKE, f.const("i32", 2**31 - 1), f.cast(bits, "i32"))
    f.ret()
    return name


def _emit_worker(m: Module, symbol: str, isa: Isa) -> None:
    share = _emit_share(m, symbol, isa)
    f = m.function(symbol, [("i64", "pool"), ("i64", "slot")], "i64", optimized=False)
    pool, slot = atomics.pointer(f, f.args["pool"]), f.args["slot"]
    can_sleep = system.futex()[1] != 0
    result = f.var("i64", 0)
    since = f.var("i64", 0)  # when there was last something to do; 0 while there is
    with f.while_() as w:
        w.until(f.cmp("ne", atomics.load(f, "i64", f.gep(pool, STOP), "acquire"), 0))
        before = atomics.load(f, "i64", f.gep(pool, TICKET), "acquire")
        count = f.call(share, "i64", [f.args["pool"], slot])
        with f.if_else(f.cmp("ne", count, 0)) as other:
            atomics.modify(f, "add", f.gep(pool, DONE), count + _HALF, "release")
            since.set(0)
            other()
            for _ in range(8):
                atomics.pause(f, isa)
            now = _now(f, pool)
            with f.if_(f.cmp("eq", since.get(), 0)):
                since.set(now)
            waited = now - since.get()
            spin, idle, busy = (f.load("i64", f.gep(pool, word)) for word in (SPIN, SPIN_IDLE, SPIN_BUSY))
            running = atomics.load(f, "i64", f.gep(pool, LOCK), "monotonic")
            patience = f.select(f.cmp("ne", running, 0), busy, idle)  # during a run the next big step may come soon
            if can_sleep:  # a run for fewer threads has nothing for this one
                limit = atomics.load(f, "i64", f.gep(pool, STEP_LIMIT), "monotonic")
                patience = f.select(f.cmp("ult", slot, limit), patience, f.i64(0))
            with f.if_(f.cmp("ugt", waited, spin)):
                _give_way(f, pool)
            with f.if_(f.cmp("ugt", waited, patience)):
                since.set(0)
                if can_sleep:
                    _emit_sleep(f, pool, slot, before)
                else:
                    result.set(1)
            if not can_sleep:
                w.until(f.cmp("ne", result.get(), 0))
    f.ret(result.get())


def _emit_sleep(f: Fn, pool: Val, slot: Val, before: Val) -> None:
    """Sleep until the ticket is another opening than ``before``, which had nothing for this worker.

    The system compares once more before it lets a thread sleep.
    """
    sleepers = f.gep(pool, SLEEPERS)
    atomics.modify(f, "add", sleepers, f.i64(1), "seq_cst")
    mask = f.shl(f.i64(1), f.min_(slot, 31))
    _futex(f, pool, _FUTEX_WAIT, f.cast(f.lshr(before, 32), "i32"), f.cast(mask, "i32"))
    atomics.modify(f, "sub", sleepers, f.i64(1), "seq_cst")


def _emit_run(m: Module, symbol: str, isa: Isa, lists: bool) -> None:
    wake = _emit_wake(m, symbol)
    together = _emit_together(m, symbol, isa, wake)
    f = m.function(symbol, [("i64", "program"), ("i64", "call")], "i64")
    program, call = (atomics.pointer(f, f.args[name]) for name in ("program", "call"))
    workspace = atomics.pointer(f, _word(f, call, WORKSPACE))
    reached = f.var("i64", -1)
    fits = (_emit_bases_of_lists if lists else _emit_bases_of_table)(f, program, call, workspace)
    with f.if_(fits):
        f.store(f.i64(0), workspace)
        f.store(_word(f, call, ARENA), f.gep(workspace, 8))
        bases = _word(f, program, BASES)
        block = f.gep(workspace, bases, "i64")
        entries = atomics.pointer(f, _word(f, program, ENTRIES))
        with f.loop(0, _word(f, program, ENTRY_COUNT)) as k:
            entry = f.gep(entries, k * 16)
            base = f.load("i64", f.gep(workspace, f.load("i64", entry), "i64"))
            f.store(base + f.load("i64", f.gep(entry, 8)), f.gep(block, k, "i64"))
        helpers = _emit_join(f, wake, program, _word(f, call, POOL), _word(f, call, THREADS))
        with subnormals.flushing(f, isa, _word(f, program, FLUSH)):
            _emit_steps(f, program, call, block, helpers, together, reached)
        _emit_leave(f, helpers)
    f.ret(reached.get())


def _emit_bases_of_table(f: Fn, program: Val, call: Val, workspace: Val) -> Val:
    """Copy the bases of inputs and outputs; returns whether there are as many as there should be."""
    count = _word(f, call, GIVEN_COUNT)
    fits = f.cmp("eq", count + 2, _word(f, program, BASES))
    with f.if_(fits):
        given = atomics.pointer(f, _word(f, call, GIVEN))
        with f.loop(0, count) as k:
            f.store(f.load("i64", f.gep(given, k, "i64")), f.gep(workspace, k + 2, "i64"))
    return fits


def _emit_bases_of_lists(f: Fn, program: Val, call: Val, workspace: Val) -> Val:
    """Read the bases out of Python's own objects; false where those are not what they should be."""
    given = atomics.pointer(f, _word(f, call, GIVEN))
    items = f.load("ptr", f.gep(given, objects.LIST_ITEMS))
    pair = [f.load("ptr", f.gep(items, 8 * k)) for k in range(2)]
    list_type = f.load("i64", f.gep(given, objects.TYPE))
    array_type = _word(f, program, ARRAY_TYPE)
    are_lists = f.and_(*(f.cmp("eq", f.load("i64", f.gep(each, objects.TYPE)), list_type) for each in pair))
    good = f.var("i1", 0)
    with f.if_(are_lists):
        counts = [f.load("i64", f.gep(each, objects.LIST_SIZE)) for each in pair]
        good.set(f.cmp("eq", counts[0] + counts[1] + 2, _word(f, program, BASES)))
        with f.if_(good.get()):
            first = f.i64(2)
            for each, count in zip(pair, counts):
                arrays = f.load("ptr", f.gep(each, objects.LIST_ITEMS))
                with f.loop(0, count) as k:
                    array = f.load("ptr", f.gep(arrays, k, "i64"))
                    is_array = f.cmp("eq", f.load("i64", f.gep(array, objects.TYPE)), array_type)
                    flags = f.and_(f.load("i32", f.gep(array, objects.ARRAY_FLAGS)), objects.PLAIN)
                    good.set(f.and_(good.get(), f.and_(is_array, f.cmp("eq", flags, objects.PLAIN))))
                    f.store(f.load("i64", f.gep(array, objects.ARRAY_DATA)), f.gep(workspace, first + k, "i64"))
                first = first + count
    return good.get()


def _emit_join(f: Fn, wake: str, program: Val, pool_at: Val, threads: Val) -> Val:
    """The pool if this run may use it now, else 0; its sleepers are woken at once, for they take long to come."""
    mine = f.var("i64", 0)
    with f.if_(f.cmp("ne", pool_at, 0)):
        pool = atomics.pointer(f, pool_at)
        _, got = atomics.compare_exchange(f, f.gep(pool, LOCK), f.i64(0), 1, "acquire", "monotonic")
        with f.if_(got):
            mine.set(pool_at)
            atomics.store(f, threads, f.gep(pool, STEP_LIMIT), "monotonic")
            ticket = atomics.load(f, "i64", f.gep(pool, TICKET), "monotonic")
            atomics.store(f, f.or_(ticket, _LOW) + 1, f.gep(pool, TICKET), "seq_cst")
            now = _now(f, pool)
            f.call(wake, "void", [pool_at, threads, _word(f, program, HEAD_WORK), now])
    return mine.get()


def _emit_leave(f: Fn, pool_at: Val) -> None:
    with f.if_(f.cmp("ne", pool_at, 0)):
        pool = atomics.pointer(f, pool_at)
        f.store(_now(f, pool), f.gep(pool, LAST_END))
        atomics.store(f, f.i64(0), f.gep(pool, LOCK), "release")


def _emit_steps(f: Fn, program: Val, call: Val, block: Val, helpers: Val, together: str, reached: Var) -> None:
    """All steps in order, until the end or the abort flag."""
    back = _emit_turn(f, program)
    limit, abort, stamps = (_word(f, call, k) for k in (THREADS, ABORT, TIMES))
    steps, table = _word(f, program, STEPS), atomics.pointer(f, _word(f, program, TABLE))
    clock = f.load("ptr", f.gep(program, 8 * CLOCK))
    block_at = f.emit("i64", f"ptrtoint ptr {block.name} to i64")
    scratch = _word(f, call, WORKSPACE) + _word(f, program, SCRATCH)
    stride, flush = _word(f, program, STRIDE), _word(f, program, FLUSH)
    index = f.var("i64", 0)
    with f.while_() as w:
        w.only(f.cmp("slt", index.get(), steps))
        w.until(f.cmp("ne", _aborted(f, abort), 0))
        step = f.gep(table, index.get() * (8 * STEP_WORDS))
        words = [_word(f, step, k) for k in range(STEP_WORDS)]
        words[BUFFERS] = block_at + words[BUFFERS]
        kernel, buffers, dims, tiles, grain, chunks, _, rounds, slice_ = words
        timed = f.cmp("ne", stamps, 0)
        times = f.gep(atomics.pointer(f, stamps), index.get() * (8 * TIME_WORDS))
        with f.if_(timed):
            f.store(system.emit_now(f, clock), times)
        threads = f.var("i64", 1)
        with f.if_else(f.and_(f.cmp("ne", helpers, 0), f.cmp("sgt", chunks, 1))) as other:
            threads.set(f.call(together, "i64", [helpers, *words, scratch, stride, limit, abort, flush]))
            other()
            with f.if_else(f.and_(back, f.and_(f.cmp("ne", slice_, 0), f.cmp("eq", abort, 0)))) as forwards:
                left = f.var("i64", tiles)
                with f.while_() as go:
                    go.only(f.cmp("sgt", left.get(), 0))
                    end = left.get()
                    left.set(f.max_(end - slice_, 0))
                    _call(f, kernel, buffers, dims, left.get(), end, scratch)
                forwards()
                # a run that may be aborted goes by chunks here too
                whole = tiles * rounds
                part = f.select(f.cmp("eq", abort, 0), whole, f.max_(grain, 1))
                begin = f.var("i64", 0)
                with f.while_() as go:
                    go.only(f.cmp("slt", begin.get(), whole))
                    go.until(f.cmp("ne", _aborted(f, abort), 0))
                    end = f.min_(begin.get() + part, whole)
                    _call(f, kernel, buffers, dims, begin.get(), end, scratch)
                    begin.set(end)
        with f.if_(timed):
            f.store(system.emit_now(f, clock), f.gep(times, 8))
            f.store(threads.get(), f.gep(times, 16))
        index.set(index.get() + 1)
    reached.set(index.get())


def _emit_turn(f: Fn, program: Val) -> Val:
    """Whether this run goes backwards: every second one of a program with slices."""
    back = f.var("i1", 0)
    with f.if_(f.cmp("ne", _word(f, program, TURNS), 0)):
        before = atomics.modify(f, "add", f.gep(program, 8 * RUNS), f.i64(1), "monotonic")
        back.set(f.cmp("ne", f.and_(before, 1), 0))
    return back.get()


def _emit_together(m: Module, symbol: str, isa: Isa, wake: str) -> str:
    """``i64 together(pool, step…, scratch, stride, threads, abort, flush)``: open a step, round by round, and see it
    through; returns how many took part."""
    share = _emit_share(m, symbol, isa)
    name = f"{symbol}_together"
    step = ("kernel", "buffers", "dims", "tiles", "grain", "chunks", "work", "rounds", "slice")
    words = (*step, "scratch", "stride", "threads", "abort")
    names = ("pool", *words, "flush")
    f = m.function(name, [("i64", n) for n in names], "i64", internal=True, optimized=False)
    pool_at, chunks, rounds = (f.args[n] for n in ("pool", "chunks", "rounds"))
    pool = atomics.pointer(f, pool_at)
    for k, word in enumerate(words):
        atomics.store(f, f.args[word], f.gep(pool, STEP + 8 * k), "monotonic")
    atomics.store(f, f.args["flush"], f.gep(pool, STEP_FLUSH), "monotonic")
    free = f.select(f.cmp("sle", chunks, PLACED_CHUNKS), f.shl(f.i64(1), chunks) - 1, chunks)
    most, number = f.var("i64", 0), f.var("i64", 0)
    with f.while_() as each:
        atomics.store(f, number.get() * f.args["tiles"], f.gep(pool, STEP_FIRST), "monotonic")
        atomics.store(f, f.i64(0), f.gep(pool, DONE), "monotonic")
        ticket = atomics.load(f, "i64", f.gep(pool, TICKET), "monotonic")
        atomics.store(f, f.or_(ticket, _LOW) + 1 + free, f.gep(pool, TICKET), "seq_cst")
        start = _now(f, pool)
        with f.if_(f.cmp("eq", number.get(), 0)):
            f.call(wake, "void", [pool_at, f.args["threads"], f.args["work"], start])
        mine = f.call(share, "i64", [pool_at, f.i64(0)])
        end = _now(f, pool)
        # others need about as long for a chunk as this thread, unless they were suspended
        patience = f.div(end - start, f.max_(mine, 1), signed=False) * 2 + _PATIENCE_NS
        done = f.var("i64", 0)
        with f.while_() as w:
            done.set(atomics.load(f, "i64", f.gep(pool, DONE), "acquire"))
            w.until(f.cmp("eq", _low(f, done.get()), chunks - mine))
            atomics.pause(f, isa)
            with f.if_(f.cmp("ugt", _now(f, pool) - end, patience)):
                _give_way(f, pool)
        most.set(f.max_(most.get(), f.lshr(done.get(), 32)))
        number.set(number.get() + 1)
        each.until(f.cmp("sge", number.get(), rounds))
        each.until(f.cmp("ne", _aborted(f, f.args["abort"]), 0))
    f.ret(most.get() + 1)
    return name
