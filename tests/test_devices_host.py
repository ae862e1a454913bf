"""Cores, memory and nodes of made-up machines, whole and broken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.devices import machine_info, usable_cores, usable_memory
from ranvier.devices.host import core_list, cpu_features, cpu_quota, numa_nodes, processor_name, vector_features
from ranvier.devices.surroundings import Surroundings

GB = 1 << 30
V2 = "0::/\n"
V1 = "4:memory:/\n3:cpu,cpuacct:/\n"
Machine = Callable[..., Surroundings]
Files = dict[str, str | bytes]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine of 8 cores and 16 GB with these files."""

    def make(
        files: dict[str, str | bytes] | None = None, cores: Iterable[int] = range(8), **more: object
    ) -> Surroundings:
        for name, content in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        allowed = frozenset(cores)
        around = Surroundings(
            root=tmp_path,
            environ={},
            system="linux",
            machine="x86_64",
            platform=lambda: "Linux-made-up",
            cores_present=8,
            affinity=lambda: allowed,
            physical_memory=lambda: 16 * GB,
        )
        return replace(around, **more)  # type: ignore[arg-type]

    return make


def test_nothing_but_the_affinity(machine):
    around = machine(cores=(1, 3, 5))
    assert usable_cores(around) == 3 and cpu_quota(around) is None
    assert usable_memory(around) == 16 * GB


@pytest.mark.parametrize(
    ("text", "quota", "cores"),
    [
        ("max 100000", None, 8),
        ("400000 100000", 4.0, 4),
        ("250000 100000", 2.5, 2),  # a part of a core is no core
        ("50000 100000", 0.5, 1),
        ("1 100000", 1e-5, 1),
        (f"{10**40} 100000", 1e35, 8),
        ("400000", None, 8),
        ("400000 0", None, 8),
        ("-1 100000", None, 8),
        ("4e5 100000", None, 8),
        ("four cores", None, 8),
        ("", None, 8),
        (b"\xff\xfe\x00 \xff", None, 8),
    ],
)
def test_quota_of_version_2(machine, text, quota, cores):
    around = machine({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": text})
    found = cpu_quota(around)
    assert found == (None if quota is None else pytest.approx(quota))
    assert usable_cores(around) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("300000", "100000", 3), ("-1", "100000", 8), ("50000", "100000", 1), ("200000", "", 8), ("200000", "0", 8)],
)
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(machine, folder, quota, period, cores):
    base = f"sys/fs/cgroup/{folder}"
    files = {"proc/self/cgroup": V1, f"{base}/cpu.cfs_quota_us": quota, f"{base}/cpu.cfs_period_us": period}
    assert usable_cores(machine(files)) == cores


def test_the_lowest_group_on_the_way_up_counts(machine):
    around = machine(
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "600000 100000",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max",
            "sys/fs/cgroup/user.slice/memory.max": str(3 * GB),
            "sys/fs/cgroup/other.slice/cpu.max": "100000 100000",
        }
    )
    assert cpu_quota(around) == 2.0 and usable_memory(around) == 3 * GB


def test_a_path_of_the_host_inside_a_container(machine):
    """What the process is told of is not there; the container's own limits are at the top."""
    around = machine(
        {
            "proc/self/cgroup": "0::/system.slice/docker-1234.scope\n",
            "sys/fs/cgroup/cpu.max": "150000 100000",
            "sys/fs/cgroup/memory.max": str(GB),
        }
    )
    assert (usable_cores(around), usable_memory(around)) == (1, GB)


def test_a_group_cannot_lead_out_of_its_tree(machine):
    files = {"sys/fs/cgroup/cgroup.procs": "", "sys/outside/cpu.max": "100000 100000"}
    around = machine({"proc/self/cgroup": "0::/../../outside\n", **files})
    assert cpu_quota(around) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (str(2 * GB), 2 * GB),
        ("max", 16 * GB),
        (str(1 << 63), 16 * GB),  # what version 1 says for no limit
        (str(10**30), 16 * GB),
        ("0", 16 * GB),
        ("-1", 16 * GB),
        ("2G", 16 * GB),
        ("²", 16 * GB),
        ("", 16 * GB),
    ],
)
@pytest.mark.parametrize(
    "path", ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"], ids=["v2", "v1"]
)
def test_memory_limit(machine, path, text, expected):
    assert usable_memory(machine({"proc/self/cgroup": V2 + V1, path: text})) == expected


def test_memory_that_nobody_tells(machine):
    assert usable_memory(machine(physical_memory=lambda: None)) is None


