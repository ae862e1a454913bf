"""Nothing stays behind: no memory, threads or open files after good and failing loads; no half-written files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

import ranvier as rv
from ranvier.errors import CannotWrite, RanvierError
from ranvier.formats import onnx as onnx_format
from tests.faults.models import model, zeros
from tests.faults.worker import rss

CYCLES = 300
GROWTH = 30 << 20
PROC = Path("/proc/self/fd")

pytestmark = pytest.mark.skipif(not PROC.exists(), reason="needs /proc to look at its own process")


def linear() -> ModelProto:
    """Weights of 1 MB: 300 of them that stay behind would be seen."""
    made = model("linear (float[n, 500] x) => (float[n, 500] y) { h = MatMul(x, w) y = Relu(h) }")
    weights = np.random.default_rng(0).standard_normal((500, 500)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return made


@contextlib.contextmanager
def nothing_stays() -> Iterator[Callable[[], None]]:
    """Compares memory, threads and open files at the first call of the given function and at the end of the block."""
    before: dict[str, int] = {}

    def look() -> dict[str, int]:
        gc.collect()
        with contextlib.suppress(AttributeError):  # what is free goes back to the system, where the C library can
            ctypes.CDLL(None).malloc_trim(0)
        return {"rss": rss(), "threads": threading.active_count(), "files": len(list(PROC.iterdir()))}

    yield lambda: before.update(look())
    after = look()
    assert after["rss"] - before["rss"] < GROWTH, f"{after['rss'] - before['rss']:,} bytes stayed in memory"
    assert after["threads"] <= before["threads"]
    assert after["files"] <= before["files"]


def repeat(action: Callable[[], None]) -> None:
    with nothing_stays() as start:
        for cycle in range(CYCLES):
            if cycle == CYCLES // 10:  # caches are filled by now
                start()
            action()


@pytest.mark.parametrize("closed", [True, False])
def test_loading_and_running(tmp_path: Path, closed: bool) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(linear().SerializeToString())
    x = zeros(8, 500)

    def cycle() -> None:
        session = rv.load(path)
        session.run({"x": x})
        session.run({"x": x[:3]})
        if closed:
            session.close()

    repeat(cycle)


def test_many_shapes_in_one_session() -> None:
    with rv.load(linear()) as session:
        sizes = itertools.count(1)

        def cycle() -> None:
            session.run({"x": zeros(next(sizes), 500)})
            session.trim()

        repeat(cycle)


def test_failing_loads(tmp_path: Path) -> None:
    good = linear().SerializeToString()
    broken = linear()
    broken.graph.node[0].input[0] = "ghost"
    unknown = linear()
    unknown.graph.node[0].op_type = "Teleport"
    (tmp_path / "truncated.onnx").write_bytes(good[:-100_000])
    (tmp_path / "broken.onnx").write_bytes(broken.SerializeToString())
    (tmp_path / "unknown.onnx").write_bytes(unknown.SerializeToString())

    def cycle() -> None:
        for source in (tmp_path / "truncated.onnx", tmp_path / "broken.onnx", tmp_path / "unknown.onnx"):
            with pytest.raises(RanvierError):
                rv.load(source)
        with pytest.raises(RanvierError):
            rv.load(io.BytesIO(good[:500_000]))

    repeat(cycle)


def test_failing_runs() -> None:
    text = "g (float[n] x, int64[k] i) => (y) { a = Concat <axis = 0> (x, x) b = Neg(a) y = Gather(b, i) }"
    with rv.load(model(text)) as session:
        inputs = {"x": zeros(500_000), "i": np.array([10**7])}

        def cycle() -> None:
            with pytest.raises(RanvierError):
                session.run(inputs)

        repeat(cycle)


def test_memory_limits_hold_no_references() -> None:
    """Counting live tensors must not keep them alive."""
    text = "g (float[n] x, int64[k] s) => (y) { a = Reshape(x, s) y = Neg(a) }"
    with rv.load(model(text), limits=rv.Limits(memory_bytes=1 << 30)) as session:
        repeat(lambda: session.run({"x": zeros(500_000), "s": np.array([-1])}) and None)


# -- files: wholly or not at all ------------------------------------------------------------------------------------


def save_plain(path: Path) -> None:
    onnx_format.save(onnx_format.read(linear()), path)


def save_external(path: Path) -> None:
    onnx_format.save(onnx_format.read(linear()), path, external_data=True)


def save_trace(path: Path) -> None:
    with rv.load(linear()) as session:
        with session.profile() as profiler:
            session.run({"x": zeros(1, 500)})
        profiler.save(path)


SAVERS = [save_plain, save_external, save_trace]


class FullDisk:
    """``os.fdopen`` on a disk with room for ``room`` bytes in all."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.real = os.fdopen

    def __call__(self, handle: int, mode: str = "r", **more: Any) -> Any:
        file = self.real(handle, mode, **more)
        write = file.write

        def limited(data: bytes) -> int:
            if len(data) > self.room:
                write(data[: self.room])
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= len(data)
            return int(write(data))

        return _Proxy(file, limited)


class _Proxy:
    def __init__(self, file: Any, write: Callable[[bytes], int]) -> None:
        self._file = file
        self.write = write

    def __enter__(self) -> _Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("room", [0, 100, 1_000_050])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None], room: int
) -> None:
    target = tmp_path / "out.onnx"
    save(target)
    if room and save is save_trace:
        room = 100
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fdopen", FullDisk(room))
    with pytest.raises(CannotWrite, match=r"cannot write .*out\.onnx.*: No space left on device"):
        save(target)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("save", SAVERS)
def test_a_full_disk_leaves_nothing_where_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(os, "fdopen", FullDisk(50))
    with pytest.raises(CannotWrite):
        save(tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", SAVERS)
def test_weights_that_cannot_be_renamed_leave_the_old_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None]
) -> None:
    target = tmp_path / "out.onnx"
    save(target)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CannotWrite, match="Permission denied"):
        save(target)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("where", ["missing/out.onnx", "file/out.onnx", "folder", "n" * 300, "a\0b"])
def test_places_where_nothing_can_be_written(tmp_path: Path, save: Callable[[Path], None], where: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(CannotWrite, match="cannot write"):
        save(tmp_path / where)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize("save", SAVERS)
def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None]) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):  # root may write anywhere

        def refuse(*_: Any) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CannotWrite, match="Permission denied"):
        save(folder / "out.onnx")
    assert list(folder.iterdir()) == []


def test_what_is_written_is_complete_and_has_ordinary_permissions(tmp_path: Path) -> None:
    for save in SAVERS:
        save(tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o666 & ~mask}
    assert json.loads((tmp_path / "out").read_text())["traceEvents"]


def test_a_profile_that_failed_writes_no_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with rv.load(linear()) as session, pytest.raises(RanvierError), session.profile(trace):
        session.run({"x": zeros(1, 7)})
    assert list(tmp_path.iterdir()) == []
