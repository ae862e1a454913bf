"""Forests (``ai.onnx.ml``): TreeEnsembleClassifier, TreeEnsembleRegressor and TreeEnsemble over numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import add, cast, compare, const, div, op, sub, where
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS, NUMERIC
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import trees as kernels
from ranvier.codegen.llvm.trees import EQUAL, GREATER, LESS, UNORDERED, Ending, Fold, Nodes, PackedForest, Votes
from ranvier.codegen.loops.ir import Expr, Reduce, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops.ml.forest import LEAF, MEMBER, Forest
from ranvier.ops.ml.forest_attributes import forest_by_ids, forest_by_positions
from ranvier.ops.ml.scores import TRANSFORMS
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
ML = "ai.onnx.ml"
INT64, FLOAT32, FLOAT64 = DType.int64, DType.float32, DType.float64
_FOLDS: tuple[Fold, ...] = ("average", "sum", "min", "max")  # as TreeEnsemble numbers them
_FOLD_NAMES = {fold.upper(): fold for fold in _FOLDS}
_WITHOUT_PROBIT = TRANSFORMS[:-1]
# by mode: the outcomes of comparing a feature with the threshold that take the true branch
_OUTCOMES = (LESS | EQUAL, LESS, GREATER | EQUAL, GREATER, EQUAL, LESS | GREATER | UNORDERED, EQUAL, 0)
_MOST_MEMBERS = 1 << 16  # members of sets become nodes


@dataclass(frozen=True)
class _Ensemble:
    """What a node's attributes say, whichever operator they belong to."""

    forest: Forest
    fold: Fold
    base: Array
    transform: str
    labels: Array | None = None


def _ensemble(name: str, attrs: Mapping[str, Any]) -> _Ensemble:
    if name == "TreeEnsemble":
        forest = forest_by_positions(
            name,
            roots=attrs["tree_roots"],
            modes=attrs["nodes_modes"],
            features=attrs["nodes_featureids"],
            thresholds=attrs["nodes_splits"],
            true_positions=attrs["nodes_truenodeids"],
            true_is_leaf=attrs["nodes_trueleafs"],
            false_positions=attrs["nodes_falsenodeids"],
            false_is_leaf=attrs["nodes_falseleafs"],
            nan_is_true=attrs.get("nodes_missing_value_tracks_true", ()),
            member_values=attrs.get("membership_values"),
            leaf_targets=attrs["leaf_targetids"],
            leaf_weights=attrs["leaf_weights"],
            targets=attrs.get("n_targets", 1),
        )
        fold = _FOLDS[attrs.get("aggregate_function", 1)]
        return _Ensemble(forest, fold, np.zeros(0), TRANSFORMS[attrs.get("post_transform", 0)])
    is_classifier = name == "TreeEnsembleClassifier"
    votes = "class" if is_classifier else "target"
    labels = np.asarray(attrs["classlabels_int64s"], np.int64) if is_classifier else None
    forest = forest_by_ids(
        name,
        tree_ids=attrs.get("nodes_treeids", ()),
        node_ids=attrs.get("nodes_nodeids", ()),
        modes=attrs.get("nodes_modes", ()),
        features=attrs.get("nodes_featureids", ()),
        thresholds=_floats(attrs, "nodes_values"),
        true_ids=attrs.get("nodes_truenodeids", ()),
        false_ids=attrs.get("nodes_falsenodeids", ()),
        nan_is_true=attrs.get("nodes_missing_value_tracks_true", ()),
        vote_tree_ids=attrs.get(f"{votes}_treeids", ()),
        vote_node_ids=attrs.get(f"{votes}_nodeids", ()),
        vote_targets=attrs.get(f"{votes}_ids", ()),
        vote_weights=_floats(attrs, f"{votes}_weights"),
        targets=attrs.get("n_targets", 1) if labels is None else len(labels),
    )
    base = np.asarray(_floats(attrs, "base_values"))
    base = (base if "base_values_as_tensor" in attrs else base.astype(np.float32)).ravel().astype(np.float64)
    fold = _FOLD_NAMES["SUM" if is_classifier else attrs.get("aggregate_function", "SUM")]
    return _Ensemble(forest, fold, base, attrs.get("post_transform", "NONE"), labels)


