"""Which device is chosen, who decides it, and that one process warns once."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ranvier as rv
from ranvier import logs
from ranvier.devices import CPU, Device, DeviceConfig, detect_devices, forced, get_device, warn_of_unusable_gpus
from ranvier.devices.choose import CUDA_DEVICE, FORCE_CPU
from ranvier.devices.surroundings import Surroundings
from ranvier.errors import InvalidConfig
from tests.test_devices_gpu import BIG, CUDA_BUILD, SMALL, Cuda, Library, never, no_library, torch_with

NOWHERE = Path("/nonexistent")
BARE = Surroundings(
    root=NOWHERE,
    environ={},
    system="linux",
    machine="x86_64",
    cores_present=8,
    affinity=lambda: frozenset(range(8)),
    physical_memory=lambda: 1 << 34,
    nvml=no_library(),
    find_torch=lambda: None,
    loaded_torch=lambda: None,
    import_torch=never,
)
TWO = replace(
    BARE,
    nvml=lambda: Library(BIG, SMALL),
    find_torch=lambda: CUDA_BUILD,
    import_torch=lambda: torch_with(Cuda(BIG, SMALL)),
)
WITHOUT_TORCH = replace(TWO, find_torch=lambda: None, import_torch=never)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is a process of its own as far as warnings go."""
    monkeypatch.setattr(logs, "_said", set())


# -- the choice -----------------------------------------------------------------------------------------------------


def test_cuda_comes_first(capfd):
    assert get_device(around=TWO) == Device("cuda", 0)
    assert get_device(DeviceConfig(cuda_device=1), around=TWO) == Device("cuda", 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        (BARE, "there is no CUDA device"),
        (WITHOUT_TORCH, "Big Card cannot be used: torch is not installed"),
        (replace(TWO, import_torch=lambda: torch_with(Cuda(error="out of luck"))), "out of luck"),
        (replace(TWO, environ={"CUDA_VISIBLE_DEVICES": ""}), "hidden by CUDA_VISIBLE_DEVICES="),
    ],
)
def test_else_the_cpu_with_one_warning(around, reason, capfd):
    assert [get_device(around=around) for _ in range(3)] == [CPU] * 3
    said = capfd.readouterr().err
    assert said.count("warning") == 1 and reason in said and "RANVIER_FORCE_CPU=1" in said


def test_the_warning_is_in_the_log_and_on_stderr(capfd):
    records: list[logging.LogRecord] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    listener = Listener()
    logs.logger.addHandler(listener)
    try:
        get_device(around=BARE)
    finally:
        logs.logger.removeHandler(listener)
    assert [record.levelname for record in records] == ["WARNING"]
    assert "there is no CUDA device" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        (DeviceConfig(force_cpu=True), {}),
        (DeviceConfig(), {"RANVIER_FORCE_CPU": "1"}),
        (DeviceConfig(cuda_device=7), {"VSA_OPTIM_FORCE_CPU": "yes"}),
    ],
)
def test_who_wants_the_cpu_is_left_in_peace(config, environ, capfd):
    around = replace(WITHOUT_TORCH, environ=environ)
    assert get_device(config, around=around) == CPU
    warn_of_unusable_gpus(replace(around, environ={"RANVIER_FORCE_CPU": "on"}))
    assert capfd.readouterr().err == ""


def test_the_warning_can_be_declined(capfd):
    assert get_device(DeviceConfig(warn=False), around=BARE) == CPU
    assert capfd.readouterr().err == ""


def test_code_wins_over_the_environment():
    around = replace(TWO, environ={"RANVIER_FORCE_CPU": "1", "RANVIER_CUDA_DEVICE": "0"})
    assert get_device(DeviceConfig(force_cpu=False, cuda_device=1), around=around) == Device("cuda", 1)


@pytest.mark.parametrize(
    ("config", "environ", "source"),
    [
        (DeviceConfig(cuda_device=2), {}, "cuda_device"),
        (DeviceConfig(), {"AXOLOTL_CUDA_DEVICE": "2"}, "AXOLOTL_CUDA_DEVICE"),
        (DeviceConfig(), {"RANVIER_CUDA_DEVICE": "123456789"}, "RANVIER_CUDA_DEVICE"),
    ],
)
def test_a_gpu_that_is_not_there(config, environ, source):
    with pytest.raises(InvalidConfig, match=f"{source}.*0 to 1"):
        get_device(config, around=replace(TWO, environ=environ))


