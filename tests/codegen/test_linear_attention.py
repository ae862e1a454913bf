"""Linear attention against float64 NumPy, step by step: every rule, remainders of columns, shared heads, every path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.linear_attention import linear_attention
from tests.codegen.harness import ISAS, Array, aligned, run, view_of

RNG = np.random.default_rng(4)
each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def oracle(
    q: Array, k: Array, v: Array, past: Array | None, keep: Array | None, rate: Array | None, heads: int, scale: float
) -> tuple[Array, Array]:
    batch, time, _ = k.shape

    def split(x: Array, count: int) -> Array:
        return x.astype(np.float64).reshape(batch, time, count, x.shape[2] // count)

    k, v = split(k, heads), split(v, heads)
    group = q.shape[2] // (heads * k.shape[3])
    q = split(q, heads * group)
    state = np.zeros((batch, heads, k.shape[3], v.shape[3])) if past is None else past.astype(np.float64)
    y = np.empty((batch, time, heads * group, v.shape[3]))
    for t in range(time):
        if keep is not None:
            state = state * split(keep, heads)[:, t, :, :, None]
        write = v[:, t]
        if rate is not None:
            recalled = np.einsum("bhk,bhkv->bhv", k[:, t], state)
            write = split(rate, rate.shape[2])[:, t] * (write - recalled)
        state = state + k[:, t][..., None] * write[:, :, None]
        y[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t] * scale, np.repeat(state, group, 1))
    return y.reshape(batch, time, heads * group * v.shape[3]), state


def check(
    isa: Isa,
    *,
    sizes: tuple[int, int, int, int, int, int] = (2, 5, 3, 1, 8, 16),
    past: bool = True,
    keep: str = "",
    rate: str = "",
    dtype: Any = np.float32,
    split: int = 1,
) -> None:
    batch, time, heads, group, size, width = sizes
    widths = {"head": heads, "row": heads * size, "one": 1}

    def numbers(*shape: int) -> Array:
        return (RNG.normal(size=shape) * 0.5).astype(dtype)

    q, k, v = (numbers(batch, time, n) for n in (heads * group * size, heads * size, heads * width))
    before = numbers(batch, heads, size, width) if past else None
    kept = np.abs(numbers(batch, time, widths[keep])) if keep else None
    rates = np.abs(numbers(batch, time, widths[rate])) if rate else None
    given = [q, k, v, before, kept, rates]
    shapes = ((batch, time, heads * group * width), (batch, heads, size, width))
    outs = [aligned(int(np.prod(s)) * np.dtype(dtype).itemsize).view(dtype).reshape(s) for s in shapes]
    views = [None if a is None else view_of(a, index=n) for n, a in enumerate(given)]
    results = [view_of(a, "output", n) for n, a in enumerate(outs)]
    launches = linear_attention(*views, *results, isa, heads=heads, scale=0.7)  # type: ignore[arg-type]
    bound = {view.storage: a for view, a in zip([*views, *results], [*given, *outs]) if view is not None}
    run(launches, isa, bound, split=split)  # type: ignore[arg-type]
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    for have, want in zip(outs, oracle(q, k, v, before, kept, rates, heads, 0.7)):
        np.testing.assert_allclose(
            have, want, rtol=tolerance * 10, atol=tolerance * max(1.0, np.abs(want).max(initial=0.0))
        )


@each_isa
@pytest.mark.parametrize("keep", ["", "head", "row"])
@pytest.mark.parametrize("rate", ["", "head", "one"])
def test_every_rule(isa: Isa, keep: str, rate: str) -> None:
    check(isa, keep=keep, rate=rate)


@each_isa
@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 130])
def test_columns_of_any_number(isa: Isa, width: int) -> None:
    check(isa, sizes=(1, 3, 2, 1, 5, width), keep="row", rate="head", split=3)


@each_isa
def test_heads_that_share_a_matrix(isa: Isa) -> None:
    check(isa, sizes=(2, 4, 2, 3, 8, 16), keep="head", rate="one")


@each_isa
def test_no_past_one_step_and_none(isa: Isa) -> None:
    check(isa, past=False, keep="row")
    check(isa, sizes=(1, 1, 2, 1, 8, 16), rate="head")
    check(isa, sizes=(1, 0, 2, 1, 8, 16))


@each_isa
def test_doubles(isa: Isa) -> None:
    check(isa, dtype=np.float64, keep="row", rate="head")
