"""Forests from the attributes of tree operators, checked: ids that exist, trees without cycles.

There are two ways to write a forest down. TreeEnsembleClassifier and TreeEnsembleRegressor name a node by (tree id,
node id), and a leaf is a node (:func:`forest_by_ids`). TreeEnsemble keeps inner nodes and leaves in lists of their own
and names both by position (:func:`forest_by_positions`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue
from ranvier.ops.ml.forest import LEAF, MEMBER, MODES, Forest, MemberSets
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array

_MODE_NUMBERS = {name: number for number, name in enumerate(MODES)}


@prepared
def forest_by_ids(
    op_name: str,
    *,
    tree_ids: Sequence[int],
    node_ids: Sequence[int],
    modes: Sequence[str],
    features: Sequence[int],
    thresholds: Sequence[float] | Array,
    true_ids: Sequence[int],
    false_ids: Sequence[int],
    nan_is_true: Sequence[int],
    vote_tree_ids: Sequence[int],
    vote_node_ids: Sequence[int],
    vote_targets: Sequence[int],
    vote_weights: Sequence[float] | Array,
    targets: int,
) -> Forest:
    """A forest whose nodes are named by tree id and node id."""
    read = _Reader(op_name)
    count, votes = len(tree_ids), len(vote_targets)
    names = _NodeNames(op_name, read.ints("tree ids", tree_ids, count), read.ints("node ids", node_ids, count))
    mode = read.mode_names(modes, count)
    inner = mode != LEAF
    when_true = np.arange(count)  # a leaf leads to itself: what its attributes say has no meaning
    when_false = np.arange(count)
    when_true[inner] = names.find(names.tree_ids[inner], read.ints("true node ids", true_ids, count)[inner])
    when_false[inner] = names.find(names.tree_ids[inner], read.ints("false node ids", false_ids, count)[inner])

    voter = names.find(
        read.ints("tree ids of votes", vote_tree_ids, votes), read.ints("node ids of votes", vote_node_ids, votes)
    )
    by_voter = np.argsort(voter, kind="stable")
    vote_count = np.bincount(voter, minlength=count)
    vote_target = read.ints("targets of votes", vote_targets, votes)[by_voter]
    return _checked(
        Forest(
            op_name=op_name,
            roots=_roots(op_name, names.tree_ids, when_true[inner], when_false[inner]),
            mode=mode,
            feature=np.where(inner, read.ints("feature ids", features, count), 0),
            threshold=read.floats("thresholds", thresholds, count),
            when_true=when_true,
            when_false=when_false,
            nan_is_true=read.flags("missing value tracks", nan_is_true, count),
            members=None,
            vote_start=np.cumsum(vote_count) - vote_count,
            vote_count=vote_count,
            vote_target=vote_target,
            vote_weight=read.floats("weights of votes", vote_weights, votes)[by_voter].astype(np.float64),
            targets=targets,
            only_target=_only(vote_target),
        )
    )


@prepared
def forest_by_positions(
    op_name: str,
    *,
    roots: Sequence[int],
    modes: Array,
    features: Sequence[int],
    thresholds: Array,
    true_positions: Sequence[int],
    true_is_leaf: Sequence[int],
    false_positions: Sequence[int],
    false_is_leaf: Sequence[int],
    nan_is_true: Sequence[int],
    member_values: Array | None,
    leaf_targets: Sequence[int],
    leaf_weights: Array,
    targets: int,
) -> Forest:
    """A forest whose inner nodes and leaves are named by position; here the leaves follow the inner nodes."""
    read = _Reader(op_name)
    inner, leaves = len(features), len(leaf_targets)
    mode = read.ints("modes", modes, inner)
    read.require_range("modes", mode, MEMBER + 1)
    root_positions = read.ints("tree roots", roots, len(roots))
    read.require_range("tree roots", root_positions, inner)

    def children(what: str, positions: Sequence[int], is_leaf: Sequence[int]) -> Array:
        position = read.ints(what, positions, inner)
        leaf = read.ints(f"leaf flags of {what}", is_leaf, inner) != 0
        read.require_range(what, position, np.where(leaf, leaves, inner))
        return np.concatenate([np.where(leaf, inner + position, position), np.arange(inner, inner + leaves)])

    def with_leaves(of_inner: Array, of_leaf: int) -> Array:
        return np.concatenate([of_inner, np.full(leaves, of_leaf, of_inner.dtype)])

    flags = read.flags("missing value tracks", nan_is_true, inner)
    vote_target = read.ints("leaf targets", leaf_targets, leaves)
    return _checked(
        Forest(
            op_name=op_name,
            roots=root_positions,
            mode=with_leaves(mode, LEAF),
            feature=with_leaves(read.ints("feature ids", features, inner), 0),
            threshold=with_leaves(read.floats("splits", thresholds, inner), 0),
            when_true=children("true node ids", true_positions, true_is_leaf),
            when_false=children("false node ids", false_positions, false_is_leaf),
            nan_is_true=None if flags is None else with_leaves(flags, 0),
            members=_member_sets(op_name, mode == MEMBER, member_values),
            vote_start=np.concatenate([np.zeros(inner, np.int64), np.arange(leaves)]),
            vote_count=np.repeat([0, 1], [inner, leaves]),
            vote_target=vote_target,
            vote_weight=read.floats("leaf weights", leaf_weights, leaves).astype(np.float64),
            targets=targets,
            only_target=_only(vote_target),
        )
    )


class _Reader:
    """Attributes as arrays of the expected length."""

    def __init__(self, op_name: str) -> None:
        self._op_name = op_name

    def ints(self, what: str, values: Sequence[int] | Array, count: int) -> Array:
        self._require_length(what, len(values), count)
        return np.asarray(values, np.int64)

    def floats(self, what: str, values: Sequence[float] | Array, count: int) -> Array:
        """Lists hold 32-bit floats by the standard; tensors keep their type."""
        self._require_length(what, len(values), count)
        return values if isinstance(values, np.ndarray) else np.asarray(values, np.float32)

    def flags(self, what: str, values: Sequence[int], count: int) -> Array | None:
        """None where all flags are off, which is also what an absent attribute means."""
        if not len(values):
            return None
        flags = self.ints(what, values, count) != 0
        return flags if flags.any() else None

    def mode_names(self, names: Sequence[str], count: int) -> Array:
        self._require_length("modes", len(names), count)
        numbers = [_MODE_NUMBERS.get(name, MEMBER) for name in names]
        if MEMBER in numbers:  # set membership came with TreeEnsemble and has no name here
            unknown = names[numbers.index(MEMBER)]
            raise InvalidValue(f"{self._op_name}: unknown node mode {unknown!r}")
        return np.asarray(numbers, np.int64)

    def require_range(self, what: str, values: Array, stop: int | Array) -> None:
        outside = np.flatnonzero((values < 0) | (values >= stop))
        if outside.size:
            raise InvalidValue(f"{self._op_name}: {what} hold {values[outside[0]]}, which is out of range")

    def _require_length(self, what: str, length: int, count: int) -> None:
        if length != count:
            raise InvalidValue(f"{self._op_name}: expected {count} {what}, got {length}")


class _NodeNames:
    """Finds nodes by tree id and node id."""

    def __init__(self, op_name: str, tree_ids: Array, node_ids: Array) -> None:
        if not len(tree_ids):
            raise InvalidValue(f"{op_name}: the ensemble has no nodes")
        self._op_name = op_name
        self.tree_ids = tree_ids
        self._node_ids = node_ids
        self._known_trees = np.unique(tree_ids)
        self._known_nodes = np.unique(node_ids)
        keys = self._keys(tree_ids, node_ids)
        self._by_key = np.argsort(keys, kind="stable")
        self._sorted_keys = keys[self._by_key]
        twice = np.flatnonzero(self._sorted_keys[1:] == self._sorted_keys[:-1])
        if twice.size:
            k = self._by_key[twice[0]]
            raise InvalidValue(f"{op_name}: node {node_ids[k]} of tree {tree_ids[k]} is defined twice")

    def _keys(self, tree_ids: Array, node_ids: Array) -> Array:
        """One number per name. Ids may be any integers, so they are numbered first, lest the product overflow."""
        tree = np.searchsorted(self._known_trees, tree_ids)
        return np.asarray(tree * (len(self._known_nodes) + 1) + np.searchsorted(self._known_nodes, node_ids))

    def find(self, tree_ids: Array, node_ids: Array) -> Array:
        place = np.searchsorted(self._sorted_keys, self._keys(tree_ids, node_ids))
        found = self._by_key[np.minimum(place, len(self._by_key) - 1)]
        wrong = np.flatnonzero((self.tree_ids[found] != tree_ids) | (self._node_ids[found] != node_ids))
        if wrong.size:
            k = wrong[0]
            raise InvalidValue(f"{self._op_name}: tree {tree_ids[k]} has no node {node_ids[k]}")
        return found


def _roots(op_name: str, tree_ids: Array, *children: Array) -> Array:
    """The first node of each tree that is nobody's child."""
    is_child = np.zeros(len(tree_ids), np.bool_)
    is_child[np.concatenate(children)] = True
    tops = np.flatnonzero(~is_child)
    trees_with_top, first = np.unique(tree_ids[tops], return_index=True)
    rootless = np.setdiff1d(tree_ids, trees_with_top)
    if rootless.size:
        raise InvalidValue(f"{op_name}: tree {rootless[0]} has no root, its nodes form a cycle")
    return tops[first]