def test_a_folder_where_a_file_should_be(machine, tmp_path):
    (tmp_path / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    assert usable_cores(machine({"proc/self/cgroup": V2})) == 8


# -- NUMA -----------------------------------------------------------------------------------------------------------


def node(cpus: str, kilobytes: str) -> dict[str, str]:
    return {"cpulist": cpus, "meminfo": f"Node 0 MemTotal:  {kilobytes} kB\nNode 0 MemFree:  5 kB\n"}


def nodes(**listed: dict[str, str]) -> dict[str, str]:
    return {f"sys/devices/system/node/{n}/{file}": text for n, files in listed.items() for file, text in files.items()}


def test_several_nodes(machine):
    files = nodes(node0=node("0-1,4\n", "1024"), node10=node("", "4096"), node2=node("2-3,5-7", "2048"))
    found = numa_nodes(machine({**files, "sys/devices/system/node/online": "0,2,10"}, cores=(0, 1, 2, 3, 4, 5)))
    assert [(n.index, n.cores, n.memory_bytes) for n in found] == [
        (0, (0, 1, 4), 1 << 20),
        (2, (2, 3, 5), 2 << 20),
        (10, (), 4 << 20),  # memory without cores, as on cards of the expansion bus
    ]


@pytest.mark.parametrize(
    "files",
    [
        {},
        nodes(node0=node("nonsense", "1024")),
        nodes(node0=node("100-200", "1024")),  # none of them is ours
        {"sys/devices/system/node/nodeX/cpulist": "0-7"},
    ],
)
def test_one_node_where_nothing_else_is_known(machine, files):
    (found,) = numa_nodes(machine(files, cores=(2, 1)))
    assert (found.index, found.cores, found.memory_bytes) == (0, (1, 2), 16 * GB)


def test_a_node_that_does_not_tell_its_memory(machine):
    files = nodes(node0={"cpulist": "0-3", "meminfo": "none of it"}, node1=node("4-7", "1024"))
    assert [n.memory_bytes for n in numa_nodes(machine(files))] == [None, 1 << 20]


@pytest.mark.parametrize(("physical", "expected"), [(16 * GB, 16 * GB), (None, 1 << 20)])
def test_a_single_node_has_all_memory(machine, physical, expected):
    around = machine(nodes(node0=node("0-7", "1024")), physical_memory=lambda: physical)
    assert [(n.cores, n.memory_bytes) for n in numa_nodes(around)] == [(tuple(range(8)), expected)]


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cores_reads_back(cores):
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    assert core_list(text) == tuple(sorted(cores))


@pytest.mark.parametrize("text", ["", "3-1", "0-99999999999", "1,,2", "-3", "0x10", "1-2-3", "٣"])
def test_what_is_no_list_of_cores(text):
    assert core_list(text) == ()


# -- the processor --------------------------------------------------------------------------------------------------

X86 = "processor\t: 0\nmodel name\t: Made Up 9000\nflags\t\t: fpu sse4_2 avx2 fma avx512_bf16 amx_tile smep lm\n"


def test_features_have_one_name_on_every_system(machine):
    around = machine({"proc/cpuinfo": X86})
    assert {"avx512bf16", "amx-tile", "lm"} <= cpu_features(around)
    assert vector_features(around) == ("amx-tile", "avx2", "avx512bf16", "fma", "sse4.2")
    assert processor_name(around) == "Made Up 9000"


def test_features_of_arm(machine):
    around = machine({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd asimddp sve\n"}, machine="aarch64")
    assert vector_features(around) == ("dotprod", "neon", "sve")
    assert vector_features(replace(around, root=around.root / "empty", machine="arm64")) == ("neon",)


@pytest.mark.parametrize("content", [None, "", b"\xff\xfe no flags here", "flags\n", "x" * 100_000])
def test_features_that_cannot_be_read(machine, content):
    around = machine({} if content is None else {"proc/cpuinfo": content})
    assert cpu_features(around) == frozenset() and processor_name(around) == ""


def test_the_machine_in_short(machine):
    found = machine_info(machine({"proc/cpuinfo": X86, "sys/fs/cgroup/cpu.max": "200000 100000"}))
    assert (found.cores, found.cores_present, found.memory_bytes) == (2, 8, 16 * GB)
    assert (found.platform, found.machine, found.model_name) == ("Linux-made-up", "x86_64", "Made Up 9000")


def test_this_machine():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert usable_memory() is None or usable_memory() > 1 << 20