def _floats(attrs: Mapping[str, Any], name: str) -> Any:
    tensor = attrs.get(f"{name}_as_tensor")
    return attrs.get(name, ()) if tensor is None else tensor


def _unsuitable(node: Node) -> str | None:
    kind = node.inputs[0].type if node.inputs and node.inputs[0] is not None else None
    if not isinstance(kind, TensorType) or kind.dtype is DType.bfloat16:
        return "the element type of the features"
    if node.op == "TreeEnsemble" and kind.dtype not in FLOATS:
        return "scores that are integers"
    if node.op == "TreeEnsembleClassifier" and (
        node.attrs.get("classlabels_strings") or not node.attrs.get("classlabels_int64s")
    ):
        return "labels that are not integers"
    try:
        made = _ensemble(node.op, node.attrs)
    except (RanvierError, KeyError, IndexError, ValueError) as error:
        return f"attributes: {error}"
    if made.transform not in _WITHOUT_PROBIT:
        return f"post_transform {made.transform!r}"
    if made.base.size not in (0, 1 if _is_margin(made) else made.forest.targets):
        return f"{made.base.size} base values"
    members = made.forest.members
    nodes = len(made.forest.mode) + (0 if members is None else len(members.pairs))
    if members is not None and len(members.pairs) > _MOST_MEMBERS:
        return f"sets of {len(members.pairs)} members"
    if not kernels.fits(nodes) or made.forest.feature.max(initial=0) >= kernels.MOST_FEATURES:
        return f"{nodes} nodes"
    return None


def _is_margin(made: _Ensemble) -> bool:
    """Two classes of which only one is voted for: how far, says what both get."""
    return (
        made.labels is not None and len(made.labels) == 2 and made.forest.only_target is not None and made.base.size < 2
    )


@lowers(
    "TreeEnsembleClassifier",
    "TreeEnsembleRegressor",
    "TreeEnsemble",
    domain=ML,
    dtypes=NUMERIC - {DType.bfloat16},
    check=_unsuitable,
)
def tree_ensemble(n: NodeView, b: Definitions) -> None:
    made = _ensemble(n.op, n.attrs)
    forest, shape = made.forest, n.shape(0)
    rows, features = (1, shape[0]) if len(shape) == 1 else shape if len(shape) == 2 else (0, 0)
    if forest.feature.max(initial=-1) >= features:
        raise Declined(f"{n.op}: the trees use more features than {list(shape)} has")
    wide = n.dtype(0) not in (FLOAT32, DType.float16) or any(
        a.dtype == np.float64 for a in (forest.threshold, *(() if forest.members is None else (forest.members.values,)))
    )
    kind = FLOAT64 if wide else FLOAT32
    x = n.input(0) if n.dtype(0) is kind else b.pointwise([n.input(0)], lambda e: cast(e[0], kind), kind)
    ending, base = _ending(made)
    columns = 2 if ending.startswith("margin") else forest.targets
    after_labels = 0 if made.labels is None else 1
    result = n.outputs[after_labels] if len(n.outputs) > after_labels else None
    dtype = n.dtype(0) if n.op == "TreeEnsemble" else FLOAT32
    # the votes are counted in float64; what comes out as it is, is rounded on the way out
    direct = made.transform == "NONE" and dtype in (FLOAT32, FLOAT64)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        packed = r.packs.get(("forest", n.node), lambda: _packed(made, wide))
        best = outs[1] if len(outs) > 1 else None
        return kernels.walk(views[0], packed, made.fold, base, outs[0], ending, made.labels, best)

    outs: list[tuple[DType, Sequence[int]]] = [(dtype if direct else FLOAT64, (rows, columns))]
    results = [result if direct else None]
    if made.labels is not None:
        outs.append((INT64, (rows,)))
        results.append(n.outputs[0])
    scores = b.opaque([b.reshape(x, (rows, features))], realise, outs, results)[0]
    if not direct and result is not None:
        _transformed(b, scores, made.transform, dtype, result)


