"""Decision forests: rows of features walk down all trees, and the leaves they reach vote.

A node is one small record, so that a step touches one cache line. Nodes are named by their distance in bytes from the
first leaf: inner nodes are negative, leaves are not, and the sign of all positions OR-ed together tells whether anyone
still walks. A leaf leads to itself, so several trees walk in step without branches and hide each other's latency; the
votes are counted afterwards in the order of the trees, which makes sums independent of how many walked together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
Fold = Literal["sum", "average", "min", "max"]
# what becomes of a row's votes: the scores; those and the best label (of classes that were voted for); or, where all
# votes are for one of two classes, its margin beside what the other class gets
Ending = Literal["scores", "best", "best voted", "margin 0", "margin 1-m", "margin -m"]

EQUAL, GREATER, LESS, UNORDERED = 1, 2, 4, 8  # how a feature may compare with a threshold; sets are bits
_ORDERED = ("oeq", "ogt", "oge", "olt", "ole", "one", "ord")
_PREDICATES = ("false", *_ORDERED, "uno", "ueq", "ugt", "uge", "ult", "ule", "une", "true")  # by such a set
_TOGETHER = 8  # trees that walk in step: enough to hide latency, few enough for 16 registers
_SET_AT = 28  # where a node's set of outcomes stands above its feature
MOST_FEATURES = 1 << _SET_AT
_ROWS = 64  # rows that pass a group of trees one after another, while its nodes are in cache
_VISIT_BYTES = 24.0


@dataclass(frozen=True)
class Nodes:
    """Every field has one entry per node. A row goes to ``when_true`` where the comparison of its feature with the
    threshold has one of the ``outcomes``; leaves are marked."""

    outcomes: Array
    feature: Array
    threshold: Array
    when_true: Array
    when_false: Array
    is_leaf: Array


@dataclass(frozen=True)
class Votes:
    """The votes of node ``k`` are ``start[k]`` to ``start[k] + count[k]``."""

    start: Array
    count: Array
    target: Array
    weight: Array


@dataclass(frozen=True)
class PackedForest:
    wide: bool  # thresholds are float64, and so must features be
    predicate: str  # the comparison of all nodes; empty: each has its own
    one_vote: bool  # every leaf has one vote, all for the same target
    trees: int
    depth: float  # of a usual walk
    first_leaf: int  # its place in ``nodes``, in bytes
    nodes: Storage
    roots: Storage
    starts: Storage
    targets: Storage
    weights: Storage

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in (self.nodes, self.roots, self.starts, self.targets, self.weights))


def pack_forest(roots: Array, nodes: Nodes, votes: Votes, *, wide: bool, one_target: bool) -> PackedForest:
    """``one_target``: all votes are for target 0, and their sum is all that matters."""
    inner, leaves = np.flatnonzero(~nodes.is_leaf), np.flatnonzero(nodes.is_leaf)
    order = np.concatenate([inner, leaves])
    record = np.dtype(
        [("threshold", np.float64 if wide else np.float32), ("word", np.uint32), ("children", np.int32, (2,))]
        + ([("", np.uint32)] if wide else [])
    )
    place = np.empty(len(order), np.int64)  # of a node as others name it
    place[order] = (np.arange(len(order)) - len(inner)) * record.itemsize
    sets = np.unique(nodes.outcomes[inner])
    predicate = _PREDICATES[int(sets[0])] if len(sets) == 1 else "" if len(sets) else "false"
    # one more leaf, without votes, fills the last group of trees up
    table = np.zeros(len(order) + 1, record)
    filler = len(leaves) * record.itemsize
    table["threshold"][:-1] = nodes.threshold[order]
    table["word"][:-1] = nodes.feature[order]
    if not predicate:
        table["word"][: len(inner)] |= nodes.outcomes[inner].astype(np.uint32) << _SET_AT
    table["children"][: len(inner), 0] = place[nodes.when_false[inner]]
    table["children"][: len(inner), 1] = place[nodes.when_true[inner]]
    table["children"][len(inner) :] = (np.arange(len(leaves) + 1) * record.itemsize)[:, None]
    padded = np.full(-(-len(roots) // _TOGETHER) * _TOGETHER, filler, np.int32)
    padded[: len(roots)] = place[roots]
    count = votes.count[leaves]
    one_vote = one_target and bool((count == 1).all())
    starts = np.zeros(len(leaves) + 2, np.int32)
    starts[1:-1] = np.cumsum(count)
    starts[-1] = starts[-2]
    listed = np.repeat(votes.start[leaves] - starts[:-2], count) + np.arange(starts[-1])  # votes in the leaves' order
    return PackedForest(
        wide=wide,
        predicate=predicate,
        one_vote=one_vote,
        trees=len(roots),
        depth=float(np.log2(max(len(order) / max(len(roots), 1), 2))),
        first_leaf=len(inner) * record.itemsize,
        nodes=Storage.packed(table.view(np.uint8), "nodes"),
        roots=Storage.packed(padded, "roots"),
        starts=Storage.packed(starts, "first votes"),
        targets=Storage.packed(votes.target[listed].astype(np.int32), "targets"),
        weights=Storage.packed(np.append(votes.weight[listed], 0.0).astype(np.float64), "weights"),
    )


def fits(nodes: int) -> bool:
    """Can that many nodes be told apart by 32-bit distances?"""
    return nodes * 24 < 1 << 31


def walk(
    x: View,
    forest: PackedForest,
    fold: Fold,
    base: Array,
    scores: View,
    ending: Ending = "scores",
    labels: Array | None = None,
    best: View | None = None,
) -> list[Launch]:
    """Dense rows [N, F] (float64 where the forest is wide, else float32) to dense scores [N, targets].

    ``base`` has one float64 per target and is added to what the votes come to; with ``labels`` (int64, one per class)
    the best one of each row goes to ``best``. A margin has one target and two scores per row; a second number in
    ``base`` says what it must exceed for the second label.
    """
    rows, features = x.shape
    targets = 1 if ending.startswith("margin") else len(base)
    if not rows:
        return []
    block = min(rows, _ROWS)
    shape = _Shape(register_type(x.dtype), register_type(scores.dtype), forest.predicate, forest.one_vote, fold, ending)
    weights = At(forest.weights)
    buffers = (
        At.of(x),
        At(forest.nodes, forest.first_leaf),
        At(forest.roots),
        At(forest.starts),
        At(forest.targets),
        weights,
        At(Storage.packed(base, "base")),
        weights if labels is None else At(Storage.packed(labels, "labels")),
        At.of(scores),
        weights if best is None else At(best.storage, best.offset * 8),
    )
    visits = rows * forest.trees * forest.depth
    return [
        Launch(
            KernelSpec(f"trees {shape.x} {fold} {ending}", ("trees", *shape.key), shape.emit),
            buffers,
            (rows, features, block, forest.roots.nbytes // 4 // _TOGETHER, targets, forest.trees),
            -(-rows // block),
            (scores.storage,) if best is None else (scores.storage, best.storage),
            scratch=block * targets * 16,
            flops=4 * visits,
            traffic=_VISIT_BYTES * visits + x.nbytes + scores.nbytes,
        )
    ]


@dataclass(frozen=True)
class _Shape:
    """What the code depends on."""

    x: str
    out: str
    predicate: str
    one_vote: bool
    fold: Fold
    ending: Ending

    @property
    def key(self) -> tuple[object, ...]:
        return (self.x, self.out, self.predicate, self.one_vote, self.fold, self.ending)

    @property
    def is_counted(self) -> bool:
        return self.fold in ("min", "max") or self.ending == "best voted"

    def emit(self, module: Module, symbol: str, isa: Isa) -> None:
        _Emitter(self, module.kernel(symbol)).emit()


class _Emitter:
    def __init__(self, shape: _Shape, f: Fn) -> None:
        self.s, self.f = shape, f
        self.record = 16 if shape.x == "float" else 24
        pointers = [f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(10)]
        self.x, self.nodes, self.roots, self.starts, self.targets = pointers[:5]
        self.weights, self.base, self.labels, self.scores, self.best = pointers[5:]
        numbers = [f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True) for k in range(6)]
        self.rows, self.features, self.block, self.groups, self.width, self.trees = numbers
        self.sums = f.args["scratch"]
        self.counts = f.gep(self.sums, f.mul(self.block, self.width), "double")

    def emit(self) -> None:
        f = self.f
        start = {"min": float("inf"), "max": float("-inf")}.get(self.s.fold, 0.0)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            first = f.mul(tile, self.block)
            count = f.min_(self.block, f.sub(self.rows, first))
            with f.loop(0, f.mul(count, self.width)) as k:
                f.store(f.const("double", start), f.gep(self.sums, k, "double"))
                if self.s.is_counted:
                    f.store(f.i64(0), f.gep(self.counts, k, "i64"))
            with f.loop(0, self.groups) as group, f.loop(0, count) as row:
                features = f.gep(self.x, f.mul(f.add(first, row), self.features), self.s.x)
                self.count_votes(self.walk(group, features), f.mul(row, self.width))
            with f.loop(0, count) as row:
                self.finish(f.add(first, row), f.mul(row, self.width))
        f.ret()

    def walk(self, group: Val, features: Val) -> list[Val]:
        """The leaves that a row reaches in the trees of a group, by number."""
        f = self.f
        roots = f.gep(self.roots, f.mul(group, _TOGETHER), "i32")
        at = [f.var("i64", f.cast(f.load("i32", f.gep(roots, k, "i32")), "i64")) for k in range(_TOGETHER)]
        with f.while_() as walking:
            reached = [self.step(each.get(), features) for each in at]
            every = reached[0]
            for each, place in zip(at, reached):
                each.set(place)
                every = f.or_(every, place)
            walking.until(f.cmp("sge", every, 0))
        return [f.div(each.get(), self.record, signed=False) for each in at]

    def step(self, at: Val, features: Val) -> Val:
        f, kind = self.f, self.s.x
        node = f.gep(self.nodes, at)
        size = 4 if kind == "float" else 8
        threshold = f.load(kind, node, 4 if kind == "float" else 8)
        word = f.load("i32", f.gep(node, size))
        feature = word if self.s.predicate else f.and_(word, MOST_FEATURES - 1)
        value = f.load(kind, f.gep(features, f.cast(feature, "i64", signed=False), kind))
        if self.s.predicate:
            taken = f.cast(f.cmp(self.s.predicate, value, threshold), "i64", signed=False)
        else:
            # equal, greater, less, unordered are 0 to 3, and the bit of that number in the set answers
            greater = f.cast(f.cmp("ugt", value, threshold), "i32", signed=False)
            less = f.cast(f.cmp("ult", value, threshold), "i32", signed=False)
            outcome = f.or_(greater, f.shl(less, 1))
            taken = f.cast(f.and_(f.lshr(f.lshr(word, _SET_AT), outcome), 1), "i64", signed=False)
        # the address of the child rather than a choice of two: there is nothing to predict wrongly
        return f.cast(f.load("i32", f.gep(f.gep(node, size + 4), taken, "i32")), "i64")

    def count_votes(self, leaves: list[Val], row: Val) -> None:
        f = self.f
        if self.s.one_vote:
            place = f.gep(self.sums, row, "double")
            total = f.load("double", place)
            for leaf in leaves:
                total = f.add(total, f.load("double", f.gep(self.weights, leaf, "double")))
            f.store(total, place)
            return
        fold: dict[str, Callable[[Val, Val], Val]] = {"min": f.min_, "max": f.max_}
        for leaf in leaves:
            start = f.gep(self.starts, leaf, "i32")
            first, end = (f.cast(f.load("i32", f.gep(start, k, "i32")), "i64") for k in range(2))
            with f.loop(first, end) as vote:
                target = f.cast(f.load("i32", f.gep(self.targets, vote, "i32")), "i64")
                cell = f.add(row, target)
                place = f.gep(self.sums, cell, "double")
                weight = f.load("double", f.gep(self.weights, vote, "double"))
                f.store(fold.get(self.s.fold, f.add)(f.load("double", place), weight), place)
                if self.s.is_counted:
                    counter = f.gep(self.counts, cell, "i64")
                    f.store(f.add(f.load("i64", counter), 1), counter)

    def finish(self, row: Val, cells: Val) -> None:
        f, ending = self.f, self.s.ending
        if ending.startswith("margin"):
            margin = self.score(cells, f.i64(0))
            other = {"0": f.const("double", 0.0), "1-m": f.sub(1.0, margin), "-m": f.neg(margin)}[ending.split()[1]]
            self.put(other, f.mul(row, 2))
            self.put(margin, f.add(f.mul(row, 2), 1))
            even = f.load("double", f.gep(self.base, 1, "double"))
            self.name(row, f.cast(f.cmp("ogt", margin, even), "i64", signed=False))
            return
        highest, at = f.var("double", float("-inf")), f.var("i64", 0)
        with f.loop(0, self.width) as k:
            score = self.score(cells, k)
            self.put(score, f.add(f.mul(row, self.width), k))
            if ending != "scores":
                if ending == "best voted":
                    voted = f.cmp("sgt", f.load("i64", f.gep(self.counts, f.add(cells, k), "i64")), 0)
                    score = f.select(voted, score, float("-inf"))
                # the first of the largest; a NaN is beyond all numbers
                top = highest.get()
                first_nan = f.and_(f.cmp("uno", score, score), f.cmp("ord", top, top))
                with f.if_(f.or_(f.cmp("ogt", score, top), first_nan)):
                    highest.set(score)
                    at.set(k)
        if ending != "scores":
            self.name(row, at.get())

    def score(self, cells: Val, k: Val) -> Val:
        f = self.f
        value = f.load("double", f.gep(self.sums, f.add(cells, k), "double"))
        if self.s.fold in ("min", "max"):
            count = f.load("i64", f.gep(self.counts, f.add(cells, k), "i64"))
            value = f.select(f.cmp("eq", count, 0), 0.0, value)
        elif self.s.fold == "average":
            value = f.div(value, f.cast(self.trees, "double"))
        return f.add(value, f.load("double", f.gep(self.base, k, "double")))

    def put(self, score: Val, at: Val) -> None:
        self.f.store(self.f.cast(score, self.s.out), self.f.gep(self.scores, at, self.s.out))

    def name(self, row: Val, number: Val) -> None:
        f = self.f
        f.store(f.load("i64", f.gep(self.labels, number, "i64")), f.gep(self.best, row, "i64"))
