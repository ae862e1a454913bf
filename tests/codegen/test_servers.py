"""Processes that compile: the same code as inside, and what happens when they die, hang, lie or cannot be started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ranvier import logs
from ranvier.codegen.llvm import compile_server, compiler, image, isa, library, servers, toolchain
from ranvier.codegen.llvm.servers import Rejected, Servers, Unavailable
from ranvier.errors import InvalidConfig, KernelError
from tests.codegen.test_cache import adds, call
from tests.codegen.test_compiler import function

HOST = isa.host()
pytestmark = pytest.mark.skipif(compiler._obstacle() is not None, reason="no process can be started")

# servers that do something else; each reads its first request, if any, after greeting
_HELLO = f"import os, signal, sys, time\nos.write(1, {compile_server.GREETING!r})\n"
_FAKES = {
    "ends at once": "pass",
    "greets wrongly": "import os, time\nos.write(1, b'good morning')\ntime.sleep(60)",
    "ends during a request": _HELLO + "os.read(0, 9)",
    "is killed during a request": _HELLO + "os.read(0, 9)\nos.kill(os.getpid(), signal.SIGKILL)",
    "answers nonsense": _HELLO + "os.read(0, 9)\nos.write(1, b'x' * 1000)\ntime.sleep(60)",
    "answers half": _HELLO
    + f"os.read(0, 9)\nos.write(1, {compile_server.REPLY.pack(compile_server.GREETING, 0, 99)!r})",
}


@pytest.fixture
def own(tmp_path, monkeypatch) -> Iterator[Callable[..., Servers]]:
    """Servers of a test's own, gone with it; nothing is remembered of what went wrong."""
    made: list[Servers] = []

    def make(code: str | None = None, most: int = 2, **settings: float) -> Servers:
        argv = servers.command(compiler._library()) if code is None else [sys.executable, "-I", "-S", "-c", code]
        made.append(Servers(argv, most, **settings))
        return made[-1]

    monkeypatch.setenv("RANVIER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(compiler.VARIABLE, compiler.PROCESS)
    monkeypatch.setattr(compiler, "_given_up", False)
    monkeypatch.setattr(logs, "_said", set())
    yield make
    for each in made:
        each.close()


def request(text: str = function(), want: int = toolchain.OBJECT) -> bytes:
    return servers.request(text, "", HOST.cpu, HOST.features, want)


def alive(pid: int) -> bool:
    """Does a process exist that is no zombie?"""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(some: Servers) -> list[int]:
    return [each.process.pid for each in some._all]


def soon(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    return condition()


# -- what is compiled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [False, True])
def test_results_of_both_ways(own, monkeypatch, reduced):
    """Three sums over a table, written so that strength reduction has something to do."""
    text = """
define i64 @f(ptr %p, i64 %n) nounwind {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %sum = phi i64 [ 0, %entry ], [ %more, %loop ]
  %k = mul i64 %i, 24
  %at = getelementptr i8, ptr %p, i64 %k
  %v = load i64, ptr %at
  %w = mul i64 %v, %i
  %more = add i64 %sum, %w
  %next = add i64 %i, 1
  %c = icmp slt i64 %next, %n
  br i1 %c, label %loop, label %end
end:
  ret i64 %more
}
"""
    text = (toolchain.REDUCE.decode() if reduced else "") + text
    numbers = (ctypes.c_int64 * 30)(*[7 * k * k - 5 for k in range(30)])
    expected = sum(numbers[3 * k] * k for k in range(10))
    for way in compiler.WAYS:
        monkeypatch.setenv(compiler.VARIABLE, way)
        assert compiler.way() == way
        code = compiler.compile_object(text, HOST)
        linked = compiler.link([code], ["f"])
        found = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(linked["f"])
        assert found(ctypes.addressof(numbers), 10) == expected
        assert "f:" in compiler.assembly(text, HOST)


def test_reduction_is_a_matter_of_the_text(own):
    """The only loop of this function has a product in it, or, reduced, a second number that grows."""
    text = """
define void @f(ptr %p, i64 %n, i64 %step) nounwind {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %k = mul i64 %i, %step
  %at = getelementptr i8, ptr %p, i64 %k
  store volatile i64 0, ptr %at
  %next = add i64 %i, 1
  %c = icmp slt i64 %next, %n
  br i1 %c, label %loop, label %end
end:
  ret void
}
"""
    x86 = next(each for each in isa.TABLE if each.triple == "x86_64" and each.name == "portable")
    assert "imul" in compiler.assembly(text, x86)
    assert "imul" not in compiler.assembly(toolchain.REDUCE.decode() + text, x86)


def test_what_llvm_rejects(own):
    with pytest.raises(KernelError, match="does not parse"):
        compiler.compile_object("define void @f() { nonsense }", HOST)
    some = own()
    for _ in range(3):  # the same server goes on
        with pytest.raises(Rejected, match="not valid"):
            some.compile(request("define i64 @f() {\n  %v = add i64 %w, 1\n  %w = add i64 %v, 1\n  ret i64 %w\n}"))
    before = pids(some)
    assert some.compile(request()) and pids(some) == before and len(before) == 1


def test_other_architectures(own):
    arm = isa.named("neon", "aarch64")
    assert compiler.compile_object(function(), arm)[18:20] == b"\xb7\x00"  # EM_AARCH64
    assert compiler.compile_object(function(), HOST)  # and the same server still knows the host


def test_eight_threads(own):
    some = own(most=3)
    texts = [function(f"f{k}", k) for k in range(40)]
    expected = [some.compile(request(text)) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: some.compile(request(text)), texts)) == expected
    assert 1 <= len(pids(some)) <= 3


def test_a_long_text(own):
    """More than a connection holds at a time, both ways."""
    text = "\n".join(function(f"f{k}", k) for k in range(3000))
    assert len(own().compile(request(text))) > 200_000


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", _FAKES)
def test_a_server_that(own, what):
    some = own(_FAKES[what])
    with pytest.raises(Unavailable, match="the compile server failed"):
        some.compile(request())
    assert not pids(some)


def test_a_server_that_hangs(own):
    started = time.monotonic()
    with pytest.raises(Unavailable, match="did not answer within"):
        own("import time\ntime.sleep(60)", limit=0.2).compile(request())
    with pytest.raises(KernelError, match="did not answer within"):  # it greeted: LLVM is at it
        own(_HELLO + "time.sleep(60)", limit=0.5).compile(request())
    assert time.monotonic() - started < 30


def test_llvm_that_crashes(own):
    """It would take this process with it, so nobody tries inside."""
    with pytest.raises(KernelError, match="LLVM fails"):
        own(_HELLO + "os.read(0, 9)\nos.abort()").compile(request())


def test_killed_between_and_during_requests(own):
    some = own(most=1)
    expected = some.compile(request())
    os.kill(pids(some)[0], signal.SIGKILL)
    assert some.compile(request()) == expected  # by another one
    os.kill(pids(some)[0], signal.SIGSTOP)
    victim = pids(some)[0]
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()  # while it has the request
    assert some.compile(request()) == expected
    assert victim not in pids(some) and not alive(victim)


@pytest.mark.parametrize("executable", ["", "/nowhere/python3", sys.executable + "-config", "/usr/bin/application"])
def test_no_interpreter(own, monkeypatch, caplog, executable):
    monkeypatch.setattr(sys, "executable", executable)
    compiler._obstacle.cache_clear()
    try:
        for _ in range(2):
            compiler.prepare(2)
            assert compiler.compile_object(function(), HOST)
        assert compiler.way() == compiler.INSIDE
    finally:
        compiler._obstacle.cache_clear()
    assert caplog.text.count("compiled inside this process") == 1


def test_frozen(own, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.delenv(compiler.VARIABLE)
    compiler._obstacle.cache_clear()
    try:
        assert compiler.way() == compiler.INSIDE
    finally:
        compiler._obstacle.cache_clear()
    assert not logs._said  # nobody asked for it


@pytest.mark.skipif(not image.supported(), reason="inside is what one gets here anyway")
def test_kernels_in_spite_of_all(own, monkeypatch, caplog):
    """A server that always dies costs one warning; what was compiled otherwise is not kept under the wrong name."""
    broken = own(_FAKES["is killed during a request"])
    monkeypatch.setattr(servers, "of", lambda argv, most: broken)
    specs = [adds(k) for k in range(900, 906)]
    found = library.kernels(specs, HOST)
    assert [call(found[s], 1) for s in specs] == [k + 1 for k in range(900, 906)]
    assert caplog.text.count("compiled inside this process") == 1
    assert compiler.way() == compiler.INSIDE


def test_unknown_ways(own, monkeypatch):
    monkeypatch.setenv(compiler.VARIABLE, "proces")
    with pytest.raises(InvalidConfig, match=r"RANVIER_COMPILER.*'proces'.*process"):
        compiler.compile_object(function(), HOST)


# -- their life -----------------------------------------------------------------------------------------------------


def test_idle_servers_end(own):
    some = own(keep=0.3)
    some.prepare(2)
    mine = pids(some)
    assert len(mine) == 2 and some.compile(request())
    assert soon(lambda: not pids(some) and not any(os.path.exists(f"/proc/{pid}") for pid in mine))  # no zombies
    assert some.compile(request())


def test_no_more_than_asked_for(own):
    some = own(most=2)
    some.prepare(1)
    assert len(pids(some)) == 1
    some.prepare(5)
    assert len(pids(some)) == 2


def test_closed(own):
    some = own()
    some.compile(request())
    mine = pids(some)
    some.close()
    assert mine and not any(alive(pid) for pid in mine)
    with pytest.raises(Unavailable, match="ending"):
        some.compile(request())


def test_interrupts_from_the_terminal_do_not_reach_them(own):
    some = own()
    some.compile(request())
    assert all(os.getsid(pid) == pid != os.getsid(0) for pid in pids(some))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forks_start_their_own(own):
    code = compiler.compile_object(function(), HOST)
    [mine] = [s for s in servers._servers.values() if s._all]
    before = pids(mine)
    child = os.fork()
    if not child:
        status = 1
        try:
            if not servers._servers and compiler.compile_object(function(), HOST) == code:
                status = 0 if not set(before) & set(pids(next(iter(servers._servers.values())))) else 2
                servers._close_all()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert compiler.compile_object(function(), HOST) == code and pids(mine) == before


_PARENT = """
import os, signal, sys, threading
from ranvier.codegen.llvm import compiler, isa, servers
compiler.prepare(2)
compiler.compile_object("define void @f() {{ ret void }}", isa.host())
print(*[s.process.pid for each in servers._servers.values() for s in each._all], flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_gone_with_the_process(own, end):
    done = subprocess.run(
        [sys.executable, "-c", _PARENT.format(end=end)], capture_output=True, text=True, timeout=60, check=False
    )
    found = [int(pid) for pid in done.stdout.split()]
    assert found and not done.stderr
    assert soon(lambda: not any(alive(pid) for pid in found))