def _ending(made: _Ensemble) -> tuple[Ending, Array]:
    """What becomes of the votes, and the numbers that are added to them."""
    none = not made.base.size
    base = np.zeros(made.forest.targets) if none else made.base
    if made.labels is None:
        return "scores", base
    if not _is_margin(made):
        return ("best voted" if none else "best"), base
    is_probability = made.transform in ("NONE", "PROBIT") and bool((made.forest.vote_weight >= 0).all())
    base = np.array([0.0 if none else made.base[0], 0.5 if is_probability else 0.0])
    if made.forest.only_target == 1:
        return "margin 0", base
    return ("margin 1-m" if is_probability else "margin -m"), base


def _packed(made: _Ensemble, wide: bool) -> PackedForest:
    forest = made.forest
    outcomes = np.array(_OUTCOMES, np.uint8)[forest.mode]
    if forest.nan_is_true is not None:
        outcomes[forest.nan_is_true & (forest.mode != LEAF)] |= UNORDERED
    one_target = _is_margin(made) or forest.targets == 1
    target = np.zeros_like(forest.vote_target) if one_target else forest.vote_target
    nodes = Nodes(outcomes, forest.feature, forest.threshold, forest.when_true, forest.when_false, forest.mode == LEAF)
    count = forest.vote_count
    start = forest.vote_start
    if forest.members is not None:
        nodes = _spelled_out(forest, nodes)
        more = (0, len(nodes.feature) - len(count))
        count, start = np.pad(count, more), np.pad(start, more)
    return kernels.pack_forest(
        forest.roots,
        nodes,
        Votes(start, count, target, forest.vote_weight),
        wide=wide,
        one_target=one_target and made.fold in ("sum", "average"),
    )


def _spelled_out(forest: Forest, nodes: Nodes) -> Nodes:
    """Tests for membership as a chain of tests for equality; whoever equals nobody reaches the chain's end."""
    members = forest.members
    assert members is not None
    outcomes, feature = list(nodes.outcomes), list(nodes.feature)
    threshold = list(nodes.threshold.astype(np.float64))
    when_true, when_false, is_leaf = list(nodes.when_true), list(nodes.when_false), list(nodes.is_leaf)
    values = members.values.astype(np.float64)
    for at in np.flatnonzero(forest.mode == MEMBER):
        first, end = np.searchsorted(members.pairs, (members.set_of_node[at] + np.arange(2)) * len(values))
        mine = values[members.pairs[first:end] % max(len(values), 1)]
        if not mine.size:
            outcomes[at] &= UNORDERED
            continue
        threshold[at] = mine[0]
        last = int(at)
        for value in mine[1:]:
            when_false.append(when_false[last])
            when_false[last] = len(feature)
            last = len(feature)
            outcomes.append(np.uint8(EQUAL))
            feature.append(feature[at])
            threshold.append(value)
            when_true.append(when_true[at])
            is_leaf.append(np.False_)
    return Nodes(*(np.array(a) for a in (outcomes, feature, threshold, when_true, when_false, is_leaf)))


def _transformed(b: Definitions, scores: Value, transform: str, dtype: DType, out: Value) -> None:
    one, zero = const(1.0, FLOAT64), const(0.0, FLOAT64)

    def pointwise(e: list[Expr]) -> Expr:
        if transform == "NONE":
            return cast(e[0], dtype)
        decay = op("exp", op("neg", op("abs", e[0])))
        return cast(div(where(compare("lt", e[0], zero), decay, one), add(one, decay)), dtype)

    def along_row(e: list[Expr]) -> RowBody:
        power = op("exp", sub(e[0], Result(0, FLOAT64)))
        total: Expr = Result(1, FLOAT64)
        if transform == "SOFTMAX_ZERO":  # a score of zero says "no vote" and stays zero
            power = where(compare("gt", op("abs", e[0]), const(1e-7, FLOAT64)), power, zero)
            total = where(compare("eq", total, zero), one, total)
        reduces = [Reduce("max", e[0], FLOAT64), Reduce("sum", power, FLOAT64)]
        return RowBody(reduces, maps={0: cast(div(power, total), dtype)})

    if transform in ("SOFTMAX", "SOFTMAX_ZERO"):
        b.rows([scores], [1], along_row, [(dtype, True)], results=[out])
    else:
        b.pointwise([scores], pointwise, dtype, out=out)
