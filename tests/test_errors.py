"""Errors: typed, readable by programs, and whole after a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from ranvier import errors
from ranvier.errors import MissingOp, nearest

SAMPLES = [
    errors.ProviderUnavailable("cuda", "no driver"),
    errors.ResourceLimit("memory_bytes", 10, 20, "plan"),
    errors.UnsupportedOp([MissingOp("d", "Op", 3, ("a", "b"), "unknown")]),
    errors.InvalidValue("Gather: index 7", op="Gather", node="g"),
    errors.OutOfMemory("no room", requested=5),
    errors.KernelError("failed", node="n", op="Add", provider="reference"),
    errors.ShapeMismatch("shapes"),
    errors.DeadlineExceeded("late"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_errors_survive_pickling(error: errors.RanvierError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)


def test_built_in_bases() -> None:
    assert issubclass(errors.InvalidModel, ValueError)
    assert issubclass(errors.OutOfMemory, MemoryError)
    assert issubclass(errors.DTypeMismatch, TypeError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.NotSupported, NotImplementedError)


def test_hints() -> None:
    assert nearest("optimisation", ["optimization", "limits"]) == " (did you mean 'optimization'?)"
    assert nearest("X", ["x"]) == " (did you mean 'x'?)"
    assert nearest("qqq", ["b", "a"]) == " (known: a, b)"
    assert nearest("qqq", []) == ""
    assert nearest("qqq", ["a", "\x1b[2J"]) == r" (known: '\x1b[2J', a)"


def test_messages() -> None:
    assert str(SAMPLES[0]) == "provider 'cuda' is not available: no driver"
    assert str(SAMPLES[1]) == "limit 'memory_bytes' reached (plan): allowed 10, needed 20"
    assert "d::Op-3 at 'a', 'b': unknown" in str(SAMPLES[2])


def test_a_list_of_known_names_ends_somewhere() -> None:
    names = [f"node{k:03}" for k in range(100)]
    text = errors.nearest("zzz", names)
    assert "node039 and 60 more" in text and "node040" not in text
    assert errors.nearest("zzz", names[:40]) == f" (known: {', '.join(names[:40])})"
