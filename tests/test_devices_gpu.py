"""GPUs of made-up machines: what the driver's library, its files and torch tell, and what is wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ranvier.devices.gpu import find_gpus
from ranvier.devices.nvml import Nvml, NvmlError, NvmlGpu, open_nvml
from ranvier.devices.surroundings import Surroundings, TorchBuild, read_torch_version

GB = 1 << 30
BIG = NvmlGpu("Big Card", "GPU-aaaa-1", 80 * GB, (9, 0))
SMALL = NvmlGpu("Small Card", "GPU-bbbb-2", 8 * GB, (7, 5))
CUDA_BUILD = TorchBuild("2.9.0+cu128", "12.8")


class Library:
    """The driver's library on a machine with these GPUs."""

    def __init__(self, *gpus: NvmlGpu) -> None:
        self._gpus = list(gpus)

    def read(self) -> tuple[str, list[NvmlGpu]]:
        return "570.1", self._gpus


def no_library(text: str = "the NVIDIA driver is not loaded"):
    def fail() -> Any:
        raise NvmlError(text)

    return fail


def never() -> Any:
    raise AssertionError("torch must not be imported here")


@pytest.fixture
def machine(tmp_path: Path) -> Surroundings:
    """A machine without a GPU and without torch."""
    return Surroundings(
        root=tmp_path,
        environ={},
        system="linux",
        machine="x86_64",
        nvml=no_library(),
        find_torch=lambda: None,
        loaded_torch=lambda: None,
        import_torch=never,
        has_package=lambda _name: False,
    )


@pytest.fixture
def two_cards(machine: Surroundings) -> Surroundings:
    return replace(machine, nvml=lambda: Library(BIG, SMALL), find_torch=lambda: CUDA_BUILD)


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# -- what the driver tells ------------------------------------------------------------------------------------------


def test_none(machine):
    assert find_gpus(machine) == ()


def test_two_that_can_be_used(two_cards):
    big, small = find_gpus(two_cards)
    assert (big.kind, big.index, big.name, big.memory_bytes) == ("cuda", 0, "Big Card", 80 * GB)
    assert (big.capability, big.driver, big.usable) == ((9, 0), "570.1", True)
    assert str(small.device) == "cuda:1" and small.usable


@pytest.mark.parametrize(
    ("torch", "problem"),
    [(None, "torch is not installed"), (TorchBuild("2.9.0+cpu", None), "torch 2.9.0+cpu is built without CUDA")],
)
def test_torch_that_does_not_do(two_cards, torch, problem):
    found = find_gpus(replace(two_cards, find_torch=lambda: torch))
    assert len(found) == 2 and all(problem in gpu.problem and not gpu.usable for gpu in found)


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("1,0", {"Big Card": 1, "Small Card": 0}),
        ("1", {"Big Card": None, "Small Card": 0}),
        ("", {"Big Card": None, "Small Card": None}),
        ("-1", {"Big Card": None, "Small Card": None}),
        ("0,7,1", {"Big Card": 0, "Small Card": None}),  # CUDA stops at the first that makes no sense
        ("0,0,1", {"Big Card": 0, "Small Card": None}),
        ("GPU-bbbb", {"Big Card": None, "Small Card": 0}),
        ("gpu-BBBB-2, GPU-aaaa", {"Big Card": 1, "Small Card": 0}),
        ("GPU-", {"Big Card": None, "Small Card": None}),  # could be either
        ("999999999999999999", {"Big Card": None, "Small Card": None}),
        ("²", {"Big Card": None, "Small Card": None}),
    ],
)
def test_visible_devices(two_cards, text, indices):
    found = find_gpus(replace(two_cards, environ={"CUDA_VISIBLE_DEVICES": text}))
    assert {gpu.name: gpu.index for gpu in found} == indices
    for gpu in found:
        assert gpu.hidden == (gpu.index is None) == (not gpu.usable)
        assert gpu.usable or f"CUDA_VISIBLE_DEVICES={text}" in gpu.problem


def test_the_beginning_common_to_all_identifiers_names_none(two_cards):
    around = replace(two_cards, nvml=lambda: Library(BIG), environ={"CUDA_VISIBLE_DEVICES": "GPU-"})
    assert find_gpus(around)[0].hidden  # although only one card would fit


def test_one_that_does_not_answer_leaves_the_other(two_cards):
    lost = NvmlGpu("NVIDIA GPU", problem="the GPU has fallen off the bus")
    first, second = find_gpus(replace(two_cards, nvml=lambda: Library(lost, SMALL)))
    assert "fallen off" in first.problem and second.usable and second.index == 1


# -- GPUs the library does not tell of ------------------------------------------------------------------------------

LISTED = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC: 12\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA Made Up 5000\nIRQ:   \t\t 87\n",
}


