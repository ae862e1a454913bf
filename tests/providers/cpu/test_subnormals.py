"""Subnormal numbers: computed as IEEE 754 has it, or taken for zeros where that is asked for, and nowhere else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.errors import InvalidConfig
from tests.codegen import harness

Array = np.ndarray[Any, Any]
ISAS = [isa.name for isa in harness.ISAS]
SIZE = 3 << 20  # several chunks for each of two threads


def model() -> onnx.ModelProto:
    """A value by itself, and one whose intermediate result is too small."""
    return onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n] x, float[m] s) => (float[n] doubled, float[m] back) {
            doubled = Add (x, x)
            small = Mul (s, s)
            part = ReduceSum (small)
            back = Add (small, part)
        }""")


def feeds(size: int = SIZE) -> dict[str, Array]:
    x = np.ones(size, np.float32)
    x[::3] = 1e-39
    return {"x": x, "s": np.full(5, 1e-20, np.float32)}


def load(flush: bool, isa: str = "", threads: int = 1) -> rv.Session:
    return rv.load(
        model(), threads=threads, providers=["cpu"], provider_options={"cpu": {"flush_subnormals": flush, "isa": isa}}
    )


def check(session: rv.Session, flush: bool, size: int = SIZE) -> None:
    given = feeds(size)
    found = session.run(given)
    want = np.where(given["x"] < 1, np.float32(0), given["x"]) * 2 if flush else given["x"] * 2
    np.testing.assert_array_equal(found["doubled"], want)
    assert (found["back"] == 0).all() if flush else (found["back"] > 5e-40).all()
    assert np.float32(1e-39) * np.ones(1, np.float32) > 0, "the thread computes as before"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ISAS)
def test_both_ways(isa: str, threads: int) -> None:
    """In turns, by the same workers."""
    sessions = [(load(flush, isa, threads), flush) for flush in (True, False)]
    for _ in range(3):
        for session, flush in sessions:
            check(session, flush)
            check(session, flush, 7)


def test_at_the_same_time() -> None:
    sessions = [(load(flush, threads=2), flush) for flush in (True, False)]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(check, *sessions[k % 2]) for k in range(16)]:
            done.result()


@pytest.mark.parametrize("value", ["0", "1"])
def test_onnx_runtimes_entry(value: str) -> None:
    options = rv.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", value)
    for providers in (["cpu"], [("cpu", {"winograd": False})], None):
        session = rv.InferenceSession(model().SerializeToString(), options, providers=providers)
        assert session.session.config.provider_options.get("cpu", {}).get("flush_subnormals", False) == (value == "1")
        check(session.session, value == "1", 100)


def test_the_option_is_checked() -> None:
    with pytest.raises(InvalidConfig, match="flush_subnormals"):
        rv.load(model(), provider_options={"cpu": {"flush_subnormals": "yes"}})
