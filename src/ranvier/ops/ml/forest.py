"""Decision forests as arrays: walking them for many rows at once, and counting the votes of the leaves.

All trees share one array of nodes. A walk holds one position per pair (row, tree) and moves all of them one level down
at a time, so the work is NumPy's and the number of steps is the depth of the deepest tree. Forests come from
:mod:`ranvier.ops.ml.forest_attributes`, which checks that every walk stays inside the arrays and ends.
"""

from __future__ import annotations

import numpy as np

from ranvier.errors import ShapeMismatch
from ranvier.ops.registry import Array
from ranvier.records import dataclass

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
MEMBER, LEAF = MODES.index("BRANCH_MEMBER"), MODES.index("LEAF")
_COMPARISONS = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
_WALKERS = 1 << 18  # (row, tree) pairs moved together: enough to amortise NumPy's calls, few enough for the cache


@dataclass(frozen=True)
class MemberSets:
    """The sets of BRANCH_MEMBER nodes; a member is a pair (set, value), kept as one number."""

    set_of_node: Array
    values: Array  # the members of all sets, sorted, each once
    pairs: Array  # sorted: set * len(values) + position in `values`

    def contain(self, nodes: Array, x: Array) -> Array:
        """Whether each ``x`` is in the set of its node."""
        if not self.values.size:
            return np.zeros(len(x), np.bool_)
        at = np.minimum(np.searchsorted(self.values, x), len(self.values) - 1)
        pair = self.set_of_node[nodes] * len(self.values) + at
        place = np.minimum(np.searchsorted(self.pairs, pair), len(self.pairs) - 1)
        return np.asarray((self.values[at] == x) & (self.pairs[place] == pair))


@dataclass(frozen=True)
class Forest:
    """The nodes of all trees, one array per field, and the votes of the leaves."""

    op_name: str
    roots: Array
    mode: Array  # index into MODES
    feature: Array
    threshold: Array
    when_true: Array
    when_false: Array
    nan_is_true: Array | None  # per node: a missing feature takes the true branch; None: it never does
    members: MemberSets | None
    vote_start: Array  # per node: its votes are vote_start .. vote_start + vote_count
    vote_count: Array
    vote_target: Array
    vote_weight: Array
    targets: int
    only_target: int | None  # the one target that gets all votes, where there is such a one

    def aggregate(self, X: Array, how: str) -> tuple[Array, Array]:
        """Per row of ``X`` and target: the SUM, AVERAGE over the trees, MIN or MAX of the votes, and their number.

        Sums are kept in float64. A target without votes gets 0.
        """
        widest = int(self.feature.max(initial=-1))
        if widest >= X.shape[1]:
            raise ShapeMismatch(f"{self.op_name}: the trees use feature {widest}, the input has {X.shape[1]} features")
        values = np.zeros((len(X), self.targets))
        counts = np.zeros((len(X), self.targets), np.int64)
        together = max(_WALKERS // max(len(self.roots), 1), 1)
        for start in range(0, len(X), together):
            rows = slice(start, start + together)
            values[rows], counts[rows] = self._aggregate(X[rows], how)
        return values, counts

    def _aggregate(self, X: Array, how: str) -> tuple[Array, Array]:
        leaf = self._leaves(X)
        row = np.repeat(np.arange(len(X)), len(self.roots))
        count = self.vote_count[leaf]
        votes_before = np.cumsum(count) - count
        vote = np.repeat(self.vote_start[leaf] - votes_before, count) + np.arange(count.sum())
        cell = np.repeat(row, count) * self.targets + self.vote_target[vote]
        weight = self.vote_weight[vote]
        shape = (len(X), self.targets)
        size = len(X) * self.targets
        counts = np.bincount(cell, minlength=size)
        if how in ("SUM", "AVERAGE"):
            sums = np.bincount(cell, weight, minlength=size)
            values = sums / len(self.roots) if how == "AVERAGE" else sums
        else:
            best, worst = (np.minimum, np.inf) if how == "MIN" else (np.maximum, -np.inf)
            values = np.full(size, worst)
            best.at(values, cell, weight)
            values[counts == 0] = 0
        return values.reshape(shape), counts.reshape(shape)

    def _leaves(self, X: Array) -> Array:
        """The leaf that each row reaches in each tree; all trees of the first row come first."""
        node = np.tile(self.roots, len(X))
        row_start = np.repeat(np.arange(len(X)) * X.shape[1], len(self.roots))
        features = X.ravel()
        walking = np.flatnonzero(self.mode[node] != LEAF)
        while walking.size:
            at = node[walking]
            taken = self._branch(at, features[row_start[walking] + self.feature[at]])
            reached = np.where(taken, self.when_true[at], self.when_false[at])
            node[walking] = reached
            walking = walking[self.mode[reached] != LEAF]
        return node

    def _branch(self, at: Array, x: Array) -> Array:
        """Whether each walker, standing at node ``at`` with the feature's value ``x``, takes the true branch."""
        mode = self.mode[at]
        if mode[0] == mode[-1] and (mode == mode[0]).all():
            taken = self._compare(int(mode[0]), at, x)
        else:
            taken = np.empty(len(at), np.bool_)
            for kind in np.unique(mode):
                mine = mode == kind
                taken[mine] = self._compare(int(kind), at[mine], x[mine])
        if self.nan_is_true is not None:
            taken = taken | (self.nan_is_true[at] & np.isnan(x))
        return taken

    def _compare(self, mode: int, at: Array, x: Array) -> Array:
        if mode == MEMBER and self.members is not None:
            return self.members.contain(at, x)
        return np.asarray(_COMPARISONS[mode](x, self.threshold[at]))
