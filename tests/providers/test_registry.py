"""Providers that cannot be had are absent; providers that are broken are errors."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from ranvier.errors import InvalidConfig, ProviderUnavailable
from ranvier.providers import registry
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import ProviderRegistry


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ProviderRegistry:
    """A registry without installed packages' providers."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    made = ProviderRegistry()
    made.register("reference", ReferenceProvider)
    return made


def needs(statement: str) -> Any:
    def factory() -> ReferenceProvider:
        exec(statement, {})
        return ReferenceProvider()

    return factory


def test_a_library_that_is_not_installed_makes_a_provider_unavailable(own: ProviderRegistry) -> None:
    own.register("gpu", needs("import library_nobody_has.driver"), first=True)
    with pytest.raises(ProviderUnavailable, match=r"its library is missing.*library_nobody_has"):
        own.get("gpu")
    assert own.available() == ["reference"]


@pytest.mark.parametrize(
    "statement",
    [
        "import ranvier.providers.module_nobody_wrote",
        "from ranvier.providers.base import name_nobody_defined",
        "from math import name_nobody_defined",
    ],
)
def test_a_failing_import_of_ours_is_an_error(own: ProviderRegistry, statement: str) -> None:
    own.register("gpu", needs(statement), first=True)
    with pytest.raises(ImportError, match="nobody"):
        own.get("gpu")
    with pytest.raises(ImportError, match="nobody"):
        own.chain(["auto"])


def test_a_missing_module_of_the_cpu_provider_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ranvier.providers.cpu.provider", None)  # as if it were not there
    made = ProviderRegistry()
    made.register("cpu", registry._ours("cpu.provider", "CpuProvider"))
    with pytest.raises(ImportError, match=r"ranvier\.providers\.cpu\.provider"):
        made.get("cpu")


def test_cpu_is_unavailable_without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
    from ranvier.providers.cpu import provider

    found = provider.importlib.util.find_spec  # type: ignore[attr-defined]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "llvmlite" else found(name, *a))
    provider._llvm_problem.cache_clear()
    try:
        with pytest.raises(ProviderUnavailable, match="llvmlite is not installed"):
            registry.REGISTRY.get("cpu")
        assert "cpu" not in registry.REGISTRY.available()
    finally:
        provider._llvm_problem.cache_clear()


@pytest.mark.parametrize("content", ["import library_nobody_has", "from math import name_nobody_defined"])
def test_a_package_that_cannot_be_imported_leaves_the_others(
    own: ProviderRegistry,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "broken_plugin.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("ranvier.logs._said", set())
    entry = importlib.metadata.EntryPoint("plugged", "broken_plugin:Provider", registry.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [entry])
    assert own.available() == ["reference"]
    assert "broken_plugin:Provider cannot be imported" in caplog.text


def test_names_are_found_in_any_spelling(own: ProviderRegistry) -> None:
    own.register("cpu", ReferenceProvider, ("CPUExecutionProvider",))
    assert [own.resolve(name) for name in ("CPU", "cpuexecutionprovider", "Reference")] == ["cpu", "cpu", "reference"]
    assert own.resolve("TensorRT") == own.resolve("TensorrtExecutionProvider") == "tensorrt"
    with pytest.raises(InvalidConfig, match="did you mean 'tensorrt'"):
        own.resolve("tensorr")


@pytest.mark.parametrize("name", ["tensorrt", "TensorrtExecutionProvider"])
def test_the_way_to_a_provider_of_onnx_runtime_is_told(own: ProviderRegistry, name: str) -> None:
    with pytest.raises(ProviderUnavailable, match="'onnxruntime' with the option ep='TensorrtExecutionProvider'"):
        own.get(name)


def test_nobody_takes_a_name_that_means_another(own: ProviderRegistry) -> None:
    own.register("cpu", ReferenceProvider, ("CPUExecutionProvider",))
    for alias, owner in (("CPUExecutionProvider", "cpu"), ("reference", "reference")):
        with pytest.raises(InvalidConfig, match=f"provider 'mine': '{alias}' means '{owner}'"):
            own.register("mine", ReferenceProvider, ("Mine", alias))
    assert own.names() == ["reference", "cpu"]
    with pytest.raises(InvalidConfig, match="unknown provider 'Mine'"):
        own.resolve("Mine")
