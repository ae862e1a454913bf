"""Text to code: errors, images against the linker, threads, memory."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ranvier.codegen.llvm import compiler, fresh_code, image, isa
from ranvier.errors import KernelError
from tests.codegen.harness import ISAS

HOST = isa.host()
needs_images = pytest.mark.skipif(not image.supported(), reason="images are not loaded on this platform")


def function(name: str = "f", scale: int = 3) -> str:
    return f"""
@{name}_table = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40], align 64
define internal i64 @{name}_helper(i64 %i) noinline nounwind {{
  %at = getelementptr inbounds i64, ptr @{name}_table, i64 %i
  %v = load i64, ptr %at
  ret i64 %v
}}
define i64 @{name}(i64 %i) nounwind {{
  %v = call i64 @{name}_helper(i64 %i)
  %r = mul i64 %v, {scale}
  ret i64 %r
}}
"""


def call(address: int, *args: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(args))(address)(*args)


def load(text: str) -> image.Loaded:
    made = image.from_object(compiler.compile_object(text, HOST))
    assert made is not None
    return image.Loaded([image.Image.from_bytes(made.to_bytes())])


def test_linked_by_llvm():
    linked = compiler.link([compiler.compile_object(function(n), HOST) for n in ("f", "g")], ["f", "g"])
    assert call(linked["f"], 2) == 90 and call(linked["g"], 3) == 120


def test_text_that_does_not_parse():
    with pytest.raises(KernelError, match="does not parse"):
        compiler.compile_object("define void @f() { nonsense }", HOST)


def test_text_that_is_not_valid():
    text = """
define i64 @f(i1 %c) {
  br i1 %c, label %a, label %b
a:
  %v = add i64 1, 2
  br label %b
b:
  ret i64 %v
}
"""
    with pytest.raises(KernelError, match="not valid"):
        compiler.compile_object(text, HOST)


@pytest.mark.parametrize("target", ISAS, ids=lambda i: i.key)
def test_what_people_read(target):
    assert "f:" in compiler.assembly(function("f"), target)


def test_threads_compile_the_same_code_at_once():
    texts = [function(f"f{k}", k) for k in range(12)] * 2
    expected = [compiler.compile_object(text, HOST) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: compiler.compile_object(text, HOST), texts))
    assert found == expected


# -- images ---------------------------------------------------------------------------------------------------------


@needs_images
def test_images_in_one_piece():
    objects = [compiler.compile_object(function(f"f{k}", k), HOST) for k in range(9)]
    images = [image.from_object(each) for each in objects]
    loaded = image.Loaded([i for i in images if i is not None])
    assert len(loaded.addresses) == 9
    for k in range(9):
        assert loaded[f"f{k}"] % 16 == 0
        assert [call(loaded[f"f{k}"], i) for i in range(4)] == [10 * k, 20 * k, 30 * k, 40 * k]


@needs_images
def test_constants_keep_their_alignment():
    text = """
@t = internal constant [16 x float] [float 1.0, float 2.0, float 3.0, float 4.0, float 5.0, float 6.0, float 7.0,
  float 8.0, float 9.0, float 10.0, float 11.0, float 12.0, float 13.0, float 14.0, float 15.0, float 16.0], align 64
define ptr @f() { ret ptr @t }
"""
    made = [image.from_object(compiler.compile_object(text.replace("@f(", f"@f{k}("), HOST)) for k in range(3)]
    loaded = image.Loaded([m for m in made if m is not None])
    for k in range(3):
        address = ctypes.CFUNCTYPE(ctypes.c_void_p)(loaded[f"f{k}"])()
        assert address % 64 == 0
        assert (ctypes.c_float * 16).from_address(address)[15] == 16.0


@needs_images
def test_calls_into_the_process():
    text = """
declare double @fmod(double, double)
declare ptr @memcpy(ptr, ptr, i64)
@power = external constant i8
define i64 @f(i64 %a, i64 %b) nounwind {
  %x = sitofp i64 %a to double
  %y = sitofp i64 %b to double
  %m = call double @fmod(double %x, double %y)
  %n = call double @fmod(double %m, double 4.0)
  %r = fptosi double %n to i64
  ret i64 %r
}
define ptr @g() { ret ptr @memcpy }
"""
    loaded = load(text)
    assert call(loaded["f"], 29, 11) == int(math.fmod(math.fmod(29, 11), 4))
    found = ctypes.CFUNCTYPE(ctypes.c_void_p)(loaded["g"])()
    copy = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)(found)
    target = ctypes.create_string_buffer(4)
    copy(target, b"abc", 3)
    assert target.value == b"abc"


@needs_images
def test_a_function_nobody_has():
    with pytest.raises(KernelError, match="no_such_function"):
        load("declare void @no_such_function()\ndefine void @f() {\n  call void @no_such_function()\n  ret void\n}")


@needs_images
def test_tables_of_functions():
    text = """
