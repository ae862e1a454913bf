"""Code and memory that are given back: many sessions, many shapes, forks, exits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ranvier

MODEL = Path(ranvier.__file__).parent / "models" / "digits.onnx"
needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")


def _run(source: str) -> str:
    """A fresh interpreter: what other tests left behind does not count."""
    prelude = """
        import gc, os, sys
        import numpy as np
        import ranvier as rv

        def megabytes():
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

        MODEL = sys.argv[1]
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-c", script, str(MODEL)], capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr, done.stderr[-2000:]
    return done.stdout


@needs_proc
def test_two_hundred_sessions_leave_memory_flat() -> None:
    out = _run("""
        image = np.zeros((1, 1, 8, 8), np.float32)
        sizes = []
        for turn in range(200):
            with rv.load(MODEL) as session:
                session.run({"image": image})
            if turn in (49, 199):
                sizes.append(megabytes())
        print(sizes[1] - sizes[0])
    """)
    assert float(out) < 8


@needs_proc
def test_five_hundred_shapes_leave_memory_flat() -> None:
    out = _run("""
        session = rv.load(MODEL)
        order = np.random.default_rng(0).permutation(np.arange(1, 501))
        sizes = []
        for turn, batch in enumerate(order):
            session.run({"image": np.zeros((int(batch), 1, 8, 8), np.float32)})
            if turn in (149, 499):
                sizes.append(megabytes())
        print(sizes[1] - sizes[0])
    """)
    assert float(out) < 40


def test_other_shapes_need_hardly_any_new_code() -> None:
    """Sizes are arguments of the code; only another remainder of rows can ask for a kernel that is not there yet."""
    out = _run("""
        from ranvier.codegen.llvm import library

        session = rv.load(MODEL)

        def kernels_for(batches):
            before = library.counts.compiled + library.counts.read
            for batch in batches:
                session.run({"image": np.zeros((batch, 1, 8, 8), np.float32)})
            return library.counts.compiled + library.counts.read - before

        print(kernels_for(range(12, 120, 12)), kernels_for(range(126, 366, 12)))
    """)
    first, later = map(int, out.split())
    assert first > 5
    assert later <= 3


def test_many_threads_and_sessions_agree() -> None:
    out = _run("""
        import concurrent.futures

        rng = np.random.default_rng(1)
        images = [rng.random((n, 1, 8, 8), np.float32) for n in (1, 3, 16, 33)]
        sessions = [rv.load(MODEL, threads=t) for t in (1, 2, 2)]
        expected = [sessions[0].run({"image": x}) for x in images]

        def work(k):
            session, x, y = sessions[k % 3], images[k % 4], expected[k % 4]
            found = session.run({"image": x})
            return all(np.allclose(found[name], y[name], rtol=1e-5, atol=1e-6) for name in y)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(work, range(800))))
    """)
    assert int(out) == 800


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_runs_and_ends() -> None:
    out = _run("""
        import warnings
        warnings.simplefilter("ignore")
        image = np.ones((64, 1, 8, 8), np.float32)
        session = rv.load(MODEL, threads=2)
        expected = session.run({"image": image})
        child = os.fork()
        if child == 0:
            try:
                found = session.run({"image": image})
                other = rv.load(MODEL, threads=2).run({"image": image})
                same = all(np.array_equal(found[k], v) and np.array_equal(other[k], v) for k, v in expected.items())
                os._exit(0 if same else 3)
            except BaseException:
                os._exit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        session.run({"image": image})
    """)
    assert int(out) == 0


def test_the_interpreter_ends_with_sessions_alive() -> None:
    assert "done" in _run("""
        import threading

        session = rv.load(MODEL, threads=2)
        image = np.ones((64, 1, 8, 8), np.float32)
        stop = threading.Event()

        def forever():
            while not stop.is_set():
                session.run({"image": image})

        threading.Thread(target=forever, daemon=True).start()
        session.run({"image": image})
        print("done")
    """)


def test_the_number_of_threads_changes_only_rounding() -> None:
    out = _run("""
        image = np.random.default_rng(2).random((200, 1, 8, 8), np.float32)
        one, two, four = (rv.load(MODEL, threads=t).run({"image": image}) for t in (1, 2, 4))
        print(max(float(np.abs(one[k] - other[k]).max()) for other in (two, four) for k in one))
    """)
    assert float(out) < 1e-6
