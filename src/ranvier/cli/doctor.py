"""``ranvier doctor``: is everything here that should be, and does it compute?"""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from ranvier.cli import exit_codes
from ranvier.cli.cache import cache_facts
from ranvier.cli.options import Sources, source_options, with_output
from ranvier.cli.providers import provider_facts
from ranvier.cli.render import Output, bytes_text, facts, seconds_text, table
from ranvier.cli.versions import package_version, ranvier_version
from ranvier.codegen.llvm import isa
from ranvier.config import SessionConfig
from ranvier.config.resolve import VARIABLES
from ranvier.config.session import PRECISIONS
from ranvier.config.variables import OTHERS, PREFIX, likely
from ranvier.devices import DeviceInfo, GpuInfo, MachineInfo, detect_devices, machine_info
from ranvier.dtypes import DType
from ranvier.errors import ProviderUnavailable, RanvierError, UnsupportedOp
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.providers.cpu.narrow.effective import effective
from ranvier.providers.registry import REGISTRY

_REQUIRED = ("numpy", "onnx", "ml_dtypes", "llvmlite", "click", "rich")
_OPTIONAL = ("pillow", "onnxruntime", "openvino", "torch", "triton")


@click.command()
@source_options
@click.option("--probe", is_flag=True, help="Import torch, which takes seconds, to be certain of the GPUs.")
@with_output
def command(output: Output, sources: Sources, probe: bool) -> None:
    """Check this installation; exit code 1 when something that should work does not."""
    resolved = sources.resolve(collect=True)
    devices, trouble = device_facts(probe)
    data: dict[str, Any] = {
        "versions": {"ranvier": ranvier_version(), "python": platform.python_version()}
        | {name: package_version(name) for name in (*_REQUIRED, *_OPTIONAL)},
        "machine": machine_info(),
        "devices": devices,
        "code": code_facts(),
        "environment": environment_facts([*resolved.problems, trouble]),
        "preset": resolved.preset,
        "files": resolved.files,
        "options": resolved.settings,
        "providers": [check_provider(name) for name in REGISTRY.names()],
    }
    data["gpu"], gpu_problem = gpu_figures(data["providers"])
    problems = [*resolved.problems, *(text for text in (trouble, data["code"]["problem"], gpu_problem) if text)]
    problems += [
        f"package {name} is missing" for name in _REQUIRED if data["versions"][name] is None and not _found(name)
    ]
    problems += [f"provider {p['name']}: {p['problem']}" for p in data["providers"] if p["problem"]]
    if not any(p["result"] == "ok" for p in data["providers"]):
        problems.append("no provider works")
    data["problems"] = problems
    if output.json:
        output.emit(data)
    else:
        _show(output, data)
    if problems:
        raise SystemExit(exit_codes.CHECK_FAILED)


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# -- the machine and the environment --------------------------------------------------------------------------------


def device_facts(probe: bool) -> tuple[DeviceInfo | None, str]:
    """What the machine has, and what is wrong with the variables that choose from it."""
    try:
        return detect_devices(probe=probe), ""
    except RanvierError as error:
        return None, str(error)


def environment_facts(problems: Sequence[str]) -> dict[str, str]:
    """Ranvier's environment variables, and older names of some, with what each does or what is wrong with it."""
    wrong = {name: text for text in problems for name in os.environ if f"variable {name}:" in text}
    found = {}
    for name in sorted(os.environ):
        if name in wrong:
            found[name] = f"invalid: {wrong[name]}"
        elif name.startswith(PREFIX) or name in OTHERS:
            found[name] = _effect(name)
    return found


def _effect(variable: str) -> str:
    if not os.environ[variable].strip():
        return "empty, has no effect"
    if variable in VARIABLES:
        return f"sets {VARIABLES[variable]}"
    return OTHERS.get(variable) or f"unknown, has no effect{likely(variable, VARIABLES)}"


# -- generated code -------------------------------------------------------------------------------------------------


