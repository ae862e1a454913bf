"""Shares of a softmax below the smallest normal number are zero, and all others what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.codegen.llvm.isa import Isa
from tests.codegen.harness import ISAS
from tests.providers.cpu.compare import Array, check, one_node

LEAST = float(np.finfo(np.float32).tiny)


def far_down(rows: int, columns: int) -> Array:
    """Rows whose shares are all over what float32 has, subnormal numbers and less included."""
    rng = np.random.default_rng(columns)
    x = rng.uniform(-110, 0, (rows, columns)).astype(np.float32)
    x[:, rng.integers(0, columns)] = 0.0
    x[1:3, : columns // 2] = -np.inf
    return x


def ran(inputs: list[Array], isa: Isa, op: str, attrs: dict[str, Any], **how: Any) -> Array:
    options = {"cpu": {"isa": isa.name}}
    with rv.load(one_node(op, inputs, attrs, **how), providers=["cpu"], provider_options=options) as session:
        (found,) = session.run({f"x{k}": x for k, x in enumerate(inputs)}).values()
    return np.asarray(found)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.key)
@pytest.mark.parametrize("columns", [3, 32, 37, 1000])
@pytest.mark.parametrize("op", ["Softmax", "BiasSoftmax"])
def test_no_share_is_subnormal(isa: Isa, columns: int, op: str) -> None:
    x = far_down(5, columns)
    if op == "Softmax":
        found = ran([x], isa, op, {"axis": -1})
    else:
        attrs = {"axis": 1, "is_inner_broadcast": 0}
        found = ran([x, np.zeros((1, columns), np.float32)], isa, op, attrs, domain="com.microsoft")
    powers = np.exp(x.astype(np.float64))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    normal = wanted >= LEAST * (1 + 2.0**-12)
    assert (wanted[(wanted > 0) & ~normal]).any(), "some would be subnormal"
    np.testing.assert_allclose(found[normal], wanted[normal], rtol=2e-6)
    rest = found[~normal]
    assert ((rest == 0) | (rest >= LEAST)).all() and (rest <= LEAST * (1 + 2.0**-10)).all()
    assert (found[wanted < LEAST / 2] == 0).all()


@pytest.mark.parametrize("columns", [2, 33])
def test_what_is_no_number_stays_none(columns: int) -> None:
    x = far_down(5, columns)
    x[0, 0], x[3, 1], x[4] = np.nan, np.inf, -np.inf
    check("Softmax", [x], {"axis": -1}, rtol=1e-5, atol=1e-30)
    check("LogSoftmax", [x], {"axis": -1}, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.key)
@pytest.mark.parametrize("queries", [1, 9])
def test_attention_has_none_either(isa: Isa, queries: int) -> None:
    """A value that is large enough to show them."""
    size, keys = 16, 20
    q, k, v = (np.zeros((1, 2, n, size), np.float32) for n in (queries, keys, keys))
    q[..., 0], k[:, :, 1, 0], v[:, :, 1] = 1.0, -95.0, 1e38
    k[:, :, 2:, 0] = -60.0
    found = ran([q, k, v], isa, "Attention", {"scale": 1.0}, opset=23)
    assert (found == 0).all()
    k[:, :, 1, 0] = -80.0
    found = ran([q, k, v], isa, "Attention", {"scale": 1.0}, opset=23)
    np.testing.assert_allclose(found, np.exp(-80.0) * 1e38, rtol=1e-4)