@pytest.mark.parametrize(
    ("files", "name", "driver", "problem"),
    [
        (LISTED, "NVIDIA Made Up 5000", "550.54.15", "cannot be loaded"),
        ({"dev/nvidia0": "", "dev/nvidiactl": "", "dev/null": ""}, "NVIDIA GPU", "", "cannot be loaded"),
        (
            {"proc/driver/nvidia/gpus/0000:01:00.0/information": "\x00\x01", "proc/driver/nvidia/version": "what?"},
            "NVIDIA GPU",
            "",
            "cannot be loaded",
        ),
        (
            {"sys/bus/pci/devices/1/class": "0x030200\n", "sys/bus/pci/devices/1/vendor": "0x10de\n"},
            "NVIDIA GPU",
            "",
            "no NVIDIA driver is loaded",
        ),
    ],
)
def test_present_without_the_library(machine, files, name, driver, problem):
    put(machine.root, files)
    (found,) = find_gpus(replace(machine, nvml=no_library("the library cannot be loaded")))
    assert (found.kind, found.index, found.name, found.driver) == ("cuda", None, name, driver)
    assert problem in found.problem and not found.usable and found.device is None


def test_the_open_driver_words_its_version_differently(machine):
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n"
    put(machine.root, {**LISTED, "proc/driver/nvidia/version": text})
    assert find_gpus(machine)[0].driver == "570.86.10"


def test_a_driver_that_gives_this_process_none(machine):
    put(machine.root, LISTED)
    (found,) = find_gpus(replace(machine, nvml=lambda: Library()))
    assert "no GPU that this process may use" in found.problem


@pytest.mark.parametrize(
    ("kind", "vendor"), [("0x020000", "0x10de"), ("0x030000", "0x8086"), ("", "0x10de"), ("0x030000", "")]
)
def test_other_cards_are_none(machine, kind, vendor):
    put(machine.root, {"sys/bus/pci/devices/1/class": kind, "sys/bus/pci/devices/1/vendor": vendor})
    assert find_gpus(machine) == ()


# -- what torch says ------------------------------------------------------------------------------------------------


class Cuda:
    """``torch.cuda`` on a machine with these cards."""

    def __init__(self, *cards: NvmlGpu, code: Sequence[str] = ("sm_75", "sm_90"), error: str | None = None) -> None:
        self._cards, self._code, self._error = cards, list(code), error

    def is_available(self) -> bool:
        return bool(self._cards)

    def init(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    def get_arch_list(self) -> list[str]:
        return self._code

    def device_count(self) -> int:
        return len(self._cards)

    def get_device_properties(self, index: int) -> Any:
        card = self._cards[index]
        major, minor = card.capability or (0, 0)
        return SimpleNamespace(name=card.name, total_memory=card.memory_bytes, major=major, minor=minor)


def torch_with(cuda: Any) -> Any:
    return SimpleNamespace(cuda=cuda, __version__="2.9.0")


def test_torch_is_imported_only_for_a_probe(two_cards):
    assert all(gpu.usable for gpu in find_gpus(two_cards))  # never() would have raised
    torch = torch_with(Cuda(SMALL, BIG))
    found = find_gpus(replace(two_cards, import_torch=lambda: torch), probe=True)
    assert [gpu.name for gpu in found] == ["Small Card", "Big Card"]  # its order is the one that counts
    assert [gpu.index for gpu in found] == [0, 1] and all(gpu.driver == "570.1" for gpu in found)


def test_torch_is_not_imported_where_there_is_nothing_to_ask(machine, two_cards):
    assert find_gpus(machine, probe=True) == ()
    found = find_gpus(replace(two_cards, find_torch=lambda: None), probe=True)
    assert all(gpu.problem == "torch is not installed" for gpu in found)


def test_torch_that_is_loaded_is_asked(two_cards):
    found = find_gpus(replace(two_cards, loaded_torch=lambda: torch_with(Cuda(error="driver too old\nmore"))))
    assert all(gpu.problem == "torch cannot use it (driver too old)" for gpu in found)


@pytest.mark.parametrize(
    ("cuda", "problem"),
    [
        (Cuda(), "torch finds no CUDA device"),
        (Cuda(error=""), "torch cannot use it (RuntimeError)"),
        (SimpleNamespace(), "torch cannot use it ("),
    ],
)
def test_torch_that_refuses(two_cards, cuda, problem):
    found = find_gpus(replace(two_cards, import_torch=lambda: torch_with(cuda)), probe=True)
    assert len(found) == 2 and all(problem in gpu.problem for gpu in found)


def test_torch_that_cannot_be_imported(two_cards):
    def broken() -> Any:
        raise OSError("libcudart.so.12: cannot open")

    found = find_gpus(replace(two_cards, import_torch=broken), probe=True)
    assert all("libcudart" in gpu.problem for gpu in found)


def test_torch_that_sees_fewer(two_cards):
    found = find_gpus(replace(two_cards, import_torch=lambda: torch_with(Cuda(BIG))), probe=True)
    assert [gpu.usable for gpu in found] == [True, False] and "sees only 1" in found[1].problem


@pytest.mark.parametrize(
    ("code", "usable"),
    [
        (["sm_90"], True),
        (["sm_90a"], True),
        (["sm_80", "compute_80"], True),  # intermediate code is translated for what is newer
        (["sm_80"], False),  # another generation
        (["sm_95"], False),  # a later step of its own
        (["sm_100", "compute_100"], False),
        ([], True),
        (["gfx90a"], True),  # not NVIDIA's names: nothing is known
        (["sm_x"], False),
    ],
)
def test_code_for_the_card(two_cards, code, usable):
    around = replace(two_cards, import_torch=lambda: torch_with(Cuda(BIG, code=code)))
    found = find_gpus(around, probe=True)[0]
    assert found.usable == usable
    assert usable or "no code for compute capability 9.0" in found.problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n", TorchBuild("2.9.0+cu128", "12.8")),
        ("__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\n", TorchBuild("2.9.0+cpu", None)),
        ('__version__ = "1.0"\ncuda = "11.1"\n', TorchBuild("1.0", "11.1")),
        ("", TorchBuild("", None)),
    ],
)
def test_what_torch_was_built_for(text, expected):
    assert read_torch_version(text) == expected