def _member_sets(op_name: str, is_member: Array, values: Array | None) -> MemberSets | None:
    """The sets stand one after another, in the order of the nodes, each ended by a NaN."""
    count = int(is_member.sum())
    if not count:
        return None
    members = np.zeros(0) if values is None else values.ravel()
    ends = np.isnan(members)
    set_of_value = np.cumsum(ends) - ends
    sets = int(ends.sum()) + (0 if not members.size or ends[-1] else 1)  # the last NaN may be left out
    if sets != count:
        raise InvalidValue(f"{op_name}: {count} nodes test for membership, but membership_values holds {sets} sets")
    distinct, position = np.unique(members[~ends], return_inverse=True)
    pairs = np.unique(set_of_value[~ends] * len(distinct) + position)
    return MemberSets(np.cumsum(is_member) - 1, distinct, pairs)


def _only(targets: Array) -> int | None:
    return int(targets[0]) if targets.size and (targets == targets[0]).all() else None


def _checked(forest: Forest) -> Forest:
    """The forest, once nothing in it can lead a walk astray."""
    read = _Reader(forest.op_name)
    if forest.targets < 1:
        raise InvalidValue(f"{forest.op_name}: the number of targets must be positive, got {forest.targets}")
    read.require_range("targets of votes", forest.vote_target, forest.targets)
    if forest.feature.min(initial=0) < 0:
        raise InvalidValue(f"{forest.op_name}: a feature id is negative")
    _require_no_cycle(forest)
    return forest


def _require_no_cycle(forest: Forest) -> None:
    """Take away nodes that no remaining node leads to, level by level; what is left in the end is a cycle."""
    inner = forest.mode != LEAF
    parents = np.bincount(
        np.concatenate([forest.when_true[inner], forest.when_false[inner]]), minlength=len(forest.mode)
    )
    free = np.flatnonzero(parents == 0)
    removed = 0
    while free.size:
        removed += free.size
        above = free[inner[free]]
        children, edges = np.unique(
            np.concatenate([forest.when_true[above], forest.when_false[above]]), return_counts=True
        )
        parents[children] -= edges
        free = children[parents[children] == 0]
    if removed != len(forest.mode):
        raise InvalidValue(f"{forest.op_name}: the nodes form a cycle")
