"""Decision forests as arrays: building them from attributes, walking them for many rows at once, counting votes.

All trees share one array of nodes. A walk holds one position per pair (row, tree) and moves all of them a level down
at a time, so the work is NumPy's and the number of steps is the depth of the deepest tree. Building checks that every
walk stays inside the arrays and ends; afterwards nothing needs checking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_COMPARISONS = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
_MEMBER, _LEAF = MODES.index("BRANCH_MEMBER"), MODES.index("LEAF")
_WALKERS = 1 << 18  # (row, tree) pairs moved together: large enough to amortise NumPy, small enough for the cache


@dataclass(frozen=True)
class _MemberSets:
    """The sets of BRANCH_MEMBER nodes; a member is a pair (set, value), kept as one sorted number."""

    values: Array  # all members of all sets, sorted, each once
    pairs: Array  # sorted: set * len(values) + position in `values`
    set_of_node: Array

    def contains(self, nodes: Array, x: Array) -> Array:
        at = np.minimum(np.searchsorted(self.values, x), len(self.values) - 1)
        pair = self.set_of_node[nodes] * len(self.values) + at
        place = np.minimum(np.searchsorted(self.pairs, pair), len(self.pairs) - 1)
        return (self.values[at] == x) & (self.pairs[place] == pair)


@dataclass(frozen=True)
class Forest:
    """Nodes of all trees, one array per field, and the votes of the leaves."""

    op_name: str
    roots: Array
    mode: Array  # index into MODES
    feature: Array
    threshold: Array
    when_true: Array
    when_false: Array
    nan_is_true: Array | None  # per node: a missing feature takes the true branch; None: never
    members: _MemberSets | None
    vote_start: Array  # per node: its votes are vote_start .. vote_start + vote_count
    vote_count: Array
    vote_target: Array
    vote_weight: Array
    targets: int

    @property
    def trees(self) -> int:
        return len(self.roots)

    @property
    def only_target(self) -> int | None:
        """The one target that gets all votes, if there is such a one."""
        voted = np.unique(self.vote_target)
        return int(voted[0]) if len(voted) == 1 else None

    def aggregate(self, X: Array, how: str) -> tuple[Array, Array]:
        """Per row of ``X`` and target: the votes' SUM, AVERAGE over trees, MIN or MAX, and how many votes there were.

        Sums are kept in float64. A target without votes gets 0.
        """
        if self.feature.max(initial=-1) >= X.shape[1]:
            raise ShapeMismatch(
                f"{self.op_name}: the trees use feature {self.feature.max()}, the input has {X.shape[1]} features"
            )
        results = [self._aggregate_chunk(rows, how) for rows in _chunks(X, max(_WALKERS // max(self.trees, 1), 1))]
        if not results:
            return np.zeros((0, self.targets)), np.zeros((0, self.targets), np.int64)
        values, counts = zip(*results)
        return np.concatenate(values), np.concatenate(counts)

    def _aggregate_chunk(self, X: Array, how: str) -> tuple[Array, Array]:
        leaf = self._leaves(X)
        row = np.repeat(np.arange(len(X)), self.trees)
        count = self.vote_count[leaf]
        first_of_leaf = np.cumsum(count) - count
        vote = np.repeat(self.vote_start[leaf] - first_of_leaf, count) + np.arange(count.sum())
        cell = np.repeat(row, count) * self.targets + self.vote_target[vote]
        weight = self.vote_weight[vote]
        size = len(X) * self.targets
        counts = np.bincount(cell, minlength=size)
        if how in ("SUM", "AVERAGE"):
            values = np.bincount(cell, weight, minlength=size)
            if how == "AVERAGE":
                values /= max(self.trees, 1)
        else:
            lowest = how == "MIN"
            values = np.full(size, np.inf if lowest else -np.inf)
            (np.minimum if lowest else np.maximum).at(values, cell, weight)
            values[counts == 0] = 0
        return values.reshape(-1, self.targets), counts.reshape(-1, self.targets)

    def _leaves(self, X: Array) -> Array:
        """The leaf every row reaches in every tree, row by row."""
        node = np.tile(self.roots, len(X))
        row_start = np.repeat(np.arange(len(X)) * X.shape[1], self.trees)
        features = X.ravel()
        walking = np.flatnonzero(self.mode[node] != _LEAF)
        while walking.size:
            at = node[walking]
            goes_true = self._branch(at, features[row_start[walking] + self.feature[at]])
            reached = np.where(goes_true, self.when_true[at], self.when_false[at])
            node[walking] = reached
            walking = walking[self.mode[reached] != _LEAF]
        return node

    def _branch(self, at: Array, x: Array) -> Array:
        """Whether each walker, standing at node ``at`` with feature value ``x``, takes the true branch."""
        mode = self.mode[at]
        present = np.flatnonzero(np.bincount(mode))
        if len(present) == 1:
            taken = self._compare(int(present[0]), at, x)
        else:
            taken = np.empty(len(at), np.bool_)
            for kind in present:
                mine = mode == kind
                taken[mine] = self._compare(int(kind), at[mine], x[mine])
        if self.nan_is_true is not None:
            taken |= self.nan_is_true[at] & np.isnan(x)
        return taken

    def _compare(self, mode: int, at: Array, x: Array) -> Array:
        if mode == _MEMBER:
            assert self.members is not None
            return self.members.contains(at, x)
        return np.asarray(_COMPARISONS[mode](x, self.threshold[at]))


def _chunks(X: Array, rows: int) -> Iterator[Array]:
    for start in range(0, len(X), rows):
        yield X[start : start + rows]


# -- building ----------------------------------------------------------------------------------------------------------


@prepared
def forest_by_ids(
    op_name: str,
    tree_ids: Sequence[int],
    node_ids: Sequence[int],
    modes: Sequence[str],
    features: Sequence[int],
    thresholds: Sequence[float] | Array,
    true_ids: Sequence[int],
    false_ids: Sequence[int],
    missing_tracks_true: Sequence[int] | None,
    vote_tree_ids: Sequence[int],
    vote_node_ids: Sequence[int],
    vote_targets: Sequence[int],
    vote_weights: Sequence[float] | Array,
    targets: int,
) -> Forest:
    """A forest written the older way: nodes are named by (tree id, node id), leaves are nodes of their own."""
    count = len(tree_ids)
    if not count:
        raise InvalidValue(f"{op_name}: the ensemble has no nodes")
    _require_length(op_name, "nodes_nodeids", node_ids, count)
    mode = _modes_by_name(op_name, modes, count)
    feature = _integers(op_name, "nodes_featureids", features, count)
    names = _NodeNames(op_name, np.asarray(tree_ids, np.int64), np.asarray(node_ids, np.int64))
    inner = np.flatnonzero(mode != _LEAF)
    tree = names.tree_ids[inner]
    when_true, when_false = np.arange(count), np.arange(count)  # a leaf leads to itself
    when_true[inner] = names.find(tree, _integers(op_name, "nodes_truenodeids", true_ids, count)[inner])
    when_false[inner] = names.find(tree, _integers(op_name, "nodes_falsenodeids", false_ids, count)[inner])

    votes = len(vote_tree_ids)
    voter = names.find(
        _integers(op_name, "vote tree ids", vote_tree_ids, votes),
        _integers(op_name, "vote node ids", vote_node_ids, votes),
    )
    order = np.argsort(voter, kind="stable")
    vote_count = np.bincount(voter, minlength=count)
    forest = Forest(
        op_name=op_name,
        roots=_roots(op_name, names.tree_ids, when_true, when_false),
        mode=mode,
        feature=np.where(mode == _LEAF, 0, feature),
        threshold=_floats(op_name, "nodes_values", thresholds, count),
        when_true=when_true,
        when_false=when_false,
        nan_is_true=_flags(op_name, missing_tracks_true, count),
        members=None,
        vote_start=np.cumsum(vote_count) - vote_count,
        vote_count=vote_count,
        vote_target=_integers(op_name, "vote targets", vote_targets, votes)[order],
        vote_weight=_floats(op_name, "vote weights", vote_weights, votes)[order].astype(np.float64),
        targets=targets,
    )
    _check(forest)
    return forest


@prepared
def forest_by_positions(
    op_name: str,
    roots: Sequence[int],
    modes: Array,
    features: Sequence[int],
    thresholds: Array,
    true_positions: Sequence[int],
    true_is_leaf: Sequence[int],
    false_positions: Sequence[int],
    false_is_leaf: Sequence[int],
    missing_tracks_true: Sequence[int] | None,
    member_values: Array | None,
    leaf_targets: Sequence[int],
    leaf_weights: Array,
    targets: int,
) -> Forest:
    """A forest written the newer way: inner nodes and leaves stand in lists of their own, named by position."""
    inner, leaves = len(features), len(leaf_targets)
    inner_modes = _integers(op_name, "nodes_modes", modes, inner)
    if inner_modes.min(initial=0) < 0 or inner_modes.max(initial=0) > _MEMBER:
        raise InvalidValue(f"{op_name}: nodes_modes must lie in 0..{_MEMBER}")

    def child(side: str, positions: Sequence[int], is_leaf: Sequence[int]) -> Array:
        position = _integers(op_name, f"nodes_{side}nodeids", positions, inner)
        leaf = _integers(op_name, f"nodes_{side}leafs", is_leaf, inner) != 0
        limit = np.where(leaf, leaves, inner)
        if ((position < 0) | (position >= limit)).any():
            raise InvalidValue(f"{op_name}: a position in nodes_{side}nodeids is out of range")
        return np.concatenate([np.where(leaf, inner + position, position), np.arange(inner, inner + leaves)])

    def with_leaves(values: Array, fill: int) -> Array:
        return np.concatenate([values, np.full(leaves, fill, values.dtype)])

    missing = _flags(op_name, missing_tracks_true, inner)
    forest = Forest(
        op_name=op_name,
        roots=_integers(op_name, "tree_roots", roots, len(roots)),
        mode=with_leaves(inner_modes, _LEAF),
        feature=with_leaves(_integers(op_name, "nodes_featureids", features, inner), 0),
        threshold=with_leaves(_floats(op_name, "nodes_splits", thresholds, inner), 0),
        when_true=child("true", true_positions, true_is_leaf),
        when_false=child("false", false_positions, false_is_leaf),
        nan_is_true=None if missing is None else with_leaves(missing, 0),
        members=_member_sets(op_name, inner_modes, member_values),
        vote_start=np.concatenate([np.zeros(inner, np.int64), np.arange(leaves)]),
        vote_count=np.repeat([0, 1], [inner, leaves]),
        vote_target=_integers(op_name, "leaf_targetids", leaf_targets, leaves),
        vote_weight=_floats(op_name, "leaf_weights", leaf_weights, leaves).astype(np.float64),
        targets=targets,
    )
    if ((forest.roots < 0) | (forest.roots >= inner)).any():
        raise InvalidValue(f"{op_name}: a position in tree_roots is out of range for {inner} nodes")
    _check(forest)
    return forest


class _NodeNames:
    """Finds a node by its tree id and node id."""

    def __init__(self, op_name: str, tree_ids: Array, node_ids: Array) -> None:
        self._op_name = op_name
        self.tree_ids = tree_ids
        self._trees = np.unique(tree_ids)
        self._nodes = np.unique(node_ids)
        key = self._key(tree_ids, node_ids)
        self._order = np.argsort(key, kind="stable")
        self._keys = key[self._order]
        twice = np.flatnonzero(self._keys[1:] == self._keys[:-1])
        if twice.size:
            k = self._order[twice[0]]
            raise InvalidValue(f"{op_name}: node {node_ids[k]} of tree {tree_ids[k]} is defined twice")

    def _key(self, tree_ids: Array, node_ids: Array) -> Array:
        """One number per name; ids may be any integers, so they are numbered first."""
        return np.searchsorted(self._trees, tree_ids) * (len(self._nodes) + 1) + np.searchsorted(self._nodes, node_ids)

    def find(self, tree_ids: Array, node_ids: Array) -> Array:
        place = np.minimum(np.searchsorted(self._keys, self._key(tree_ids, node_ids)), len(self._keys) - 1)
        found = self._order[place]
        return self._checked(found, tree_ids, node_ids)

    def _checked(self, found: Array, tree_ids: Array, node_ids: Array) -> Array:
        raise NotImplementedError
