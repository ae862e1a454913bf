"""Activations as digits of 8 bits, against what they are defined to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.llvm.coded import Coding, Groups, pack_coded
from ranvier.codegen.llvm.coded.adding import multiplies_fours
from ranvier.codegen.llvm.coded.prepare import DIGITS, DIGITS_ABOUT, prepare
from ranvier.codegen.llvm.gemm.problem import folded, problem_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen.harness import Runner, aligned, view_of
from tests.codegen.test_coded import WAYS

Array = np.ndarray[Any, Any]
F32 = np.float32
KINDS = [isa for isa in WAYS.values() if multiplies_fours(isa)]
pytestmark = pytest.mark.skipif(not KINDS, reason="no instruction here multiplies bytes")


def digits_of(a: Array, group: int, isa: Isa) -> tuple[Array, Array, Array, Array, Array]:
    """What is made of rows [M, K]: their upper digits [M, K, 3], the lower first, and the lowest [M, K]; of groups, the
    steps of both, and all that is about them [M, groups, numbers] as integers."""
    m, k = a.shape
    codes, groups = np.full((64, k), 8, np.uint8), Groups.even(k, group, Coding(4))
    scales = np.ones((64, len(groups.order)), F32)
    b = pack_coded(lambda first, last: codes[first:last], Coding(4), 64, groups, scales, None, isa)
    out = np.empty((m, 64), F32)
    av, ov = view_of(a), view_of(out, "output")
    p = folded(problem_of(av, View(b.codes, DType.float32, (k, 64), (0, 0)), ov, None, 1.0))
    made = prepare(p, b, isa, "digits")
    rows = aligned(m * b.deep * (1 + DIGITS)).view(np.int8)
    about = aligned(m * b.groups * DIGITS_ABOUT * 4).view(np.int32)
    Runner(list(made.launches), isa, {av.storage: a, made.rows.storage: rows, made.about.storage: about})()
    rows, about = rows.reshape(m, -1), about.reshape(m, b.groups, DIGITS_ABOUT)
    upper = rows[:, : b.deep * DIGITS].reshape(m, b.deep // 4, DIGITS, 4).swapaxes(2, 3).reshape(m, b.deep, DIGITS)
    steps = about.view(F32)[..., [0, 2 + DIGITS]].astype(np.float64)
    return upper[:, :k], rows[:, b.deep * DIGITS :][:, :k], steps[..., 0], steps[..., 1], about


@pytest.mark.parametrize("isa", KINDS, ids=lambda isa: isa.key)
@settings(max_examples=30)
@given(st.data())
def test_digits_are_what_activations_are(isa: Isa, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    m, groups, group = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from([8, 32, 96])),
    )
    spread = data.draw(st.sampled_from([0.0, 1.0, 3.0, 12.0, 40.0]))
    a = rng.standard_normal((m, groups * group)) * np.exp(spread * rng.standard_normal((m, groups * group)))
    a = np.clip(a * 10.0 ** data.draw(st.integers(-44, 30)), -3e38, 3e38).astype(F32)
    a[rng.random(a.shape) < data.draw(st.sampled_from([0.0, 0.7, 1.0]))] = 0
    upper, lowest, step, lower_step, about = digits_of(a, group, isa)
    size = np.abs(a).astype(np.float64).reshape(m, groups, group)
    largest = np.maximum(size.max(axis=-1), 2.0**-96)  # below it steps would be no normal numbers
    three = (upper.astype(np.float64) @ [1, 256, 65536]).reshape(m, groups, group) * step[..., None]
    exact = a.astype(np.float64).reshape(three.shape)
    bound = largest[..., None] * 128 / 127  # those near a power of two count as that power
    assert (np.abs(three - exact) <= bound * 2.0**-23).all()
    four = three + lowest.reshape(three.shape) * step[..., None] / 256
    assert (np.abs(four - exact) <= bound * 2.0**-31).all()
    plain = size >= largest[..., None] / 64
    assert (four[plain] == exact[plain]).all()
    # the lowest count where the first says nothing of most that are something
    first = np.abs(four) >= step[..., None] * 65536
    some = (np.abs(four) > 0).sum(axis=-1)
    counts = 2 * (some - (first & (four != 0)).sum(axis=-1)) > some
    np.testing.assert_array_equal(lower_step, np.where(counts, step / 256, 0))
    sums = upper.astype(np.int64).reshape(m, groups, group, DIGITS).sum(axis=2)
    np.testing.assert_array_equal(about[..., 1 : 1 + DIGITS], -8 * sums)
    np.testing.assert_array_equal(
        about[..., 3 + DIGITS], -8 * lowest.astype(np.int64).reshape(three.shape).sum(axis=-1)
    )
    np.testing.assert_allclose(about.view(F32)[..., 1 + DIGITS], sums @ [1.0, 256.0, 65536.0], rtol=1e-6)


@pytest.mark.parametrize("isa", KINDS, ids=lambda isa: isa.key)
def test_lowest_digits_count_only_where_a_few_numbers_hide_the_others(isa: Isa) -> None:
    rng = np.random.default_rng(1)
    usual = rng.standard_normal((4, 256)).astype(F32)
    gated = (usual * np.maximum(rng.standard_normal(usual.shape), 0)).astype(F32)  # as layers of decoders have it
    for a in (usual, gated, np.zeros_like(usual)):
        assert not digits_of(a, 32, isa)[3].any()
    usual[1, 70] = 1e4
    usual[2, 200] = np.nan
    _, _, step, lower_step, _ = digits_of(usual, 32, isa)
    assert np.argwhere(lower_step != 0).tolist() == [[1, 2]]
    assert np.argwhere(np.isnan(step)).tolist() == [[2, 6]]
