"""The kernel that walks forests, against a walk in plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm import compiler, library
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.llvm.trees import EQUAL, GREATER, LESS, UNORDERED, Ending, Nodes, Votes, pack_forest, walk
from tests.codegen.harness import ISAS, aligned, run, view_of

Array = np.ndarray[Any, Any]
FEATURES, TARGETS = 5, 3
MIXED = (LESS, LESS | EQUAL, GREATER, EQUAL | UNORDERED, LESS | GREATER | UNORDERED)


def grown(rng: np.random.Generator, trees: int, depth: int, sets: tuple[int, ...]) -> tuple[Array, Nodes, Votes]:
    """Full binary trees in heap order one after another; every node has up to two votes, only those of leaves count."""
    size = 2 ** (depth + 1) - 1
    number = np.tile(np.arange(size), trees)
    start = np.repeat(np.arange(trees) * size, size)
    is_leaf = number >= size // 2
    nodes = Nodes(
        rng.choice(np.array(sets, np.uint8), trees * size),
        rng.integers(0, FEATURES, trees * size),
        rng.integers(-3, 4, trees * size).astype(np.float64),
        np.where(is_leaf, 0, start + 2 * number + 1),
        np.where(is_leaf, 0, start + 2 * number + 2),
        is_leaf,
    )
    count = rng.integers(0, 3, trees * size)
    total = int(count.sum())
    votes = Votes(np.cumsum(count) - count, count, rng.integers(0, TARGETS, total), rng.normal(size=total))
    return np.arange(trees) * size, nodes, votes


def reached(nodes: Nodes, root: int, row: Array) -> int:
    at = root
    while not nodes.is_leaf[at]:
        x, t = row[nodes.feature[at]], nodes.threshold[at]
        outcome = UNORDERED if np.isnan(x) else LESS if x < t else GREATER if x > t else EQUAL
        at = int((nodes.when_true if nodes.outcomes[at] & outcome else nodes.when_false)[at])
    return at


def expected(forest: tuple[Array, Nodes, Votes], x: Array, base: Array) -> tuple[Array, Array]:
    """Sums and counts of votes."""
    roots, nodes, votes = forest
    sums, counts = np.tile(base, (len(x), 1)), np.zeros((len(x), TARGETS), int)
    for (k, row), root in itertools.product(enumerate(x), roots):
        leaf = reached(nodes, int(root), row)
        for vote in range(votes.start[leaf], votes.start[leaf] + votes.count[leaf]):
            sums[k, votes.target[vote]] += votes.weight[vote]
            counts[k, votes.target[vote]] += 1
    return sums, counts


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sets", [(LESS | EQUAL,), MIXED])
@pytest.mark.parametrize("trees,rows,split", [(1, 1, 1), (11, 150, 3), (16, 65, 2)])
def test_walks(isa: Isa, wide: bool, sets: tuple[int, ...], trees: int, rows: int, split: int) -> None:
    rng = np.random.default_rng(trees + rows)
    forest = grown(rng, trees, 3, sets)
    dtype = np.dtype(np.float64 if wide else np.float32)
    x = aligned(rows * FEATURES * dtype.itemsize, shift=dtype.itemsize).view(dtype).reshape(rows, FEATURES)
    x[...] = rng.integers(-3, 4, x.shape)
    x[rng.random(x.shape) < 0.1] = np.nan
    x[rng.random(x.shape) < 0.05] = -np.inf
    scores = aligned(rows * TARGETS * 8).view(np.float64).reshape(rows, TARGETS)
    best = aligned(rows * 8).view(np.int64)
    base = np.array([0.5, -0.25, 0.0])
    labels = np.array([7, -2, 40])
    for ending in ("best", "best voted"):
        views = [view_of(x), view_of(scores, "output"), view_of(best, "output", 1)]
        start: Array = base if ending == "best" else np.zeros(TARGETS)
        kind: Ending = ending  # type: ignore[assignment]
        packed = pack_forest(*forest, wide=wide, one_target=False)
        launches = walk(views[0], packed, "sum", start, views[1], kind, labels, views[2])
        run(launches, isa, dict(zip((v.storage for v in views), (x, scores, best))), split=split)
        sums, counts = expected(forest, x, start)
        np.testing.assert_allclose(scores, sums, rtol=1e-12, atol=1e-12)
        allowed = sums if ending == "best" else np.where(counts > 0, sums, -np.inf)
        np.testing.assert_array_equal(best, labels[allowed.argmax(axis=1)])


def test_emits_for_aarch64() -> None:
    neon = named("neon", "aarch64")
    forest = grown(np.random.default_rng(0), 3, 2, MIXED)
    x, scores = np.zeros((4, FEATURES), np.float32), np.zeros((4, TARGETS), np.float32)
    packed = pack_forest(*forest, wide=False, one_target=False)
    (launch,) = walk(view_of(x), packed, "min", np.zeros(TARGETS), view_of(scores, "output"))
    assert compiler.compile_object(library.source(launch.spec, neon), neon)
