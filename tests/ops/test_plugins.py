"""Operators of installed packages: looked for once, when a domain is unknown, and never a reason to fail."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ranvier.domains import normal_domain
from ranvier.ops import plugins, registry
from ranvier.ops.custom import register_op, unregister_op

DOMAIN = "test.plugged"


class Installed:
    """Entry points as if a package had been installed, and how often they were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.loaded = 0
        self.value = "plugged_operators:register"

    def entry_points(self, *, group: str, name: str) -> list[importlib.metadata.EntryPoint]:
        self.asked.append(name)
        assert group == "ranvier.ops"
        return [importlib.metadata.EntryPoint(name, self.value, group)] if name == DOMAIN else []

    def register(self) -> None:
        self.loaded += 1
        time.sleep(0.05)  # others come meanwhile
        register_op(DOMAIN, "Twice", lambda x: x + x)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    made = Installed()
    module: Any = types.ModuleType("plugged_operators")
    module.register = made.register
    monkeypatch.setitem(sys.modules, "plugged_operators", module)
    monkeypatch.setattr(importlib.metadata, "entry_points", made.entry_points)
    monkeypatch.setattr(plugins, "_asked", set())
    monkeypatch.setattr("ranvier.logs._said", set())
    registry._changed()  # what was not found before may be there now
    yield made
    if registry.own_declaration(DOMAIN, "Twice", None) is not None:
        unregister_op(DOMAIN, "Twice")


def test_a_package_is_loaded_for_its_domain_only(installed: Installed) -> None:
    assert registry.find("test.other", "Twice") is None
    assert installed.loaded == 0
    np.testing.assert_array_equal(registry.evaluate("Twice", np.float32([3]), domain=DOMAIN), [6])
    assert registry.find(DOMAIN, "Thrice") is None
    assert installed.loaded == 1
    assert installed.asked == ["test.other", DOMAIN]


def test_domains_of_the_standard_are_not_looked_for(installed: Installed) -> None:
    for domain in ("", "ai.onnx", "ai.onnx.ml", "com.microsoft"):
        assert registry.find(normal_domain(domain), "NobodyHasThis") is None
    assert installed.asked == []


def test_threads_that_come_at_once_all_find_it(installed: Installed) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(registry.find(DOMAIN, "Twice"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and None not in found
    assert installed.loaded == 1


@pytest.mark.parametrize("value", ["plugged_operators:missing", "module_nobody_has", "plugged_operators:register"])
def test_a_broken_package_is_told_once_and_absent(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    def register() -> None:
        raise RuntimeError("half installed")

    monkeypatch.setattr(sys.modules["plugged_operators"], "register", register)
    installed.value = value
    for _ in range(2):
        assert registry.find(DOMAIN, "Twice") is None
        assert registry.find(DOMAIN, "Thrice") is None
    assert caplog.text.count(f"operators of domain {DOMAIN!r}: {value} failed") == 1


def test_a_module_that_declares_on_import(installed: Installed) -> None:
    installed.value = "plugged_operators"
    register_op(DOMAIN, "Twice", lambda x: x * 2)  # what importing it would have done
    assert registry.find(DOMAIN, "Thrice") is None
    assert registry.find(DOMAIN, "Twice") is not None
    assert installed.loaded == 0
