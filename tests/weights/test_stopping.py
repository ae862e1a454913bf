"""Work that nobody waits for any more ends: an error of one of many, a cancelled task, an interruption by the user."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import WeightError
from ranvier.weights import HubSource, S3Source, WeightLoader, save_safetensors
from ranvier.weights import together as together_module
from ranvier.weights.together import Stop, apart, together
from tests.weights.server import Served, serving

SECONDS = 20  # that the slow server would take


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Served]:
    """A server that sends its file in small pieces, and stops when nobody listens."""
    save_safetensors(tmp_path / "m", {"a": np.zeros(100_000, np.float32)})
    data = (tmp_path / "m").read_bytes()
    with serving(m__safetensors=data) as server:

        def drip(handler: Any) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            try:
                for k in range(0, len(data), len(data) // (SECONDS * 100)):
                    handler.wfile.write(data[k : k + len(data) // (SECONDS * 100)])
                    time.sleep(0.01)
            except OSError:
                handler.close_connection = True

        server.fail, server.failure = 1000, drip
        yield server


def url(server: Served) -> str:
    return f"{server.url}/m.safetensors"


def wait_for(server: Served) -> None:
    while not server.requests:
        time.sleep(0.005)


def test_an_error_of_one_stops_the_others(slow: Served, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(WeightError, match="no file"):
        WeightLoader(cache=tmp_path / "cache").preload(url(slow), tmp_path / "absent")
    assert time.monotonic() - began < SECONDS / 4


def test_an_interruption_stops_a_download(slow: Served, tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_for(slow)
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            WeightLoader(cache=tmp_path / "cache").preload(url(slow))
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < SECONDS / 4


def test_a_cancelled_task_stops_its_transfers(slow: Served, tmp_path: Path) -> None:
    loader = WeightLoader(cache=tmp_path / "cache")

    async def cancelled() -> None:
        task = asyncio.create_task(loader.aload_many(url(slow)))
        await asyncio.to_thread(wait_for, slow)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(cancelled())  # which waits for its threads
    assert time.monotonic() - began < SECONDS / 4
    slow.fail = 0
    assert loader.load_many(url(slow))["a"].shape == (100_000,), "the loader itself goes on"


@pytest.mark.parametrize("kind", ["http", "s3", "hub"])
def test_cancelled_tasks_do_not_wait_for_a_server_that_says_nothing(tmp_path: Path, kind: str) -> None:
    """Their threads are those that all others of the program wait for, too."""
    if kind != "http":
        pytest.importorskip({"s3": "obstore", "hub": "huggingface_hub"}[kind])
    loader = WeightLoader(cache=tmp_path / "cache", timeout=SECONDS)

    async def cancelled(source: Any) -> None:
        tasks = [asyncio.create_task(loader.apreload(source)) for _ in range(40)]
        await asyncio.wait(tasks, timeout=0.5)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await asyncio.to_thread(int) == 0

    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        source: Any = f"{place}/m.safetensors"
        if kind == "s3":
            keys = {"access_key_id": "a", "secret_access_key": "b"}
            source = S3Source("bucket", "m.safetensors", region="us-east-1", endpoint=place, options=keys)
        elif kind == "hub":
            folder = str(tmp_path / "hub")
            source = HubSource("owner/name", "m.safetensors", cache_dir=folder, endpoint=place, token=False)
        asyncio.run(cancelled(source))
        assert time.monotonic() - began < SECONDS / 4


def test_a_cancelled_task_does_not_wait_for_a_host_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes back from it, not even a refusal."""
    found = threading.Event()
    monkeypatch.setattr(HTTPConnection, "connect", lambda self: found.wait(SECONDS))
    loader = WeightLoader(cache=tmp_path / "cache", timeout=SECONDS)

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(loader.aload("http://host/m.safetensors", "a"), 0.2)

    began = time.monotonic()
    asyncio.run(cancelled())
    assert time.monotonic() - began < SECONDS / 4
    found.set()


def test_apart() -> None:
    assert apart(lambda: 3, lambda: None) == 3
    with pytest.raises(ZeroDivisionError, match="0"):
        apart(lambda: failing(0), lambda: None)
    over = threading.Event()
    with pytest.raises(ZeroDivisionError, match="1"):
        apart(over.wait, lambda: failing(1))
    over.set()


def test_the_wait_for_another_process_is_stopped(slow: Served, tmp_path: Path) -> None:
    loader = WeightLoader(cache=tmp_path / "cache")

    async def cancelled() -> None:
        first = asyncio.create_task(loader.apreload(url(slow)))
        await asyncio.to_thread(wait_for, slow)
        second = asyncio.create_task(loader.apreload(url(slow)))
        await asyncio.sleep(0.05)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    began = time.monotonic()
    asyncio.run(cancelled())
    assert time.monotonic() - began < SECONDS / 4


def test_a_loop_that_is_closed_stops_its_transfers(slow: Served, tmp_path: Path) -> None:
    """Nobody cancels its tasks then, and their threads would keep the program from ending."""
    loop, before = asyncio.new_event_loop(), set(threading.enumerate())
    task: Any = loop.create_task(WeightLoader(cache=tmp_path / "cache").apreload(url(slow)))
    loop.run_until_complete(asyncio.wait_for(asyncio.to_thread(wait_for, slow), SECONDS))
    threads = [thread for thread in threading.enumerate() if thread not in before and "asyncio" in thread.name]
    task._log_destroy_pending = False  # which is what is tried here
    loop.close()
    for thread in threads:
        thread.join(SECONDS / 4)
    assert threads and not any(thread.is_alive() for thread in threads)


def failing(k: int) -> None:
    raise ZeroDivisionError(k)


def test_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert together(lambda x: x * x, range(5), 2, Stop()) == [0, 1, 4, 9, 16]
    assert together(lambda x: x, [], 2, Stop()) == []
    threads: set[str] = set()
    with monkeypatch.context() as patch:
        submitted: list[Any] = []
        submit = ThreadPoolExecutor.submit
        patch.setattr(ThreadPoolExecutor, "submit", lambda *given: submitted.append(given) or submit(*given))
        together(lambda _: threads.add(threading.current_thread().name), range(5000), 3, Stop())
    assert len(threads) <= len(submitted) == 3, "nothing is set up for each of many small ones"
    with monkeypatch.context() as patch:
        patch.setattr(together_module, "wait", lambda futures, return_when: wait(futures))
        for k in range(8):  # of several that fail at once the one that comes first is told
            with pytest.raises(ZeroDivisionError, match=r"^0$"):
                together(failing, range(8), k + 1, Stop())
    stop = Stop()
    done: list[int] = []

    def work(k: int) -> None:
        if k == 0:
            raise KeyError(k)
        stop.sleep(5.0)
        done.append(k)

    began = time.monotonic()
    with pytest.raises(KeyError):
        together(work, range(100), 2, stop)
    assert stop.is_set() and len(done) <= 2 and time.monotonic() - began < 4
    assert Stop(stop).is_set() and not Stop().is_set()
