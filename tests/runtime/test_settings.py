"""Options reach the session: from objects, presets, files and the environment, and through ONNX Runtime's interface."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier import logs
from ranvier.devices import choose
from ranvier.errors import InvalidConfig, ResourceLimit
from ranvier.providers.cpu.provider import CpuProvider
from ranvier.runtime import settings
from tests.test_devices_choose import BARE, WITHOUT_TORCH

MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[N, 4] y) { a = Exp(x) y = Add(a, x) }'
)


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A working folder whose file of options is read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANVIER_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    return tmp_path / "ranvier.toml"


def test_a_preset_sets_what_nothing_else_does(monkeypatch):
    monkeypatch.setenv("RANVIER_OPTIMIZATION", "none")
    edge = rv.ProviderConfig.edge()
    with rv.load(MODEL, preset="edge", threads=1) as session:
        config = session.config
    assert (config.threads, config.optimization) == (1, "none")
    assert (config.limits.memory_bytes, config.memory) == (edge.memory_limit, edge.memory)


def test_an_object_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("RANVIER_OPTIMIZATION", "none")
    for make in (lambda c: rv.load(MODEL, config=c), lambda c: rv.Session(MODEL, c)):
        with make(rv.ProviderConfig(optimization_level="aggressive")) as session:
            assert session.config.optimization == session.report.optimization == "aggressive"
        with make(rv.ProviderConfig(threads=2)) as session:
            assert (session.config.threads, session.config.optimization) == (2, "none")
    with rv.load(MODEL, config=rv.SessionConfig(threads=3), debug=0) as session:
        assert session.config == rv.SessionConfig(threads=3)


def test_the_memory_limit_is_one(local):
    x = np.ones((1000, 4), np.float32)
    local.write_text("[limits]\nmemory_bytes = '1k'\n")
    with rv.load(MODEL) as session, pytest.raises(ResourceLimit, match="memory_bytes"):
        session.run({"x": x})
    with rv.load(MODEL, config=rv.ProviderConfig(memory_limit=1 << 20)) as session:
        assert session.run({"x": x})["y"].shape == x.shape
    with rv.load(MODEL, config=rv.ProviderConfig(memory_limit=1000)) as session, pytest.raises(ResourceLimit):
        session.run({"x": x})


def test_a_file_in_the_working_folder(local):
    local.write_text("providers = ['reference']\noptimization = 'none'\n")
    with rv.load(MODEL) as session:
        assert [p.name for p in session.providers] == ["reference"] and session.report.optimization == "none"
    local.write_text("optimisation = 'none'\n")
    with pytest.raises(InvalidConfig, match=r"ranvier\.toml:1: .*'optimization'"):
        rv.load(MODEL)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cpuu": {}}, None),  # nothing is said about it
        ({"cpuu": {"winograd": True}}, "unknown provider 'cpuu' .did you mean 'cpu'"),
        ({"cpu": {"winogrd": True}}, "did you mean 'winograd'"),
        ({"cpu": {"winograd": 3}}, "winograd must be True or False"),
        ({"cpu": {"isa": "sse9"}}, "CpuOptions: isa: unknown instruction set 'sse9'"),
        ({"cpu": {"isa": 2}}, "isa must be a name, got 2"),
        ({"CPUExecutionProvider": {"winograd": True}}, "another name of 'cpu'"),
    ],
)
def test_options_of_providers_are_checked_before_anything_runs(options, problem):
    if problem is None:
        rv.load(MODEL, provider_options=options).close()
        return
    with pytest.raises(InvalidConfig, match=problem):
        rv.load(MODEL, provider_options=options)


def test_options_of_providers_reach_them(monkeypatch):
    seen = []

    compiled = CpuProvider.compile
    monkeypatch.setattr(
        CpuProvider, "compile", lambda self, part, ctx: (seen.append(ctx), compiled(self, part, ctx))[1]
    )
    config = rv.ProviderConfig(threads=1, options={"cpu": {"isa": "portable"}})
    with rv.load(MODEL, config=config) as session:
        session.run({"x": np.ones((2, 4), np.float32)})
    assert seen and all(ctx.options.isa == "portable" and ctx.config.threads == 1 for ctx in seen)


# -- ONNX Runtime's interface ---------------------------------------------------------------------------------------


def test_presets_through_onnx_runtimes_interface():
    options = rv.SessionOptions()
    options.preset = "edge"
    edge = rv.ProviderConfig.edge()
    assert options.memory == edge.memory and options.optimization == "aggressive"
    options.intra_op_num_threads = 1
    session = rv.InferenceSession(MODEL.SerializeToString(), options)
    assert (session.session.config.threads, session.session.config.memory) == (1, edge.memory)
    other = rv.InferenceSession(MODEL.SerializeToString(), options, preset="none").session.config
    assert other.memory == rv.MemoryConfig() and other.threads == 1
    for problem in (lambda: setattr(options, "preset", "edgy"), lambda: rv.InferenceSession(b"", preset="edgy")):
        with pytest.raises((InvalidConfig, rv.Fail, rv.InvalidArgument), match="did you mean 'edge'"):
            problem()


def test_every_session_takes_memory_options():
    memory = rv.MemoryConfig(pool_size=1 << 20, secure=True)
    assert rv.load(MODEL, memory=memory).config.memory == memory
    assert rv.load(MODEL, memory={"secure": True}).config.memory == rv.MemoryConfig(secure=True)


# -- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "providers", "told"),
    [(WITHOUT_TORCH, "auto", True), (WITHOUT_TORCH, "reference", False), (BARE, "auto", False)],
)
def test_a_plain_session_tells_of_a_gpu_that_cannot_be_used(monkeypatch, capfd, around, providers, told):
    monkeypatch.setattr(logs, "_said", set())
    monkeypatch.setattr(settings, "warn_of_unusable_gpus", lambda: choose.warn_of_unusable_gpus(replace(around)))
    for _ in range(2):
        rv.load(MODEL, providers=providers).close()
    assert capfd.readouterr().err.count("torch is not installed") == int(told)