def test_a_number_on_a_machine_without_gpus(capfd):
    assert get_device(DeviceConfig(cuda_device=3), around=BARE) == CPU
    assert "no CUDA device" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"force_cpu": 1}, "force_cpu must be True or False or None, got 1"),
        ({"cuda_device": -1}, "whole number of 0 or more"),
        ({"cuda_device": True}, "whole number of 0 or more"),
        ({"cudadevice": 1}, "did you mean 'cuda_device'"),
        ({"warn": None}, "warn must be True or False"),
    ],
)
def test_a_configuration_is_checked(options, problem):
    with pytest.raises(InvalidConfig, match=problem):
        DeviceConfig(**options)


# -- plain sessions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "around",
    [BARE, TWO, replace(WITHOUT_TORCH, environ={"CUDA_VISIBLE_DEVICES": "-1"})],
    ids=["none", "good", "hidden"],
)
def test_no_nagging(around, capfd):
    warn_of_unusable_gpus(replace(around, import_torch=never))
    assert capfd.readouterr().err == ""


def test_a_gpu_that_cannot_be_used_is_told_of_once(capfd):
    for _ in range(3):
        warn_of_unusable_gpus(WITHOUT_TORCH)
    get_device(around=WITHOUT_TORCH)
    said = capfd.readouterr().err
    assert said.count("warning") == 1 and "Big Card cannot be used: torch is not installed" in said


# -- the environment ------------------------------------------------------------------------------------------------

FLAGS = {"1": True, "true": True, "YES": True, " on ": True, "0": False, "False": False, "no": False, "off": False}


@given(st.dictionaries(st.sampled_from(FORCE_CPU), st.sampled_from([*FLAGS, "", "  "])))
def test_the_first_variable_that_is_set_decides(environ: dict[str, str]):
    texts = [environ[name] for name in FORCE_CPU if environ.get(name, "").strip()]
    expected = bool(texts) and FLAGS[texts[0]]
    assert (forced(environ)[0] == CPU) == expected


@given(st.dictionaries(st.sampled_from(CUDA_DEVICE), st.one_of(st.just(""), st.integers(0, 99).map(str))))
def test_the_first_number_that_is_set_decides(environ: dict[str, str]):
    names = [name for name in CUDA_DEVICE if environ.get(name)]
    expected = (Device("cuda", int(environ[names[0]])), names[0]) if names else (None, "")
    assert forced(environ) == expected


def test_the_names():
    assert FORCE_CPU == ("RANVIER_FORCE_CPU", "RUST_AI_FORCE_CPU", "AXOLOTL_FORCE_CPU", "VSA_OPTIM_FORCE_CPU")
    assert CUDA_DEVICE == ("RANVIER_CUDA_DEVICE", "RUST_AI_CUDA_DEVICE", "AXOLOTL_CUDA_DEVICE", "VSA_OPTIM_CUDA_DEVICE")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANVIER_FORCE_CPU", "maybe"),
        ("RUST_AI_FORCE_CPU", "2"),
        ("RANVIER_CUDA_DEVICE", "-1"),
        ("RANVIER_CUDA_DEVICE", "cuda:0"),
        ("AXOLOTL_CUDA_DEVICE", "1.0"),
        ("VSA_OPTIM_CUDA_DEVICE", "9" * 40),
        ("RANVIER_CUDA_DEVICE", "²"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, text: str):
    for use in (forced, lambda environ: get_device(around=replace(TWO, environ=environ))):
        with pytest.raises(InvalidConfig, match=name):
            use({name: text})


# -- everything at once ---------------------------------------------------------------------------------------------


def test_all_devices():
    found = detect_devices(around=replace(TWO, environ={"RUST_AI_FORCE_CPU": "1"}, import_torch=never))
    assert (found.cores, found.cores_present, found.quota, found.memory_bytes) == (8, 8, None, 1 << 34)
    assert [gpu.name for gpu in found.cuda] == ["Big Card", "Small Card"]
    assert (found.forced, found.forced_by) == (CPU, "RUST_AI_FORCE_CPU")
    assert len(found.numa) == 1 and found.numa[0].cores == tuple(range(8))


def test_a_probe_asks_torch():
    around: Any = replace(TWO, import_torch=lambda: torch_with(Cuda(SMALL)))
    assert detect_devices(probe=True, around=around).gpus[0].name == "Small Card"


def test_of_this_machine():
    found = rv.detect_devices()
    assert found.cores >= 1 and found.numa and isinstance(found, rv.DeviceInfo)


def test_the_public_name_answers_both_questions():
    assert rv.get_device() == "CPU"  # ONNX Runtime's
    assert rv.get_device(rv.DeviceConfig(force_cpu=True)) == rv.Device("cpu")