def code_facts() -> dict[str, Any]:
    """The instruction set code is generated for, those this machine has, and where compiled kernels are kept."""
    here = isa.available()
    found: dict[str, Any] = {
        "isa": None,
        "extensions": [],
        "available": [i.name for i in here],
        "precisions": {},  # those a session may ask for, with the reason why one is not to be had
        "cache": None,
        "problem": "",
    }
    try:
        chosen = isa.host()
        found |= {"isa": chosen.name, "extensions": sorted(chosen.extensions), "cache": cache_facts()}
        found["precisions"] = {name: effective(name, chosen)[1] for name in PRECISIONS}
    except RanvierError as error:
        found["problem"] = str(error)
    return found


# -- providers ------------------------------------------------------------------------------------------------------


def check_provider(name: str) -> dict[str, Any]:
    """One provider with the outcome of a small computation on it: ok, failed, declines it, or not available."""
    checked: dict[str, Any] = {"name": name, "device": "", "seconds": None, "problem": ""}
    try:
        found = provider_facts(name)
    except RanvierError as error:  # it cannot even say what it is: a variable of the environment is wrong
        return checked | {"result": "failed", "problem": str(error)}
    checked["device"] = found["device"]
    if not found["available"]:
        return checked | {"result": "not available", "reason": found["reason"]}
    try:
        seconds, gap = run_small_graph(name)
    except ProviderUnavailable as error:  # seen only when it is used: nobody answers where it should be
        return checked | {"result": "not available", "reason": error.reason}
    except UnsupportedOp as error:  # it is for other models than this one, and says so
        return checked | {"result": "declines it", "reason": error.missing[0].reason}
    except Exception as error:  # a broken provider may raise anything; finding that out is what this is for
        return checked | {"result": "failed", "problem": f"{type(error).__name__}: {error}"}
    if gap > 1e-5:
        return checked | {"result": "failed", "seconds": seconds, "problem": f"wrong result, off by {gap:.3g}"}
    return checked | {"result": "ok", "seconds": seconds}


def gpu_figures(checked: Sequence[dict[str, Any]]) -> tuple[Any, str]:
    """What the GPU does, measured, where its provider works; and what is wrong with it."""
    if not any(p["name"] == "cuda" and p["result"] == "ok" for p in checked):
        return None, ""
    from ranvier.providers.cuda.figures import measured  # which imports torch

    provider: Any = REGISTRY.get("cuda")
    try:
        found = measured(provider.place)
    except Exception as error:  # finding out what a device cannot do is what this is for
        return None, f"{provider.device}: {type(error).__name__}: {error}"
    return found, f"{provider.device}: {found.kernel}" if found.kernel else ""


def run_small_graph(provider: str) -> tuple[float, float]:
    """Seconds of one run of ``Relu(x @ w + b)`` on a provider, and its largest distance from NumPy's result."""
    from ranvier.runtime.session import Session

    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape, np.float32) for shape in ((8, 32), (32, 16), (16,)))
    graph = Graph("doctor", opsets={"": 21})
    value = graph.add_input("x", TensorType(DType.float32, x.shape))
    for op, operand in (("MatMul", w), ("Add", b), ("Relu", None)):
        constant = [] if operand is None else [graph.add_constant(ConstTensor.of(operand))]
        node = graph.add(op, [value, *constant], name=op.lower())
        complete(node)
        value = node.output
    value.name = "y"
    graph.outputs = [value]
    with Session(graph, SessionConfig(providers=(provider,))) as session:
        session.run({"x": x})
        started = time.perf_counter()
        result = session.run({"x": x})["y"]
        seconds = time.perf_counter() - started
    return seconds, float(np.abs(result - np.maximum(x @ w + b, 0)).max())


# -- for people -----------------------------------------------------------------------------------------------------


