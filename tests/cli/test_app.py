"""The group: help, errors, exit codes, and what is imported when."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ranvier import errors
from ranvier.cli import app, exit_codes


def test_help_lists_every_command_and_the_exit_codes(call):
    result = call("--help")
    assert result.exit_code == 0
    for name in app.COMMANDS:
        assert f"\n  {name} " in result.stdout
    for code, meaning in exit_codes.MEANING.items():
        assert f"{code}  {meaning}" in result.stdout


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_help(call, name):
    result = call(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout and "--quiet" in result.stdout


def test_version(call):
    result = call("--version")
    assert result.exit_code == 0 and result.stdout.startswith("ranvier ")


def test_help_imports_no_command_and_no_rich():
    code = (
        "import sys, ranvier.cli.app as app\n"
        "app.cli(['--help'], standalone_mode=False)\n"
        "print([m for m in sys.modules if m == 'rich' or m.split('.')[-1] in app.COMMANDS and 'ranvier.cli' in m])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_unknown_command_names_the_nearest(call):
    result = call("inspekt")
    assert result.exit_code == exit_codes.USAGE
    assert "did you mean 'inspect'" in result.stderr


def test_output_options_work_before_and_after_the_command(call, dense):
    for args in (("--json", "run", dense), ("run", dense, "--json")):
        result = call(*args)
        assert json.loads(result.stdout)["outputs"]["y"]["type"] == "float32[1, 5]"


def test_quiet_leaves_out_notes(call, dense):
    assert "random values" in call("run", dense).stderr
    assert call("run", dense, "--quiet").stderr == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidConfig("x"), 2),
        (errors.InvalidModel("x"), 3),
        (errors.WeightError("x"), 3),
        (errors.InvalidInput("x"), 4),
        (errors.DimensionMismatch("x"), 4),
        (errors.UnsupportedOp([]), 5),
        (errors.NotSupported("x"), 5),
        (errors.ProviderUnavailable("gpu", "none"), 6),
        (errors.ResourceLimit("memory_bytes", 1, 2), 7),
        (errors.OutOfMemory("x"), 7),
        (errors.DeadlineExceeded("x"), 7),
        (MemoryError(), 7),
        (errors.KernelError("x"), 8),
        (errors.InvalidValue("x"), 8),
        (errors.RanvierError("x"), 8),
    ],
)
def test_exit_codes_by_error_class(error, code):
    assert exit_codes.exit_code(error) == code


def test_a_mismatch_inside_the_model_is_a_failed_run():
    error = errors.ShapeMismatch("Add: shapes differ")
    error.add_note("while running Add 'a' on reference")
    assert exit_codes.exit_code(error) == exit_codes.RUN_FAILED
    assert "while running" in exit_codes.describe(error)


def test_errors_are_one_line_without_traceback(call, tmp_path, monkeypatch):
    monkeypatch.delenv("RANVIER_DEBUG", raising=False)
    result = call("run", tmp_path / "none.onnx")
    assert result.exit_code == exit_codes.INVALID_MODEL
    assert result.stdout == ""
    assert result.stderr.startswith("error: cannot open model") and result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(call, tmp_path, monkeypatch):
    monkeypatch.setenv("RANVIER_DEBUG", "1")
    result = call("run", tmp_path / "none.onnx")
    assert "Traceback" in result.stderr and "InvalidModel" in result.stderr


def test_json_errors(call_json, tmp_path):
    found = call_json("run", tmp_path / "none.onnx", code=3)
    assert found["error"]["type"] == "InvalidModel" and found["error"]["exit_code"] == 3


def test_interrupt(call, dense, monkeypatch):
    def stop(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("ranvier.cli.run.collect", stop)
    result = call("run", dense)
    assert result.exit_code == exit_codes.INTERRUPTED and "interrupted" in result.stderr


def test_a_closed_pipe_is_no_error_message(dense):
    command = [sys.executable, "-m", "ranvier.cli", "inspect", str(dense), "--text"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait() == exit_codes.BROKEN_PIPE
    assert b"Traceback" not in stderr and b"Broken" not in stderr


@pytest.mark.parametrize("module", ["ranvier", "ranvier.cli"])
def test_as_a_module(module):
    command = [sys.executable, "-m", module, "providers", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    assert "cpu" in str(found)


def test_limits_and_providers_from_the_command_line(call, dense):
    assert call("run", dense, "--limit", "memory_bytes=16").exit_code == exit_codes.RESOURCE_LIMIT
    assert call("run", dense, "--limit", "memory_bytes=1G", "--limit", "run_seconds=none").exit_code == 0
    assert "did you mean 'memory_bytes'" in call("run", dense, "--limit", "memory_byte=1").stderr
    assert call("run", dense, "--limit", "memory_bytes=lots").exit_code == exit_codes.USAGE
    assert call("run", dense, "--provider", "ROCMExecutionProvider").exit_code == exit_codes.PROVIDER_UNAVAILABLE
    assert call("run", dense, "--provider", "reference", "--threads", "1", "--level", "none").exit_code == 0
    assert call("run", dense, "--provider", "unheard-of").exit_code == exit_codes.USAGE


def test_unsupported_operators_are_listed(call, tmp_path):
    from onnx import helper

    from .conftest import save_model

    nodes = [helper.make_node("Frobnicate", ["x"], ["y"], name="odd", domain="my.own")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my.own", 1)]
    path = save_model(Path(tmp_path / "odd.onnx"), nodes, {"x": [1]}, {"y": [1]}, opsets=opsets)
    result = call("run", path)
    assert result.exit_code == exit_codes.UNSUPPORTED_OP
    assert "my.own::Frobnicate" in result.stderr and "'odd'" in result.stderr
    # what cannot be run can still be looked at
    assert "my.own::Frobnicate" in call("inspect", path).stdout