@t = internal constant [2 x ptr] [ptr @one, ptr @two]
define internal i64 @one() { ret i64 1 }
define internal i64 @two() { ret i64 2 }
define i64 @f(i64 %i) {
  %at = getelementptr ptr, ptr @t, i64 %i
  %p = load ptr, ptr %at
  %r = call i64 %p()
  ret i64 %r
}
"""
    loaded = load(text)
    assert [call(loaded["f"], i) for i in (0, 1)] == [1, 2]


@needs_images
def test_jump_tables():
    cases = "\n".join(f"    i64 {k}, label %c{k}" for k in range(12))
    bodies = "\n".join(f"c{k}:\n  %v{k} = call i64 @h(i64 {k * k + 7})\n  ret i64 %v{k}" for k in range(12))
    text = f"""
define internal i64 @h(i64 %x) noinline {{
  %y = mul i64 %x, 5
  ret i64 %y
}}
define i64 @f(i64 %i) {{
  switch i64 %i, label %other [
{cases}
  ]
other:
  ret i64 -1
{bodies}
}}
"""
    loaded = load(text)
    assert [call(loaded["f"], k) for k in range(13)] == [5 * (k * k + 7) for k in range(12)] + [-1]


@needs_images
def test_what_an_image_cannot_hold_is_left_to_the_linker():
    mutable = "@n = internal global i64 5\ndefine i64 @f() {\n  %v = load i64, ptr @n\n  %w = add i64 %v, 1\n"
    mutable += "  store i64 %w, ptr @n\n  ret i64 %w\n}"
    made = compiler.compile_object(mutable, HOST)
    assert image.from_object(made) is None
    linked = compiler.link([made], ["f"])
    assert [call(linked["f"]), call(linked["f"])] == [6, 7]
    assert image.from_object(b"not an object") is None
    foreign = next(each for each in isa.TABLE if each.triple != isa.architecture())
    assert image.from_object(compiler.compile_object(function(), foreign)) is None


def test_image_as_bytes():
    made = image.Image(b"\x90" * 70, {"f": 0, "ünïcode": 16}, [("fmod", 64)], [8, 24])
    assert image.Image.from_bytes(made.to_bytes()) == made
    with pytest.raises(struct.error):
        image.Image.from_bytes(made.to_bytes()[:10])


_ENDLESS = """
import ctypes, sys, threading, time
from ranvier.codegen.llvm import compiler, image, isa
text = 'define void @f() {\\nbr label %l\\nl:\\ncall void asm sideeffect "nop", ""()\\nbr label %l\\n}'
kept = image.Loaded([image.from_object(compiler.compile_object(text, isa.host()))])
threading.Thread(target=ctypes.CFUNCTYPE(None)(kept["f"]), daemon=True).start()
time.sleep(0.05)
"""


@needs_images
def test_threads_inside_code_when_the_interpreter_ends():
    done = subprocess.run([sys.executable, "-c", _ENDLESS], timeout=60, check=False)
    assert done.returncode == 0


@needs_images
def test_other_code_in_the_same_place():
    """What a core holds of the code that was there before is not run, whichever core wrote the new one."""
    text = "define i64 @f(i64 %i) {{\n  %r = add i64 %i, {}\n  ret i64 %r\n}}"
    made = [image.from_object(compiler.compile_object(text.format(k), HOST)) for k in range(4)]
    places = set()
    with ThreadPoolExecutor(2) as pool:
        for k in range(400):
            image_now = made[k % 4]
            assert image_now is not None
            held = image.Loaded([image_now])
            places.add(held["f"])
            assert list(pool.map(lambda i, at=held["f"]: call(at, i), range(8))) == [i + k % 4 for i in range(8)]
            assert call(held["f"], k) == k + k % 4
            del held
    assert len(places) < 400  # or nothing was tried


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64", "vax"])
def test_where_caches_of_instructions_cannot_be_told(monkeypatch, architecture):
    """Without the function that tells them LLVM links, except where they notice by themselves."""
    for module in (fresh_code, image):
        monkeypatch.setattr(module, "architecture", lambda: architecture)
    monkeypatch.setattr(fresh_code, "_cleaner", lambda: None)
    assert image.supported() is (sys.platform == "linux" and architecture == "x86_64")


@pytest.mark.skipif(isa.architecture() != "aarch64" or not image.supported(), reason="nothing is registered here")
@pytest.mark.parametrize("threads", [True, False])
def test_a_process_is_registered_beside_other_work(monkeypatch, threads):
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if not threads:
        monkeypatch.setattr(threading.Thread, "start", none_left)
    fresh_code._synchronizer.cache_clear()
    fresh_code.expect()
    answer = fresh_code._synchronizer()
    assert threads or answer.done()
    child = os.fork()
    if not child:  # where the one who was to answer does not exist
        again = fresh_code._synchronizer()
        os._exit(0 if again is not answer and again.result(10) is not None else 1)
    assert (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0) is (answer.result(10) is not None)


@needs_images
def test_memory_is_returned():
    def mappings() -> int:
        return sum(" r-xp 00000000 00:00 0" in line for line in Path("/proc/self/maps").read_text().splitlines())

    made = image.from_object(compiler.compile_object(function(), HOST))
    assert made is not None
    before = mappings()
    held = [image.Loaded([made]) for _ in range(8)]
    assert [call(each["f"], 1) for each in held] == [60] * 8
    del held
    gc.collect()
    assert mappings() <= before