def _show(output: Output, data: dict[str, Any]) -> None:
    output.heading("machine")
    output.show(facts(_machine_lines(data["machine"], data["devices"])))
    output.heading("generated code")
    output.show(facts(_code_lines(data["code"])))
    output.heading("versions")
    output.show(facts((name, version or "not installed") for name, version in data["versions"].items()))
    output.heading("options")
    output.show(
        table(
            ["!option", "value", "!from"],
            [(s.option, _option_text(s.value), s.origin) for s in data["options"]],
        )
    )
    for name, effect in data["environment"].items():
        output.show(f"{name}: {effect}")
    if data["gpu"] is not None:
        output.heading("GPU, measured")
        output.show(facts(_gpu_lines(data["gpu"], data["devices"])))
    output.heading("providers, each asked for Relu(x @ w + b)")
    rows = [
        (
            p["name"],
            p["device"],
            p["result"],
            "" if p["seconds"] is None else seconds_text(p["seconds"]),
            p.get("reason") or p["problem"],
        )
        for p in data["providers"]
    ]
    output.show(table(["!provider", "!device", "!result", ">time", ""], rows), "")
    if data["problems"]:
        output.show(*(f"problem: {text}" for text in data["problems"]))
    else:
        output.show("everything works")


def _machine_lines(machine: MachineInfo, devices: DeviceInfo | None) -> list[tuple[str, str]]:
    lines = [
        ("system", machine.platform),
        ("processor", machine.model_name or machine.machine),
        ("cores", f"{machine.cores} usable of {machine.cores_present}"),
        ("memory", f"{bytes_text(machine.memory_bytes)} usable"),
    ]
    if devices is None:
        return lines
    if devices.quota is not None:
        lines.append(("quota", f"{devices.quota:g} processors"))
    lines.append(("features", " ".join(devices.features)))
    if len(devices.numa) > 1:
        lines += [(f"node {n.index}", f"{len(n.cores)} cores, {bytes_text(n.memory_bytes)}") for n in devices.numa]
    lines += [("gpu", _gpu_text(gpu)) for gpu in devices.gpus] or [("gpu", "none")]
    if devices.forced is not None:
        lines.append(("forced", f"{devices.forced} by {devices.forced_by}"))
    return lines


def _gpu_text(gpu: GpuInfo) -> str:
    parts = [gpu.name if gpu.device is None else f"{gpu.device} {gpu.name}"]
    if gpu.memory_bytes is not None:
        parts.append(bytes_text(gpu.memory_bytes))
    if gpu.capability is not None:
        parts.append(f"compute capability {gpu.capability[0]}.{gpu.capability[1]}")
    if gpu.driver:
        parts.append(f"driver {gpu.driver}")
    return ", ".join([*parts, *([f"cannot be used: {gpu.problem}"] if gpu.problem else [])])


def _gpu_lines(figures: Any, devices: DeviceInfo | None) -> list[tuple[str, str]]:
    driver = next((gpu.driver for gpu in (devices.gpus if devices else ()) if gpu.driver), "unknown")
    capability = "" if figures.capability is None else ".".join(map(str, figures.capability))
    return [
        ("device", figures.name),
        ("driver", f"{driver}, CUDA {figures.runtime}"),
        ("compute capability", capability),
        ("kernel", figures.kernel or "right"),
        ("memory", f"{figures.copy_bytes / 1e12:.2f} TB/s copied"),
        ("from the host", f"{figures.upload_bytes / 1e9:.1f} GB/s"),
        (f"{figures.matrix_type} products", f"{figures.matrix_flops / 1e12:.0f} TFLOP/s"),
    ]


def _code_lines(code: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("instruction set", code["isa"] or "none"),
        ("extensions", ", ".join(code["extensions"])),
        ("available", ", ".join(code["available"])),
        *((f"precision {name}", why or "yes") for name, why in code["precisions"].items()),
    ]
    if kept := code["cache"]:
        size = f"{kept['entries']:,} kernels, {bytes_text(kept['bytes'])}"
        lines.append(("kernel cache", f"{kept['location']} ({size})" if kept["enabled"] else "off"))
    return lines


def _option_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return "" if value in (None, {}) else f"{value:,}" if type(value) is int else str(value)
