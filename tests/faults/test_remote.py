"""A worker over the network: the same answers, and every way in which it may fail has a name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

grpc = pytest.importorskip("grpc")

import ranvier as rv  # noqa: E402
from ranvier import errors  # noqa: E402
from ranvier.config import SessionConfig  # noqa: E402
from ranvier.providers.distant import wire  # noqa: E402
from ranvier.providers.remote.provider import METHOD, TOKEN_KEY  # noqa: E402
from ranvier.runtime.session import Session  # noqa: E402
from ranvier.runtime.worker.network import Worker, WorkerSettings  # noqa: E402
from tests.faults.test_sim import chain, check, some_input  # noqa: E402


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(WorkerSettings(token="secret", providers=("reference",), connections=4))
    yield made
    made.close(0.1)


def session(address: str, *, fallback: str = "on", **more: Any) -> Session:
    options = {"address": address, "token": "secret", "timeout": 20.0, **more}
    config = SessionConfig(
        providers=("remote", "reference"), provider_options={"remote": options}, fallback=fallback, optimization="none"
    )
    return Session(chain(), config)


def test_a_part_is_shipped_once_and_runs_there(worker: Worker) -> None:
    with session(worker.address) as made:
        assert {n.provider for n in made.report.nodes} == {"remote"}
        for seed in range(3):
            x = some_input(seed)
            check(made.run({"x": x}), x)
        there = made.providers[0].statistics()  # type: ignore[attr-defined]
        assert (there["parts"], there["runs"], there["tensors"]) == (1, 3, 0)


def test_tensors_larger_than_a_piece(worker: Worker) -> None:
    with session(worker.address) as made:
        provider: Any = made.providers[0]
        big = np.random.default_rng(1).standard_normal((1 << 20) + 13).astype(np.float32)
        others = [np.zeros((), np.int64), np.empty((0, 3), np.float16), np.array([True, False])]
        found = provider.download(provider.upload([big, *others]))
        for want, got in zip([big, *others], found):
            assert want.dtype == got.dtype and want.shape == got.shape
            np.testing.assert_array_equal(want, got)


def test_a_wrong_token_is_refused(worker: Worker) -> None:
    with pytest.raises(errors.ProviderFailed, match="token"):
        session(worker.address, token="guess", fallback="off")
    with session(worker.address, token="guess") as made:  # others take over, and the report says why
        x = some_input()
        check(made.run({"x": x}), x)
        assert any("token" in text for text in made.report.fallbacks)


def test_where_nobody_else_takes_over_no_next_provider_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(errors.ProviderUnavailable, match="no address"):
        Session(chain(), SessionConfig(providers=("remote",)))
    assert not caplog.messages


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier.providers.remote.provider._CONNECT", 0.3)
    with pytest.raises(errors.ProviderUnavailable, match="nobody answers"):
        session("127.0.0.1:1", fallback="off")
    with pytest.raises(errors.ProviderUnavailable, match="no address"):
        session("", fallback="off")
    monkeypatch.setenv("RANVIER_WORKER", "somewhere")
    with pytest.raises(errors.ProviderUnavailable, match="RANVIER_WORKER must be HOST:PORT, got 'somewhere'"):
        session("", fallback="off")


@pytest.mark.parametrize("address", ["localhost", ":50551", "localhost:", "localhost:70000", "localhost:http"])
def test_an_address_has_a_port(address: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="must be HOST:PORT"):
        session(address)


def test_an_encrypted_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} -out {certificate} -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([tool, *make.split(), *names], check=True, capture_output=True, timeout=60)
    pair = {"certificate": certificate.read_bytes(), "key": key.read_bytes()}
    closed = Worker(WorkerSettings(token="secret", providers=("reference",), **pair))
    try:
        x = some_input()
        with session(closed.address, ca=str(certificate)) as made:
            check(made.run({"x": x}), x)
            assert made.health["remote"].failed == 0
        with monkeypatch.context() as patch:
            patch.setenv("RANVIER_WORKER_CA", str(certificate))
            with session(closed.address, fallback="off") as made:
                check(made.run({"x": x}), x)
        monkeypatch.setattr("ranvier.providers.remote.provider._CONNECT", 0.3)
        with pytest.raises(errors.ProviderUnavailable, match="without encryption; with it, set 'ca'"):
            session(closed.address, fallback="off")
        with pytest.raises(errors.InvalidConfig, match="ca cannot be read"):
            session(closed.address, ca=str(tmp_path / "absent.pem"), fallback="off")
    finally:
        closed.close(0.1)


def test_a_worker_that_ends_between_two_requests(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier.providers.remote.provider._CONNECT", 0.5)
    with session(worker.address) as made:
        x = some_input()
        check(made.run({"x": x}), x)
        worker.close(0.1)
        check(made.run({"x": x}), x)
        assert made.health["remote"].fallbacks == 1


def test_its_memory_has_a_limit() -> None:
    small = Worker(WorkerSettings(providers=("reference",), memory_bytes=4800))
    try:
        with session(small.address) as made:
            x = some_input()
            check(made.run({"x": x}), x)
            assert made.health["remote"].failed >= 1
            assert "no memory" in made.health["remote"].last_error
    finally:
        small.close(0.1)


def test_messages_have_a_limit() -> None:
    strict = Worker(WorkerSettings(providers=("reference",), message_bytes=3000))
    try:
        with pytest.raises(errors.ProviderFailed, match="longer than the 3,000 allowed"):
            session(strict.address, fallback="off")
    finally:
        strict.close(0.1)


def test_a_request_beyond_the_limit_says_so() -> None:
    """Also where the connection has been replaced by the time the part is started."""
    strict = Worker(WorkerSettings(providers=("reference",), message_bytes=20_000, token="secret"))
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]> g (float[N] x) => (float[N] y) { y = Neg(x) }"""
    )
    options = {"remote": {"address": strict.address, "token": "secret"}}
    try:
        with rv.load(model, providers=["remote"], provider_options=options, fallback="off") as made:
            with pytest.raises(errors.ProviderFailed, match="longer than the 20,000 allowed"):
                made.run({"x": np.ones(10_000, np.float32)})
            np.testing.assert_array_equal(made.run({"x": np.ones(5, np.float32)})["y"], -np.ones(5))
    finally:
        strict.close(0.1)


