"""Random nests cut in every way that their axes allow, not only in the one that is chosen for their sizes."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.loops.normalize import normalized
from ranvier.codegen.triton.library import planned
from ranvier.codegen.triton.schedule import Plan, plan, power_of_two
from tests.codegen.test_nests_random import Random
from tests.torch.codegen.checking import check


def plans(nest: Nest) -> list[Plan]:
    """Small tiles, so that rows take several steps and most tiles reach past an end."""
    axes = tuple(range(len(nest.extents)))
    if not nest.row:
        found = [Plan("flat", axes, (), (), (64, 1), False, 1)]
        if len(axes) > 1:
            found.append(Plan("tiled", axes[:1], axes[1:], (), (4, 32), False, 2))
        if len(axes) > 2:
            found.append(Plan("tiled", axes[1:2], axes[2:], axes[:1], (8, 8), False, 1))
        return found
    row = tuple(a for a in axes if a in nest.row)
    whole = power_of_two(math.prod(nest.extents[a] for a in row))
    return [
        Plan("rows", nest.outer, row, (), (8, 16), False, 1),
        Plan("rows", nest.outer, row, (), (16, max(2, whole)), True, 4),
        Plan("columns", nest.outer, row, (), (32, 1), False, 1),
    ]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(1000, 100_000))
def test_every_way_gives_the_same(seed: int) -> None:
    made = Random(seed)
    nest = made.nest()
    normal = normalized(nest)
    if normal is None or math.prod(normal.extents) > 600:
        return
    for each in plans(normal):
        check(nest, made.memory, 1e-4 * math.sqrt(math.prod(nest.extents)), planned(normal, each))


@pytest.mark.parametrize("seed", range(30))
def test_tiles_are_powers_of_two(seed: int) -> None:
    normal = normalized(Random(seed).nest())
    assert normal is not None
    found = plan(normal)
    for size in (*found.blocks, found.warps):
        assert size == power_of_two(size) >= 1
    covered = sorted((*found.first, *found.second, *found.rest))
    assert covered == list(range(len(normal.extents)))
    assert found.blocks[0] * found.blocks[1] <= 1 << 15