# -- Apple ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("installed", "problem"), [(True, ""), (False, "mlx is not installed")])
def test_apple(machine, installed, problem):
    around = replace(
        machine,
        system="darwin",
        machine="arm64",
        physical_memory=lambda: 32 * GB,
        has_package=lambda name: installed and name == "mlx",
    )
    (found,) = find_gpus(around)
    assert (found.kind, found.memory_bytes, found.problem) == ("metal", 32 * GB, problem)
    assert find_gpus(replace(around, machine="x86_64")) == ()


# -- the library through ctypes -------------------------------------------------------------------------------------


class Loaded:
    """A stand-in for the loaded library: it fills in what it is pointed to, as the C functions do."""

    def __init__(self, gpus: Sequence[NvmlGpu] = (), fail: dict[str, int] | None = None) -> None:
        self._gpus, self._fail, self.open = gpus, fail or {}, 0

    def __getattr__(self, name: str) -> Any:
        if f"_{name}" not in dir(type(self)):
            raise AttributeError(name)
        return lambda *arguments: self._fail.get(name, 0) or getattr(self, f"_{name}")(*arguments)

    def _nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def _nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        return self._write(text, size, "570.1")

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def _nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        return self._write(text, size, self._gpus[handle.value - 1].name)

    def _nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        return self._write(text, size, self._gpus[handle.value - 1].uuid)

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._gpus[handle.value - 1].capability or (0, 0)
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self._gpus[handle.value - 1].memory_bytes or 0
        return 0

    @staticmethod
    def _write(text: Any, size: Any, content: str) -> int:
        ctypes.memmove(text, content.encode()[: size.value - 1] + b"\0", min(len(content.encode()), size.value - 1) + 1)
        return 0


def test_the_library_is_read_and_closed():
    loaded = Loaded([BIG, SMALL])
    assert Nvml(loaded).read() == ("570.1", [BIG, SMALL])
    assert loaded.open == 0


@pytest.mark.parametrize(
    ("function", "code", "text"),
    [
        ("nvmlInit_v2", 9, "not loaded"),
        ("nvmlInit_v2", 18, "different versions"),
        ("nvmlDeviceGetCount_v2", 999, "error 999"),
    ],
)
def test_the_library_refuses(function, code, text):
    loaded = Loaded([BIG], {function: code})
    with pytest.raises(NvmlError, match=text):
        Nvml(loaded).read()
    assert loaded.open == 0


def test_one_card_refuses():
    _, (found,) = Nvml(Loaded([BIG], {"nvmlDeviceGetHandleByIndex_v2": 15})).read()
    assert found == NvmlGpu("NVIDIA GPU", problem="the GPU has fallen off the bus")
    _, (found,) = Nvml(Loaded([BIG], {"nvmlDeviceGetUUID": 4})).read()
    assert found.name == "Big Card" and "may not use" in found.problem


def test_cards_that_share_the_memory_of_the_host():
    _, (found,) = Nvml(Loaded([BIG], {"nvmlDeviceGetMemoryInfo": 3})).read()
    assert found == replace(BIG, memory_bytes=None)


def test_a_driver_without_a_version():
    assert Nvml(Loaded([BIG], {"nvmlSystemGetDriverVersion": 3})).read() == ("", [BIG])


def test_an_old_library():
    with pytest.raises(NvmlError, match="too old"):
        Nvml(SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlShutdown=lambda: 0)).read()


def test_the_library_of_this_machine():
    """Where there is one it answers; where there is none it says so."""
    try:
        _, found = open_nvml().read()
    except NvmlError as error:
        assert "NVIDIA" in str(error)
    else:
        assert all(gpu.problem or gpu.capability for gpu in found)