def test_rubbish_does_not_harm_it(worker: Worker) -> None:
    rubbish = [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, wire.MAGIC + b"\xff" * 64, os.urandom(200)]
    for data in rubbish:
        with grpc.insecure_channel(worker.address) as connection:
            answers = connection.stream_stream(METHOD)(iter([data]), metadata=((TOKEN_KEY, "secret"),), timeout=10)
            with pytest.raises(grpc.RpcError):
                if not list(answers):
                    raise grpc.RpcError("it ended, as it should where nothing came")
    message = wire.join(wire.encode("run", {"number": 1, "part": 99, "inputs": "x", "outputs": []}))
    with grpc.insecure_channel(worker.address) as connection:
        answers = connection.stream_stream(METHOD)(iter([message]), metadata=((TOKEN_KEY, "secret"),), timeout=10)
        assert wire.split(b"".join(answers)).kind == "error"
    with session(worker.address) as made:
        x = some_input()
        check(made.run({"x": x}), x)


def test_several_sessions_at_once(worker: Worker) -> None:
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with session(worker.address) as made:
                for k in range(20):
                    x = some_input(seed * 100 + k)
                    check(made.run({"x": x}), x)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_worker_that_others_could_reach_needs_a_token() -> None:
    with pytest.raises(errors.InvalidConfig, match="needs a token"):
        WorkerSettings("0.0.0.0:0")
    with pytest.raises(errors.InvalidConfig, match="HOST:PORT"):
        WorkerSettings("nowhere")


def test_the_command(tmp_path: Any) -> None:
    (tmp_path / "token").write_text("secret\n")
    command = [sys.executable, "-m", "ranvier.cli", "worker", "--listen", "127.0.0.1:0", "--provider", "reference"]
    process = subprocess.Popen(
        [*command, "--token-file", str(tmp_path / "token"), "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, "the worker ended before it said where it listens"
            text += line
        with session(json.loads(text)["address"]) as made:
            x = some_input()
            check(made.run({"x": x}), x)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        process.stdout.close()  # type: ignore[union-attr]
