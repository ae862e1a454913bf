"""``ranvier cache``."""

from __future__ import annotations

import os
import time

import pytest

from ranvier.codegen.llvm import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "kept"))
    monkeypatch.delenv(cache.SWITCH, raising=False)
    monkeypatch.setenv(cache.LIMIT, "2M")
    return tmp_path / "kept"


def fill(folder):
    disk = cache.current()
    assert disk is not None
    for k, days in enumerate((0, 0, 3, 20, 400)):
        disk.put(f"{k:032x}", bytes(1000))
        then = time.time() - days * 86400
        os.utime(folder / "kernels" / f"{k:032x}.kernel", (then, then))
    (folder / "peaks.json").write_text("{}")


def test_empty(call, call_json, folder):
    found = call_json("cache")
    assert found["enabled"] and found["location"] == str(folder / "kernels")
    assert found["entries"] == found["bytes"] == 0 and found["limit_bytes"] == 2_000_000
    assert "last used" not in call("cache").stdout


def test_entries_by_age(call, call_json, folder):
    fill(folder)
    found = call_json("cache")
    assert {age: f["entries"] for age, f in found["by_last_use"].items()} == {
        "today": 2,
        "this week": 1,
        "this month": 1,
        "longer ago": 1,
    }
    assert found["entries"] == 5 and 5000 < found["bytes"] < 6000
    text = call("cache").stdout
    assert str(folder) in text and "of at most 2 MB" in text and "longer ago" in text


def test_clear(call, call_json, folder):
    fill(folder)
    result = call("cache", "--clear")
    assert result.exit_code == 0 and "deleted 5 kernels" in result.stdout
    assert not (folder / "peaks.json").exists()
    assert call_json("cache")["entries"] == 0
    assert call_json("cache", "--clear")["deleted"] == {"entries": 0, "bytes": 0}


def test_off(call, call_json, monkeypatch, folder):
    monkeypatch.setenv(cache.SWITCH, "off")
    found = call_json("cache", "--clear")
    assert not found["enabled"] and found["location"] is None
    assert "not kept" in call("cache").stdout


def test_a_limit_that_is_no_size(call, monkeypatch, folder):
    monkeypatch.setenv(cache.LIMIT, "much")
    result = call("cache")
    assert result.exit_code == 2 and cache.LIMIT in result.stderr


def test_doctor_knows(call, call_json, folder, monkeypatch):
    monkeypatch.setenv("RANVIER_CPU_ISA", "portable")
    found = call_json("doctor")
    assert found["code"]["isa"] == "portable" and "portable" in found["code"]["available"]
    assert found["code"]["cache"]["location"] == str(folder / "kernels")
    assert found["environment"]["RANVIER_CPU_ISA"].startswith("forces")
    text = call("doctor").stdout
    assert "instruction set" in text and str(folder) in text
    monkeypatch.setenv("RANVIER_CPU_ISA", "avx3")
    result = call("doctor")
    assert result.exit_code == 1 and "unknown instruction set 'avx3'" in result.stdout
