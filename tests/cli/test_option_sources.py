"""``--preset``, ``--config``, ``--option``, and what ``doctor`` says about options and devices."""

from __future__ import annotations

import pytest

import ranvier as rv
from ranvier.cli import doctor, exit_codes
from ranvier.cli.options import Setup, Sources
from ranvier.devices import DeviceInfo, NumaNode
from ranvier.devices.kinds import CPU, GpuInfo


def options(found):
    return {o["option"]: (o["value"], o["origin"]) for o in found["options"]}


def test_doctor_tells_every_origin(call_json, call, tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    file.write_text("plan_cache = 3\n[provider_options.cpu]\nwinograd = false\n")
    monkeypatch.setenv("RANVIER_DEBUG", "0")
    more = ("--preset", "edge", "--config", file, "--option", "memory.secure=on", "--option", "threads=1")
    found = call_json("doctor", *more)
    assert (found["preset"], found["files"], found["problems"]) == ("edge", [str(file)], [])
    told = options(found)
    assert told["memory.secure"] == (True, "command line") and told["threads"] == (1, "command line")
    assert told["debug"] == (0, "RANVIER_DEBUG") and told["fallback"] == ("on", "default")
    assert told["plan_cache"] == (3, f"{file}:1")
    assert told["provider_options.cpu.winograd"] == (False, f"{file}:3")
    assert told["optimization"] == ("aggressive", "preset edge")
    text = call("doctor", *more).stdout
    assert "preset edge" in text and "command line" in text and f"{file}:3" in text


def test_doctor_collects_faults_of_all_sources(call_json, tmp_path, monkeypatch):
    (tmp_path / "bad.toml").write_text("thread = 3\n")
    monkeypatch.setenv("RANVIER_THREADS", "many")
    monkeypatch.setenv("RANVIER_CUDA_DEVICE", "first")
    monkeypatch.setenv("RANVIER_THREAD", "3")
    monkeypatch.setenv("RANVIER_PRESET", "")
    monkeypatch.setenv("VSA_OPTIM_FORCE_CPU", "0")
    found = call_json("doctor", "--config", tmp_path / "bad.toml", "--preset", "edgy", code=exit_codes.CHECK_FAILED)
    problems = "\n".join(found["problems"])
    for part in ("RANVIER_THREADS", "RANVIER_CUDA_DEVICE", "bad.toml:1", "did you mean 'edge'"):
        assert part in problems
    variables = found["environment"]
    assert variables["RANVIER_CUDA_DEVICE"].startswith("invalid") and found["devices"] is None
    assert "did you mean 'RANVIER_THREADS'" in variables["RANVIER_THREAD"]
    assert "empty" in variables["RANVIER_PRESET"] and "CPU" in variables["VSA_OPTIM_FORCE_CPU"]


def test_doctor_shows_devices(call, call_json, monkeypatch):
    gpus = (
        GpuInfo("cuda", 0, "Big Card", 85_900_000_000, (9, 0), "570.1"),
        GpuInfo("cuda", None, "Old Card", problem="no NVIDIA driver is loaded"),
    )
    nodes = (NumaNode(0, (0, 1), 10**9), NumaNode(1, (2, 3), None))
    made_up = DeviceInfo("p", "m", "c", 4, 8, 4.5, 10**9, 10**9, ("avx2",), nodes, gpus, CPU, "RUST_AI_FORCE_CPU")
    monkeypatch.setattr(doctor, "detect_devices", lambda probe: made_up)
    text = call("doctor").stdout
    for part in (
        "cuda:0 Big Card, 85.9 GB, compute capability 9.0, driver 570.1",
        "Old Card, cannot be used: no NVIDIA driver is loaded",
        "4.5 processors",
        "node 1",
        "cpu by RUST_AI_FORCE_CPU",
        "avx2",
    ):
        assert part in text
    devices = call_json("doctor")["devices"]
    assert devices["gpus"][0]["capability"] == [9, 0] and devices["numa"][1]["cores"] == [2, 3]
    assert devices["quota"] == 4.5 and devices["forced_by"] == "RUST_AI_FORCE_CPU"


def test_doctor_probes_when_asked(call_json, monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "detect_devices", lambda probe: (asked.append(probe), rv.detect_devices())[1])
    call_json("doctor")
    call_json("doctor", "--probe")
    assert asked == [False, True]


def test_sources_of_a_run(call, dense, tmp_path):
    (tmp_path / "o.toml").write_text("[limits]\nmemory_bytes = 16\n")
    assert call("run", dense, "--config", tmp_path / "o.toml").exit_code == exit_codes.RESOURCE_LIMIT
    assert call("run", dense, "--config", tmp_path / "o.toml", "--limit", "memory_bytes=1G").exit_code == 0
    assert call("run", dense, "--preset", "edge").exit_code == 0
    assert call("run", dense, "--option", "limits.memory_bytes=16").exit_code == exit_codes.RESOURCE_LIMIT


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--preset", "edgy"), "did you mean 'edge'"),
        (("--config", "absent.toml"), "absent.toml: cannot be read"),
        (("--option", "thread=2"), "did you mean 'threads'"),
        (("--option", "threads=many"), "threads must be a number"),
        (("--option", "memory.growth=linear"), "memory.growth cannot be 'linear'"),
        (("--option", "threads"), "not of the form name=value"),
        (("--option", "provider_options.cpu.winogrd=false"), "did you mean 'winograd'"),
        (("--option", "provider_options.cpu=false"), "options of a provider by their names"),
    ],
)
def test_faults_on_the_command_line(call, dense, more, problem):
    result = call("run", dense, *more)
    assert result.exit_code == exit_codes.USAGE and problem in result.stderr


def test_what_another_process_is_told():
    sources = Sources("none", "off", (("provider_options.cpu.winograd", "False"), ("memory.pool_size", "2k")))
    setup = Setup(("cpu,reference",), None, 3, (("memory_bytes", 5),), (), sources)
    plain = setup.plain()
    assert plain["providers"] == ("cpu", "reference") and plain["limits.memory_bytes"] == 5
    assert plain["memory.pool_size"] == 2048 and plain["provider_options.cpu.winograd"] is False
    assert rv.SessionConfig.default(**plain) == setup.config()
